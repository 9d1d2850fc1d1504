"""The start and the end of the command: what is left out, and for whom."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = "from clusterddp.__main__ import main; main()"
DRY_RUN = ["submit", "--dry-run", "--run-name=x"]


def command(
    *argv: str, code: str = COMMAND, **keywords: object
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True, text=True, check=False, **keywords,
    )  # type: ignore[call-overload, no-any-return] # fmt: skip


def test_everything_is_printed_and_the_exit_code_kept(tmp_path: Path) -> None:
    done = command(*DRY_RUN, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("#!/bin/bash\n")
    assert done.stdout.endswith(f" --data-dir={tmp_path}/data\n")
    refused = command("submit", "--nodes=0", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--nodes" in refused.stderr


@pytest.mark.parametrize(
    ("argv", "code"),
    [(["submit", "--node=2"], "CD0101"), (["submit", "--time=soon"], "CD0102"),
     (["status", "nothing"], "CD0501"), (["explain", "CD0499"], "CD0101")],
)  # fmt: skip
def test_a_refusal_ends_with_its_code(argv: list[str], code: str, tmp_path: Path) -> None:
    refused = command(*argv, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.endswith(f" [{code}]\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["jobs"], "no such command 'jobs'. Did you mean 'runs'?"),
     (["resubmit"], "no such command 'resubmit'. Did you mean 'resume'?"),
     (["submit", "--node=2"], "no such option '--node'. Did you mean '--nodes'?"),
     (["submit", "--gpu=2"], "no such option '--gpu'. Did you mean '--gpus-per-node'?"),
     (["status", "--lines=3"], "no such option '--lines'. Did you mean 'clusterddp logs --lines'?"),
     (["submit", "--nodes=x"], "--nodes: 'x' is not valid. Use a whole number from 1 to 1000000."),
     (["submit", "--launcher=x"], "--launcher: 'x' is not one of sbatch, submitit, local, held."),
     (["runs", "-n0"], "--last: 0 is not valid. Use 1 or more."),
     (["completion", "tcsh"], "SHELL: 'tcsh' is not one of bash, zsh, fish.")],
)  # fmt: skip
def test_clicks_refusals_have_the_form_of_ours(argv: list[str], words: str, tmp_path: Path) -> None:
    assert words in command(*argv, cwd=tmp_path).stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize(
    "argv", [["submit", "--dry-run", "--", "true"], ["check", "a.py"], ["status", "a"]]
)
def test_a_current_folder_that_was_removed_is_said(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code = f"import os; os.rmdir(os.getcwd()); {COMMAND}"
    done = command(*argv, code=code, cwd=tmp_path / "gone")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("clusterddp: ")


@pytest.mark.parametrize("name", ["batch", "probe", "notify", "exec", "submit"])
def test_a_python_without_ctypes_starts_each_command(name: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules['_ctypes'] = None; {COMMAND}"
    done = command(name, "--help", code=code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_that_cannot_be_written_is_no_success(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *DRY_RUN],
            cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode != 0
    assert "No space left" in done.stderr


def test_what_is_still_in_a_buffer_is_printed(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from clusterddp.cli import main as cli\n"
        "import gc; gc.disable()\n"
        "sys.stdout.write('words')\n"
        "cli.end(SystemExit(3))"
    )
    done = command(code=code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "words")


@pytest.mark.parametrize("module", ["clusterddp.cli.main", "click", "clusterddp.cli.commands.runs"])
def test_an_interruption_during_the_imports_is_no_traceback(module: str, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(name, path, target=None):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted)\n"
    )
    done = command("runs", code=code + COMMAND, cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


@pytest.mark.parametrize(("done", "left_at_once"), [("cli.allow_fast_exit()", True), ("", False)])
def test_what_went_on_leaves_at_once_only_when_it_is_done(
    done: str, left_at_once: bool, tmp_path: Path
) -> None:
    code = (
        "import atexit, sys\n"
        "from clusterddp.cli import main as cli\n"
        "import gc; gc.disable()\n"
        "cli.enable_gc()\n"
        "atexit.register(print, 'taken apart')\n"
        "sys.stdout.write('words ')\n"
        f"{done}\n"
        "cli.end(SystemExit(0))"
    )
    expected = "words " if left_at_once else "words taken apart\n"
    assert command(code=code, cwd=tmp_path).stdout == expected


def test_a_closed_stdout_is_no_crash(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", COMMAND, *DRY_RUN]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *argv],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_quick_command_leaves_at_once_and_a_profiled_one_does_not(tmp_path: Path) -> None:
    registered = "import atexit; atexit.register(print, 'at exit')\n"
    assert "at exit" not in command(*DRY_RUN, code=registered + COMMAND, cwd=tmp_path).stdout
    code = registered + "import sys; sys.setprofile(lambda *_: None)\n" + COMMAND
    assert "at exit" in command(*DRY_RUN, code=code, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("argv", "goes_on"),
    [
        (["status", "--help"], False),
        (["exec", "--", sys.executable, "-c", "pass"], True),
        (["env"], True),
    ],
)
def test_garbage_is_looked_for_where_a_command_can_take_long(
    argv: list[str], goes_on: bool, tmp_path: Path
) -> None:
    code = (
        "import gc, json, os, sys\n"
        "from clusterddp.cli import main as cli\n"
        "def end(leaving): print(json.dumps(gc.isenabled()), file=sys.stderr); os._exit(0)\n"
        "def become(*_, **__): raise SystemExit(0)\n"
        "cli.end = end; os.execvp = os.execvpe = os.execve = become\n" + COMMAND
    )
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = command(*argv, code=code, cwd=tmp_path, env=environ)
    assert json.loads(done.stderr.splitlines()[-1]) is goes_on, done.stderr


def test_a_submission_looks_for_garbage_as_soon_as_it_is_no_dry_run(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    code = (
        "import gc, sys\n"
        "from clusterddp.slurm import client\n"
        "sbatch = client.sbatch\n"
        "def watched(*a, **k): print(gc.isenabled(), file=sys.stderr); return sbatch(*a, **k)\n"
        "client.sbatch = watched\n" + COMMAND
    )
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    argv = ("submit", "--no-snapshot", "--", sys.executable, "-V")
    done = command(*argv, code=code, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "True\n"


def test_a_handled_interruption_of_generated_code_exits_with_130(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(
        "import gc\nfrom clusterddp.cli import main\n"
        "def command(**_):\n"
        "    try:\n        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n        return 130\n"
        "gc.disable()\nmain.enable_gc()\nmain.cli.main = command\nmain.main()\n"
    )
    argv = [sys.executable, "-m", "interrupted"]
    assert subprocess.run(argv, check=False, cwd=tmp_path, timeout=90).returncode == 130
