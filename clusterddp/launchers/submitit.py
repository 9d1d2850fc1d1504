"""The submitit launcher: submitit's own executor, folder and logs, below the run's directory.

submitit writes the script; what stands around its srun line (records, environment, set-up, port,
tear-down, verdict) comes from our own template, as submitit's `setup` lines. Each task runs the
same command as under the other launchers. The differences are listed in docs/launchers.md.
"""

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterddp import forms, render, slurm
from clusterddp.errors import RequestError
from clusterddp.launchers import Submission
from clusterddp.run_dir import RunDir
from clusterddp.spec import JobSpec


def prepare(spec: JobSpec, template_folder: Path | None) -> str:
    """The text that submitit sends. Raises RequestError for what submitit cannot carry."""
    if template_folder or spec.template != "ddp.sbatch.j2":
        raise RequestError(
            "--launcher submitit writes its script itself and takes no --template or "
            "--template-dir; use --launcher sbatch for those."
        )
    # The one call of a private function, for the dry run; seen to give the text that
    # SlurmExecutor.submit sends with submitit 1.5.4.
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{_python(spec)} -u -m submitit.core._submit {shlex.quote(str(_folder(spec)))}"
    text: str = _make_sbatch_string(command=command, folder=_folder(spec), **_parameters(spec))
    return text


def submit(spec: JobSpec, script: str, run: RunDir) -> Submission:  # noqa: ARG001 -- submitit renders it
    """Queue the run through submitit's executor."""
    import submitit

    try:
        executor = submitit.SlurmExecutor(folder=_folder(spec), python=_python(spec))
    except RuntimeError:
        raise RequestError(
            "no srun on PATH, so submitit cannot submit from here; log in to the cluster, or use "
            "--launcher local to rehearse the run."
        ) from None
    executor.update_parameters(**_parameters(spec))
    with _environment(slurm.submission_environment(os.environ)):
        try:
            job = executor.submit(run_task, _task_argv(spec), str(run.logs))
        except submitit.core.utils.FailedJobError as error:
            raise RequestError(f"sbatch refused the job: {' '.join(str(error).split())}") from None
    run.add_event("submitted", job_id=job.job_id, launcher="submitit")
    return Submission(job.job_id)


def run_task(argv: list[str], logs: str) -> None:
    """What submitit calls on every task: the command of the other launchers, in its rank's log.

    Raises RuntimeError when the rank failed, for submitit to record.
    """
    with (Path(logs) / f"rank-{os.environ['SLURM_PROCID']}.log").open("ab") as log:
        code = subprocess.call(argv, stdout=log, stderr=subprocess.STDOUT)
    if code:
        raise RuntimeError(f"the rank ended with exit code {code}; its log is {log.name}")


def _folder(spec: JobSpec) -> Path:
    return Path(spec.run_dir) / "submitit"


def _python(spec: JobSpec) -> str:
    return shlex.join([*spec.launch_prefix, spec.python])


def _task_argv(spec: JobSpec) -> list[str]:
    return [spec.python, "-m", "clusterddp", *render.task_arguments(spec)]


def _parameters(spec: JobSpec) -> dict[str, Any]:
    """submitit's parameters; directives go through `additional_parameters`, values as they are."""
    resources = spec.resources
    wanted = render.directive_values(spec)
    for name in ("output", "nodes", "ntasks-per-node"):  # submitit writes these by itself
        wanted.pop(name, None)
    srun_args = [f"--ntasks={resources.num_tasks}", "--kill-on-bad-exit=1", "--export=ALL"]
    if resources.cpus_per_task:
        srun_args.append(f"--cpus-per-task={resources.cpus_per_task}")
    return {
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks_per_node,
        "time": None,  # otherwise submitit asks for five minutes
        "wckey": None,
        "job_name": _escaped(wanted.pop("job-name", None)),
        "setup": render.render(replace(spec, template=render.SUBMITIT_SETUP)).split("\n"),
        "additional_parameters": {
            # submitit always asks Slurm for a signal ahead of the time limit, which would end the
            # tasks: unless one was asked for, let it be one that does nothing.
            "signal": "CONT@1",
            **{n: True if value is None else _escaped(value) for n, value in wanted.items()},
        },
        "srun_args": [*srun_args, *spec.srun_args],
    }


def _escaped(value: str | None) -> str | None:
    """submitit quotes a value for a shell; Slurm's own reader also takes backslashes out."""
    return None if value is None else forms.text("directive", value).replace("\\", "\\\\")


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """submitit starts sbatch with this process's own variables: change them while it does."""
    kept = dict(os.environ)
    os.environ.clear()
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
