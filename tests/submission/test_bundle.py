"""A run's own clusterddp is one file, the same for the same sources; its tasks need no other."""

import ast
import hashlib
import io
import json
import marshal
import os
import resource
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import pytest

from clusterddp.errors import RequestError
from clusterddp.run.attempt import begin
from clusterddp.run.run_dir import RunDir
from clusterddp.submission import bundle
from clusterddp.version import __version__
from clusterddp.worker.workstation import free_port

# Of the environment of the tests, what a task has to do without.
_ABSENT = ("clusterddp", "_editable_impl_clusterddp", "click", "jinja2", "tqdm", "submitit", "__py")
_OWN = """
import json, multiprocessing, os, sys
from pathlib import Path

import clusterddp
from torch import nn


def where(name):
    import click
    from clusterddp.slurm import forms

    Path(name).write_text(json.dumps([forms.__file__, click.__file__]))


def network():
    name = f"spawned-{os.environ['RANK']}"
    child = multiprocessing.get_context("spawn").Process(target=where, args=(name,))
    child.start()
    child.join()
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with torch and numpy, and with neither clusterddp nor click."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("torch", "numpy"):
        spec = find_spec(name)
        assert spec and spec.origin
        for each in Path(spec.origin).parents[1].iterdir():
            link = folder / "packages" / each.name
            link.parent.mkdir(exist_ok=True)
            if not each.name.startswith(_ABSENT) and not link.exists():
                link.symlink_to(each)
    venv.create(folder / "venv", symlinks=True)
    [packages] = folder.glob("venv/lib/python*/site-packages")
    (packages / "torch.pth").write_text(f"{folder / 'packages'}\n")
    return folder / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that carries this clusterddp, with its bytecode."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "it's a run")
    run.path.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", False)
        patch.setattr(sys, "pycache_prefix", str(tmp_path_factory.mktemp("bytecode")))
        bundle.bundle_into(run)
    return run


def said(*words: object, code: int = 0, folder: Path | None = None) -> str:
    """What a program prints, stderr included, when it has ended with this code."""
    argv = [str(word) for word in words]
    end = subprocess.run(
        argv, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert end.returncode == code, end.stdout + end.stderr
    return end.stdout + end.stderr


def test_the_same_sources_give_the_same_bytes(run: RunDir, tmp_path: Path) -> None:
    spec = find_spec("click")
    assert spec and spec.origin
    for package in (Path(bundle.__file__).parents[1], Path(spec.origin).parent):
        copy = tmp_path / package.name
        shutil.copytree(package, copy, copy_function=shutil.copyfile)  # younger, of other modes
        (copy / ".#editor's.py").symlink_to("nowhere")
    code = "from clusterddp.submission import bundle as b; import hashlib as h; "
    code += "print(b.__file__, h.sha256(b.build()).hexdigest())"
    seed = str(hash(str(tmp_path)) % 1000)
    end = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": seed},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    file, digest = end.stdout.rsplit(maxsplit=1)
    assert Path(file).is_relative_to(tmp_path)
    assert digest == hashlib.sha256(bundle.build()).hexdigest()
    made = bundle.bundle_into(run)
    assert made.path.name == f"clusterddp-{__version__}-{digest[:12]}.pyz"
    assert (made.version, str(made)) == (__version__, f"{__version__} ({digest[:12]})")


def test_it_holds_the_sources_of_clusterddp_and_click_alone(carried: RunDir) -> None:
    names = zipfile.ZipFile(carried.bundle).namelist()
    assert all(name.endswith(".py") for name in names)
    assert {name.split("/")[0] for name in names} == {"__main__.py", "clusterddp", "vendored"}
    assert {name.split("/")[1] for name in names if name.startswith("vendored/")} == {"click"}
    [bytecode] = carried.path.glob("__pycache__/*.zip")
    assert {f"{name}c" for name in names} == {*zipfile.ZipFile(bytecode).namelist(), "__main__.pyc"}


def test_a_file_that_was_altered_says_so_and_what_to_do(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a $(run)'s; own")
    run.path.mkdir()
    made = bundle.bundle_into(run)
    assert bundle.find(run) == made
    content = bytearray(made.path.read_bytes())
    content[len(content) // 2] ^= 1
    made.path.write_bytes(content)
    with pytest.raises(RequestError, match=r"altered.*resume '.*own' --upgrade-clusterddp"):
        bundle.find(run)
    words = said(sys.executable, run.bundle, "--version", code=1)
    assert str(made.path) in words
    assert f"clusterddp resume {shlex.quote(str(run.path))} --upgrade-clusterddp" in words
    made.path.unlink()
    with pytest.raises(RequestError, match=r"No such file.*--upgrade-clusterddp"):
        bundle.find(run)


def test_a_damaged_file_is_put_right_by_carrying_it_once_more(run: RunDir) -> None:
    made = bundle.bundle_into(run)
    made.path.write_bytes(b"")
    assert not bundle.verify_bundle(run)
    assert bundle.bundle_into(run) == bundle.find(run) == made


def test_another_one_is_taken_while_the_run_is_submitted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    former = bundle.bundle_into(run)
    assert bundle.verify_bundle(run)
    assert not logged
    with bundle.replaced_bundle(run) as same:
        assert same == []
    monkeypatch.setattr(bundle, "__version__", "9.9")
    monkeypatch.setattr(bundle, "_MAIN", f"{bundle._MAIN}# newer\n")
    assert bundle.verify_bundle(run)
    [line] = logged
    assert f"keeps its clusterddp {former}; 9.9 (" in line
    with pytest.raises(RequestError, match="sbatch"), bundle.replaced_bundle(run):
        raise RequestError("sbatch refused the job")
    assert bundle.find(run) == former
    with bundle.replaced_bundle(run) as changes:
        pass
    made = bundle.find(run)
    assert made and made.version == "9.9"
    assert changes == [f"clusterddp {former}, now {made}"]
    assert sorted(run.path.glob("*.pyz")) == sorted([former.path, made.path, run.bundle])


def test_a_run_without_one_uses_what_is_installed(run: RunDir) -> None:
    assert bundle.find(run) is None


@pytest.fixture
def no_room() -> Iterator[None]:
    """Files of at most 100 KB, as a full disk or a quota would end one in its middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_is_a_refusal_that_leaves_nothing(run: RunDir, no_room: None) -> None:
    with pytest.raises(RequestError, match=r"MB\): File too large. Free space .*--runs-dir"):
        bundle.bundle_into(run)
    assert not list(run.path.iterdir())


