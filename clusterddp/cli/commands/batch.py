"""`clusterddp batch`: what a batch script hands over to once its environment is set up."""

import os
import signal
import sys
from pathlib import Path

import click

from clusterddp import log, version
from clusterddp.request.spec import JobSpec
from clusterddp.run import controller
from clusterddp.run.controller import Controller, Script
from clusterddp.run.logs import print_to_job_log
from clusterddp.run.run_dir import RunDir

_ANSWERS = 3
"""Descriptor of the pipe to the script; what Python itself prints goes elsewhere."""


@click.command(hidden=True, context_settings={"allow_interspersed_args": False})
@click.option("--run-dir", type=click.Path(path_type=Path), required=True)
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    required=True,
    help="The batch script, which says what was asked, and of which the run keeps a copy.",
)
@click.option("--ended", type=int, help="Exit code of a script that failed before its step.")
@click.argument("srun", nargs=-1, type=click.UNPROCESSED)
def command(run_dir: Path, script: Path, ended: int | None, srun: tuple[str, ...]) -> int:
    """Run one attempt of a run to its verdict; ends with the job's exit code."""
    # The script has its signals from bash; Slurm and scancel may send them here as well.
    for name in controller.SIGNALS:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    index = os.environ.get("SLURM_ARRAY_TASK_ID")  # each element is a run, of one request
    asked = str(run_dir).removesuffix(f"-{index}") if index else str(run_dir)
    spec = JobSpec.from_script(script.read_text("utf-8", "surrogateescape"), asked)
    run = RunDir(run_dir)
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0) and not run_dir.is_dir():
        sys.stderr.write(
            f"clusterddp: {run_dir} is gone, so the run cannot resume; submit it anew\n"
        )
        return controller.EXIT_NO_RUN
    try:
        controller.make_records(run, spec, script)
        job_log = run.job_log.open("ab")
    except OSError as error:
        sys.stderr.write(
            f"clusterddp: cannot make the run directory {run_dir}: {error.strerror}. Make room "
            "there, or choose another --output-root.\n"
        )
        return controller.EXIT_NO_RUN
    the_script = Script(0, _ANSWERS, os.dup(2), job_log.fileno())
    for descriptor in (1, 2):
        os.dup2(job_log.fileno(), descriptor)
    with log.to(lambda line: print_to_job_log(f"clusterddp: {line}")):
        code = Controller(spec, run, the_script).run(srun, ended, code_changes, _carry)
        the_script.report_exit_code(code)
        return code


def _carry(run: RunDir) -> None:
    """Have a run that carries no clusterddp, such as an array's element, carry this one."""
    try:
        rendered_by = version.of_script(run.script.read_text(errors="replace"))
        if rendered_by not in ("", version.__version__):
            log.info(
                f"its script is of clusterddp {rendered_by}; what that leaves out is as in this one"
            )
        if run.bundle.exists():
            return
        from clusterddp.submission import bundle  # most runs carry one

        log.info(f"further attempts use clusterddp {bundle.carry(run)}")
    except Exception as error:  # a service, which must not end the attempt
        log.info(f"further attempts use what is installed by then: {error}")


def code_changes(run: RunDir) -> list[str]:
    """List what differs from the code that was submitted, where the run uses no copy of it."""
    from clusterddp.submission import snapshot  # most runs use a copy of their code

    folder = Path(os.environ.get("SLURM_SUBMIT_DIR") or ".")
    return snapshot.changes_since_submission(run, folder) or []
