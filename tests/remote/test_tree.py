"""The work tree on its way to a cluster, and how it is stored there."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from clusterddp.errors import RequestError
from clusterddp.remote import client, tree
from clusterddp.submission import snapshot
from tests.hostile import CARRIED
from tests.remote.sshd import Host
from tests.submission.test_snapshot import git


@pytest.fixture
def top(tmp_path: Path) -> Path:
    top = tmp_path / "here"
    top.mkdir()
    git(top, "init", "-q")
    (top / "train.py").write_text("1")
    return top


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    (tmp_path / "trees").mkdir()
    return tmp_path / "trees"


def carry(here: tree.Tree, trees: Path) -> tuple[Path, list[str]]:
    """Carry a tree as a session does; return where it is and which contents were carried."""
    asked: list[str] = []
    contents: list[bytes] = []

    def ask(wanted: Iterable[str]) -> None:
        asked.extend(wanted)
        contents.extend(here.files(asked))

    tree.receive(trees, here.digest, here.content, ask, lambda: contents.pop(0))
    return trees / here.digest, asked


def test_names_and_contents_arrive_as_bytes(top: Path, trees: Path) -> None:
    names = {os.fsencode(f"x{name}".replace("/", "_")) for name in CARRIED} | {
        b"caf\xe9",
        b"new\nl",
    }
    for name in names:
        (top / os.fsdecode(name)).write_bytes(name)
    (top / "run.sh").write_text("x")
    (top / "run.sh").chmod(0o755)
    there, _ = carry(tree.of(top, 50), trees)
    for name in names:
        assert (there / os.fsdecode(name)).read_bytes() == name
    assert os.access(there / "run.sh", os.X_OK)


def test_git_ignored_and_listed_files_stay(top: Path, trees: Path) -> None:
    (top / ".gitignore").write_text("data/\n")
    (top / tree.IGNORE_FILE).write_text("# big\n*.bin\nnotes/\nsub/only.txt\n")
    for name in ("data/a", "x.bin", "deep/y.bin", "notes/n", "sub/only.txt", "sub/kept.txt"):
        (top / name).parent.mkdir(exist_ok=True)
        (top / name).write_text(name)
    there, _ = carry(tree.of(top, 50), trees)
    found = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert found == {".gitignore", tree.IGNORE_FILE, "train.py", "sub/kept.txt"}


def test_what_is_listed_does_not_count_for_the_limit(top: Path) -> None:
    (top / "big.bin").write_bytes(bytes(3_000_000))
    with pytest.raises(RequestError, match=r"big\.bin.*\.clusterddpignore"):
        tree.of(top, 1)
    (top / tree.IGNORE_FILE).write_text("big.bin\n")
    assert "big.bin" not in tree.of(top, 1).manifest


def test_only_changed_files_are_carried_and_a_changed_copy_is_not_used(
    top: Path, trees: Path
) -> None:
    (top / "same.py").write_text("same")
    there, _ = carry(tree.of(top, 50), trees)
    (top / "train.py").write_text("2")
    again, asked = carry(tree.of(top, 50), trees)
    assert len(asked) == 1
    (again / "same.py").write_text("changed there")
    (there / "same.py").write_text("changed there")
    (top / "train.py").write_text("3")
    last, asked = carry(tree.of(top, 50), trees)
    assert len(asked) == 2
    assert (last / "same.py").read_text() == "same"


def test_links_in_the_tree_are_carried_and_others_refused(top: Path, trees: Path) -> None:
    (top / "a").mkdir()
    (top / "a/relative").symlink_to("../train.py")
    (top / "a/absolute").symlink_to(top / "train.py")
    there, _ = carry(tree.of(top, 50), trees)
    for name in ("relative", "absolute"):
        assert (there / "a" / name).resolve() == there / "train.py"
    (top / "out").symlink_to("/etc/passwd")
    with pytest.raises(RequestError, match=r"out in .* is a link to /etc/passwd"):
        tree.of(top, 50)


def test_submodules_are_carried(top: Path, trees: Path) -> None:
    inner = top / "inner"
    inner.mkdir()
    subprocess.run(["git", "init", "-q", inner], check=True)
    (inner / "lib.py").write_text("lib")
    there, _ = carry(tree.of(top, 50), trees)
    assert (there / "inner/lib.py").read_text() == "lib"


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", ""])
def test_a_manifest_cannot_leave_the_tree(trees: Path, name: str) -> None:
    manifest = json.dumps({name: ["0" * 64, 0o644]}).encode()
    with pytest.raises(RequestError, match="leaves the tree"):
        tree.receive(trees, "d", manifest, lambda _: None, lambda: b"")
    assert not list(trees.iterdir())


def test_old_trees_are_removed(top: Path, trees: Path) -> None:
    for number in range(12):
        (top / "train.py").write_text(str(number))
        there, _ = carry(tree.of(top, 50), trees)
        os.utime(there.with_suffix(".json"), (number, number))
    (top / "train.py").write_text("last")
    carry(tree.of(top, 50), trees)
    assert len([path for path in trees.iterdir() if path.is_dir()]) == 10


def test_a_part_of_a_tree_is_replaced(top: Path, trees: Path) -> None:
    there, _ = carry(tree.of(top, 50), trees)
    there.with_suffix(".json").unlink()
    (there / "train.py").rename(there / "left")
    carry(tree.of(top, 50), trees)
    assert [path.name for path in there.iterdir()] == ["train.py"]
    assert sorted(trees.iterdir()) == [there, there.with_suffix(".json")]


def test_a_tree_that_another_session_has_stored_stays(top: Path, trees: Path) -> None:
    there, _ = carry(tree.of(top, 50), trees)
    (there / "in use").touch()
    carry(tree.of(top, 50), trees)
    assert (there / "in use").exists()
    assert sorted(trees.iterdir()) == [there, there.with_suffix(".json")]


def test_what_another_session_removes_meanwhile_is_passed_over(top: Path, trees: Path) -> None:
    (trees / "gone.json").symlink_to("nothing")  # listed, but stat finds nothing
    there, _ = carry(tree.of(top, 50), trees)
    assert (there / "train.py").is_file()


def test_unfinished_trees_are_removed_after_a_day(top: Path, trees: Path) -> None:
    for name, age in (("d.abc", 90_000), ("d.old.7", 90_000), ("d.new", 0)):
        (trees / name).mkdir()
        at = time.time() - age
        os.utime(trees / name, (at, at))
    carry(tree.of(top, 50), trees)
    assert [path.name for path in trees.glob("d.*")] == ["d.new"]


@pytest.mark.parametrize("folder", ["", "sub"])
def test_a_run_copies_what_was_carried_and_nothing_else(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    around = tmp_path / "around"
    (around / "trees").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", around], check=True)
    (around / ".gitignore").write_text("*.csv\n")
    (top / "sub").mkdir()
    names = {os.fsdecode(name) for name in (b"sub/caf\xe9", b"sub/data.csv", b"sub/a b.py")}
    for name in names:
        (top / name).write_text(name, errors="surrogateescape")
    there, _ = carry(tree.of(top, 50), around / "trees")
    (there / "sub/stray.toml").write_text("another command's")
    (there / "sub/strays").mkdir()
    monkeypatch.setenv("CLUSTERDDP_TREE", str(there))
    monkeypatch.setenv("CLUSTERDDP_TREE_COMMIT", "c0ffee")
    assert snapshot.top_of(there / "sub") == there
    taken = snapshot.take(there / folder, tmp_path / "code")
    expected = {name.removeprefix(f"{folder}/") for name in names | {"train.py"} - {folder}}
    if folder:
        expected -= {"train.py"}
    assert {*taken.digests} == expected
    assert taken.commit == "c0ffee"
    assert not [*(tmp_path / "code").rglob("stray*")]


def unpack(folder: Path, content: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", client.UNPACK, str(len(content)), "clients/new"],
        cwd=folder, input=content, capture_output=True, check=False,
    )  # fmt: skip


def test_clients_that_another_session_removes_meanwhile_are_passed_over(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.mkdir()
    (clients / "gone").symlink_to("nothing")
    for number in range(6):
        (clients / str(number)).mkdir()
        os.utime(clients / str(number), (number, number))
    answer = unpack(tmp_path, client.archive())
    assert answer.returncode == 0, answer.stderr
    assert {path.name for path in clients.iterdir()} == {"gone", "new", "3", "4", "5"}
    assert (clients / "new/far.py").is_file()


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="a Python without filters")
def test_a_client_cannot_leave_its_folder(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as members:
        member = tarfile.TarInfo()
        member.name = f"{tmp_path}/out"
        members.addfile(member)
    unpack(tmp_path, content.getvalue())
    assert not (tmp_path / "out").exists()


_MAC = """
import os, sys, signal
for name in ("pidfd_open", "memfd_create", "sched_getaffinity", "posix_fallocate", "O_PATH"):
    if hasattr(os, name):
        delattr(os, name)
import builtins, io
real = os.open
def refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc"):
        raise FileNotFoundError(arguments[0])
    if event == "ctypes.dlopen":
        raise OSError("no such library")
sys.addaudithook(refuse)
sys.platform = "darwin"
for name in ("torch", "numpy", "jinja2", "submitit", "ctypes"):
    sys.modules[name] = None
sys.argv = ["clusterddp", *sys.argv[1:]]
from clusterddp.__main__ import main
main()
"""


def test_the_other_end_may_be_a_mac(host: Host) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _MAC, "--on", "big", "submit", "--dry-run", "--", "true"],
        cwd=host.work, env=host.environ(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "#SBATCH" in answer.stdout
