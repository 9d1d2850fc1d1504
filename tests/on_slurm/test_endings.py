"""Every way a run can end, as Slurm and what waits for its job see it: docs/endings.md, row by row.

All runs are queued at once, each with a job that waits for its success and one that waits for its
failure; the tests then read what became of them.
"""

import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import FINAL_STATES, PASSING_STATES, SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP, submit
from tests.waiting import wait_for

PAGE = Path(__file__).parents[2] / "docs/endings.md"
LAUNCHERS = {
    "ddp": [],
    "torchrun": ["--template", "torchrun.sbatch.j2"],
    "submitit": ["--launcher", "submitit"],
}
ALL = tuple(LAUNCHERS)
# A task of submitit is one of srun, as the template ddp starts them.
OF_RANKS = ("ddp", "torchrun")
OF_RANKS_ALONE = ("ddp", "submitit")
"""An agent of torchrun takes TERM itself, and ends its ranks."""
AHEAD_OF_TASKS = ("ddp",)
"""What the batch script has come to before any launcher is called."""
PATIENCE = 600
# As Slurm has it by default: an agent needs seconds to leave, on a machine that does all at once.
CONF = {"KillWait": "30", "MinJobAge": "3600", "RequeueExit": "200-205", "RequeueExitHold": "199,9"}
# Models: every rank leaves in the midst of its training, content with itself; rank 1 hangs.
MODEL = """
import os, threading
from torch import nn
def leave():
    os._exit(0)
class Hangs(nn.Linear):
    def forward(self, images):
        if self.training and os.environ["RANK"] == "1":
            threading.Event().wait()
        return super().forward(images.flatten(1))
def hang():
    return Hangs(784, 10)
"""
# A script whose Loop has not begun, which takes as long as its imports.
BEFORE = """
import os, pathlib, time
pathlib.Path("up-" + os.environ["CLUSTERDDP_WAY"]).touch()
time.sleep(600)
from clusterddp.loop import Loop
"""
UP = 'touch "up-$CLUSTERDDP_WAY"; '
SLEEP = "while :; do sleep 1; done"
# The first start says once that it has more to do.
ONCE = '[ -e "once-$CLUSTERDDP_WAY" ] || { touch "once-$CLUSTERDDP_WAY"; exit 75; }'


@dataclass(frozen=True)
class Way:
    """One way to an end, and the launchers with which it is tried."""

    options: tuple[str, ...]
    command: str = ""
    """What every task runs; a training without one."""
    strike: Callable[["Struck"], object] | None = None
    """What happens to it once it is up."""
    launchers: tuple[str, ...] = ALL


@dataclass
class Struck:
    """A run that is up, for what strikes it."""

    cluster: SlurmCluster
    folder: Path
    run: RunDir
    job_id: str

    def stop(self) -> None:
        trains = self.run.current / "attempt.json"
        wait_for(trains.exists, f"training: {self.run.path}")
        self.cluster.run([*CLUSTERDDP, "stop", self.run.name], cwd=self.folder, check=True)

    def stop_handled(self) -> None:
        self.cluster.run([*CLUSTERDDP, "stop", self.run.name], cwd=self.folder, check=True)

    def stop_a_command(self) -> None:
        done = self.cluster.run([*CLUSTERDDP, "stop", self.run.name], cwd=self.folder, check=True)
        assert "without a handler for it, the command fails" in done.stdout

    def _signal(self, name: str) -> None:
        self.cluster.run(["scancel", f"--signal={name}", self.job_id], check=True)

    def tell_to_end(self) -> None:
        self._signal("TERM")
        (self.folder / f"told-{self.run.name}").touch()

    def tell_to_end_twice(self) -> None:
        up = self.folder / f"up-{self.run.name}"
        up.unlink()
        self.tell_to_end()
        wait_for(up.exists, f"{self.run.name} to be up again")
        self.tell_to_end()

    def tell_to_save(self) -> None:
        self._signal("USR1")
        wait_for((self.folder / f"saved-{self.run.name}").exists, f"{self.run.name} to have saved")

    def interrupt(self) -> None:
        wait_for((self.run.current / "attempt.json").exists, f"training: {self.run.path}")
        self.cluster.run(["scancel", "--batch", "--signal=INT", self.job_id], check=True)

    def cancel_the_step(self) -> None:
        # It fails where the step is gone between its two requests; the row asserts the cancel.
        self.cluster.run(["scancel", f"{self.job_id}.0"])

    def scancel(self) -> None:
        self.cluster.run(["scancel", self.job_id], check=True)

    def requeue(self) -> None:
        self.cluster.run(["scontrol", "requeue", self.job_id], check=True)

    def refuse_requeue(self) -> None:
        self.cluster.run(["scontrol", "update", f"JobId={self.job_id}", "Requeue=0"], check=True)
        (self.folder / f"go-{self.run.name}").touch()

    def alter_its_clusterddp(self) -> None:
        with self.run.bundle.open("ab") as bundle:
            bundle.write(b"\n")
        self.cluster.run(["scontrol", "release", self.job_id], check=True)

    def lose_a_node(self) -> None:
        self.cluster.kill_host("h02")

    def kill_the_controller(self) -> None:
        [pid] = [
            pid
            for pid, line in self.cluster.processes("h01").items()
            if f" batch {self.run.path} " in line
        ]
        os.kill(pid, signal.SIGKILL)


