"""A forked program begins and ends as one of a fresh interpreter does."""

import os
from pathlib import Path

import pytest

from tests import forked

SHOWS = """
import atexit, os, sys
atexit.register(print, "at the end")
print(sys.argv, os.getcwd(), os.environ.get("GIVEN"), __name__, sys.stdin.read())
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("", 0, ""),
        ("raise SystemExit(75)", 75, ""),
        ("sys.exit('why')", 1, "why\n"),
        ("os._exit(3)", 3, ""),
        ("raise ValueError('odd')", 1, "ValueError: odd\n"),
        ("os.kill(os.getpid(), 15)", -15, ""),
    ],
)
def test_a_program_has_its_words_its_folder_its_environment_and_its_end(
    end: str, code: int, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "own.py"
    script.write_text(SHOWS)
    shown = f"{tmp_path} 1 __main__ \nat the end\n"
    given = {"cwd": tmp_path, "env": {**os.environ, "GIVEN": "1"}}
    done = forked.run(script, "a b", **given)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"['{script}', 'a b'] {shown}", "")
    done = forked.run("-c", f"{SHOWS}\nsys.stdout.flush(); {end}", "a b", **given)
    assert done.returncode == code and done.stderr.endswith(said)
    assert done.stdout.startswith("['-c', 'a b'] ")
    assert done.stdout.endswith("at the end\n") == (code >= 0 and "_exit" not in end)
