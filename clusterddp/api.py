"""Python API: the commands as functions and as methods of a run.

`from clusterddp import render, submit, runs, launch`. Importing the package loads this module only
when one of these names is used.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from clusterddp import launchers, log
from clusterddp.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, RequestError, TrainingError
from clusterddp.files import read_json
from clusterddp.processes import START_METHODS
from clusterddp.ranks.dist_env import MAX_PROCS
from clusterddp.request.options import FLAG, Given, nearest
from clusterddp.request.program import where_instead
from clusterddp.request.spec import OPTIONS, JobSpec
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.run import attempt as attempts
from clusterddp.run import events
from clusterddp.run.attempt import read_attempt_log
from clusterddp.run.events import Cause, Failure
from clusterddp.run.outcome import read_outcomes
from clusterddp.run.run_dir import RunDir, find_runs
from clusterddp.status import end_codes, follow, stacks
from clusterddp.status import stop as stopping
from clusterddp.status.find import DEFAULT_ROOT
from clusterddp.status.stacks import RankStacks
from clusterddp.status.state import latest_submission
from clusterddp.status.status import RunStatus, statuses
from clusterddp.status.stop import CancelResult, StopResult
from clusterddp.submission import resume as resuming
from clusterddp.submission import submit as submitting
from clusterddp.submission.fields import (
    check_new,
    generate_name,
    job_spec,
    slurm_folder,
    template_folder,
)
from clusterddp.submission.inputs import check_inputs
from clusterddp.submission.resume import Resumption, Terms
from clusterddp.worker import workstation

T = TypeVar("T")

_ROWS = {row.parameter: row for row in OPTIONS.values()}
_NAMES = {
    flag.removeprefix("--").replace("-", "_"): row.parameter
    for row in OPTIONS.values()
    for flag in (*row.flags, row.flag)
    if flag.startswith("--")
}
"""Parameter of each option by all its names, including aliases such as `ntasks_per_node`."""
_ELSEWHERE = {
    "dry_run": "render(spec) gives the script of a JobSpec",
    "gpus": "use gpus_per_node, the GPUs of each node",
    "sweep": "'clusterddp submit --sweep …' submits one",
    "wait": "call wait() of the returned run",
}
"""What to use in place of names that are not options of a request."""
_TEMPLATES = ("template", "template_dir")
_TRAINING = {row.parameter for row in TRAINING}
_FLAG = re.compile(r"(clusterddp [a-z][^.;\n]*)|(?<![\w-])--([a-z][a-z-]*)(?![\w-])")
"""A flag to replace by a keyword, or a shell command line, which keeps its flags."""


def render(spec: JobSpec, template_folder: str | Path | None = None) -> str:
    """Return the batch script that `submit` sends, as `clusterddp submit --dry-run` prints it.

    template_folder: directory of user templates.

    Raises RequestError if the template is invalid or the command is a launcher.
    """
    folder = Path(template_folder) if template_folder else None
    check_new(spec)
    return launchers.load(spec.launcher).prepare(_with_slurm(spec), folder)


def _with_slurm(spec: JobSpec) -> JobSpec:
    """Return the request with the directory of Slurm's commands set, like the command line."""
    return spec if spec.slurm_folder else replace(spec, slurm_folder=slurm_folder())