TWO_TASKS = ("--tasks-per-node", "2")
TRAINING = ("--dataset", "synthetic", "--threads", "1", "--batch-size", "32")
FOREVER = ("--epochs", "10000", "--max-steps", "1000000")
WAYS = {
    "the run is done": Way((), "true"),
    "a rank exits with a code, here 3": Way(
        TWO_TASKS, f'[ "$RANK" = 1 ] && exit 3; {SLEEP}'
    ),
    "a signal kills a rank, here SEGV (11)": Way(
        TWO_TASKS, f'[ "$RANK" = 1 ] && kill -SEGV $$; {SLEEP}'
    ),
    "ranks exit with 0 before the training is done": Way(
        (*TRAINING, "--model", "model:leave"), launchers=OF_RANKS
    ),
    "a rank hangs until `--process-group-timeout`": Way(
        (*TWO_TASKS, *TRAINING, "--model", "model:hang", "--hang-timeout", "2s",
         "--process-group-timeout", "30s"),  # after the watchdog, also under load
        launchers=OF_RANKS,
    ),
    "a setup line fails, here with 4": Way(
        ("--setup", "(exit 4)"), "true", launchers=AHEAD_OF_TASKS
    ),
    "`clusterddp stop`": Way((*TRAINING, *FOREVER), strike=Struck.stop),
    "`clusterddp stop` of a script without a handler": Way(
        (), f"{UP} {SLEEP}", Struck.stop_a_command
    ),
    "saved at a signal or exit code 75, requeue off": Way((), "exit 75"),
    "saved, `--max-requeues` reached": Way(
        ("--requeue", "--max-requeues", "0"), "exit 75"
    ),
    "saved, requeued by the batch script": Way(("--requeue",), ONCE),
    "saved, requeue refused: a replacement job resumes": Way(
        ("--requeue",), f'{UP} until [ -e "go-$CLUSTERDDP_WAY" ]; do sleep 0.2; done; {ONCE}',
        Struck.refuse_requeue, OF_RANKS,
    ),
    "a script exits with 0 on TERM, requeue off": Way(
        (), f'trap "exit 0" TERM; {UP} {SLEEP}', Struck.tell_to_end
    ),
    "a script exits with 0 on TERM, requeue on": Way(
        ("--requeue",), f'[ -e "up-$CLUSTERDDP_WAY" ] && exit; trap "exit 0" TERM; {UP} {SLEEP}',
        Struck.tell_to_end,
    ),
    "a script exits with 0 on TERM twice in a row": Way(
        ("--requeue",), f'trap "exit 0" TERM; {UP} {SLEEP}', Struck.tell_to_end_twice, ("ddp",)
    ),
    "a script gets TERM before its Loop, requeue off": Way(
        (), "python before.py", Struck.tell_to_end
    ),
    "`clusterddp stop` of a script that exits with 0": Way(
        (), f'trap "exit 0" USR1; {UP} {SLEEP}', Struck.stop_handled
    ),
    "a script ignores TERM and completes": Way(
        (), f'trap "" TERM; {UP} until [ -e "told-$CLUSTERDDP_WAY" ]; do sleep 0.2; done',
        Struck.tell_to_end, OF_RANKS_ALONE,
    ),
    "a script saves on USR1 and completes over a minute later": Way(
        (), f'trap \'touch "saved-$CLUSTERDDP_WAY"\' USR1; {UP} '
        'until [ -e "saved-$CLUSTERDDP_WAY" ]; do sleep 0.2; done; '
        "for i in {1..62}; do sleep 1; done",
        Struck.tell_to_save,
    ),
    "Slurm requeues: preemption, node failure, `scontrol requeue`": Way(
        ("--requeue",),
        f'[ -e "up-$CLUSTERDDP_WAY" ] && exit; trap "exit 75" TERM; {UP} {SLEEP}', Struck.requeue,
    ),
    "Slurm requeues, but `--max-requeues` is reached": Way(
        ("--requeue", "--max-requeues", "0"), f"{UP} {SLEEP}", Struck.requeue, ("ddp",)
    ),
    "SIGINT or SIGHUP to the batch script": Way(
        (*TRAINING, *FOREVER), strike=Struck.interrupt, launchers=("ddp",)
    ),
    "`scancel JOB.STEP`": Way((), f"{UP} {SLEEP}", Struck.cancel_the_step, ("ddp",)),
    "`scancel` or `clusterddp cancel`, checkpoint saved": Way(
        (), f'trap "exit 75" TERM; {UP} {SLEEP}', Struck.scancel, ("ddp",)
    ),
    "`scancel` or `clusterddp cancel`, nothing saved": Way(
        (), f"{UP} {SLEEP}", Struck.scancel
    ),
    "the time limit, checkpoint saved": Way(
        ("--time", "1"), f'trap "exit 75" TERM; {SLEEP}'
    ),
    "the time limit, nothing saved": Way(("--time", "1"), SLEEP, launchers=OF_RANKS),
    "node failure, requeue off": Way(
        ("--nodes", "2", "--no-requeue"), f'touch "up-$CLUSTERDDP_WAY"; {SLEEP}',
        Struck.lose_a_node, ("ddp",),
    ),
    "the Python of the batch script is missing": Way(
        ("--controller-python", "/nowhere/python3"), "true", launchers=AHEAD_OF_TASKS
    ),
    "the run's copy of clusterddp was altered": Way(
        ("--sbatch", "hold"), "true", Struck.alter_its_clusterddp, AHEAD_OF_TASKS
    ),
    "the batch controller is killed or out of memory": Way(
        (), f"{UP} {SLEEP}", Struck.kill_the_controller
    ),
    "the run directory cannot be created, or was removed": Way(
        (), 'rm -r -- "jobs/$CLUSTERDDP_WAY"', launchers=OF_RANKS
    ),
}  # fmt: skip
# The slowest first: they take their time beside the others.
SLOW = ("time limit", "over a minute", "hangs", "node failure, ", "stop", "before the training")


