"""`clusterddp completion`, and what the shells are then offered."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from clusterddp.cli.commands import submit
from clusterddp.cli.main import cli
from tests.cli.made_runs import Workplace, workplace

__all__ = ["workplace"]


def complete(workplace: Workplace, words: str) -> list[str]:
    """What bash would be offered after `clusterddp WORDS`, by click's own protocol."""
    environ = {
        "PATH": f"{workplace.folder}/bin",
        "_CLUSTERDDP_COMPLETE": "bash_complete",
        "COMP_WORDS": f"clusterddp {words}",
        "COMP_CWORD": str(len(words.split(" "))),
    }
    got = subprocess.run(
        [sys.executable, "-c", "from clusterddp.cli.main import main; main()"], env=environ,
        cwd=workplace.folder, capture_output=True, text=True, check=False, timeout=90,
    )  # fmt: skip
    assert got.stderr == ""
    # click prints an empty line where it has nothing to offer
    return [line.partition(",")[2] for line in got.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_accepted_by_its_shell(shell: str, tmp_path: Path) -> None:
    got = subprocess.run(
        [sys.executable, "-m", "clusterddp", "completion", shell], capture_output=True, text=True,
        check=False, timeout=90,
    )  # fmt: skip
    assert (got.returncode, got.stderr) == (0, "")
    assert "_CLUSTERDDP_COMPLETE" in got.stdout
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} on this machine to read the script with")
    path = tmp_path / "script"
    path.write_text(got.stdout)
    read = subprocess.run([program, "-n", str(path)], capture_output=True, text=True, check=False)
    assert (read.returncode, read.stderr) == (0, "")


def test_an_unknown_shell_is_a_wrong_request(workplace: Workplace) -> None:
    got = workplace.invoke("completion", "tcsh")
    assert got.code == 2
    assert "bash" in got.err


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_run_names_are_offered_the_latest_first(workplace: Workplace, command: str) -> None:
    workplace.run("mnist-1", age=20)
    workplace.run("mnist-2", age=10)
    workplace.run("other")
    assert complete(workplace, f"{command} ") == ["other", "mnist-2", "mnist-1"]
    assert complete(workplace, f"{command} mn") == ["mnist-2", "mnist-1"]


def test_run_names_of_another_runs_dir_are_offered(workplace: Workplace) -> None:
    workplace.run("one")
    workplace.root.rename(workplace.folder / "runs")
    assert complete(workplace, "status --runs-dir runs ") == ["one"]
    assert complete(workplace, "status ") == []


def offered(incomplete: str) -> list[str]:
    option = next(one for one in submit.command.params if one.name == "partition")
    return [item.value for item in option.shell_complete(click.Context(submit.command), incomplete)]


def test_partitions_are_offered_where_a_slurm_answers(workplace: Workplace) -> None:
    workplace.command("sinfo", "echo main; echo high; echo huge")
    assert offered("") == ["main", "high", "huge"]
    assert offered("h") == ["high", "huge"]
    assert offered("high,h") == ["high,huge"]


def test_no_partitions_are_offered_without_slurm(workplace: Workplace) -> None:
    assert offered("") == []


def test_completing_the_partition_of_submit_reaches_slurm(workplace: Workplace) -> None:
    workplace.command("sinfo", "echo main; echo high")
    assert complete(workplace, "submit --partition ") == ["main", "high"]


def test_templates_and_recipes_are_offered(workplace: Workplace) -> None:
    (workplace.folder / "own").mkdir()
    (workplace.folder / "own/site.sbatch.j2").write_text("")
    shipped = ["ddp.sbatch.j2", "torchrun.sbatch.j2"]
    assert complete(workplace, "submit --template ") == [*shipped, ""]  # the last stands for files
    assert complete(workplace, "submit --template to") == ["torchrun.sbatch.j2"]
    own = complete(workplace, "submit --template-dir own --template ")
    assert own == [*shipped, "site.sbatch.j2", ""]
    for command in ("submit", "debug"):
        assert complete(workplace, f"{command} --recipe ") == ["fast", "accurate"]
        assert complete(workplace, f"{command} --recipe a") == ["accurate"]


def test_commands_are_offered_by_click() -> None:
    completer = ShellComplete(cli, {}, "clusterddp", "_CLUSTERDDP_COMPLETE")
    offered = {item.value for item in completer.get_completions([], "st")}
    assert offered == {"stacks", "status", "stop"}
    assert os.environ.get("_CLUSTERDDP_COMPLETE") is None
