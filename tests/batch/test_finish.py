"""The start of an attempt beside another job of its run."""

import pytest

from clusterddp import polling
from clusterddp.batch import begin as beginning
from clusterddp.batch.job import JobStart
from clusterddp.run.attempt import StartRefused
from clusterddp.run.run_dir import RunDir
from tests.cli.made_runs import Workplace, ended, started, submitted, workplace
from tests.event_lines import add_event, kinds

__all__ = ["workplace"]


@pytest.fixture
def run(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of a COMMAND that job 7 was the first to start, and that job 8 runs now."""
    monkeypatch.setattr(polling, "SLURM_POLL_SECONDS", 0.01)
    first = {**started("7"), "attempt": 1}, {**ended("7", 75), "attempt": 1, "cause": "stopped"}
    second = submitted("8"), {**started("8"), "attempt": 2}
    run = workplace.run("one", submitted("7"), *first, *second)
    for number in (1, 2):
        (run.attempts / f"{number:04}").mkdir(parents=True)
    return run


def begin(run: RunDir, job_id: str = "7", patience: float = 0.05) -> int:
    job = JobStart(run, job_id, 1, "h01")
    return beginning.begin_attempt(job, 20, patience, lambda _: []).number


def test_an_older_job_that_is_requeued_does_not_start_the_command_a_second_time(
    workplace: Workplace, run: RunDir
) -> None:
    workplace.command("squeue", "echo '8|RUNNING|None'")
    with pytest.raises(StartRefused, match=r"attempt 2 of one still runs as job 8 on h\[01-02\]"):
        begin(run)
    assert not (run.attempts / "0003").exists()
    assert kinds(run)[-2:] == ["started", "ended"]  # what came of this start


def test_it_waits_for_the_other_job_and_starts_once_that_has_ended(
    workplace: Workplace, run: RunDir
) -> None:
    end = f"""echo '{{"event": "ended", "attempt": 2, "job_id": "8"}}' >>{run.events}"""
    workplace.command("squeue", f"echo '8|RUNNING|None'; {end}")
    assert begin(run, patience=60) == 3
    assert len(workplace.calls) == 1


@pytest.mark.parametrize(
    ("job_id", "answer"),
    [
        ("7", "echo '8|COMPLETED|None'"),
        ("7", "echo '8|PENDING|Resources'"),  # it comes after this one
        ("7", "exit 1"),
        ("8", "echo '8|RUNNING|None'"),  # the same job, started again
    ],
)
def test_what_no_job_runs_any_more_keeps_nobody_from_starting(
    workplace: Workplace, run: RunDir, job_id: str, answer: str
) -> None:
    workplace.command("squeue", answer)
    assert begin(run, job_id) == 3


def test_slurm_is_not_asked_where_the_end_is_recorded(workplace: Workplace, run: RunDir) -> None:
    add_event(run, **{**ended("8", 75), "attempt": 2, "cause": "stopped"})
    workplace.command("squeue", "echo '8|RUNNING|None'")
    assert begin(run) == 3
    assert workplace.calls == []