@dataclass(frozen=True)
class Row:
    """One line of the page's table."""

    state: str
    exit_code: str
    afterok: str
    cause: str
    code: str
    wait: str

    @property
    def afternotok(self) -> str:
        """By the page, the jobs with this dependency start exactly if the others never do."""
        return {"never": "starts", "starts": "never"}.get(self.afterok, self.afterok)


def rows() -> dict[str, Row]:
    table = PAGE.read_text().partition("| how the run ends ")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name: Row(*values) for name, *values in cells[2:]}


ROWS = rows()
FIRST = (
    "the run is done", "a rank exits with a code, here 3", "`clusterddp stop`",
    "saved, requeued by the batch script",
)  # fmt: skip
# What another launcher than the first could do differently: an agent of torchrun takes signals
# itself, and submitit requeues in its own way.
OTHERS = {
    "`clusterddp stop`": ("torchrun", "submitit"),
    "a rank exits with a code, here 3": ("torchrun",),
    "saved, requeued by the batch script": ("submitit",),
}
TRIED = [
    pytest.param(
        name, launcher,
        marks=(
            [] if name in FIRST and launcher == "ddp"
            else [pytest.mark.slow] if launcher in (way.launchers[0], *OTHERS.get(name, ()))
            else [pytest.mark.slow, pytest.mark.release]
        ),
        id=f"{name}-{launcher}",
    )
    for name, way in WAYS.items()
    for launcher in way.launchers
]  # fmt: skip


