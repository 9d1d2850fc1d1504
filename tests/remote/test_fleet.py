"""All clusters at once, and results that are fetched, through a real ssh and sshd."""

import json
from pathlib import Path

import pytest

from clusterddp.remote import fleet
from clusterddp.submission.submit import seconds_until
from tests.remote.sshd import Host


def make_run(host: Host, name: str) -> Path:
    folder = host.there / "jobs" / name
    (folder / "logs").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    for path in ("script.sbatch", "spec.json", "logs/rank-0.log", "checkpoints/step-1.pt"):
        (folder / path).write_text("{}")
    return folder


def test_results_are_fetched_without_checkpoints(host: Host, tmp_path: Path) -> None:
    run = make_run(host, "first")
    (run / "code").mkdir()
    for name in ("code/train.py", "clusterddp-0.1.1-abc.pyz"):
        (run / name).touch()
    (run / "workdir").symlink_to("code")
    answer = host.run("fetch", "first", f"--to={tmp_path}")
    assert answer.returncode == 0, answer.stderr
    found = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"script.sbatch", "spec.json", "rank-0.log"}


def test_a_pattern_chooses_files(host: Host, tmp_path: Path) -> None:
    make_run(host, "second")
    answer = host.run("fetch", "second", "checkpoints/*", f"--to={tmp_path}")
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "checkpoints/step-1.pt").read_text() == "{}"
    assert not (tmp_path / "logs").exists()


def test_fetch_of_an_unknown_run_says_so(host: Host) -> None:
    answer = host.run("fetch", "nothing")
    assert answer.returncode == 2
    assert "[CD0501]" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_all_clusters_are_asked_and_a_dead_one_is_named(host: Host) -> None:
    make_run(host, "third")
    host.site("[cluster:dead]", "host = nowhere.invalid")
    answer = host.run("runs", "--json", on="all")
    assert answer.returncode == 1
    assert ("big", "third") in {
        (each["cluster"], each["name"]) for each in json.loads(answer.stdout)
    }
    assert "dead shows no runs" in answer.stderr


@pytest.mark.parametrize(("on", "command"), [("all", "submit"), ("any", "runs")])
def test_other_commands_need_one_cluster(host: Host, on: str, command: str) -> None:
    answer = host.run(command, on=on)
    assert answer.returncode == 2
    assert "[CD1405]" in answer.stderr
    assert host.connections() == 0


def answers(monkeypatch: pytest.MonkeyPatch, **found: tuple[object, str]) -> None:
    monkeypatch.setattr(fleet, "_clusters", lambda: [])
    monkeypatch.setattr(fleet, "_asked", lambda *_: found)


def test_the_soonest_is_taken_and_no_answer_is_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = {"forecast": "later", "start_in_seconds": 90.0}
    soon = {"forecast": "sooner", "start_in_seconds": 0.0}
    answers(monkeypatch, a=(None, "no answer"), b=(late, ""), c=(soon, ""))
    assert fleet._soonest(["submit"]) == "c"
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()[1:]] == ["c", "b", "a"]


def test_none_is_taken_blindly(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, a=(None, "no"), b=({"forecast": "no", "start_in_seconds": None}, ""))
    with pytest.raises(fleet.RequestError, match="CD1405"):
        fleet._soonest(["submit"])


def test_a_forecast_without_a_start_is_unknown() -> None:
    assert seconds_until("Requested node configuration is not available") is None
    assert seconds_until("to start at 2001-01-01T00:00:00 using 1 processors") == 0.0
