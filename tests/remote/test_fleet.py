"""All clusters at once, and results that are fetched, through a real ssh and sshd."""

import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from clusterddp.remote import fleet, results
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
    elsewhere = host.run("fetch", "--runs-dir=/nowhere", "nothing")
    assert "the directory '/nowhere'" in elsewhere.stderr
    answer = host.run("fetch", "nothing")
    assert answer.returncode == 2
    assert "[CD0501]" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_what_is_here_is_replaced_only_if_it_was_fetched(host: Host) -> None:
    run = make_run(host, "again")
    os.link(run / "spec.json", run / "same.json")
    (run / "events.jsonl").write_text("old")
    assert host.run("fetch", "again").returncode == 0
    here = host.work / "jobs/again"
    assert (here / "same.json").read_text() == "{}"
    (run / "events.jsonl").write_text("new")
    assert host.run("fetch", "again").returncode == 0
    assert (here / "events.jsonl").read_text() == "new"
    (here / ".fetched-from").unlink()
    refused = host.run("fetch", "again")
    assert refused.returncode == 2
    assert "jobs/again is here already" in refused.stderr
    (here / "spec.json").unlink()
    (here / "spec.json").mkdir()
    refused = host.run("fetch", "again", f"--to={here}")
    assert "[CD0108]" in refused.stderr
    assert not list(here.rglob(".fetch-*"))
    shutil.rmtree(host.work / "jobs")


def sent(*members: tuple[str, bytes, bytes], run: str = "x") -> bytes:
    """An archive, as a cluster sends it; each member has a name, a type and a content."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w|gz", pax_headers={"run": run}) as archive:
        for name, kind, data in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(data), "/etc/passwd"
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes, code: int = 0) -> int:
    (tmp_path / "sent").write_bytes(content)
    words = ["sh", "-c", f"cat '{tmp_path}/sent'; exit {code}"]
    monkeypatch.setattr(results.session, "command", lambda *_: words)
    monkeypatch.chdir(tmp_path)
    return results.fetch("big", "x", (), (), tmp_path / "to")[0]


@pytest.mark.parametrize(
    "member",
    [
        ("../out", tarfile.REGTYPE, b"x"),
        ("/tmp/far-out", tarfile.REGTYPE, b"x"),
        ("link", tarfile.SYMTYPE, b""),
        ("link", tarfile.LNKTYPE, b""),
        ("pipe", tarfile.FIFOTYPE, b""),
        (".fetched-from", tarfile.REGTYPE, b"x"),
    ],
)
def test_a_hostile_archive_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, member: tuple[str, bytes, bytes]
) -> None:
    content = sent(("fine", tarfile.REGTYPE, b"x"), member)
    with pytest.raises(results.RequestError, match="CD1406"):
        fetched(monkeypatch, tmp_path, content)
    assert {path.name for path in tmp_path.rglob("*")} == {"sent", "to", "fine"}


def test_a_link_here_leads_nothing_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("to", "else"):
        (tmp_path / name).mkdir()
    (tmp_path / "to/link").symlink_to("../else")
    with pytest.raises(results.RequestError, match="CD1406"):
        fetched(monkeypatch, tmp_path, sent(("link/file", tarfile.REGTYPE, b"x")))
    assert not list((tmp_path / "else").iterdir())


@pytest.mark.parametrize("run", ["", "..", "a/b", "/tmp"])
def test_a_hostile_name_of_a_run_is_refused(run: str) -> None:
    with pytest.raises(results.RequestError, match="as the name of a run"):
        results._default(run, "big")


def test_a_file_that_was_cut_off_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = sent(("whole", tarfile.REGTYPE, b"x"), ("cut", tarfile.REGTYPE, os.urandom(90_000)))
    assert fetched(monkeypatch, tmp_path, content[:50_000], code=1) == 1
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["whole"]
    with pytest.raises(results.RequestError, match="sent no archive"):
        fetched(monkeypatch, tmp_path, b"Welcome\n" + bytes(1 << 20))


def test_a_report_is_written_here(host: Host) -> None:
    (make_run(host, "drawn") / "metrics.jsonl").write_text('{"step": 1, "train_loss": 2.5}\n')
    answer = host.run("report", "drawn", "--html", "page.html")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "wrote page.html\n"
    assert (host.work / "page.html").read_text().endswith("</html>")
    assert not list(host.there.rglob("page.html"))
    host.connections()
    refused = host.run("report", "drawn", "--html", "missing/page.html")
    assert "the directory missing does not exist" in refused.stderr
    assert host.connections() == 0
    assert host.run("report", "unknown", "--html=no.html").returncode == 2
    assert not (host.work / "no.html").exists()


def test_a_module_in_the_directory_does_not_shadow_ours(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('theirs')")
    words = fleet.session.command("big", ["--version"])
    answer = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def test_all_clusters_are_asked_and_a_dead_one_is_named(host: Host) -> None:
    make_run(host, "third")
    host.site("[cluster:dead]", "host = nowhere.invalid")
    answer = host.run("runs", "--json", on="all")
    assert answer.returncode == 1
    assert ("big", "third") in {
        (each["cluster"], each["name"]) for each in json.loads(answer.stdout)
    }
    assert "dead shows no runs" in answer.stderr


@pytest.mark.parametrize(
    ("on", "argv"), [("all", ["submit"]), ("any", ["runs"]), ("all", ["runs", "--watch=3"])]
)
def test_other_commands_need_one_cluster(host: Host, on: str, argv: list[str]) -> None:
    answer = host.run(*argv, on=on)
    assert answer.returncode == 2
    assert "[CD1405]" in answer.stderr
    assert host.connections() == 0


def test_a_section_called_all_does_not_ask_itself(host: Host) -> None:
    host.site("[cluster:all]", "host = near")
    answer = host.run("runs", on="all")
    assert answer.returncode == 2
    assert "[cluster:all]" in answer.stderr
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


def test_a_run_of_a_cluster_is_gone_on_with_from_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [{"name": "x", "next_command": "clusterddp logs x"}, {"next_command": "sbatch f"}, {}]
    answers(monkeypatch, a=(runs, ""))
    assert fleet._runs(["runs", "--json"]) == 0
    commands = [each["next_command"] for each in json.loads(capsys.readouterr().out)]
    assert commands == ["clusterddp --on a logs x", "sbatch f", ""]


def test_no_runs_is_not_said_of_a_cluster_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, a=([], ""), b=(None, "no route"))
    assert fleet._runs(["runs"]) == 1
    assert capsys.readouterr().out == ""
    answers(monkeypatch, a=([], ""))
    assert fleet._runs(["runs"]) == 0
    assert capsys.readouterr().out == "no runs\n"


def test_none_is_taken_blindly(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, a=(None, "no"), b=({"forecast": "no", "start_in_seconds": None}, ""))
    with pytest.raises(fleet.RequestError, match="CD1405"):
        fleet._soonest(["submit"])


def test_a_forecast_without_a_start_is_unknown() -> None:
    assert seconds_until("Requested node configuration is not available") is None
    assert seconds_until("to start at 2001-01-01T00:00:00 using 1 processors") == 0.0
