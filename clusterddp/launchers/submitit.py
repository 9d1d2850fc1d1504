"""Launch with submitit: its executor, directory and logs, in the run's directory.

submitit writes the script. Everything around its srun line (records, environment, setup, port,
teardown, result) comes from our template, as submitit's `setup` lines. Each task runs the same
command as with the other launchers. Before the time limit, submitit's own protocol requeues the
job: `Task.checkpoint`. docs/launchers.md lists the differences.
"""

import io
import math
import os
import shlex
import signal
import subprocess
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp import polling
from clusterddp.errors import RequestError
from clusterddp.launchers import SentJob, sbatch
from clusterddp.processes import replace_environment
from clusterddp.ranks.variables import host_name
from clusterddp.request.options import EXPEDITE
from clusterddp.request.spec import JobSpec
from clusterddp.run import events
from clusterddp.run.attempt import Attempt
from clusterddp.run.events import Cause
from clusterddp.run.history import History, Policy, decide, steps_gained
from clusterddp.run.outcome import read_outcomes, read_outcomes_of
from clusterddp.run.records import Outcome
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client, forms

_SIGNAL_VARIABLE = "SUBMITIT_PREEMPT_SIGNAL"
_MIN_PATIENCE_SECONDS = 30


def prepare(spec: JobSpec, template_folder: Path | None) -> str:
    """Return the text that submitit submits. Raises RequestError for other options."""
    if template_folder or spec.template != "ddp.sbatch.j2":
        raise RequestError(
            "--launcher submitit writes its script itself and takes no --template or "
            "--template-dir; use --launcher sbatch for those. [CD0305]"
        )
    if spec.container_image:
        raise RequestError(
            "--launcher submitit starts submitit's own program in each task, which an image rarely "
            "has; use --launcher sbatch with --container-image. [CD0305]"
        )
    # The only call of a private function, for the dry run; verified to return the text that
    # SlurmExecutor.submit sends with submitit 1.5.4.
    try:
        from submitit.slurm.slurm import _make_sbatch_string
    except ImportError:
        raise RequestError(
            "--launcher submitit: the installed submitit has no _make_sbatch_string, which gives "
            "the script before it is submitted. Install submitit 1.5.4, or use --launcher "
            "sbatch. [CD0305]"
        ) from None

    command = f"{_python(spec)} -u -m submitit.core._submit {shlex.quote(str(_folder(spec)))}"
    return str(_make_sbatch_string(command=command, folder=_folder(spec), **_parameters(spec)))


def submit(spec: JobSpec, script: str, run: RunDir) -> SentJob:
    """Submit the run through submitit's executor, which renders the script again."""
    import submitit

    if spec.requeue == EXPEDITE:
        client.check_expedite(os.environ)
    try:
        executor = submitit.SlurmExecutor(
            folder=_folder(spec), python=_python(spec), max_num_timeout=spec.max_requeues
        )
    except RuntimeError:
        raise RequestError(
            "no srun on PATH, so submitit cannot submit from here; log in to the cluster, or use "
            "--launcher local to rehearse the run. [CD0402]"
        ) from None
    executor.update_parameters(**_parameters(spec))
    task = Task(
        run_dir=str(run.path),
        argv=(spec.python, "-m", "clusterddp", *sbatch.task_arguments(spec)),
        policy=Policy.of(spec),
        world_size=spec.world_size,
        patience_seconds=max(spec.signal_lead, _MIN_PATIENCE_SECONDS),
        by_protocol=_by_protocol(spec),
    )
    kept = dict(os.environ)
    replace_environment(client.submission_environment(kept))  # submitit starts sbatch with it
    try:
        with redirect_stderr(io.StringIO()):  # submitit also prints the message that it raises
            job = executor.submit(task)
    except submitit.core.utils.FailedJobError as error:
        raise client.refusal(" ".join(str(error).split()), script, os.environ) from None
    finally:
        replace_environment(kept)
        # Slurm has its own copy of the script; submitit leaves the file or a link to it.
        for left in _folder(spec).glob(".submission_file_*.sh"):
            left.unlink(missing_ok=True)
    events.add(
        run.events, events.Submitted(job_id=job.job_id, launcher="submitit", folder=str(Path.cwd()))
    )
    return SentJob(job.job_id)


