"""A copy of the code holds what git would keep, leads to the rest, and no later edit reaches it."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import RequestError
from clusterddp.submission import snapshot as snapshots
from clusterddp.submission.snapshot import Snapshot, carry_over, difference, fingerprint, take
from tests.hostile import CARRIED, REFUSED

# A name of a file can be anything but these; -n covers what an option would look like.
NAMES = [
    *(name for name in CARRIED + REFUSED if name and "\0" not in name and "/" not in name), "-n",
    "'\"", os.fsdecode(b"latin-1 \xe9"), os.fsdecode(b"cut off \xe2\x98"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def git_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the person who tests, and no repository around the directory of the test."""
    for name in list(os.environ):
        if name.startswith("GIT_"):
            monkeypatch.delenv(name)
    for name, value in {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_CEILING_DIRECTORIES": str(tmp_path),
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with code, not a repository."""
    path = tmp_path / "tree"
    write(path, {"train.py": "one", "package/model.py": "two"})
    return path


@pytest.fixture
def repository(tree: Path) -> Path:
    """The same in git, committed, with a data directory that git ignores."""
    write(tree, {".gitignore": "/data\n*.so\n", "data/images": "pixels"})
    git(tree, "init", "--quiet")
    commit(tree)
    return tree


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "code"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def git(folder: Path, *arguments: str) -> str:
    if not shutil.which("git"):
        pytest.skip("no git on this machine")
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")


def digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def recorded(taken: Snapshot, target: Path) -> Snapshot:
    """The snapshot, written beside its copy and read again."""
    taken.write(target.with_name("code.json"))
    return Snapshot.read(target.with_name("code.json"))


def said_by(link: Path) -> str:
    return os.readlink(link)  # noqa: PTH115 -- Path.readlink tidies what it says


def below(folder: Path) -> set[str]:
    """Everything in a directory; what is linked by its own name alone."""
    found = set()
    for place, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(place, name)
            if path.is_symlink() or not path.is_dir():
                found.add(path.relative_to(folder).as_posix())
    return found


def test_the_files_that_git_keeps_are_copied(repository: Path, target: Path) -> None:
    write(repository, {"new.py": "three", "kernel.so": "built", "package/__pycache__/m.pyc": "x"})
    write(repository, {"slurm-7.out": "of a job that is at work"})
    (repository / "train.py").write_text("edited")
    taken = take(repository, target)
    assert taken == Snapshot(
        files=4,
        bytes=len("edited" + "two" + "three" + "/data\n*.so\n"),
        digests={
            ".gitignore": digest("/data\n*.so\n"),
            "new.py": digest("three"),
            "package/model.py": digest("two"),
            "train.py": digest("edited"),
        },
        commit=git(repository, "rev-parse", "HEAD"),
    )
    assert below(target) == {*taken.digests, "data", "kernel.so"}
    assert (target / "train.py").read_text() == "edited"
    assert target.stat().st_mode & 0o777 == 0o700


def test_without_a_repository_all_but_environments_are_copied(tree: Path, target: Path) -> None:
    write(
        tree,
        {
            "weights.bin": "w",
            "__pycache__/train.pyc": "x",
            "package/__pycache__/model.pyc": "x",
            "my env/pyvenv.cfg": "home = /usr",
            "my env/bin/python": "x",
            "conda/conda-meta/history": "x",
            ".venv/lib/x.py": "x",
            "web/node_modules/x.js": "x",
            "web/index.js": "x",
            "clone/.git/config": "x",
            "worktree/.git": "gitdir: ../elsewhere",
            "worktree/b.py": "x",
            "clone/a.py": "x",
        },
    )
    taken = take(tree, target)
    copied = {
        "train.py", "package/model.py", "weights.bin", "web/index.js", "clone/a.py",
        "worktree/b.py",
    }  # fmt: skip
    assert taken.digests.keys() == copied
    assert taken.commit == ""
    assert below(target) == {*copied, "my env", "conda", ".venv", "web/node_modules"}
    assert (target / "my env/bin/python").read_text() == "x"


def test_without_a_git_program_all_files_are_copied(
    repository: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    taken = take(repository, target)
    copied = {".gitignore", "train.py", "package/model.py", "data/images"}
    assert taken.digests.keys() == copied == below(target)
    assert taken.commit == ""


@pytest.mark.parametrize("kind", ["no git", "untracked", "tracked"])
def test_hostile_names_are_carried(tree: Path, target: Path, kind: str) -> None:
    for number, name in enumerate(NAMES):
        write(tree, {name: str(number), f"in/{name}/{name}": f"deep {number}"})
        write(tree, {f"ignored/{name}": "data", f"part ignored/{name}.so": "built"})
    write(tree, {"part ignored/x.py": "x"})
    if kind != "no git":
        write(tree, {".gitignore": "ignored\n*.so\n"})
        git(tree, "init", "--quiet")
    if kind == "tracked":
        commit(tree)
    taken = take(tree, target)
    for number, name in enumerate(NAMES):
        assert (target / name).read_text() == str(number)
        assert taken.digests[name] == digest(str(number))
        assert (target / "in" / name / name).read_text() == f"deep {number}"
        assert (target / "part ignored" / f"{name}.so").read_text() == "built"
        assert (target / "part ignored" / f"{name}.so").is_symlink() == (kind != "no git")
        assert taken.digests[f"in/{name}/{name}"] == digest(f"deep {number}")
    assert (target / "ignored").is_symlink() == (kind != "no git")
    assert sum(name.startswith("in/") for name in taken.digests) == len(NAMES)
    assert recorded(taken, target) == taken
    assert target.with_name("code.json").read_bytes().isascii()
    assert fingerprint(tree) == taken


@pytest.mark.parametrize("name", [name for name in NAMES if name.strip()])
def test_trees_and_targets_have_hostile_names_too(tmp_path: Path, name: str) -> None:
    tree, target = tmp_path / name / "tree", tmp_path / name / "code"
    write(tree, {"a.py": "a", "data/x": "x", "env/pyvenv.cfg": ""})
    assert take(tree, target, exclude=[tree / "data"]).digests == {"a.py": digest("a")}
    assert below(target) == {"a.py", "env"}
    assert (target / "env/pyvenv.cfg").is_file()


def test_an_edit_after_it_does_not_reach_the_copy(repository: Path, target: Path) -> None:
    before = take(repository, target)
    (repository / "train.py").write_text("edited")
    (repository / "package/model.py").unlink()
    write(repository, {"package/new.py": "new"})
    assert (target / "train.py").read_text() == "one"
    assert (target / "package/model.py").read_text() == "two"
    assert below(target) == {*before.digests, "data"}
    after = fingerprint(repository)
    assert after is not None
    assert difference(before, after) == ["changed train.py", "removed package/model.py"]


def test_nothing_differs_when_nothing_was_edited(repository: Path, target: Path) -> None:
    before = take(repository, target)
    write(repository, {"package/__pycache__/model.pyc": "x", "data/more": "pixels"})
    after = fingerprint(repository)
    assert after == before
    assert difference(before, after) == []


def test_a_difference_is_one_line_a_file_whatever_its_name() -> None:
    before = Snapshot(0, 0, dict.fromkeys(["two words", "new\nline", "\udc80", " x", "ü"], "d"), "")
    after = Snapshot(0, 0, {}, "")
    assert difference(before, after) == [
        "removed ' x'", "removed '\\udc80'", "removed 'new\\nline'", "removed two words",
        "removed ü",
    ]  # fmt: skip


def test_what_git_ignores_can_be_read_and_written_through_the_copy(
    repository: Path, target: Path
) -> None:
    (repository / "empty").mkdir()
    take(repository, target)
    assert said_by(target / "data") == str(repository / "data")
    assert (target / "data/images").read_text() == "pixels"
    (target / "empty/out.txt").write_text("result")
    assert (repository / "empty/out.txt").read_text() == "result"
    assert not (target / ".git").exists()


def test_a_tree_below_the_top_of_a_repository(repository: Path, target: Path) -> None:
    write(repository, {".gitignore": "*.bin\n", "package/x.bin": "big", "package/sub/y.py": "y"})
    taken = take(repository / "package", target)
    assert taken.digests.keys() == {"model.py", "sub/y.py"}
    assert taken.commit == git(repository, "rev-parse", "HEAD")
    assert said_by(target / "x.bin") == str(repository / "package/x.bin")


def test_a_tree_that_a_repository_around_it_ignores_is_copied_whole(
    repository: Path, target: Path
) -> None:
    write(repository / "data", {"train.py": "x", "__pycache__/x.pyc": "x"})
    taken = take(repository / "data", target)
    assert taken.digests.keys() == {"train.py", "images"} == below(target)
    assert taken.commit == ""


def test_a_repository_without_a_commit(tree: Path, target: Path) -> None:
    git(tree, "init", "--quiet")
    assert take(tree, target).commit == ""
    assert below(target) == {"train.py", "package/model.py"}


def test_the_repository_of_a_hook_is_not_taken_for_the_tree(
    repository: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    write(other, {"other.py": "x"})
    git(other, "init", "--quiet")
    commit(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    taken = take(repository, target)
    assert taken.digests.keys() == {".gitignore", "train.py", "package/model.py"}
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.delenv("GIT_INDEX_FILE")
    assert taken.commit == git(repository, "rev-parse", "HEAD") != git(other, "rev-parse", "HEAD")


def test_tracked_files_that_are_gone_are_passed_over(repository: Path, target: Path) -> None:
    (repository / "train.py").unlink()
    assert take(repository, target).digests.keys() == {".gitignore", "package/model.py"}


def test_tracked_files_behind_a_new_link_are_not_written_through_it(
    repository: Path, target: Path, tmp_path: Path
) -> None:
    """git still lists package/model.py; writing it through the copied link would hit the shared."""
    (repository / "package").rename(tmp_path / "shared")
    (repository / "package").symlink_to(tmp_path / "shared")
    assert take(repository, target).digests.keys() == {".gitignore", "train.py", "package"}
    assert said_by(target / "package") == str(tmp_path / "shared")


def test_a_tracked_file_that_became_a_folder(repository: Path, target: Path) -> None:
    (repository / "train.py").unlink()
    write(repository, {"train.py/main.py": "x"})
    assert "train.py/main.py" in take(repository, target).digests


def test_submodules_and_repositories_within_are_copied(
    repository: Path, target: Path, tmp_path: Path
) -> None:
    library = tmp_path / "library"
    write(library, {"lib.py": "lib", ".gitignore": "*.so", "deep/x.py": "x"})
    git(library, "init", "--quiet")
    commit(library)
    allow = ("-c", "protocol.file.allow=always")
    git(repository, *allow, "submodule", "--quiet", "add", str(library), "a sub")
    git(repository, "clone", "--quiet", str(library), "clone")
    write(repository, {"a sub/k.so": "built", "a sub/new.py": "new"})
    taken = take(repository, target)
    assert {name for name in taken.digests if name.startswith(("a sub", "clone"))} == {
        "a sub/lib.py", "a sub/.gitignore", "a sub/deep/x.py", "a sub/new.py",
        "clone/lib.py", "clone/.gitignore", "clone/deep/x.py",
    }  # fmt: skip
    assert (target / "a sub/k.so").is_symlink()
    assert not (target / "a sub/.git").exists()
    assert not (target / "clone/.git").exists()


@pytest.mark.parametrize("damage", ["no .git", "empty .git", "lost"])
def test_a_submodule_that_git_cannot_list_is_linked(
    repository: Path, target: Path, damage: str
) -> None:
    git(repository, "clone", "--quiet", str(repository), "clone")
    git(repository, "add", "clone")
    shutil.rmtree(repository / "clone/.git")
    if damage == "empty .git":
        (repository / "clone/.git").mkdir()
    if damage == "lost":
        write(repository, {"clone/.git": "gitdir: /nowhere"})
    taken = take(repository, target)
    assert not any(name.startswith("clone") for name in taken.digests)
    assert (target / "clone/train.py").read_text() == "one"


def test_modes_and_times_are_kept(repository: Path, target: Path) -> None:
    write(repository, {"run.sh": "#!/bin/sh\necho ran\n"})
    (repository / "run.sh").chmod(0o755)
    (repository / "train.py").chmod(0o440)
    os.utime(repository / "train.py", (1_000_000, 1_000_000))
    take(repository, target)
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (target / "train.py").stat().st_mode & 0o777 == 0o440
    assert (target / "train.py").stat().st_mtime == 1_000_000
    assert subprocess.check_output([target / "run.sh"]) == b"ran\n"


@pytest.mark.parametrize("in_git", [False, True])
def test_links_lead_where_they_led(tree: Path, tmp_path: Path, in_git: bool) -> None:
    write(tmp_path, {"outside/shared.py": "shared"})
    write(tree, {"jobs/run/log": "log"})
    links = {
        "package/in.py": "../train.py",
        "package/out.py": "../../outside/shared.py",
        "out": "../outside",
        "absolute.py": str(tmp_path / "outside/shared.py"),
        "folder": "package",
        "package/self": ".",
        "latest": "jobs/run",
        "untidy": ".//package/../train.py",
    }
    for name, link in links.items():
        (tree / name).symlink_to(link)
    (tree / "dangling").symlink_to("no such file")
    if in_git:
        git(tree, "init", "--quiet")
    target = tmp_path / "far/away/code"
    target.parent.mkdir(parents=True)
    taken = take(tree, target, exclude=[tree / "jobs"])
    assert taken == fingerprint(tree, exclude=[tree / "jobs"])
    assert taken.files == 2 + len(links) + 1
    assert taken.bytes == len("one" + "two")
    said = {name: said_by(target / name) for name in [*links, "dangling"]}
    assert said == links | {
        "package/out.py": f"{tree}/package/../../outside/shared.py",
        "out": f"{tree}/../outside",
        "latest": f"{tree}/jobs/run",
        "dangling": "no such file",
    }
    (tree / "train.py").write_text("edited")
    assert (target / "package/in.py").read_text() == "one"
    assert (target / "package/out.py").read_text() == "shared"
    assert (target / "out/shared.py").read_text() == "shared"
    assert (target / "latest/log").read_text() == "log"


def test_a_link_that_is_turned_elsewhere_has_changed(tree: Path) -> None:
    (tree / "link").symlink_to("train.py")
    before = fingerprint(tree)
    (tree / "link").unlink()
    (tree / "link").symlink_to("package/model.py")
    turned = fingerprint(tree)
    (tree / "link").unlink()
    (tree / "link").write_text("package/model.py")
    replaced = fingerprint(tree)
    assert before
    assert turned
    assert replaced
    assert difference(before, turned) == ["changed link"]
    assert difference(turned, replaced) == ["changed link"]


@pytest.mark.parametrize("in_git", [False, True])
def test_pipes_and_sockets_are_left_out(
    tree: Path, target: Path, in_git: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tree / "pipe")
    monkeypatch.chdir(tree)  # a socket's path has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        if in_git:
            git(tree, "init", "--quiet")
        take(tree, target)
    assert below(target) == {"train.py", "package/model.py"}


def test_what_is_left_out_is_neither_copied_nor_linked(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository, {"jobs/old/code/train.py": "x", "package/jobs/x": "x", "secret": "x"})
    exclude = [
        repository / "jobs", repository / "data", repository / "package/jobs",
        repository / "secret", repository, tmp_path,
    ]  # fmt: skip
    target = repository / "jobs/new/code"
    target.parent.mkdir()
    take(repository, target, exclude=exclude)
    assert below(target) == {".gitignore", "train.py", "package/model.py"}
    (repository / "elsewhere").symlink_to(tmp_path)
    taken = fingerprint(repository, exclude=[*exclude, repository / "elsewhere"])
    assert taken == fingerprint(target)
    (repository / "elsewhere").unlink()
    # The same through a link, as many clusters have /home.
    (tmp_path / "home").symlink_to(repository)
    assert fingerprint(tmp_path / "home", exclude=exclude) == fingerprint(
        repository, exclude=exclude
    )
    monkeypatch.chdir(repository)
    assert fingerprint(Path(), exclude=exclude) == fingerprint(repository, exclude=exclude)


def test_a_tree_over_the_limit_is_refused_and_leaves_nothing(
    repository: Path, target: Path
) -> None:
    write(
        repository,
        {
            "runs/one/weights.bin": "x" * 700_000,
            "images/a": "x" * 200_000,
            "images/b": "x" * 200_000,
            "note\nbook": "x" * 300_000,
            "small": "x" * 1_000,
        },
    )
    with pytest.raises(RequestError) as refused:
        take(repository, target, limit_mb=1.25)
    said = str(refused.value)
    assert f"the code in {repository} has 1.4 MB in 8 files" in said
    assert "at most 1.25 MB" in said
    assert (
        "The largest: runs/one/weights.bin (0.7 MB), images/ (0.4 MB), 'note\\nbook' (0.3 MB)."
        in said
    )
    assert "--snapshot-limit MB" in said
    assert "--no-snapshot" in said
    assert ".gitignore" in said
    assert "not used" not in said
    assert not target.exists()
    assert fingerprint(repository, limit_mb=1.25) is None
    write(repository, {".gitignore": "/data\n*.so\n/runs\n"})
    assert take(repository, target, limit_mb=1.25).bytes < 1.25e6
    assert (target / "runs").is_symlink()


@pytest.mark.parametrize("below_it", ["MNIST/raw", "mnist/MNIST/raw"])
def test_a_folder_of_datasets_is_linked_whatever_its_name_and_size(
    tree: Path, target: Path, below_it: str
) -> None:
    write(tree, {f"sets/{below_it}/train-images-idx3-ubyte": "x" * 2_000_000})
    assert sorted(take(tree, target, limit_mb=1).digests) == ["package/model.py", "train.py"]
    assert (target / f"sets/{below_it}/train-images-idx3-ubyte").stat().st_size == 2_000_000
    assert (target / "sets").is_symlink()


def test_runs_below_another_runs_dir_are_no_code(tree: Path, target: Path) -> None:
    records = {f"runs/a/{name}": "{}" for name in ("spec.json", "events.jsonl", "logs/job.log")}
    write(tree, {**records, "suite/spec.json": "{}"})
    assert sorted(take(tree, target).digests) == ["package/model.py", "suite/spec.json", "train.py"]


def test_large_files_are_linked_the_largest_first_where_the_copy_would_be_over_its_limit(
    tree: Path, target: Path, tmp_path: Path
) -> None:
    sizes = {"weights.bin": 3_000_000, "package/table": 2_000_000, "lookup": 1_000_000}
    write(tree, {name: "x" * size for name, size in sizes.items()})
    taken = take(tree, target, limit_mb=2)
    assert taken.large == ("weights.bin", "package/table")
    assert recorded(taken, target) == taken == fingerprint(tree, limit_mb=2)
    assert set(taken.digests) == {"lookup", "package/model.py", "train.py"}
    for name in taken.large:
        assert (target / name).readlink() == tree / name
    assert (target / "lookup").is_file() and not (target / "lookup").is_symlink()
    assert take(tree, tmp_path / "all", limit_mb=7).large == ()
    with pytest.raises(RequestError, match=r"has 6\.0 MB in 5 files"):
        take(tree, tmp_path / "none", limit_mb=1e-6)  # what is left is over it, too


def test_an_ignore_list_that_was_not_used_is_said_to_be_so(tree: Path, target: Path) -> None:
    write(tree, {".gitignore": "big", "big": "x" * 2_000})
    with pytest.raises(RequestError, match=r"\.gitignore .*, which was not used here \(.*git"):
        take(tree, target, limit_mb=0.001)


@pytest.mark.parametrize("in_git", [False, True])
def test_too_many_files_are_refused(
    tree: Path, target: Path, in_git: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree, {f"images/train/{number}": "" for number in range(19)})
    if in_git:
        git(tree, "init", "--quiet")
    monkeypatch.setattr(snapshots, "MAX_FILES", 20)
    with pytest.raises(RequestError) as refused:
        take(tree, target)
    said = str(refused.value)
    assert f"the code in {tree} has 21 files" in said
    assert "at most 20. Most are in images/train/ (19 files), package/model.py (1 files)" in said
    assert "--no-snapshot" in said
    assert not target.exists()
    assert fingerprint(tree) is None
    monkeypatch.setattr(snapshots, "MAX_FILES", 21)
    assert take(tree, target).files == 21


def test_counting_stops_in_a_tree_that_is_no_code_at_all(
    tree: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree, {f"home/{number}": "" for number in range(100)})
    monkeypatch.setattr(snapshots, "MAX_FILES", 5)
    with pytest.raises(RequestError, match="has at least 51 files"):
        take(tree, target)


def test_too_many_ignored_files_beside_code_are_refused(
    repository: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository, {f"package/{number}.so": "x" for number in range(20)})
    monkeypatch.setattr(snapshots, "MAX_FILES", 23)
    with pytest.raises(
        RequestError, match=r"21 git-ignored files .* 20 of them in package; at most 23 "
    ):
        take(repository, target)
    assert not target.exists()
    assert fingerprint(repository) is not None


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A directory whose owner this process is for a while: root may read everything."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.geteuid()
        if before == 0:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(before)


@pytest.mark.parametrize("name", ["secret.key", "private"])
def test_what_cannot_be_read_is_named_before_anything_is_written(
    as_nobody: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, target = as_nobody / "tree", as_nobody / "code"
    write(tree, {"train.py": "x", "secret.key": "x", "private/x": "x"})
    (tree / name).chmod(0)
    with pytest.raises(RequestError, match=f"cannot read {name} .*Permission denied.*--no-snap"):
        take(tree, target)
    assert not target.exists()
    assert fingerprint(tree) is None
    assert snapshots.try_to_take(tree, target, 200, (), needed=False) is None
    assert capsys.readouterr().err.endswith("from the directory itself. [CD0312]\n")
    (tree / name).chmod(0o700)
    assert take(tree, target).files == 3


def test_a_full_disk_is_said_and_nothing_is_left(tree: Path, small_disk: Any) -> None:
    write(tree, {"big.bin": "x" * 100_000, "link": ""})
    program = (
        "import sys; from pathlib import Path; from clusterddp import errors\n"
        "from clusterddp.submission import snapshot\n"
        "disk = Path.cwd()\n"
        "try: snapshot.take(Path(sys.argv[1]), disk / 'code')\n"
        "except errors.RequestError as error: print(error, list(disk.iterdir()))\n"
    )
    done = small_disk("size=64k", sys.executable, "-c", program, str(tree))
    assert "cannot copy big.bin " in done.stdout, done.stderr
    assert "No space left on device" in done.stdout
    assert done.stdout.endswith(" []\n")


def test_a_file_that_vanishes_while_it_is_copied_is_passed_over(
    tree: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = snapshots._links

    def remove_one(plan: snapshots.Plan) -> dict[str, str]:
        (tree / "train.py").unlink()
        return links(plan)

    monkeypatch.setattr(snapshots, "_links", remove_one)
    assert take(tree, target).digests == {"package/model.py": digest("two")}
    assert below(target) == {"package/model.py"}


def test_a_target_that_exists_is_left_alone(tree: Path, target: Path) -> None:
    write(target, {"mine": "mine"})
    with pytest.raises(RequestError, match=r"cannot create .* for the code: File exists"):
        take(tree, target)
    assert below(target) == {"mine"}


def test_a_target_without_a_parent_and_a_tree_that_is_none_are_refused(
    tree: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=r"cannot create .*no/code"):
        take(tree, tmp_path / "no/code")
    with pytest.raises(RequestError, match="is not a directory"):
        take(tree / "train.py", tmp_path / "code")
    assert fingerprint(tmp_path / "gone") is None


def test_a_git_that_does_not_answer_is_not_waited_for(
    tree: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"bin/git": "#!/bin/sh\nexec sleep 60\n"})
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr("clusterddp.submission.snapshot.GIT_SECONDS", 0.2)
    with pytest.raises(RequestError, match=r"git ls-files did not finish within 0.2s"):
        take(tree, target)
    assert not target.exists()


@pytest.mark.parametrize(
    "content", ["", "[]", "null", "{}", json.dumps({"files": 1, "bytes": 1, "digests": 3})]
)
def test_a_damaged_record_is_refused(tmp_path: Path, content: str) -> None:
    write(tmp_path, {"code.json": content})
    with pytest.raises(RequestError, match=r"code\.json cannot be read: .* not a record of a code"):
        Snapshot.read(tmp_path / "code.json")


def test_a_record_that_the_disk_does_not_give_is_refused_in_its_words(tmp_path: Path) -> None:
    (tmp_path / "code.json").mkdir()
    with pytest.raises(RequestError, match=r"code\.json cannot be read: .*(directory|regular)"):
        Snapshot.read(tmp_path / "code.json")


# -- a copy taken anew -------------------------------------------------------------------------


def again(tree: Path, copy: Path, record: Snapshot) -> tuple[Path, list[str]]:
    """A new copy with what was written in the former one."""
    target = copy.with_name("new")
    return target, carry_over(copy, record, tree, target, take(tree, target))


def test_what_a_command_has_written_goes_along(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    record = take(repository, copy)
    write(copy, {"state-0": "7", "out/deep/log": "x", "package/cache.bin": "y"})
    write(copy, {"package/__pycache__/model.pyc": "old"})
    (copy / "latest").symlink_to("out/deep")
    write(repository, {"train.py": "new", "state-0": "mine", "added.py": "3"})
    (repository / "package/model.py").unlink()
    target, both = again(repository, copy, record)
    assert both == ["state-0"]
    contents = {"state-0": "7", "out/deep/log": "x", "package/cache.bin": "y", "train.py": "new",
                "added.py": "3"}  # fmt: skip
    assert {name: (target / name).read_text() for name in contents} == contents
    assert said_by(target / "latest") == "out/deep"
    assert not (target / "package/model.py").exists()
    assert not (target / "package/__pycache__").exists()
    assert (copy / "train.py").read_text() == "one"  # the former copy stays whole


def test_what_was_linked_leads_to_the_tree_again(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    record = take(repository, copy)
    assert (copy / "data").is_symlink()
    write(copy, {"runs/1": "mine"})
    write(repository, {".gitignore": "data/\nruns/\n", "runs/1": "of the folder"})
    target, both = again(repository, copy, record)
    assert ((target / "data").is_symlink(), both) == (True, [])
    assert (target / "runs/1").read_text() == "mine"
    assert (repository / "runs/1").read_text() == "of the folder"


def test_a_file_that_the_run_has_changed_is_kept_or_asked_about(tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    record = take(tree, copy)
    write(copy, {"train.py": "by the run"})
    target, both = again(tree, copy, record)
    assert ((target / "train.py").read_text(), both) == ("by the run", [])
    shutil.rmtree(target)
    write(tree, {"train.py": "by its person"})
    with pytest.raises(RequestError, match=r"train\.py was changed by the run"):
        again(tree, copy, record)


def test_nothing_is_written_through_a_link_into_the_tree(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    record = take(repository, copy)
    write(copy, {"package/state": "7"})
    git(repository, "rm", "-rq", "--cached", "package")
    write(repository, {".gitignore": "data/\npackage/\n"})
    with pytest.raises(RequestError, match="wrote package/state in"):
        again(repository, copy, record)
    assert not (repository / "package/state").exists()


@pytest.mark.parametrize("name", NAMES)
def test_written_files_of_every_name_go_along(tree: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    record = take(tree, copy)
    write(copy, {name: "7", f"package/{name}": "8"})
    target, _ = again(tree, copy, record)
    assert (target / name).read_text() + (target / f"package/{name}").read_text() == "78"
