"""The runs of a comparison on this workstation: one after the other, each by `clusterddp debug`."""

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from clusterddp import log
from clusterddp.comparison.results import DONE, INTERRUPTED, Trial, results
from clusterddp.comparison.rows import Row
from clusterddp.comparison.table import figures
from clusterddp.comparison.trials import last_words, trial
from clusterddp.processes.group import TaskGroup
from clusterddp.request.spec import JobSpec
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import CREATED, FAILED
from clusterddp.run.status import run_status

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ON_REQUEST = (
    b"clusterddp: passed on to the run under way, which saves and leaves; Ctrl-C again ends it at "
    b"once\n"
)


def shown_command(row: Row, spec: JobSpec) -> str:
    """What is started, as it would be typed."""
    hidden = [f"{name}={value}" for name, value in _some_gpus(row).items()]
    return shlex.join([*hidden, *_argv(row, spec)])


def carry_out(planned: Sequence[tuple[Row, JobSpec]]) -> tuple[list[Trial], int]:
    """Train one after the other, for two at once would share the machine.

    Returns what became of each, and the signal that asked for an end, or 0. Such a signal is passed
    on to the run under way; what was to follow is not run. Raises RequestError when a run's
    directory cannot be made.
    """
    trials = []
    with _Passing() as passing:
        for number, (row, spec) in enumerate(planned, 1):
            if passing.number:
                trials.append(Trial(row, why=INTERRUPTED))
                continue
            which = f"[{number}/{len(planned)}] {row.label}"
            log.info(f"{which} …")
            trials.append(_train(row, spec, passing))
            log.info(f"{which}: {figures(results(trials[-1:])[0])}")
    return trials, passing.number


def _train(row: Row, spec: JobSpec, passing: "_Passing") -> Trial:
    with RunDir.create(spec, None) as run:
        # Of several ranks each has its own log, and rank 0's is copied to where debug prints.
        log = run.rank_log(0) if row.ranks == 1 else run.job_log
        with TaskGroup() as group:
            passing.start(group, _argv(row, spec), _environment(row), log)
            [code] = group.wait()
        found = trial(row, run, run_status(run, {}))
    if code and passing.number:
        return Trial(row, run.name, INTERRUPTED)
    if code and found.state in (CREATED, DONE):  # before it began, or after it had said its end
        return Trial(row, run.name, FAILED, last_words(run) or f"exit code {code}")
    return found


def _argv(row: Row, spec: JobSpec) -> list[str]:
    return [
        sys.executable, "-m", "clusterddp", "debug", f"--procs={row.ranks}",
        *row.train.to_argv(), f"--run-dir={spec.run_dir}",
    ]  # fmt: skip


def _environment(row: Row) -> dict[str, str]:
    """Ours without its settings, and without a site.cfg: the command line carries every value."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTERDDP_")}
    return {**own, "CLUSTERDDP_SITE": os.devnull, "PYTHONUNBUFFERED": "1", **_some_gpus(row)}


def _some_gpus(row: Row) -> dict[str, str]:
    """DataParallel takes every GPU that it sees, so it is shown as many as it is to take."""
    if row.strategy != "dp":
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = seen.split(",") if seen else [str(index) for index in range(row.devices)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[: row.devices])}


class _Passing:
    """Passes a request to stop on to the run under way. A context, outside of which signals have
    their former meaning."""

    def __init__(self) -> None:
        self.number = 0
        """The signal that asked; a Ctrl-C counts above the others."""
        self._times = 0
        self._group: TaskGroup | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Passing":
        for number in _ASKING:
            # An ignored SIGHUP is nohup's doing and meant.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, group: TaskGroup, argv: Sequence[str], env: dict[str, str], log: Path) -> None:
        """Start the run's process; a signal in this moment waits until it can be passed on."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
        try:
            group.start(argv, env, log)
            self._group = group
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.number = signal.SIGINT if signal.SIGINT in (number, self.number) else number
        self._times += 1
        if self._group is None:
            return
        if self._times == 1:
            with suppress(OSError):
                os.write(sys.stderr.fileno(), _ON_REQUEST)  # print is not for a signal's handler
        if self._times > 2:  # its ranks die with it
            self._group.signal_all(signal.SIGKILL)
            return
        for pid in self._group.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
