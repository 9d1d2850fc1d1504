"""In Python what the command does: render a request, submit it, launch ranks on this workstation.

`from clusterddp import render, submit, launch`; importing the package loads this module only when
one of them is used.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from clusterddp import launchers
from clusterddp.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PAUSED, RequestError, TrainingError
from clusterddp.ranks.from_flags import MOST_PROCS, START_METHODS
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.run import attempt as attempts
from clusterddp.run.attempt_logs import of_attempt
from clusterddp.run.events import Failure
from clusterddp.run.files import read_json
from clusterddp.run.lookup import statuses
from clusterddp.run.run_dir import RunDir
from clusterddp.run.status import RunStatus
from clusterddp.submission import submit as submitting
from clusterddp.submission.preflight import make_sure
from clusterddp.worker import functions, workstation

T = TypeVar("T")

_POLL_SECONDS = 2.0
_TRACEBACK = "Traceback (most recent call last):"


def render(spec: JobSpec, template_folder: str | Path | None = None) -> str:
    """Exactly what `submit` sends, and what `clusterddp submit --dry-run` prints of the same spec.

    template_folder: where a template of your own lies. Raises RequestError where it is at fault,
    or where the command is a launcher.
    """
    folder = Path(template_folder) if template_folder else None
    spec.refuse_launcher()
    return launchers.load(spec.launcher).prepare(spec, folder)


@dataclass(frozen=True)
class SubmittedRun:
    """A run that was submitted."""

    job_id: str
    run_dir: Path

    def status(self) -> RunStatus:
        """How it is doing, as `clusterddp status` shows it."""
        return statuses([RunDir(self.run_dir)])[0]

    def wait(self) -> RunStatus:
        """How it ended, once it has; a run that is requeued has not."""
        while not (status := self.status()).has_ended:
            time.sleep(_POLL_SECONDS)
        return status


def submit(
    spec: JobSpec,
    template_folder: str | Path | None = None,
    *,
    check: bool = False,
    snapshot_limit_mb: float = 50.0,
) -> SubmittedRun:
    """Submit a run as `clusterddp submit` does, with the same checks; says on stderr what it finds.

    check: ask Slurm for its forecast. snapshot_limit_mb: most that a copy of your code may have.

    With the launcher `local` the run lives no longer than this process: `wait` for it. Raises
    RequestError where nothing was submitted, SlurmError where Slurm did not answer.
    """
    script = render(spec, template_folder)
    run, submission = submitting.submit(
        spec, script, snapshot_limit_mb=snapshot_limit_mb, check=check
    )
    return SubmittedRun(submission.job_id, run.path)


@overload
def launch(
    target: TrainConfig,
    *,
    procs: int = 1,
    start_method: str | None = None,
    run_dir: str | Path | None = None,
) -> dict[str, Any]: ...


@overload
def launch(
    target: Callable[..., T],
    *,
    args: Sequence[Any] = (),
    procs: int = 1,
    start_method: str | None = None,
) -> list[T]: ...


def launch(
    target: TrainConfig | Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    procs: int = 1,
    start_method: str | None = None,
    run_dir: str | Path | None = None,
) -> Any:
    """Train a configuration, or call a function, in so many processes of this workstation.

    A function finds RANK, WORLD_SIZE, MASTER_ADDR and the rest of torchrun's variables in
    os.environ; what its ranks return comes back as a list, by rank. A configuration is trained as
    `clusterddp debug --procs` does, in run_dir (jobs/debug-<time>), and its report comes back; one
    that holds checkpoints is gone on with.

    start_method: fork (the usual one of a function, and the only one for a notebook's own), spawn
    or forkserver; for a configuration also exec, the usual one: fresh interpreters.

    Raises RequestError where it cannot be started; TrainingError with the rank that failed first,
    and its traceback; KeyboardInterrupt when it was interrupted, a training after it has saved.
    """
    if not isinstance(procs, int):
        raise RequestError(f"procs: {procs!r} is no number of processes; give one such as 2.")
    if not 1 <= procs <= MOST_PROCS:
        raise RequestError(f"procs: {procs} is not within 1 and {MOST_PROCS}.")
    if isinstance(target, TrainConfig):
        if args:
            raise RequestError("args are those of a function, but a TrainConfig is given.")
        _check_method(start_method, START_METHODS)
        return _train(target, procs, start_method or "exec", run_dir)
    if not callable(target):
        raise RequestError(
            f"target: {target!r} is neither a TrainConfig nor a function to call; for one with "
            "arguments give the function itself, and the arguments as args."
        )
    if run_dir is not None:
        raise RequestError("run_dir is that of a TrainConfig; a function keeps its own records.")
    _check_method(start_method, START_METHODS[1:])
    return functions.call_on_ranks(target, args, procs, start_method or "fork")


def _check_method(start_method: str | None, known: Sequence[str]) -> None:
    if start_method is not None and start_method not in known:
        raise RequestError(f"start_method: {start_method!r} is not one of {', '.join(known)}.")


def _train(
    config: TrainConfig, procs: int, start_method: str, run_dir: str | Path | None
) -> dict[str, Any]:
    path = os.path.abspath(run_dir or time.strftime("jobs/debug-%Y%m%d-%H%M%S"))
    make_sure(config, may_fetch=False)
    with workstation.recorded(path, config, procs, may_exist=bool(run_dir)) as (run, record):
        code, failure = workstation.train(config, run, procs, start_method)
        record(code, failure)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    report = read_json(run.report)
    if code == EXIT_DONE and report is not None:
        return report
    if code == EXIT_PAUSED:
        raise TrainingError(f"it was stopped and has saved; go on with run_dir={str(path)!r}.")
    raise TrainingError(_how_it_failed(run, failure))


def _how_it_failed(run: RunDir, failure: Failure | None) -> str:
    """The rank that failed first, with its traceback where its log ends with one."""
    if failure is None:
        return f"the training failed; the logs are in {run.logs}"
    attempt = attempts.latest(run)
    text = of_attempt(run.rank_log(failure.rank), attempt.number if attempt else 1)
    _, found, trace = text.rpartition(_TRACEBACK)
    return f"{failure.describe()}\n{found}{trace}".rstrip() if found else failure.describe()
