"""Carries out the runs of a comparison one after the other: on this workstation, or as Slurm jobs.

Here each run is a `clusterddp debug`; each job waits for the end of the one before.
"""

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from clusterddp import launchers, log
from clusterddp.comparison.plan import Planned, Row, after
from clusterddp.comparison.results import (
    DONE,
    INTERRUPTED,
    Trial,
    figures,
    last_words,
    results,
    trial,
)
from clusterddp.errors import ClusterDDPError
from clusterddp.processes.group import TaskGroup
from clusterddp.processes.signals import Relay, held_back, send
from clusterddp.request.spec import JobSpec
from clusterddp.run.follow import wait_for_end
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import CREATED, FAILED
from clusterddp.run.status import run_status
from clusterddp.submission import submit

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ON_REQUEST = (
    b"clusterddp: passed on to the run under way, which saves and leaves; Ctrl-C again ends it at "
    b"once\n"
)


def dry_run(
    rows: Sequence[Row], planned: Planned, base: JobSpec | None, template_folder: Path | None
) -> Iterator[str]:
    """Yield the commands or scripts that would be started, each below a line that names it."""
    for row in rows:
        if row.missing:
            yield f"# {row.label}: not run: {row.missing}"
    for number, (row, spec) in enumerate(planned, 1):
        yield f"# [{number}/{len(planned)}] {row.label}: {spec.run_name}"
        if base is None:
            yield _shown_command(row, spec)
            continue
        before = ""
        if number > 1:
            before = str(number - 1)
            yield f"# for afterany:{before} in it: the job id of [{before}/{len(planned)}]"
        sent = after(spec, before)
        yield launchers.load(sent.launcher).prepare(sent, template_folder).removesuffix("\n")


def _shown_command(row: Row, spec: JobSpec) -> str:
    """Format the command of a run as a shell line."""
    hidden = [f"{name}={value}" for name, value in _some_gpus(row).items()]
    return shlex.join([*hidden, *_argv(row, spec)])


def train_here(planned: Sequence[tuple[Row, JobSpec]]) -> tuple[list[Trial], int]:
    """Train one after the other, as two at once would share the machine.

    Returns the result of each, and the signal that asked for an end, or 0. Such a signal is passed
    on to the run that trains; the runs after it are not run. Raises RequestError when a run's
    directory cannot be made.
    """
    trials = []
    under_way = _UnderWay()
    with Relay(_ASKING, under_way.pass_on) as relay:
        relay.listen()
        for number, (row, spec) in enumerate(planned, 1):
            if relay.number:
                trials.append(Trial(row, why=INTERRUPTED))
                continue
            which = f"[{number}/{len(planned)}] {row.label}"
            log.info(f"{which} …")
            trials.append(_train(row, spec, under_way))
            log.info(f"{which}: {figures(results(trials[-1:])[0])}")
    return trials, relay.number


def _train(row: Row, spec: JobSpec, under_way: "_UnderWay") -> Trial:
    with RunDir.create(spec, None) as run:
        # Each of several ranks has its own log, and debug prints a copy of rank 0's.
        log = run.rank_log(0) if row.ranks == 1 else run.job_log
        with TaskGroup() as group:
            with held_back(_ASKING):  # until it can be passed on
                group.start(_argv(row, spec), _environment(row), log)
                under_way.group = group
            [code] = group.wait()
        result = trial(row, run, run_status(run, {}))
    if code and under_way.requests:
        return Trial(row, run.name, INTERRUPTED)
    if code and result.state in (CREATED, DONE):  # before its start, or after its recorded end
        return Trial(row, run.name, FAILED, last_words(run) or f"exit code {code}")
    return result


def _argv(row: Row, spec: JobSpec) -> list[str]:
    debug = [sys.executable, "-m", "clusterddp", "debug", f"--procs={row.ranks}"]
    return [*debug, *row.train.to_argv(), f"--run-dir={spec.run_dir}"]


def _environment(row: Row) -> dict[str, str]:
    """Return our environment without settings or site.cfg: the command line carries all values."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTERDDP_")}
    return {**kept, "CLUSTERDDP_SITE": os.devnull, "PYTHONUNBUFFERED": "1", **_some_gpus(row)}


def _some_gpus(row: Row) -> dict[str, str]:
    """Show DataParallel, which takes every visible GPU, no more than its row has."""
    if row.strategy != "dp":
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(row.devices)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[: row.devices])}


class _UnderWay:
    """Passes a request to stop on to the run that trains now."""

    def __init__(self) -> None:
        self.group: TaskGroup | None = None
        self.requests = 0

    def pass_on(self, number: int, _earlier: int) -> None:
        """Ask the run to stop; the third time, kill it."""
        self.requests += 1
        if self.group is None:
            return
        if self.requests == 1:
            with suppress(OSError):
                os.write(sys.stderr.fileno(), _ON_REQUEST)  # a signal handler must not print
        if self.requests > 2:  # its ranks die with it
            self.group.signal_all(signal.SIGKILL)
            return
        send(number, self.group.pids)


class Interrupted(Exception):
    """A Ctrl-C interrupted the wait for the jobs of these runs, which may still run."""

    def __init__(self, runs: Sequence[RunDir]) -> None:
        super().__init__()
        self.runs = runs


def train_as_jobs(
    planned: Sequence[tuple[Row, JobSpec]],
    template_folder: Path | None,
    snapshot_limit_mb: float,
) -> list[Trial]:
    """Submit all and wait for their ends; returns the result of each.

    The caller has prepared the dataset, which all of them read. A job that is refused after
    another was queued is a failed row. Raises RequestError or SlurmError when the first cannot be
    queued, and Interrupted after a Ctrl-C.
    """
    ended: set[str] = set()
    trials = []
    try:
        submitted = _submit(planned, template_folder, snapshot_limit_mb)
        for number, (row, run) in enumerate(submitted, 1):
            which = f"[{number}/{len(planned)}] {row.label}"
            if isinstance(run, Trial):
                trials.append(run)
            else:
                log.info(f"{which} …")
                trials.append(trial(row, run, wait_for_end(run)))
                ended.add(run.name)
            log.info(f"{which}: {figures(results(trials[-1:])[0])}")
    except KeyboardInterrupt:
        left = [RunDir(Path(spec.run_dir)) for _, spec in planned if spec.run_name not in ended]
        raise Interrupted([run for run in left if run.path.is_dir()]) from None
    return trials


def _submit(
    planned: Sequence[tuple[Row, JobSpec]],
    template_folder: Path | None,
    snapshot_limit_mb: float,
) -> list[tuple[Row, RunDir | Trial]]:
    submitted: list[tuple[Row, RunDir | Trial]] = []
    before = ""
    for row, request in planned:
        spec = after(request, before)
        script = launchers.load(spec.launcher).prepare(spec, template_folder)
        try:
            run, submission = submit.submit(
                spec, script, snapshot_limit_mb=snapshot_limit_mb, inputs_are_sure=True
            )
        except ClusterDDPError as error:
            if not before:
                raise
            why = f"not submitted: {error}".partition("\n")[0]
            submitted.append((row, Trial(row, state=FAILED, why=why)))
        else:
            submitted.append((row, run))
            before = submission.job_id
    return submitted