@dataclass(frozen=True)
class Task:
    """Task that submitit pickles, calls in every process, and asks for its successor.

    On submitit's signal, its handler calls `checkpoint` in the task of rank 0, requeues the job if
    that returns a successor, and exits. Slurm then kills all other tasks. So `checkpoint` returns
    only when all ranks have saved and exited.
    """

    run_dir: str
    argv: tuple[str, ...]
    """Command of the other launchers, PYTHON -m clusterddp NAME …, without the attempt."""
    policy: Policy
    world_size: int
    patience_seconds: float
    """Time limit for the ranks to save."""
    by_protocol: bool
    """True if submitit handles its signal; otherwise only the ranks do."""

    def __call__(self) -> None:
        """Run one rank with its own log.

        Raises RuntimeError if it failed, for submitit to record, and SystemExit if it has stopped,
        so that submitit stores no result of an attempt that is not the last.
        """
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            # Without its protocol, submitit's handler would check a time limit that it does not
            # know, and requeue. The other signal is for the rank, and would end this process.
            if not (self.by_protocol and number == _submitits_signal()):
                signal.signal(number, _do_nothing)
        attempt = self._attempt()
        rank = int(os.environ["SLURM_PROCID"])
        python, *words = self.argv[:4]
        if attempt.run.bundle.is_symlink():
            words = [str(attempt.run.bundle), words[-1]]
        argv = [python, *words, f"--attempt={attempt.number}", *self.argv[4:]]
        with attempt.run.rank_log(rank).open("ab") as log:
            code = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT).wait()
        if code:
            raise RuntimeError(f"the rank ended with exit code {code}; its log is {log.name}")
        of_host = read_outcomes_of(attempt.outcomes, host_name(os.environ))
        if any(each.rank == rank and each.stopped for each in of_host):
            raise SystemExit(0)

    def checkpoint(self) -> object:
        """Ask the ranks to save and exit. Return what submitit requeues, or None for no requeue."""
        import submitit

        signal.signal(_submitits_signal(), _do_nothing)  # a second signal would start this again
        attempt = self._attempt()
        if not attempt.stop.exists():
            with suppress(OSError):  # the ranks have received the signal as well
                attempt.ask_to_stop("signal")
        outcomes: list[Outcome] = []
        for _ in polling.poll(self.patience_seconds, every=polling.RECORDS_POLL_SECONDS):
            outcomes = read_outcomes(attempt.outcomes)
            if sum(outcome.ended is not None for outcome in outcomes) >= self.world_size:
                break
        if outcomes and all(outcome.exit_code == 0 for outcome in outcomes):
            raise SystemExit(0)  # the ranks were just done; None would be an error
        return submitit.helpers.DelayedSubmission(self) if self._is_requeued(attempt) else None

    def _attempt(self) -> Attempt:
        return Attempt(RunDir(Path(self.run_dir)), int(os.environ[forms.ATTEMPT_VARIABLE]))

    def _is_requeued(self, attempt: Attempt) -> bool:
        """Decide on a requeue, as the batch controller does after a signal and logs."""
        run, job_id = attempt.run, os.environ["SLURM_JOB_ID"]
        if any(outcome.failed for outcome in read_outcomes(attempt.outcomes)):
            return False
        final_record = attempt.read_final_record()
        if final_record and final_record.reason == "stop":
            return False  # 'clusterddp stop' came first
        restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        history = History.read(run)
        cancelled = any(event.job_id == job_id for event in history.every(events.CancelRequested))
        if cancelled or client.ending(job_id, restart) is client.Ending.CANCELLED:
            return False
        gains = steps_gained(attempt, history.spec)
        starts = history.past_attempts_with(attempt.number, cause=Cause.SIGNAL, steps_gained=gains)
        return decide(self.policy, Cause.SIGNAL, starts).restarts


def _do_nothing(*_: object) -> None:
    """Do nothing on a signal. Unlike SIG_IGN, a handler is not inherited by child processes."""


def _submitits_signal() -> signal.Signals:
    return signal.Signals[f"SIG{os.environ.get(_SIGNAL_VARIABLE, 'USR2')}"]


def _folder(spec: JobSpec) -> Path:
    return Path(spec.run_dir) / "submitit"


def _by_protocol(spec: JobSpec) -> bool:
    """Return whether submitit can interpret its signal, for which it needs the limit of --time."""
    timed = "time" in sbatch.directive_values(spec)
    limit = forms.limit_seconds(spec.resources.time) if timed else None
    return bool(spec.requeue and spec.signal) and limit is not None


def _python(spec: JobSpec) -> str:
    return shlex.join([*spec.wrapper, spec.python])


def _parameters(spec: JobSpec) -> dict[str, Any]:
    """Return submitit's parameters; directives are in `additional_parameters`, unquoted."""
    resources = spec.resources
    wanted = sbatch.directive_values(spec)
    limit = forms.limit_seconds(wanted.get("time") or "")
    if spec.signal:  # to the tasks, where submitit listens
        wanted["signal"] = spec.signal.removeprefix("B:")
    for name in ("output", "nodes", "ntasks-per-node"):  # submitit writes these
        wanted.pop(name, None)
    srun_args = [f"--ntasks={resources.num_tasks}", "--kill-on-bad-exit=1", "--export=ALL"]
    if resources.cpus_per_task:
        srun_args.append(f"--cpus-per-task={resources.cpus_per_task}")
    return {
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks_per_node,
        # submitit counts timeouts with it; without one it would request five minutes.
        "time": None if limit is None else math.ceil(limit / 60),
        "wckey": None,
        "job_name": _escaped(wanted.pop("job-name", None)),
        "setup": sbatch.render(spec, template=sbatch.SUBMITIT_SETUP).split("\n"),
        "additional_parameters": {
            # submitit always requests a signal before the time limit, which would end the tasks.
            # Without a requested signal, use one that does nothing.
            "signal": "CONT@1",
            **{n: True if value is None else _escaped(value) for n, value in wanted.items()},
        },
        "srun_args": [*srun_args, *spec.srun_args],
    }


def _escaped(value: str | None) -> str | None:
    """Escape backslashes, which Slurm's reader removes after submitit's shell quoting."""
    return None if value is None else forms.text("directive", value).replace("\\", "\\\\")
