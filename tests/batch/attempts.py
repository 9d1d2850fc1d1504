"""Attempts that are begun and finished in this process, as the batch process does both."""

from collections.abc import Callable
from typing import Any

from clusterddp import log
from clusterddp.batch import finish
from clusterddp.errors import ClusterDDPError, coded
from clusterddp.run.attempt import Attempt
from clusterddp.run.logs import print_to_job_log
from clusterddp.run.restart_policy import Policy
from clusterddp.run.run_dir import RunDir
from tests.cli.made_runs import Outcome, Workplace


def begin_attempt(
    workplace: Workplace,
    run: RunDir,
    *,
    job_id: str = "17",
    restart: int = 0,
    nodelist: str = "h[01-02]",
    max_requeues: int = 20,
) -> Outcome:
    """Exit code and lines of a start of the job; `out` is the attempt's number, if one began."""
    number = ""

    def begin() -> int:
        nonlocal number
        try:
            made = finish.begin(run, job_id, restart, nodelist, max_requeues, 0.0, lambda _: [])
        except ClusterDDPError as error:
            log.info(coded(error))
            return error.exit_code
        number = f"{made.number}"
        return 0

    got = logged(workplace, begin)
    return Outcome(got.code, number, got.out)


def finish_attempt(
    workplace: Workplace, run: RunDir, srun_code: int, *, number: int = 1, **policy: Any
) -> Outcome:
    """Exit code of the job and lines of its log; `policy` is the request's."""
    allowed = {"requeue": False, "max_requeues": 20, "restart_on_failure": 0, **policy}
    attempt = Attempt(run, number)
    return logged(workplace, lambda: finish.finish(attempt, srun_code, "17", 0, Policy(**allowed)))


def logged(workplace: Workplace, call: Callable[[], int]) -> Outcome:
    """Give what a call returns, and what it prints into the job's log."""
    workplace.capture.readouterr()
    with log.to(lambda line: print_to_job_log(f"clusterddp: {line}")):
        code = call()
    out, err = workplace.capture.readouterr()
    return Outcome(code, out, err)
