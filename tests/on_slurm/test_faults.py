"""The quick faults of the campaign; `python -m tests.on_slurm.campaign` carries out all."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.on_slurm.campaign import FAULTS_OF_ALL_SUBJECTS
from tests.on_slurm.campaign.__main__ import AT_ONCE
from tests.on_slurm.campaign.place import Result, Site

QUICK = [fault.name for fault in FAULTS_OF_ALL_SUBJECTS.values() if fault.quick]
# Without a Slurm, training/test_loop.py and tests/test_loop.py stop four ranks and sharded ones,
# fill a disk and tear a checkpoint, and cli/commands/test_train.py refuses a run's second job; on
# one, test_endings.py cancels, requeues, up to the cap as well, kills the batch controller,
# and has a set-up that is broken. CI preempts with grace on Slurm 24.11 (.ci/run), and here a Loop
# (test_frameworks.py) and trials (test_sweeps.py).
RELEASE = (
    "preempt-with-grace",
    *("signal-four-ranks", "signal-four-ranks-buckets", "loop-fsdp-killed", "newest-torn"),
    *("disk-full-at-the-signal", "requeue-from-outside", "scancel", "requeue-cap"),
    *("broken-script", "two-jobs-of-one-run", "batch-controller-killed"),
)


@pytest.fixture(scope="module")
def results(
    slurm_available: None, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[Result]]]:
    """Those that were selected, several at work at once: most of what they take is waiting."""
    chosen = [item.callspec.params["name"] for item in request.session.items
              if item.path == request.path and hasattr(item, "callspec")]  # fmt: skip
    with Site(data_dir=None) as site, ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            faults = [FAULTS_OF_ALL_SUBJECTS[name] for name in chosen]
            yield {fault.name: pool.submit(site.carry_out, fault) for fault in faults}
        finally:
            site.stopping.set()
            pool.shutdown(cancel_futures=True)


# Ahead of these, test_endings.py and test_spares.py have what only a Slurm shows.
@pytest.mark.slow
@pytest.mark.timeout(900)  # the first waits for several trainings at once, each of many processes
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.release] * (name in RELEASE)) for name in QUICK]
)
def test_a_run_outlives(name: str, results: dict[str, Future[Result]]) -> None:
    result = results[name].result()
    assert result.ok, result.seen


def test_the_documentation_counts_them() -> None:
    docs = Path(__file__).parents[2] / "CONTRIBUTING.md"
    assert f"carries out {len(FAULTS_OF_ALL_SUBJECTS)} faults" in docs.read_text()
