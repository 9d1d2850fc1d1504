"""`python -m benchmarks.release` with checks of the test's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import release
from benchmarks.release import Check

ROOT = Path(__file__).parents[2]


def test_a_check_that_fails_or_cannot_run_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = (
        Check("bad", "sh -c 'echo why; exit 3'", 1),
        Check("graphics", "false", 1, release.GPU),
        Check("good", "python -c 'import sys'", 1),
    )
    monkeypatch.setattr(release, "CHECKS", checks)
    monkeypatch.setattr(release.shutil, "which", lambda _: None)
    assert release.main(["--logs", str(tmp_path), "--json"]) == 1
    results = {row["name"]: row["result"] for row in json.loads(capsys.readouterr().out)}
    log = tmp_path / "bad.log"
    assert results == {
        "bad": f"failed: exit code 3, see {log}", "graphics": "skipped: needs a GPU",
        "good": "passed",
    }  # fmt: skip
    assert log.read_text() == "why\n"


def test_ctrl_c_ends_the_check_and_prints_the_table_so_far(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from benchmarks import release
        from benchmarks.release import Check
        asks = Check("asks", "sh -c 'kill -INT $PPID; exec sleep 600'", 1)
        release.CHECKS = Check("first", "true", 1), asks, Check("never", "true", 1)
        sys.exit(release.main(["--logs", sys.argv[1]]))"""
    argv = [sys.executable, "-c", code, str(tmp_path)]
    shown = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert shown.returncode == 130, shown.stderr
    results = [line.split(" | ")[2] for line in shown.stdout.splitlines()[2:]]
    assert results == ["passed", "interrupted"]


def test_every_check_of_the_list_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["--list"]) == 0
    assert "`python -m tests.installs` | 60 min" in capsys.readouterr().out
    for check in release.CHECKS:
        words = check.command.split()
        if words[:2] == ["python", "-m"] and words[2] != "pytest":
            path = ROOT / words[2].replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