def test_no_room_ends_a_submission_before_it_is_sent(tmp_path: Path, no_room: None) -> None:
    words = said(
        sys.executable, "-m", "clusterddp", "submit", "--", "true", code=2, folder=tmp_path
    )
    assert "cannot write clusterddp's bundle" in words
    assert not list(tmp_path.iterdir())


@pytest.fixture
def pycache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the installation keeps the bytecode of bundles."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))
    return Path(cache_from_source(bundle.__file__)).parent


def test_the_bytecode_is_that_of_the_files_own_sources(
    run: RunDir, pycache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of what lies on the disk by then, as where somebody edits an installation meanwhile."""
    sources = zipfile.ZipFile(io.BytesIO(bundle.build()))
    contents = {name: sources.read(name) for name in sources.namelist()}
    contents["clusterddp/errors.py"] += b"AS_SUBMITTED = 1\n"
    content = bundle._zip(contents)
    monkeypatch.setattr(bundle, "build", lambda: content)
    carried = bundle.bundle_into(run)
    [file] = run.path.glob("__pycache__/*.zip")
    code = marshal.loads(zipfile.ZipFile(file).read("clusterddp/errors.pyc")[16:])
    assert "AS_SUBMITTED" in code.co_names
    assert code.co_filename == f"{carried.path.name}/clusterddp/errors.py"


@pytest.mark.parametrize("content", [b"", b"nothing of a zip file", None], ids=str)
def test_bytecode_that_was_altered_is_left_alone(
    run: RunDir, pycache: Path, content: bytes | None
) -> None:
    bundle.bundle_into(run)
    [file] = run.path.glob("__pycache__/*.zip")
    other = bundle._zip({"clusterddp/__init__.py": b"raise SystemExit('altered')"})
    file.write_bytes(other if content is None else content)
    assert said(sys.executable, run.bundle, "--version").endswith(f" {__version__}\n")


def test_bytecode_of_the_installation_is_taken_as_long_as_it_is_whole(
    tmp_path: Path, pycache: Path
) -> None:
    runs = [RunDir(tmp_path / name) for name in "abc"]
    for run in runs:
        run.path.mkdir()
    bundle.bundle_into(runs[0])
    [file] = pycache.glob("*.zip")
    taken = file.stat().st_mtime_ns
    bundle.bundle_into(runs[1])
    assert [each.stat().st_mtime_ns for each in pycache.glob("*.zip")] == [taken]
    file.write_bytes(b"torn")
    bundle.bundle_into(runs[2])
    assert {len(list(run.path.glob("__pycache__/*.zip"))) for run in runs} == {1}
    for each in [*pycache.glob("*.zip"), *tmp_path.glob("?/__pycache__/*.zip")]:
        assert each.stem.endswith(f"-{hashlib.sha256(each.read_bytes()).hexdigest()[:12]}")


@pytest.mark.parametrize("what", ["folder", "file"])
def test_bytecode_that_another_user_could_have_written_is_not_taken(
    tmp_path: Path, run: RunDir, pycache: Path, what: str
) -> None:
    bundle.bundle_into(RunDir(tmp_path))
    [file] = pycache.glob("*.zip")
    (pycache if what == "folder" else file).chmod(0o777)
    assert file.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "_compile", unlikely)
        bundle.bundle_into(run)
    assert not list(run.path.glob("__pycache__/*.zip"))


def unlikely(*_: object) -> Path:
    raise FileNotFoundError


def test_where_python_writes_no_bytecode_the_file_is_enough(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "none"))
    bundle.bundle_into(run)
    assert not list(run.path.glob("__pycache__/*"))
    assert said(sys.executable, "-I", "-S", run.bundle, "--version").endswith(f" {__version__}\n")


def test_an_older_python_is_refused_in_one_sentence(carried: RunDir) -> None:
    source = zipfile.ZipFile(carried.bundle).read("__main__.py").decode()
    ast.parse(source, feature_version=(3, 4))
    assert source.isascii()  # Python 2 would ask for a coding
    code = (
        "import runpy, sys; sys.version_info = (3, 9, 18); sys.version = '3.9.18 (main)'; "
        f"runpy.run_path({str(carried.bundle)!r})"
    )
    [line] = said(sys.executable, "-c", code, code=1).splitlines()
    assert "is Python 3.9.18; clusterddp needs 3.10 or later" in line
    assert sys.executable in line and "--python" in line


def test_the_batch_side_needs_python_alone(carried: RunDir) -> None:
    alone = (sys.executable, "-I", "-S", carried.bundle)
    for name in ("batch", "exec", "stop", "status", "logs", "resume"):
        assert f"clusterddp {name}" in said(*alone, name, "--help")


def test_a_python_without_torch_is_named_in_a_sentence(carried: RunDir, tmp_path: Path) -> None:
    words = said(sys.executable, "-I", "-S", carried.bundle, "train", code=1, folder=tmp_path)
    assert f"torch and numpy cannot be imported by {sys.executable}" in words
    assert "--python" in words and "Traceback" not in words


_LOOP = """
import json, os, sys
from importlib.util import find_spec

import clusterddp.loop
from torch import nn

loop = clusterddp.loop.Loop(model=nn.Linear(1, 1))
loop.finish()
path = os.environ["PYTHONPATH"].split(os.pathsep)
print(json.dumps([clusterddp.__file__, find_spec("click") is None, str(loop.attempt.path), path]))
"""


def in_attempt(carried: RunDir, bare: Path, run: RunDir, code: str, **environ: str) -> str:
    """What a COMMAND prints as the task of an attempt."""
    task = [bare, carried.bundle, "exec", "--run-dir", run.path, "--attempt", "1"]
    end = subprocess.run(
        [*task, "--", bare, "-c", code],
        env={"PATH": os.environ["PATH"], **environ}, cwd=run.path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert end.returncode == 0, end.stderr
    return end.stdout


def test_a_command_has_the_runs_own_loop_and_nobodys_click(
    carried: RunDir, bare: Path, run: RunDir, tmp_path: Path
) -> None:
    attempt = begin(run)
    of_another = "/jobs/outer/clusterddp-0.1.1-3f2a9c41d07b.pyz"  # which has submitted this one
    path = f"{tmp_path}:{of_another}:"
    said = in_attempt(carried, bare, run, _LOOP, PYTHONPATH=path, CLUSTERDDP_LOOP="1:/jobs/outer")
    file, has_no_click, path, path_of_python = json.loads(said)
    own = str(carried.bundle.resolve())
    assert file == f"{own}/clusterddp/__init__.py" and has_no_click
    # What a person names comes before the run's own; an empty part is the current directory.
    assert path_of_python == [f"{own}/clusterddp/processes/armed", str(tmp_path), "", own]
    assert path == str(attempt.path) and attempt.read_record()


def test_a_command_is_left_alone_where_a_person_says_so(
    carried: RunDir, bare: Path, run: RunDir
) -> None:
    begin(run)
    code = "import os; from importlib.util import find_spec; print(find_spec('clusterddp'), "
    code += "os.environ.get('PYTHONPATH'), os.environ['CLUSTERDDP_LOOP'])"
    armed = f"{carried.bundle.resolve()}/clusterddp/processes/armed"  # stacks, which is apart
    assert in_attempt(carried, bare, run, code, CLUSTERDDP_LOOP="off") == f"None {armed} off\n"


def test_the_command_clusterddp_within_a_command_is_the_installed_one(
    carried: RunDir, bare: Path, run: RunDir, tmp_path: Path
) -> None:
    """The run's own is on the path, and has no templates."""
    begin(run)
    package = tmp_path / "installed" / "clusterddp"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print('installed', sys.argv[1:])")
    site = f"import site, sys; site.addsitedir({str(package.parent)!r})"
    (tmp_path / "sitecustomize.py").write_text(site)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'clusterddp', 'a', 'b'])"
    said = in_attempt(carried, bare, run, code, PYTHONPATH=str(tmp_path))
    assert said == "installed ['a', 'b']\n"


