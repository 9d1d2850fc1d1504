"""An environment is packed with its base, and works at the place where it is unpacked."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from clusterddp.run.run_dir import RunDir
from clusterddp.staging import environment, node
from clusterddp.staging.environment import BASE, ENV, StagingError
from clusterddp.submission import bundle

_SAYS = """import json, sys, own
print(json.dumps([sys.prefix, sys.base_prefix, json.__file__, own.__file__]))
"""


class Made:
    """A small environment on the shared disk: a base of its own, a tool, an editable package."""

    def __init__(self, folder: Path) -> None:
        real = Path(os.path.realpath(sys.executable))
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        self.base = folder / "shared" / "base"
        (self.base / "bin").mkdir(parents=True)
        shutil.copy(real, self.base / "bin" / version)
        for name in ("python", "python3"):
            (self.base / "bin" / name).symlink_to(version)
        ignored = shutil.ignore_patterns("site-packages", "test*", "config-*", "idlelib", "*.so.*")
        shutil.copytree(Path(os.__file__).parent, self.base / "lib" / version, ignore=ignored)
        for library in Path(sys.base_prefix, "lib").glob("libpython*"):
            shutil.copy(library, self.base / "lib")
        (self.base / "lib" / version / "site-packages").mkdir()
        self.path = folder / "shared" / "env"
        subprocess.run(
            [self.base / "bin/python3", "-m", "venv", "--without-pip", self.path], check=True
        )
        self.python = str(self.path / "bin/python")
        [packages] = self.path.glob("lib/python*/site-packages")
        self.packages = packages
        (folder / "shared/source").mkdir()
        (folder / "shared/source/own.py").write_text("")
        (packages / "own.pth").write_text(f"{folder}/shared/source\n")
        (packages / "inner.pth").write_text(f"{self.path}/src\n")
        tool = self.path / "bin/tool"
        tool.write_text(f"#!{self.python}\nimport sys; print(sys.executable)\n")
        tool.chmod(0o755)
        outside = folder / "shared/cache.py"
        outside.write_text("VALUE = 7\n")
        (packages / "cached.py").symlink_to(outside)

    def packed(self, archive: Path) -> environment.Environment:
        found = environment.find(self.python)
        assert environment.pack(found, archive, lambda: False)
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    """A copy of it on a disk of a node."""
    path = node.copy_path(tmp_path / "disk", made.packed(tmp_path / "env.tar").digest)
    (tmp_path / "disk").mkdir()
    assert node.unpack(tmp_path / "env.tar", path, 0)
    return path


def said(*words: object) -> str:
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=True
    ).stdout


def test_a_copy_runs_by_itself_and_imports_an_editable_package_from_its_place(
    made: Made, copy: Path
) -> None:
    prefix, base, library, own = json.loads(said(copy / ENV / "bin/python", "-c", _SAYS))
    assert (prefix, base) == (str(copy / ENV), str(copy / BASE))
    assert library.startswith(str(copy / BASE))
    assert own == str(made.path.parent / "source/own.py")


def test_a_program_of_the_copy_starts_the_python_of_the_copy(copy: Path) -> None:
    assert said(copy / ENV / "bin/tool").strip() == str(copy / ENV / "bin/python")


def test_a_link_out_of_the_environment_becomes_a_file_and_one_within_stays(copy: Path) -> None:
    [cached] = copy.glob("env/lib/python*/site-packages/cached.py")
    assert cached.read_text() == "VALUE = 7\n" and not cached.is_symlink()
    assert (copy / ENV / "bin/python").is_symlink()
    assert (copy / ENV / "bin/python").resolve().is_relative_to(copy / BASE)
    [inner] = copy.glob("env/lib/python*/site-packages/inner.pth")
    assert inner.read_text() == f"{copy / ENV}/src\n"


def test_bytecode_stays_valid(copy: Path) -> None:
    """Python compares the time in it with its source's, in whole seconds."""
    code = "import sys, json; sys.stderr.write(json.__cached__)"
    loud = subprocess.run(
        [copy / ENV / "bin/python", "-v", "-c", code], capture_output=True, text=True, check=True
    ).stderr
    assert f"matches {copy}/base/lib" in loud


def test_the_digest_changes_with_a_file_and_not_with_time(made: Made) -> None:
    before = environment.find(made.python).digest
    assert environment.find(made.python).digest == before
    fresh = made.packages / "fresh.py"
    fresh.write_text("")
    changed = environment.find(made.python).digest
    fresh.unlink()
    assert changed != before == environment.find(made.python).digest


