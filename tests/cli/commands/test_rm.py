"""`clusterddp rm`."""

import dataclasses
import json
import sys
from io import StringIO
from typing import Any

import pytest

from clusterddp.submission.claim import claimed
from tests.checkpoints.made_checkpoints import attempt
from tests.cli.commands.test_clean import DONE, FAILED, HISTORY, STOPPED
from tests.cli.made_runs import Workplace, ended, submitted, workplace

__all__ = ["workplace"]


@pytest.fixture(autouse=True)
def slurm(workplace: Workplace) -> None:
    """A Slurm that has forgotten every job but 5, which runs."""
    workplace.command("squeue", 'case "$*" in *5*) echo "5|RUNNING|h1|None|"; esac; exit 0')
    workplace.command("sacct", "exit 1")


def left(workplace: Workplace) -> list[str]:
    return sorted(path.name for path in workplace.root.iterdir())


@pytest.mark.parametrize("history", [DONE, FAILED, STOPPED, [], HISTORY])
def test_a_run_that_is_over_goes_with_all_that_it_had(
    history: list[dict[str, object]], workplace: Workplace
) -> None:
    run = workplace.run("one", *history)
    attempt(run, 1, 100)
    own = workplace.folder / "own"
    own.mkdir()
    (own / "kept").touch()
    (run.path / "link").symlink_to(own)
    workplace.run("other", *DONE)
    shown = workplace.invoke("rm", "--dry-run", "one")
    assert (shown.code, left(workplace)) == (0, ["one", "other"])
    assert shown.out.startswith(f"{run.path} (")
    done = workplace.invoke("rm", "--yes", "one")
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("removed one\n")
    assert left(workplace) == ["other"]
    assert (own / "kept").is_file()


@pytest.mark.parametrize(("answer", "code"), [("n\n", 2), ("\n", 2), ("y\n", 0)])
def test_it_asks_first(
    answer: str, code: int, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace.run("one", *DONE)
    monkeypatch.setattr(sys, "stdin", stdin := StringIO(answer))
    stdin.isatty = lambda: True  # type: ignore[method-assign]
    done = workplace.invoke("rm", "one")
    assert done.code == code
    assert left(workplace) == ([] if answer == "y\n" else ["one"])
    assert "Permanently remove 1 run? [y/N]" in done.err


def test_a_run_that_may_be_at_work_stays(workplace: Workplace) -> None:
    workplace.run("one", submitted("5"))
    workplace.run("two", *DONE)
    workplace.command("squeue", "echo 'slurm_load_jobs error: no controller' >&2; exit 1")
    done = workplace.invoke("rm", "--yes", "one", "two")
    assert done.code == 2
    assert "clusterddp: one may still be active and is not removed. [CD0508]" in done.err
    assert left(workplace) == ["one"]


def test_a_run_that_another_process_submits_stays(workplace: Workplace) -> None:
    run = workplace.run("one", *DONE)
    with claimed(run):
        done = workplace.invoke("rm", "--yes", "one")
    assert done.code == 2
    assert "is being resumed by" in done.err
    assert left(workplace) == ["one"]


def test_a_run_from_which_another_begins_stays_until_both_are_named(workplace: Workplace) -> None:
    first, second = workplace.run("one", *DONE), workplace.run("two", *DONE)
    path = attempt(first, 1, 100).checkpoints / "step-00000100.pt"
    spec = second.load_spec()
    assert spec.train
    train = dataclasses.replace(spec.train, init_from=str(path))
    second.spec.write_text(dataclasses.replace(spec, train=train).to_json())
    done = workplace.invoke("rm", "--yes", "one")
    assert done.code == 2
    assert "two starts from one of its checkpoints" in done.err
    assert workplace.invoke("rm", "--yes", "one", "two").code == 0
    assert left(workplace) == []


@pytest.mark.parametrize("how", ["begins", "waits"])
def test_a_run_that_one_needs_which_stays_stays_too(workplace: Workplace, how: str) -> None:
    first, second = workplace.run("one", *DONE), workplace.run("two", submitted("5"))
    spec = second.load_spec()
    assert spec.train
    path = attempt(first, 1, 100).checkpoints / "step-00000100.pt"
    more: dict[str, Any] = {"after": ((str(first.path), "ok"),)}
    if how == "begins":
        more = {"train": dataclasses.replace(spec.train, init_from=str(path))}
    second.spec.write_text(dataclasses.replace(spec, **more).to_json())
    done = workplace.invoke("rm", "--yes", "one", "two")
    assert (done.code, left(workplace)) == (2, ["one", "two"])
    assert "clusterddp: one is not removed: two" in done.err


def test_a_run_that_was_moved_stays_while_its_job_may_run(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("5"))
    moved = run.path.rename(run.path.with_name("moved"))
    workplace.command("squeue", "echo '5 5 N/A|RUNNING|None|clusterddp:one'")
    done = workplace.invoke("rm", "--yes", str(moved))
    assert (done.code, left(workplace)) == (2, ["moved"])
    assert "moved may still be active and is not removed" in done.err


def test_a_sweep_goes_with_its_trials(workplace: Workplace) -> None:
    sweep = workplace.sweep("lr", ("lr",), ("1",), ("2",))
    for trial in sweep.trials:
        with trial.events.open("a") as file:
            file.write(f"{json.dumps({'time': 2e9, **ended('7', 0, cause='done')})}\n")
    workplace.run("other", *DONE)
    done = workplace.invoke("rm", "--yes", "lr")
    assert (done.code, done.err) == (0, "")
    assert left(workplace) == ["other"]


def test_a_directory_that_is_a_link_stays(workplace: Workplace) -> None:
    run = workplace.run("one", *DONE)
    elsewhere = workplace.folder / "elsewhere"
    run.path.rename(elsewhere)
    run.path.symlink_to(elsewhere)
    done = workplace.invoke("rm", "--yes", "one")
    assert done.code == 2
    assert f"is a link to {elsewhere}. Name that directory" in done.err
    assert (elsewhere / "spec.json").is_file()