def test_a_commands_script_that_submits_is_told_how(carried: RunDir, run: RunDir) -> None:
    begin(run)
    code = (
        "import clusterddp as c; spec = c.JobSpec('a', '/a', c.Resources(), python='python', "
        "command=('true',))\ntry: c.render(spec)\nexcept c.RequestError as error: print(error)"
    )
    words = in_attempt(carried, Path(sys.executable), run, code)
    assert "renders no script" in words and "--env CLUSTERDDP_LOOP=off" in words


def test_an_older_python_can_go_on_without_it() -> None:
    """An ImportError, which a script catches, before anything that such a Python cannot parse."""
    source = Path(bundle.__file__).parents[1] / "__init__.py"
    ast.parse(source.read_text(), feature_version=(3, 7))
    code = (
        "import runpy, sys; sys.version_info = (3, 9, 18); sys.version = '3.9.18 (main)'\n"
        f"try: runpy.run_path({str(source)!r})\n"
        "except ImportError as error: print(error)"
    )
    words = said(sys.executable, "-c", code)
    assert words == "clusterddp needs Python 3.10 or later, this is 3.9.18\n"


def test_a_command_gets_nothing_of_it(carried: RunDir, bare: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys; from importlib.util import find_spec; "
        "print(find_spec('click'), find_spec('clusterddp'), 'pyz' in str([sys.path, *os.environ]))"
    )
    words = said(bare, carried.bundle, "exec", "--", bare, "-c", code, folder=tmp_path)
    assert words == "None None False\n"