def test_bytecode_and_the_runs_directory_do_not_change_it(made: Made) -> None:
    runs = made.path / "jobs"
    before = environment.find(made.python, str(runs)).digest
    (made.packages / "__pycache__").mkdir()
    (made.packages / "__pycache__/own.pyc").write_bytes(b"")
    runs.mkdir()
    (runs / "log").write_text("")
    try:
        assert environment.find(made.python, str(runs)).digest == before
    finally:
        shutil.rmtree(runs)
        shutil.rmtree(made.packages / "__pycache__")


def test_a_file_that_vanishes_while_it_is_packed_is_left_out(made: Made, tmp_path: Path) -> None:
    fresh = made.packages / "fresh.py"
    fresh.write_text("")
    found = environment.find(made.python)
    fresh.unlink()
    assert environment.pack(found, tmp_path / "env.tar", lambda: False)
    path = node.copy_path(tmp_path, found.digest)
    assert node.unpack(tmp_path / "env.tar", path, 0) and node.has_copy(path)
    assert not list(path.glob("env/lib/*/site-packages/fresh.py"))


def test_links_to_the_base_and_its_lib64_are_kept(made: Made) -> None:
    top, lib64 = made.packages / "top", made.base / "lib64"
    top.symlink_to(made.base)
    lib64.symlink_to("lib")
    try:
        links = {each.name: each.link for each in environment.find(made.python).entries}
    finally:
        top.unlink()
        lib64.unlink()
    [name] = [each for each in links if each.endswith("/site-packages/top")]
    assert links[name] == str(made.base) and links["base/lib64"] == "lib"
    lib64.mkdir()
    (lib64 / "libown.so").write_bytes(b"")
    names = [each.name for each in environment.find(made.python).entries]
    shutil.rmtree(lib64)
    assert "base/lib64/libown.so" in names


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no Python in /usr here")
def test_the_nodes_own_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match=r"each node has as its own.*--stage-env off"):
        environment.find("/usr/bin/python3")
    broken = tmp_path / "bin/python"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho no library >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(StagingError, match="does not say where its environment is: no library"):
        environment.find(str(broken))


def test_packing_that_is_interrupted_leaves_nothing(made: Made, tmp_path: Path) -> None:
    found = environment.find(made.python)
    asked = iter([False, False])
    assert not environment.pack(found, tmp_path / "a.tar", lambda: next(asked, True))
    assert not list(tmp_path.iterdir())

    def interrupt() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        environment.pack(found, tmp_path / "a.tar", interrupt)
    assert not list(tmp_path.iterdir())


def test_a_copy_is_used_again_and_repaired_if_a_file_is_gone(copy: Path, tmp_path: Path) -> None:
    archive = tmp_path / "env.tar"
    assert not node.unpack(archive, copy, 1 << 62)  # it needs no space
    tool = copy / ENV / "bin/tool"
    tool.unlink()  # as cleaners of /tmp do
    assert node.unpack(archive, copy, 0)
    assert tool.exists()


def test_a_copy_that_a_job_uses_is_repaired_in_its_place(copy: Path, tmp_path: Path) -> None:
    [kept] = copy.glob("env/lib/python*/site-packages/cached.py")
    before = kept.stat().st_ino
    shutil.rmtree(copy / "env/bin")
    (copy / "manifest.json").unlink()
    with pytest.raises(StagingError):
        node.unpack(tmp_path / "none.tar", copy, 0)
    assert node.unpack(tmp_path / "env.tar", copy, 0) and node.has_copy(copy)
    assert kept.stat().st_ino == before