@dataclass(frozen=True)
class Run:
    """A run, identified by its directory, with the commands as methods.

    Methods raise RequestError if the directory does not exist.
    """

    run_dir: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_dir", Path(self.run_dir))

    def __fspath__(self) -> str:
        """Return the run's directory, so that `after=run` works."""
        return str(self.run_dir)

    @property
    def name(self) -> str:
        return self.run_dir.name

    @property
    def _run(self) -> RunDir:
        """The run's directory. Raises RequestError if it does not exist."""
        if not self.run_dir.is_dir():
            raise RequestError(f"there is no run at {self.run_dir}: no such directory. [CD0501]")
        return RunDir(self.run_dir)

    @property
    def job_id(self) -> str:
        """Job id of the latest submission; empty if nothing was submitted."""
        submission = latest_submission(events.read(self._run.events))
        return submission.job_id if submission else ""

    @property
    def spec(self) -> JobSpec:
        """Recorded request. Raises RequestError if it cannot be read."""
        return self._run.load_spec()

    def status(self) -> RunStatus:
        """Return the run's status, as `clusterddp status` shows it."""
        return statuses([self._run])[0]

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Wait until the run ends, across requeues, and return its status; log state changes.

        The state is `unknown` if Slurm no longer knows the job and no end was recorded.

        timeout: seconds until TimeoutError is raised; the run continues and can be waited for
            again.
        """
        return follow.wait_for_end(self._run, timeout=timeout)

    def logs(self, rank: int | None = None, *, job: bool = False, lines: int | None = None) -> str:
        """Return the log of a rank or, with `job`, of the job.

        By default the job's log after a failure, otherwise rank 0's.
        lines: return only this many last lines.

        Raises RequestError if there is no such log.
        """
        run, status = self._run, self.status()
        path = follow.default_log(run, status) if rank is None else run.rank_log(rank)
        if job:
            path = run.job_log
        follow.check_logs(run, status, [path])
        return follow.LogTail(path, lines).read().decode(errors="replace")

    def stacks(self, rank: int | None = None) -> list[RankStacks]:
        """Return the current stack of each rank, or of one with its threads and worker processes.

        No rank is interrupted. Raises RequestError if the run is not running, SlurmError if none
        of its hosts answers.
        """
        return stacks.read(self._run, self.status(), [] if rank is None else [rank])

    def stop(self) -> StopResult:
        """Ask the run to save a checkpoint and exit; it does not restart until `resume`.

        A queued run is cancelled; an ended run is not changed. Raises RequestError or SlurmError if
        it could not be asked.
        """
        return stopping.stop(self._run, self.status())

    def cancel(self) -> CancelResult:
        """End the run now, through Slurm or its process on this workstation.

        Raises RequestError or SlurmError if that fails.
        """
        return stopping.cancel(self._run, self.status())

    def resume(
        self,
        spec: JobSpec | None = None,
        *,
        allow_config_change: bool = False,
        refresh_code: bool = False,
        upgrade_clusterddp: bool = False,
        from_scratch: bool = False,
        force: bool = False,
        template_folder: str | Path | None = None,
        snapshot_limit_mb: float | None = None,
    ) -> Resumption:
        """Resume the run from its latest checkpoint; see `Terms`.

        spec: request that replaces the recorded one; resources, training and restarts may differ.
        Raises RequestError if nothing was submitted, SlurmError if the job may be queued.
        """
        terms = Terms(
            allow_config_change=allow_config_change,
            refresh_code=refresh_code,
            upgrade_clusterddp=upgrade_clusterddp,
            from_scratch=from_scratch,
            force=force,
            template_folder=Path(template_folder) if template_folder else None,
            snapshot_limit_mb=snapshot_limit_mb,
        )
        return resuming.resume(self._run, lambda before: spec or before, terms)


def runs(runs_dir: str | Path = DEFAULT_ROOT) -> list[Run]:
    """Return the runs in a directory, the latest last.

    Raises RequestError if the directory cannot be read.
    """
    return [Run(run.path.absolute()) for run in find_runs(Path(runs_dir))]


@overload
def submit(
    spec: JobSpec,
    template_folder: str | Path | None = None,
    *,
    test_only: Literal[False] = False,
    check_python: bool = False,
    force: bool = False,
    snapshot_limit_mb: float = 50.0,
) -> Run: ...


@overload
def submit(
    spec: Sequence[str | os.PathLike[str]] = (),
    *,
    test_only: Literal[False] = False,
    run_name: str | None = None,
    **options: object,
) -> Run: ...


@overload
def submit(
    spec: JobSpec | Sequence[str | os.PathLike[str]] = (),
    template_folder: str | Path | None = None,
    *,
    test_only: Literal[True],
    **options: Any,
) -> str: ...


def submit(
    spec: JobSpec | Sequence[str | os.PathLike[str]] = (),
    template_folder: Any = None,
    *,
    test_only: bool = False,
    check_python: Any = False,
    force: Any = False,
    snapshot_limit_mb: Any = 50.0,
    run_name: str | None = None,
    **options: object,
) -> Run | str:
    """Submit a run with the checks and warnings of `clusterddp submit`.

    spec: a request; or a command as a list of words, with the options of `clusterddp submit` as
    keywords, for example `gpus_per_node=4`. Empty: the built-in training. Paths are relative to
    the current directory. Returns the run.

    test_only: submit and write nothing; return Slurm's forecast as text. check_python: check that
    the tasks' interpreters start and import torch. force: submit even if no partition fits the
    request, or if the command's program is not on PATH here. snapshot_limit_mb: maximum size of the
    copy of your code (as a keyword with a command: snapshot_limit).

    With the launcher `local`, the run ends with this process, so call `wait()`. Raises
    RequestError if nothing was submitted, SlurmError if Slurm did not respond.
    """
    if not isinstance(spec, JobSpec):
        made = _request(spec, run_name, {"check_python": check_python, "force": force, **options})
        template_folder = template_folder or _folder_of_templates(options)
        limit = float(str(options.get("snapshot_limit", snapshot_limit_mb)))
        with _naming_keywords():
            return _submit(made, template_folder, test_only, check_python, force, limit)
    if options or run_name is not None:
        names = ", ".join([*options, *(["run_name"] if run_name is not None else [])])
        raise RequestError(
            f"{names}: keywords cannot be combined with a JobSpec. Set them in it. [CD0103]"
        )
    if spec.sweep:
        raise RequestError(
            "a sweep is not a single run. Submit it with 'clusterddp submit --sweep …', or submit "
            "each spec.trial_spec(index). [CD0102]"
        )
    return _submit(spec, template_folder, test_only, check_python, force, snapshot_limit_mb)


def _submit(
    spec: JobSpec, templates: Any, test_only: bool, check_python: Any, force: Any, limit: Any
) -> Run | str:
    spec = _with_slurm(spec)
    script = render(spec, templates)
    checks = {"check_python": check_python, "force": force}
    if test_only:
        return submitting.forecast(spec, script, **checks)
    run, _ = submitting.submit(spec, script, snapshot_limit_mb=limit, **checks)
    return Run(run.path)


@overload
def launch(
    target: TrainConfig,
    *,
    procs: int = 1,
    start_method: str | None = None,
    run_dir: str | Path | None = None,
) -> dict[str, object]: ...


@overload
def launch(
    target: Callable[..., T],
    *,
    args: Sequence[object] = (),
    procs: int = 1,
    start_method: str | None = None,
) -> list[T]: ...


def launch(
    target: TrainConfig | Callable[..., T],
    *,
    args: Sequence[object] = (),
    procs: int = 1,
    start_method: str | None = None,
    run_dir: str | Path | None = None,
) -> dict[str, object] | list[T]:
    """Train a configuration or call a function in `procs` processes on this workstation.

    A function finds torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR …) in os.environ; launch
    returns its return values as a list, ordered by rank. A configuration is trained as by
    `clusterddp debug --procs` in `run_dir` (default jobs/debug-<time>), resuming from checkpoints
    there; launch returns its report.

    args: arguments of the function.
    start_method: fork (default for a function, required for functions defined in a notebook),
        spawn or forkserver; for a configuration also exec (its default: fresh interpreters).

    Raises RequestError if it cannot be started; TrainingError with the traceback of the rank that
    failed first; KeyboardInterrupt if interrupted, after a training has saved a checkpoint.
    """
    if not isinstance(procs, int):
        raise RequestError(
            f"procs: {procs!r} is not a number of processes. Use an integer: procs=2. [CD0102]"
        )
    if not 1 <= procs <= MAX_PROCS:
        raise RequestError(f"procs: {procs} is not between 1 and {MAX_PROCS}. [CD0102]")
    known = START_METHODS if isinstance(target, TrainConfig) else START_METHODS[1:]
    if start_method not in (None, *known):
        raise RequestError(
            f"start_method: {start_method!r} is not one of {', '.join(known)}. [CD0102]"
        )
    if isinstance(target, TrainConfig):
        if args:
            raise RequestError("args apply only to a function, not to a TrainConfig. [CD0102]")
        return _train(target, procs, start_method or "exec", run_dir)
    if not callable(target):
        raise RequestError(
            f"target: {target!r} is neither a TrainConfig nor a function. Pass the function "
            "itself, and its arguments as args. [CD0102]"
        )
    if run_dir is not None:
        raise RequestError("run_dir applies only to a TrainConfig, not to a function. [CD0102]")
    return workstation.call_on_ranks(target, args, procs, start_method or "fork")


def _train(
    config: TrainConfig, procs: int, start_method: str, run_dir: str | Path | None
) -> dict[str, object]:
    path = os.path.abspath(run_dir or time.strftime("jobs/debug-%Y%m%d-%H%M%S"))
    check_inputs(config)
    spec = workstation.request(path, config, procs)
    with workstation.recorded(spec, may_exist=bool(run_dir)) as (run, record):
        code, failure = workstation.train(config, run, procs, start_method)
        record(code, failure)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    report = read_json(run.report)
    if code == EXIT_DONE and report is not None:
        return report
    attempt = attempts.latest(run) or attempts.Attempt(run, 1)
    if code == EXIT_STOPPED:
        final_record = attempt.read_final_record()
        by_user = final_record and final_record.reason == "stop"
        raise TrainingError(
            f"the training stopped after a checkpoint. Resume it with run_dir={str(path)!r}.",
            code=end_codes.BY_CAUSE[Cause.STOPPED if by_user else Cause.SIGNAL],
        )
    if failure is None:
        words = f"the training failed; the logs are in {run.logs}"
        raise TrainingError(words, code=end_codes.UNEXPLAINED)
    outcomes = read_outcomes(attempt.outcomes)
    raise TrainingError(
        _how_it_failed(attempt, failure), code=end_codes.code_of_failure(failure, outcomes)
    )


def _how_it_failed(attempt: attempts.Attempt, failure: Failure) -> str:
    """Describe the failure of the first rank, with the traceback at the end of its log, if any."""
    text = read_attempt_log(attempt.run.rank_log(failure.rank), attempt.number)
    _, begin, trace = text.rpartition("Traceback (most recent call last):")
    return f"{failure.describe()}\n{begin}{trace}".rstrip() if begin else failure.describe()


def _request(
    command: Sequence[str | os.PathLike[str]], run_name: str | None, given: Mapping[str, object]
) -> JobSpec:
    """Return the checked request for a command or, without one, for the training.

    given: values by option; environment variables and site.cfg are not used. Raises RequestError
    that names keywords.
    """
    if isinstance(command, str) or not all(isinstance(w, (str, os.PathLike)) for w in command):
        raise RequestError(
            f"the command {command!r} is not a list of words. Use for example "
            '["python", "train.py"]. [CD0102]'
        )
    for name in given:
        if name not in _NAMES:
            raise RequestError(f"there is no option {name!r}{_hint(name)}. [CD0102]")
    given = {_NAMES[name]: value for name, value in given.items()}
    of_training = ", ".join(name for name in given if command and name in _TRAINING)
    if of_training:
        raise RequestError(
            f"{of_training}: only for the built-in training, but a command is given."
            f"{where_instead(of_training)} Put the command's own options into its list. [CD0103]"
        )
    with _naming_keywords():
        asked = _given(given, tuple(os.fspath(word) for word in command))
        return job_spec(asked, generate_name("run") if run_name is None else run_name)


def _given(given: Mapping[str, object], command: tuple[str, ...] = ()) -> Given:
    values: dict[str, object] = {n: () if r.type is tuple else None for n, r in _ROWS.items()}
    plain = {name: row.default for name, row in _ROWS.items()} | dict(given)
    values |= {name: _ROWS[name].parse(v) for name, v in plain.items() if v is not None}
    return Given(values, dict.fromkeys(given, FLAG), command)


@contextmanager
def _naming_keywords() -> Iterator[None]:
    """Make errors and warnings name keywords (`run_name`) rather than flags."""
    try:
        with log.worded(_with_keywords):
            yield
    except RequestError as error:
        raise RequestError(_with_keywords(str(error)), code=error.code) from None


def _folder_of_templates(given: Mapping[str, object]) -> Path | None:
    """Return the directory of the user's templates, if the keywords name one."""
    return template_folder(_given({n: v for n, v in given.items() if n in _TEMPLATES}))


def _with_keywords(text: str) -> str:
    return _FLAG.sub(lambda found: found[1] or _keyword(found[2]) or found[0], text)


def _keyword(name: str) -> str:
    return name.replace("-", "_") if name in OPTIONS or name in ("run-name", "test-only") else ""


def _hint(name: str) -> str:
    """Return a hint about the right keyword, to append to an unknown one."""
    if name in _ELSEWHERE:
        return f": {_ELSEWHERE[name]}"
    denied = name.removeprefix("no_")
    if denied != name and denied in _ROWS:
        return f": give {denied}=False"
    return nearest(name, _ROWS)