@dataclass
class Seen:
    """What became of one run."""

    run: RunDir
    job_id: str = ""
    said: str = ""
    """`scontrol show job -o` of its job, once that was over."""
    waiting: dict[str, str] = field(default_factory=dict)
    """The jobs that wait for it, by the kind of dependency."""
    started: dict[str, bool] = field(default_factory=dict)
    wait_code: int | None = None

    def slurm(self, name: str) -> str:
        found = re.findall(rf" {name}=(\S*)", self.said)
        return str(found[-1]) if found else ""


def test_the_page_has_a_row_for_each_way_that_is_tried() -> None:
    assert set(ROWS) == set(WAYS)


@pytest.fixture(scope="module")
def own_cluster(slurm_available: None) -> Iterator[SlurmCluster]:
    with SlurmCluster(hosts=2, conf=CONF) as booted:
        yield booted


def test_the_codes_for_which_a_cluster_requeues_are_read(own_cluster: SlurmCluster) -> None:
    program = (
        "import sys; from clusterddp.slurm import client; "
        "print([[s, *(client.lists_exit_code(s, code) for code in (205, 9))] "
        "for s in client.requeue_exits()])"
    )
    said = own_cluster.run([sys.executable, "-c", program], check=True).stdout
    assert (
        said == "[['RequeueExit=200-205', True, False], ['RequeueExitHold=199,9', False, True]]\n"
    )


@pytest.mark.timeout(1200)  # the first waits for all runs, and a minute's time limit is one of them
@pytest.mark.parametrize(("name", "launcher"), TRIED)
def test_a_run_ends_as_the_page_says(
    seen: dict[tuple[str, str], Seen], name: str, launcher: str
) -> None:
    row, one = ROWS[name], seen[name, launcher]
    log = one.run.job_log.read_text() if one.run.job_log.exists() else "(no log)"
    if row.state == "PENDING":  # it has started once more since, and was done
        assert (one.slurm("JobState"), one.slurm("ExitCode")) == ("COMPLETED", "0:0"), log
        assert one.slurm("Restarts") == "1"
        assert (row.afterok, row.afternotok) == ("waits", "waits")
        assert one.started == {"afterok": True, "afternotok": False}
    else:
        assert one.slurm("JobState") == row.state, log
        assert row.exit_code in (one.slurm("ExitCode"), "Slurm's"), one.slurm("ExitCode") + log
        starts = {"afterok": row.afterok == "starts", "afternotok": row.afternotok == "starts"}
        assert one.started == starts, log
    ends = [e for e in read_events(one.run) if e["event"] == "ended" and e["job_id"] == one.job_id]
    # A job that Slurm has put back and that was refused then has two ends.
    end = ends[-1 if name.startswith("Slurm requeues, but") else 0] if ends else {}
    assert (end.get("cause", "-"), str(end.get("exit_code", "-"))) == (row.cause, row.code), log
    wait = "-" if one.wait_code is None else str(one.wait_code)
    assert wait == ("0" if row.wait == "resumes" else row.wait), log


