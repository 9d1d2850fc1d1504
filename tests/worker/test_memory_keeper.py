"""The wait of a task's parent for its rank's own save, after Slurm's SIGTERM."""

import pytest

from clusterddp.slurm.forms import KILL_WAIT_VARIABLE
from clusterddp.worker.memory_keeper import MemoryKeeper


@pytest.mark.parametrize(
    ("kill_wait", "seconds"), [("30", 4.0), ("5", 1.25), ("0", 0.0), (None, 4.0), ("", 4.0)]
)
def test_the_parent_waits_for_at_most_a_quarter_of_kill_wait(
    kill_wait: str | None, seconds: float
) -> None:
    keeper = MemoryKeeper({} if kill_wait is None else {KILL_WAIT_VARIABLE: kill_wait})
    keeper.note_term()
    assert keeper._timer and keeper._timer.interval == seconds
    keeper.close(0, "")