def test_a_copy_whose_python_does_not_start_is_refused(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = node.copy_path(tmp_path, made.packed(tmp_path / "env.tar").digest)

    def broken(draft: Path, *_: object) -> None:
        (draft / "env/bin/python").resolve().write_text("#!/bin/sh\necho no library >&2; exit 1\n")

    monkeypatch.setattr(node, "_adapt", broken)
    with pytest.raises(StagingError, match="does not start: no library"):
        node.unpack(tmp_path / "env.tar", path, 0)
    assert not path.exists()


def test_a_full_disk_is_refused_with_both_sizes_and_leaves_nothing(
    made: Made, tmp_path: Path
) -> None:
    archive = tmp_path / "env.tar"
    path = node.copy_path(tmp_path, made.packed(archive).digest)
    with pytest.raises(StagingError, match=r"has .* free, and the environment needs 4\.6 EB|TB"):
        node.unpack(archive, path, 1 << 62)
    assert [each.name for each in path.parent.iterdir()] == ["lock"]


def test_a_disk_that_starts_no_programs_is_refused(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "env.tar"
    path = node.copy_path(tmp_path, made.packed(archive).digest)
    monkeypatch.setattr(node, "forbids_programs", lambda _: True)
    with pytest.raises(StagingError, match="is mounted noexec"):
        node.unpack(archive, path, 0)
    assert not path.exists()


def test_a_directory_that_a_node_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "clusterddp-1" / "abc"
    with pytest.raises(StagingError, match=r"/none does not exist\. Choose a directory"):
        node.unpack(tmp_path / "env.tar", path, 0)
    assert not (tmp_path / "none").exists()


def test_a_disk_that_fills_up_meanwhile_keeps_nothing_of_it(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "env.tar"
    path = node.copy_path(tmp_path, made.packed(archive).digest)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "makefile", full)
    with pytest.raises(StagingError, match=r"cannot be unpacked in .*: No space left on device"):
        node.unpack(archive, path, 0)
    assert [each.name for each in path.parent.iterdir()] == ["lock"]


def test_an_archive_that_was_cut_is_no_copy(made: Made, tmp_path: Path) -> None:
    archive = tmp_path / "env.tar"
    path = node.copy_path(tmp_path, made.packed(archive).digest)
    os.truncate(archive, archive.stat().st_size // 2)
    with pytest.raises(StagingError, match="cannot be unpacked"):
        node.unpack(archive, path, 0)
    assert not path.exists()


def test_a_folder_of_another_user_is_not_trusted(made: Made, tmp_path: Path) -> None:
    archive = tmp_path / "env.tar"
    path = node.copy_path(tmp_path, made.packed(archive).digest)
    path.parent.mkdir(mode=0o700)
    path.parent.chmod(0o777)
    with pytest.raises(StagingError, match="only you can write"):
        node.unpack(archive, path, 0)
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path)
    with pytest.raises(StagingError, match="only you can write"):
        node.unpack(archive, path, 0)


def test_unused_copies_make_room_and_used_ones_stay(copy: Path, tmp_path: Path) -> None:
    home = copy.parent
    for name in ("unused", "used", ".draft-killed", "recent"):
        (home / name).mkdir()
    for name in ("unused", "used"):
        os.utime(home / name, (0, 0))
    uses = subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, env={"CLUSTERDDP_STAGED": f"{home}/used/env"}
    )
    try:
        (copy / "manifest.json").unlink()
        assert node.unpack(tmp_path / "env.tar", copy, 0)
    finally:
        uses.communicate()
    assert {each.name for each in home.iterdir()} == {"lock", "used", "recent", copy.name}


_RANK = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "h01"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1"},
    **{"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345", "LC_ALL": "C.UTF-8"},
}


@pytest.mark.skipif(shutil.which("strace") is None, reason="it counts with strace")
def test_a_staged_rank_opens_few_files_of_the_shared_disk(
    made: Made, copy: Path, tmp_path: Path
) -> None:
    """At most 25 per rank, so that 8 ranks per node open at most 200."""
    shared = made.path.parent
    run = RunDir(shared / "run")
    shutil.rmtree(run.path, ignore_errors=True)
    begin_folder = run.attempts / "0001" / "outcomes"
    begin_folder.mkdir(parents=True)
    bundled = bundle.bundle_into(run).path
    script = shared / "train.py"
    script.write_text("import own, json, cached, tempfile, argparse\n")

    def opens(python: str, own: Path) -> int:
        log = tmp_path / "trace"
        argv = [python, own, "exec", f"--run-dir={run.path}", "--attempt=1", "--", python, script]
        trace = ["strace", "-f", "-e", "trace=open,openat,execve", "-o", log]
        environ = {**_RANK, "PATH": f"{Path(python).parent}:/usr/bin:/bin"}
        subprocess.run([*trace, *argv], env=environ, cwd=shared, check=True, timeout=120)
        lines = log.read_text().splitlines()
        return sum(f'"{shared}/' in line and "ENOENT" not in line for line in lines)

    node._copy_bundle(bundled, own := node.bundle_path(copy.parent, bundled))
    before, after = opens(made.python, bundled), opens(str(copy / ENV / "bin/python"), own)
    assert before > 100
    assert after <= 25