@pytest.fixture(scope="module")
def seen(
    own_cluster: SlurmCluster, request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory, synthetic_dir: Path,
) -> dict[tuple[str, str], Seen]:  # fmt: skip
    """What became of each run that was selected, in each way; they run beside each other."""
    tests = [item for item in request.session.items if item.path == request.path]
    chosen = [tuple(test.callspec.params.values()) for test in tests if hasattr(test, "callspec")]
    return carry_out(own_cluster, tmp_path_factory.mktemp("endings"), synthetic_dir, chosen)


def carry_out(
    cluster: SlurmCluster, folder: Path, synthetic_dir: Path, chosen: list[tuple[str, str]]
) -> dict[tuple[str, str], Seen]:
    """Queue these runs, strike those that are to be struck, and wait for the end of all."""
    (folder / "model.py").write_text(MODEL)
    (folder / "before.py").write_text(BEFORE)

    def start(tried: tuple[str, str]) -> Seen:
        name, launcher = tried
        way, run_name = WAYS[name], f"{launcher}-{list(WAYS).index(name)}"
        where = [] if "--nodes" in way.options else ["--nodelist", "h01"]
        of_python = way.command.startswith("python ")
        words = way.command.split() if of_python else ["bash", "-c", way.command]
        what = ["--", *words] if way.command else []
        data = [] if way.command else ["--data-dir", str(synthetic_dir)]
        done = submit(
            cluster, folder, *LAUNCHERS[launcher], *where, *way.options, *data, "--no-snapshot",
            "--env", f"CLUSTERDDP_WAY={run_name}", "--run-name", run_name, "--json", *what,
        )  # fmt: skip
        assert done.returncode == 0, shlex.join(done.args) + done.stderr
        one = Seen(RunDir(folder / "jobs" / run_name), json.loads(done.stdout)["job_id"])
        for kind in ("afterok", "afternotok"):
            waits = [f"--dependency={kind}:{one.job_id}", "--output=/dev/null", "--nodelist=h01"]
            one.waiting[kind] = cluster.sbatch("#!/bin/sh\n", *waits, cwd=folder)
        return one

    def strike(tried: tuple[str, str]) -> None:
        way, one = WAYS[tried[0]], found[tried]
        if way.strike:
            if way.command and "hold" not in way.options:
                wait_for((folder / f"up-{one.run.name}").exists, f"{one.run.name} to be up")
            way.strike(Struck(cluster, folder, one.run, one.job_id))

    def wait_code(one: Seen) -> None:
        argv = [*CLUSTERDDP, "logs", "-f", one.run.name]
        one.wait_code = cluster.run(argv, cwd=folder, timeout=PATIENCE).returncode

    slow_first = sorted(chosen, key=lambda one: not any(word in one[0] for word in SLOW))
    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(slow_first, pool.map(start, slow_first), strict=True))
        struck = pool.map(strike, sorted(found, key=lambda one: one[0].startswith("node failure")))
        _collect(cluster, list(found.values()))
        list(struck)
        list(pool.map(wait_code, [one for one in found.values() if one.run.spec.exists()]))
    return found


def _collect(cluster: SlurmCluster, runs: list[Seen]) -> None:
    """Wait until each run's job is over, and what waits for it has started, or never will."""
    deadline = time.monotonic() + PATIENCE
    before: dict[str, str] = {}
    while unsettled := [one for one in runs if not one.said or len(one.started) < 2]:
        if time.monotonic() > deadline:
            return  # their own rows fail, and the others need not
        argv = ["squeue", "-h", "-t", "all", "-o", "%A %T %r"]
        lines = cluster.run(argv, check=True).stdout.splitlines()
        now: dict[str, Any] = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
        for one in unsettled:
            state = now[one.job_id].split()[0]
            passes = state in PASSING_STATES and before.get(one.job_id) != now[one.job_id]
            if state in FINAL_STATES and not passes and not one.said:
                show = ["scontrol", "show", "job", "-o", one.job_id]
                one.said = cluster.run(show, check=True).stdout
            for kind, job_id in one.waiting.items():
                if now[job_id].startswith("COMPLETED"):
                    one.started[kind] = True
                elif now[job_id] == "PENDING DependencyNeverSatisfied":
                    one.started[kind] = False
        before = now
        time.sleep(0.3)
