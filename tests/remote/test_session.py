"""Commands on a cluster, through a real ssh and sshd."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.launchers.sbatch import shell_word
from clusterddp.remote import cluster as clusters
from tests.hostile import CARRIED
from tests.remote.sshd import Host

DRY_RUN = ("submit", "--dry-run", "--json", "--run-name=x")


def script_of(host: Host, *argv: str) -> str:
    answer = host.run(*DRY_RUN, *argv)
    assert answer.returncode == 0, answer.stderr
    script: str = json.loads(answer.stdout)["script"]
    return script


def test_an_unchanged_tree_is_one_session(host: Host) -> None:
    host.run(*DRY_RUN)
    (host.work / "new.py").write_text("1")
    host.connections()
    first = host.run(*DRY_RUN, "--", "python", "new.py")
    assert "carried 1 files" in first.stderr
    assert host.connections() == 1
    again = host.run(*DRY_RUN, "--", "python", "new.py")
    assert "carried" not in again.stderr
    assert host.connections() == 1
    assert again.stdout == first.stdout


def test_exit_codes_and_both_outputs_pass_through(host: Host) -> None:
    answer = host.run("status", "nothing")
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert "[CD0501]" in answer.stderr


def test_hostile_words_arrive_unchanged(host: Host) -> None:
    words = [word for word in CARRIED if word]
    script = script_of(host, "--force", "--", "true", *words)
    for word in words:
        assert shell_word(word) in script, word
    assert not list(host.folder.rglob("pwned"))


@pytest.mark.parametrize("shell", ["tcsh -c", "fish -c", "dash -c", "bash -c"])
def test_the_login_shell_does_not_matter(host: Host, shell: str) -> None:
    if not shutil.which(shell.split(maxsplit=1)[0]):
        pytest.skip(f"no {shell}")
    host.serve(shell)
    assert shell_word("it's $HOME") in script_of(host, "--force", "--", "true", "it's $HOME")


def test_a_banner_is_dropped(host: Host) -> None:
    host.serve('sh -c \'echo WELCOME; printf "no end of line"; eval "$1"\' sh')
    answer = host.run("runs", "--json")
    assert json.loads(answer.stdout) is not None


def test_a_mistyped_section_is_named(tmp_path: Path) -> None:
    site = tmp_path / "site.cfg"
    site.write_text("[cluster:big]\nhost = near\n")
    names = {name: clusters.find(name, {}, tmp_path).similar for name in ("bgi", "big", "login1")}
    assert names == {"bgi": "big", "big": "", "login1": ""}


def test_a_host_that_cannot_be_reached(host: Host) -> None:
    answer = host.run("runs", on="nowhere.invalid")
    assert answer.returncode == 1
    assert "Nothing was done there" in answer.stderr
    assert answer.stderr.strip().endswith("[CD1402]")


@pytest.mark.parametrize("name", ["-oProxyCommand=touch pwned", "a b", "", "a;b"])
def test_what_is_no_host_is_refused(host: Host, name: str) -> None:
    assert host.run("runs", on=name).returncode == 2
    assert host.connections() == 0


def python_that_is_old(host: Host, name: str) -> str:
    path = host.folder / name
    path.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import runpy, sys; sys.version_info = (3, 6, 8)\n"
        'if sys.argv[1] == "-c": sys.exit(1)\n'
        'runpy.run_path(sys.argv[1], run_name="__main__")\' "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_an_old_python_of_the_section_is_named(host: Host) -> None:
    host.site(python=python_that_is_old(host, "old"))
    answer = host.run("runs")
    assert answer.returncode == 2
    assert "clusterddp needs 3.10 or later" in answer.stderr
    assert "[CD1403]" in answer.stderr


def test_a_python_is_looked_for_and_remembered(host: Host) -> None:
    folder = host.folder / "pythons"
    folder.mkdir()
    python_that_is_old(host, "pythons/python3")
    (folder / "python3.12").symlink_to(python_that_is_old(host, "pythons/python"))
    (folder / "python3.11").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "python3.11").chmod(0o755)
    host.site(f"before = PATH={folder}:$PATH", python="")
    assert host.run("explain", "CD1403").returncode == 0
    assert (host.there / "clients/python").read_text() == "python=python3.11\n"


@pytest.mark.parametrize(
    "argv", [("debug",), ("train",), ("compare",), ("submit", "--launcher=local", "--", "true")]
)
def test_nothing_trains_on_a_login_node(host: Host, argv: tuple[str, ...]) -> None:
    answer = host.run(*argv)
    assert answer.returncode == 2
    assert "would train on the login node" in answer.stderr
    assert host.connections() == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("submit", "--runs-dir", "mine", "--", "true"), "--runs-dir 'mine'"),
        (("submit", "--dry-run", "--save-config", "a.toml", "--", "true"), "--save-config"),
        (("templates", "copy", "ddp.sbatch.j2"), "TARGET 'ddp.sbatch.j2'"),
    ],
)
def test_no_output_is_lost_in_the_carried_code(
    host: Host, argv: tuple[str, ...], said: str
) -> None:
    answer = host.run(*argv)
    assert answer.returncode == 2
    assert said in answer.stderr
    assert "Give an absolute path of the cluster. [CD1401]" in answer.stderr
    written = {path.name for path in (host.there / "trees").glob("*/*")}
    assert not written & {"mine", "a.toml", "ddp.sbatch.j2"}


def test_the_sections_runs_dir_is_below_the_clusters_folder(host: Host) -> None:
    host.site("runs-dir = mine")
    answer = host.run(*DRY_RUN, "--force", "--", "true")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["run_dir"] == str(host.there / "mine/x")


def test_a_reader_that_leaves_is_no_lost_connection(host: Host) -> None:
    """As `clusterddp --on big explain CD0401 | true`: the pipe is closed before there is output."""
    host.run("explain", "CD0401")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        process = subprocess.run(
            [sys.executable, "-m", "clusterddp", "--on", "big", "explain", "CD0401"],
            cwd=host.work, env=host.environ(), stdin=subprocess.DEVNULL, stdout=closed,
            stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert process.returncode
    assert "Nothing was done" not in process.stderr


def test_a_secret_is_sent_and_on_no_command_line(host: Host) -> None:
    answer = host.run(*DRY_RUN, "--env", "TOKEN", "--", "true", TOKEN="s3cret")
    assert answer.returncode == 0, answer.stderr
    assert "s3cret" not in answer.stdout
    assert "near exec /bin/sh" in host.command_lines()[-1]
    assert "s3cret" not in " ".join(host.command_lines())
    refused = host.run(*DRY_RUN, "--env", "TOKEN", "--", "true")
    assert refused.returncode == 2, "without it here, it is not there either"


def test_runs_of_a_relative_directory_are_not_in_the_tree(host: Host) -> None:
    host.site("runs-dir = exp")
    assert str(host.there / "exp") in host.run("runs").stderr