@pytest.mark.slow  # each rehearsal trains from one, where clusterddp is installed as well
def test_two_ranks_train_from_it_and_what_they_spawn_imports_it(
    carried: RunDir, bare: Path, synthetic_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(_OWN)
    argv = [bare, carried.bundle, "train", "--run-dir=run", "--dataset=synthetic", "--max-steps=3"]
    argv += [f"--data-dir={synthetic_dir}", "--data-pipeline=loader", "--num-workers=1"]
    argv += ["--model=own:network", "--world-size=2", f"--master-port={free_port()}"]
    ranks = [
        subprocess.Popen(
            [*argv, f"--rank={rank}"], cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    printed = [rank.communicate()[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(printed)
    assert json.loads((tmp_path / "run/report.json").read_text())["steps"] == 3
    for rank in range(2):
        for file in json.loads((tmp_path / f"spawned-{rank}").read_text()):
            assert Path(file).is_relative_to(carried.path)


@pytest.mark.slow
@pytest.mark.release  # above without one; every torchrun job on Slurm has agents that do
def test_an_agent_starts_ranks_of_it(
    carried: RunDir, bare: Path, synthetic_dir: Path, tmp_path: Path
) -> None:
    agent = [bare, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    agent += [f"--master-port={free_port()}", bare, carried.bundle]
    said(
        *(*agent, "train", "--dataset=synthetic", f"--data-dir={synthetic_dir}"),
        *("--max-steps=3", "--run-dir=run"),
        folder=tmp_path,
    )
    assert json.loads((tmp_path / "run/report.json").read_text())["world_size"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["spawn", *(pytest.param(how, marks=pytest.mark.release) for how in ("forkserver", "exec"))],
)
def test_ranks_on_a_workstation_run_the_same_file(
    carried: RunDir, bare: Path, synthetic_dir: Path, tmp_path: Path, method: str
) -> None:
    words = said(
        *(bare, carried.bundle, "debug", "--procs=2", f"--start-method={method}"),
        *("--dataset=synthetic", f"--data-dir={synthetic_dir}", "--max-steps=3"),
        folder=tmp_path,
    )
    assert "done: test accuracy" in words


_OPENED = """
import os, sys

def hook(event, arguments):
    if event == "open" and "clusterddp-" in str(arguments[0]):
        os.write(2, b"opened\\n")

sys.addaudithook(hook)
"""


@pytest.mark.parametrize(
    "code",
    [
        "import runpy; sys.argv = [OWN, 'env']; runpy.run_path(OWN, run_name='__main__')",
        "sys.path.append(OWN); from clusterddp.loop import Loop; print('rank')",
    ],
    ids=["its own program", "a command's loop"],
)
def test_the_file_is_read_once_and_not_for_each_module(
    carried: RunDir, bare: Path, tmp_path: Path, code: str
) -> None:
    code = f"OWN = {str(carried.bundle.resolve())!r}{_OPENED}{code}"
    text = said(bare, "-c", code, folder=tmp_path)
    assert "rank" in text
    assert 0 < text.count("opened") <= 16  # zipimport: 60 and more


def test_a_traceback_shows_the_sources_of_a_file_that_was_read_once(
    carried: RunDir, bare: Path
) -> None:
    code = f"import sys; sys.path.append({str(carried.bundle.resolve())!r}); "
    code += "from clusterddp.slurm import forms; forms.expand_nodelist('a[')"
    text = said(bare, "-c", code, code=1)
    assert "raise RequestError" in text or "raise SlurmError" in text, text
