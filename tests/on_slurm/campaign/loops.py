"""Faults of a script of one's own that has a `Loop`: examples/, plain (DDP) and sharded (FSDP2).

The scripts of frameworks have an integration instead, on four ranks.

Each strikes at a step that is drawn anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.on_slurm.campaign.fault import fault
from tests.on_slurm.campaign.files import Filler
from tests.on_slurm.campaign.nodes import ON_BOTH, SOON
from tests.on_slurm.campaign.run import (
    FRAMEWORKS,
    SCRIPT_PACE,
    SCRIPT_STEPS,
    Run,
    Struck,
    Trial,
    slurm,
)
from tests.on_slurm.campaign.stops import more_time

_draw = random.SystemRandom()
_PATIENCE = 240.0
"""Seconds for what begins with the start of a script: it imports torch, and joins by itself."""


def _begin(trial: Trial, config: str, *options: str) -> tuple[Run, Struck, str]:
    """A run whose ranks wait at the end of some step, and that moment's name."""
    at = _draw.randrange(2, SCRIPT_STEPS[config])
    trial.want(moment := f"step-{at}")
    run = trial.start(*options, config=config, pace=SCRIPT_PACE)
    trial.held(moment, run.world_size, _PATIENCE)
    return run, Struck(at - 1, run.struck().time, 1), moment


def _end(run: Run, struck: Struck, moment: str, causes: list[str] | None = None) -> str:
    seen = run.check_same(struck, causes=causes, seconds=240)
    resumed = [attempt.read_record().step for attempt in run.attempts[1:]]
    return f"{seen}; struck at {moment}, resumed from {resumed}"


def _saved_there(run: Run, struck: Struck) -> None:
    """The ranks saved where they were told, or at the next step that they took."""
    step = run.attempts[1].read_record().step
    if step < struck.step:
        raise run.differs(f"it resumed from step {step}, but was told to stop at {struck.step}")


def _killed(trial: Trial, config: str) -> str:
    run, struck, moment = _begin(trial, config, "--retries", "1")
    run.gone(run.kill(_draw.randrange(run.world_size)))
    trial.release(moment)
    return _end(run, struck, moment, ["failed", "done"])


def _preempted(trial: Trial, config: str) -> str:
    run, struck, moment = _begin(trial, config)
    wrap = ["--parsable", "--wrap", "true", "--output", "/dev/null"]
    high = slurm(trial, "sbatch", "-p", "high", "-N2", "--exclusive", *wrap).stdout.strip()
    run.wait_said("got SIGTERM")
    trial.release(moment)
    run.wait(lambda: trial.cluster.job_state(high) == "COMPLETED", "the job that preempts")
    seen = _end(run, struck, moment)
    _saved_there(run, struck)
    return seen


def _out_of_time(trial: Trial, config: str) -> str:
    """No signal is asked for: the loop stops by its own clock."""
    pace = 3.0 + _draw.random()
    run = trial.start("--time", "2", config=config, pace=pace)
    stopped = "a stop by its own clock"
    run.wait(lambda: run.attempts and run.attempts[0].end.exists(), stopped, _PATIENCE)
    final_record = run.attempts[0].read_final_record()
    if final_record.reason != "time limit" or final_record.saved != final_record.step:
        raise run.differs(f"it stopped as {final_record}")
    struck = run.struck()
    more_time(run)
    seen = run.check_same(struck, seconds=400)
    return f"{seen}; stopped at step {final_record.step}"


def _stopped_twice(trial: Trial, config: str) -> str:
    first = _draw.randrange(2, SCRIPT_STEPS[config] // 2)
    moments = [f"step-{first}", f"step-{first + 16}"]  # ranks agree within half a second
    for moment in moments:
        trial.want(moment, until_told=True)
    run = trial.start(config=config, pace=SCRIPT_PACE)
    for moment in moments:
        trial.held(moment, run.world_size, _PATIENCE)
        trial.clusterddp("stop", run.name, timeout=_PATIENCE)
        run.wait_over(_PATIENCE)
        if (again := trial.clusterddp("resume", run.name, timeout=_PATIENCE)).returncode:
            raise run.differs(again.stderr)
    struck = Struck(first - 1, run.struck().time, 1)
    return _end(run, struck, moments[0], ["stopped", "stopped", "done"])


def _node_lost(trial: Trial, config: str) -> str:
    run, struck, moment = _begin(trial, config, *ON_BOTH)
    host = _draw.choice(["h01", "h02"])
    trial.cluster.kill_host(host)
    run.wait(lambda: "PENDING" in " ".join(run.queued()), "the job in the queue again")
    trial.release(moment)
    trial.cluster.start_slurmd(host)
    return f"{_end(run, struck, moment)}; without {host}"


def _disk_full(trial: Trial, config: str) -> str:
    """Not a byte is left at one of its saves."""
    trial.want("step-20")
    trial.want("step-28")
    run = trial.start(config=config, pace=SCRIPT_PACE)
    trial.held("step-20", run.world_size, _PATIENCE)
    filler, struck = Filler(trial.folder, leave=0), run.struck()
    trial.release("step-20")
    trial.held("step-28", run.world_size, _PATIENCE)
    filler.remove()
    trial.release("step-28")
    run.wait_said("was not written", 5)
    return _end(run, struck, "step-20", ["done"])


def _strike(what: Callable[[Trial, str], str], config: str) -> Callable[[Trial], str]:
    def strike(trial: Trial) -> str:
        return what(trial, config)

    strike.__module__ = __name__
    return strike


for _config in FRAMEWORKS:
    fault(f"{_config}-disk-full", needs=(_config,), conf={}, disk="tmpfs")(
        _strike(_disk_full, _config)
    )

fault("loop-three-killed", hosts=3, conf={}, needs=("loop-three",))(_strike(_killed, "loop-three"))

for _config in ("loop", "loop-fsdp", *FRAMEWORKS):
    _needs, _quick = (_config,), _config == "loop-fsdp"
    fault(f"{_config}-killed", needs=_needs, quick=_quick)(_strike(_killed, _config))
    fault(f"{_config}-preempted", needs=_needs, conf={})(_strike(_preempted, _config))
    fault(f"{_config}-out-of-time", needs=_needs)(_strike(_out_of_time, _config))
    fault(f"{_config}-node-lost", needs=_needs, conf=SOON)(_strike(_node_lost, _config))
    fault(f"{_config}-stopped-twice", needs=_needs)(_strike(_stopped_twice, _config))
