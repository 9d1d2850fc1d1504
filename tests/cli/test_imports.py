"""What the command loads and starts: nothing that the one asked for has no use for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "torchvision", "numpy", "submitit"}
DRY_RUN = ["submit", "--dry-run", "--nodes=2", "--gpus-per-node=4", "--run-name=x"]

# Runs the command and then writes what is loaded and what was started, as JSON into a file.
_WATCHED = """
import json, sys
started, popped = [], None
def watch(event, arguments):
    global popped
    if event == "subprocess.Popen":
        popped = list(arguments[1])
        started.append(popped[0])
    elif event == "os.posix_spawn" and list(arguments[1]) == popped:
        popped = None  # from Python 3.13 on it is how Popen starts what it has told of
    elif event in ("os.posix_spawn", "os.exec", "os.fork", "os.system"):
        started.append(event)
sys.addaudithook(watch)
from clusterddp.cli.main import main
report = sys.argv.pop(1)
try:
    main()
except SystemExit as leaving:
    code = leaving.code
loaded = sorted(sys.modules)
with open(report, "w") as file:
    json.dump({"code": code, "loaded": loaded, "started": started}, file)
"""


def watched(folder: Path, argv: list[str], **more: str) -> tuple[set[str], list[str]]:
    """The modules that the command had loaded at its end, and the programs that it had started."""
    report = folder / "report.json"
    environ = {"PATH": str(folder / "bin"), "HOME": str(folder), "LC_ALL": "C.UTF-8", **more}
    subprocess.run(
        [sys.executable, "-c", _WATCHED, str(report), *argv],
        cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    seen = json.loads(report.read_text())
    assert seen["code"] in (0, None), argv
    return set(seen["loaded"]), seen["started"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory to type in; `bin/` in it is all of PATH, and holds a sbatch and a squeue."""
    (tmp_path / "bin").mkdir()
    for name, answer in (("sbatch", "echo 7"), ("squeue", "echo '7|RUNNING|None|'")):
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"], ["--version"], ["submit", "--help"], ["train", "--help"], ["runs"],
        ["templates", "list"], ["site"], ["completion", "bash"], ["compare", "--help"],
        ["report", "--help"], ["env"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_only_rendering_loads_jinja(folder: Path, argv: list[str]) -> None:
    loaded, started = watched(folder, argv)
    assert not loaded & {"jinja2", *HEAVY}
    assert started == []


def test_the_help_of_debug_loads_nothing_that_starts_processes(folder: Path) -> None:
    loaded, _ = watched(folder, ["debug", "--help"])
    assert not loaded & {"multiprocessing", "clusterddp.worker.workstation", *HEAVY}


def test_completion_loads_no_jinja_and_starts_nothing(folder: Path) -> None:
    for words in ("clusterddp s", "clusterddp submit --n", "clusterddp status "):
        loaded, started = watched(
            folder, [], _CLUSTERDDP_COMPLETE="bash_complete", COMP_WORDS=words,
            COMP_CWORD=str(len(words.split(" ")) - 1),
        )  # fmt: skip
        assert not loaded & {"jinja2", *HEAVY}
        assert started == []


def test_a_dry_run_starts_nothing_and_loads_little_beside_click_and_jinja(folder: Path) -> None:
    needed = subprocess.run(
        [sys.executable, "-c", "import sys, click, jinja2; print(*sys.modules)"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    loaded, started = watched(folder, DRY_RUN)
    more = loaded - set(needed)
    assert not more & {*HEAVY, "subprocess", "asyncio", "configparser", "traceback", "difflib"}
    ours = {name for name in more if name.partition(".")[0] == "clusterddp"}
    # dataclasses, pathlib and what these rest on; how many that is depends on Python's version.
    assert len(more - ours) <= 20, sorted(more - ours)
    assert len(ours) <= 28, sorted(ours)
    assert started == []


def test_a_submission_starts_sinfo_and_sbatch_and_nothing_else(folder: Path) -> None:
    argv = ["submit", "--dataset=synthetic", "--run-name"]
    watched(folder, [*argv, "first"])  # renders the digits, which takes numpy
    loaded, started = watched(folder, [*argv, "second"])
    assert not loaded & HEAVY
    names = sorted(Path(command).name for command in started)
    assert names in (["sbatch"], ["sbatch", "sinfo"])


def test_a_submitted_command_starts_git_for_the_record_of_its_code_and_sbatch(folder: Path) -> None:
    loaded, started = watched(
        folder, ["submit", "--run-name=x", "--no-snapshot", "--", "/bin/true"]
    )
    assert not loaded & HEAVY
    assert {Path(command).name for command in started} <= {"git", "sbatch", "sinfo"}
    assert [Path(command).name for command in started].count("sbatch") == 1


def test_the_status_of_a_run_is_one_question(folder: Path) -> None:
    watched(folder, ["submit", "--run-name=x", "--no-snapshot", "--", "/bin/true"])
    loaded, started = watched(folder, ["status", "x"])
    assert not loaded & {"jinja2", *HEAVY}
    assert [Path(command).name for command in started] == ["squeue"]
