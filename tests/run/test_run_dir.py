"""A run's directory is made whole or not at all, and its records survive torn lines."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import RequestError, SlurmError
from clusterddp.files import read_json, read_json_lines, write_atomically
from clusterddp.request.spec import JobSpec
from clusterddp.run.run_dir import RunDir, find_runs
from tests.event_lines import add_event, read_events
from tests.request.test_spec import spec


def test_a_run_is_private_and_holds_its_records(tmp_path: Path) -> None:
    asked = spec(run_dir=str(tmp_path / "jobs/demo"), environment=(("K", "v"),))
    with RunDir.create(asked, "#!/bin/bash\n") as run:
        pass
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.script.read_text() == "#!/bin/bash\n"
    assert run.script.stat().st_mode & 0o777 == 0o600
    assert run.load_spec() == asked
    assert [found.name for found in find_runs(tmp_path / "jobs")] == ["demo"]


@pytest.mark.parametrize("name", ["2024", "demo-7"])
def test_a_run_whose_name_ends_in_a_number_is_no_element_of_an_array(
    tmp_path: Path, name: str
) -> None:
    with RunDir.create(spec(run_dir=str(tmp_path / name)), "") as run:
        assert run.array_index == ""


def test_what_a_refused_submission_made_is_taken_away(tmp_path: Path) -> None:
    asked = spec(run_dir=str(tmp_path / "a/b/demo"))
    with pytest.raises(RequestError), RunDir.create(asked, ""):
        raise RequestError("refused")
    assert list(tmp_path.iterdir()) == []


def test_an_runs_dir_that_was_there_stays(tmp_path: Path) -> None:
    with pytest.raises(RequestError), RunDir.create(spec(run_dir=str(tmp_path / "demo")), ""):
        raise RequestError("refused")
    assert tmp_path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_submission_without_an_answer_keeps_its_directory(tmp_path: Path) -> None:
    for number, error in enumerate((SlurmError("no answer"), KeyboardInterrupt(), OSError())):
        asked = spec(run_dir=str(tmp_path / f"demo-{number}"))
        with pytest.raises(type(error)), RunDir.create(asked, ""):
            raise error
        assert (tmp_path / f"demo-{number}/spec.json").is_file()


def test_a_full_disk_is_said_and_nothing_is_left(small_disk: Any) -> None:
    fill = (
        "cat /dev/zero >full 2>/dev/null\n"
        '"$1" -m clusterddp submit --launcher local -- true; echo "exit $?"; ls -A'
    )
    done = small_disk("size=1m", "sh", "-c", fill, "sh", sys.executable)
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.split() == ["exit", "2", "full"]


def test_torn_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": \n[1]\n\xff\n{"c": 3}')
    assert list(read_json_lines(path)) == [{"a": 1}, {"c": 3}]


def test_what_is_nested_too_deeply_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("[" * 100_000)
    assert read_json(path) is None
    path.write_text("[" * 100_000 + '\n{"a": 1}\n')
    assert list(read_json_lines(path)) == [{"a": 1}]
    with pytest.raises(RequestError, match=r"spec\.json"):
        JobSpec.from_json("[" * 100_000)


def test_an_event_after_a_torn_line_stands_on_its_own(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    add_event(run, "started", job_id="1")
    with run.events.open("ab") as file:
        file.write(b'{"event": "ended", "exi')  # a writer was killed
    add_event(run, "requeued", job_id="1")
    add_event(run, "started", job_id="1")
    assert [event["event"] for event in read_events(run)] == ["started", "requeued", "started"]


def test_events_of_many_writers_at_once_stay_whole(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.events.write_bytes(b'{"torn": ')
    write = (
        "import sys; from pathlib import Path; from clusterddp.files import *\n"
        "path = Path(sys.argv[1], 'events.jsonl')\n"
        "for number in range(20):\n"
        "    line = {'event': 'x' * number, 'writer': sys.argv[2], 'number': number}\n"
        "    append_json_line(path, line)"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", write, str(tmp_path), str(writer)])
        for writer in range(4)
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    for writer in range(4):
        events = [event for event in read_events(run) if event["writer"] == str(writer)]
        assert [event["number"] for event in events] == list(range(20))


def test_an_event_is_synced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses its power keeps the last event of a run."""
    synced: list[bytes] = []
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append(name.read_bytes() if name.is_file() else b"")
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    run = RunDir(tmp_path)
    for event in ("ended", "requeued"):
        add_event(run, event)
    assert synced[0].count(b"\n") == 1 and b"requeued" in synced[-1]


def test_an_event_that_a_full_disk_has_cut_is_an_error_and_costs_no_other(small_disk: Any) -> None:
    write = (
        "import os, sys; from pathlib import Path; from clusterddp.files import *\n"
        "path = Path('events.jsonl')\n"
        "append_json_line(path, {'event': 'begun'})  # on a page, whatever its size\n"
        "try: Path('filler').write_bytes(bytes(1 << 20))\n"
        "except OSError: pass\n"
        "try:\n"
        "    for number in range(9_999): append_json_line(path, {'event': 'x', 'number': number})\n"
        "except OSError as error: print(error.strerror)\n"
        "Path('filler').unlink()\n"
        "append_json_line(path, {'event': 'ended'})\n"
        "events = list(read_json_lines(path))\n"
        "print(events[-1]['event'], len(events) == number + 2)\n"
    )
    done = small_disk("size=1m", sys.executable, "-c", write)
    assert done.stdout.splitlines() == ["No space left on device", "ended True"], done.stderr


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "x", b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "x", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"
