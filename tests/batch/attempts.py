"""Attempts that are begun and finished in this process, as the batch process does both."""

from collections.abc import Callable
from typing import Any

from clusterddp import log
from clusterddp.batch.begin import begin_attempt as begin
from clusterddp.batch.finish import finish
from clusterddp.batch.job import JobStart
from clusterddp.errors import ClusterDDPError, coded
from clusterddp.run.attempt import Attempt, print_to_job_log
from clusterddp.run.history import Policy
from clusterddp.run.run_dir import RunDir
from tests.cli.made_runs import Outcome, Workplace


def begin_attempt(
    workplace: Workplace, run: RunDir, *, job_id: str = "17", restart: int = 0,
    nodelist: str = "h[01-02]", max_requeues: int = 20, patience: float = 0.0, needed: int = 0,
) -> Outcome:  # fmt: skip
    """Exit code and lines of a start of the job; `out` is the attempt's number, if one began."""
    number = ""

    def start() -> int:
        nonlocal number
        try:
            job = JobStart(run, job_id, restart, nodelist)
            made = begin(job, max_requeues, patience, lambda _: [], needed=needed)
        except ClusterDDPError as error:
            log.info(coded(error))
            return error.exit_code
        number = f"{made.number}"
        return 0

    got = logged(workplace, start)
    return Outcome(got.code, number, got.out)


def finish_attempt(
    workplace: Workplace, run: RunDir, srun_code: int, *, number: int = 1, **policy: Any
) -> Outcome:
    """Exit code of the job and lines of its log; `policy` is the request's."""
    allowed = {"requeue": False, "max_requeues": 20, "retries": 0, **policy}
    job, attempt = JobStart(run, "17"), Attempt(run, number)
    return logged(workplace, lambda: finish(job, attempt, srun_code, Policy(**allowed)))


def logged(workplace: Workplace, call: Callable[[], int]) -> Outcome:
    """Give what a call returns, and what it prints into the job's log."""
    workplace.capture.readouterr()
    with log.to(lambda line: print_to_job_log(f"clusterddp: {line}")):
        code = call()
    out, err = workplace.capture.readouterr()
    return Outcome(code, out, err)
