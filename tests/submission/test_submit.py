"""Directories of trials that cannot all be made."""

import dataclasses

import pytest

from clusterddp.errors import RequestError
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import Sweep
from clusterddp.run.run_dir import SweepDir
from clusterddp.submission import submit
from tests.cli.made_runs import Workplace, workplace

__all__ = ["workplace"]


def of_five(workplace: Workplace) -> JobSpec:
    """Request of a sweep of five trials, of which the first is there."""
    spec = workplace.sweep("s", ("n",), ("0",)).load_spec()
    return dataclasses.replace(spec, sweep=Sweep(("n",), tuple((f"{n}",) for n in range(5))))


def test_a_run_that_appears_meanwhile_is_left_alone(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = of_five(workplace)
    # It comes behind the look, as that of another submission can.
    monkeypatch.setattr(submit, "refuse_existing", lambda *_: workplace.run("s-3"))
    sweep = SweepDir(workplace.root / "s")
    with (
        pytest.raises(RequestError, match="s-3: File exists"),
        submit.created_trials(sweep, spec, range(1, 5)),
    ):
        pytest.fail("it is yielded")
    assert sorted(path.name for path in workplace.root.iterdir()) == ["s", "s-0", "s-3"]
    assert sweep.trial(3).spec.is_file()


def test_an_interruption_leaves_no_trial(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, trial_spec = of_five(workplace), JobSpec.trial_spec

    def interrupted(spec: JobSpec, index: int) -> JobSpec:
        if index == 3:
            raise KeyboardInterrupt
        return trial_spec(spec, index)

    monkeypatch.setattr(JobSpec, "trial_spec", interrupted)
    sweep = SweepDir(workplace.root / "s")
    with pytest.raises(KeyboardInterrupt), submit.created_trials(sweep, spec, range(1, 5)):
        pytest.fail("it is yielded")
    assert sorted(path.name for path in workplace.root.iterdir()) == ["s", "s-0"]
