"""Programs and interpreters that cannot start are refused, or warned of, before a job queues."""

import os
import sys
from pathlib import Path

import pytest

from clusterddp.errors import RequestError
from clusterddp.launchers import sbatch
from clusterddp.request.spec import DEFAULT_TEMPLATE
from clusterddp.request.sweep import NO_SWEEP, Sweep
from clusterddp.submission.programs import check_pythons
from clusterddp.submission.submit import check_commands
from tests.cli.made_runs import Workplace, workplace
from tests.request.test_spec import spec

__all__ = ["workplace"]


@pytest.fixture
def tree(workplace: Workplace) -> Path:
    """The current directory, with a few programs that nobody may run here."""
    (workplace.folder / "pkg").mkdir()
    (workplace.folder / "nets.py").write_text("raise SystemExit\n")
    for name in ("python-of-the-site", "pkg/run.py"):
        (workplace.folder / name).write_text("#!/bin/false\n")
        (workplace.folder / name).chmod(0o755)
    workplace.command("sbatch", "/bin/cat >sent; echo 12")
    return workplace.folder


@pytest.mark.parametrize(
    ("argv", "missing"),
    [
        (["--", "./train.sh"], "./train.sh"),
        (["--", "python", "trian.py", "--lr", "1"], "trian.py"),
        (["--", "/usr/bin/python3", "pkg/none.py"], "pkg/none.py"),
        (["--", f"./{'x' * 300}"], f"./{'x' * 300}"),
        (["--", "python", "nets.py"], ""),
        (["--", "python", "-u", "-W", "error", "trian.py"], "trian.py"),
        (["--", "env", "LR=1", "nice", "-n", "5", "python", "trian.py"], "trian.py"),
        (["--", "bash", "-e", "trian.sh"], "trian.sh"),
        (["--", "bash", "-c", "./trian.sh"], ""),
        (["--", "python", "-c", "trian.py"], ""),
        (["--", "pkg/run.py"], ""),
        (["--", "python", "-m", "nets"], ""),
        (["--setup", "make train.sh", "--", "./train.sh"], ""),
        (["--wrapper", "apptainer exec image", "--", "./train.sh"], ""),
        (["--srun-args", "--chdir=/else", "--", "./train.sh"], ""),
        (["--sbatch", "container-image=x", "--", "./train.sh"], ""),
        (["--dependency", "afterok:7", "--", "./train.sh"], ""),
        (["--", "./python-of-the-site", "train"], ""),
        (["--", "python", ""], ""),
        (["--", "trian.py", "--lr", "1"], "trian.py"),
        (["--", "env", "LR=1", "trian.sh"], "trian.sh"),
        (["--setup", "PATH=$PWD:$PATH", "--", "trian.py"], ""),
        (["--module", "trainers", "--", "trian.py"], ""),
    ],
)
def test_a_command_whose_file_is_not_there_is_refused_and_nothing_is_queued(
    tree: Path, workplace: Workplace, argv: list[str], missing: str
) -> None:
    for name in ("python", "env", "bash"):
        workplace.command(name, "true")
    got = workplace.invoke("submit", "--run-name", "one", *argv)
    assert (got.code, (workplace.root / "one").exists()) == ((2, False) if missing else (0, True))
    assert (f"COMMAND: there is no {missing} in {tree}" in got.err) == bool(missing)
    assert "is not on this machine" not in got.err


def test_a_command_in_quotes_is_refused_as_one_word(tree: Path, workplace: Workplace) -> None:
    got = workplace.invoke("submit", "--run-name", "one", "--", "python train.py")
    assert (got.code, "Remove the quotes: -- python train.py" in got.err) == (2, True)
    (tree / "my tool").write_text("#!/bin/sh\n")
    (tree / "my tool").chmod(0o755)
    assert workplace.invoke("submit", "--run-name", "two", "--", "./my tool").code == 0


def test_a_program_that_is_not_on_the_path_is_refused_unless_a_person_insists(
    tree: Path, workplace: Workplace
) -> None:
    argv = ("submit", "--run-name", "one")
    got = workplace.invoke(*argv, "--", "pyton", "nets.py")
    assert (got.code, workplace.calls) == (2, [])
    assert "COMMAND: there is no program pyton on the PATH" in got.err
    refusal = "warning: a submission would be refused: COMMAND: there is no program pyton on"
    assert refusal in workplace.invoke(*argv, "--dry-run", "--", "pyton", "nets.py").err
    got = workplace.invoke(*argv, "--force", "--", "pyton", "nets.py")
    assert got.code == 0 and "warning: pyton of COMMAND is not on this machine" in got.err


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["--", "/no/such/program"], "/no/such/program"),
        (["--module", "x", "--", "/no/such/program"], "/no/such/program"),
        (["--", "env", "PATH=/of/the/nodes", "trainer"], "trainer"),
        (["--", "uv", "run", "trainer"], "trainer"),
        (["--env", "PATH=/of/the/nodes", "--", "trainer"], "trainer"),
        (["--export", "NONE", "--", "trainer"], "trainer"),
        (["--module", "x", "--", "trainer"], ""),
        (["--setup", ". of-the-nodes", "--", "trainer"], ""),
        (["--wrapper", "conda run -p /env", "--", "trainer"], ""),
        (["--container-image", "docker://torch", "--", "trainer"], ""),
    ],
)
def test_a_program_that_only_the_nodes_may_have_is_no_reason_to_refuse(
    tree: Path, workplace: Workplace, argv: list[str], program: str
) -> None:
    got = workplace.invoke("submit", "--run-name", "one", *argv)
    assert got.code == 0, got.err
    warned = (
        f"warning: {program} of COMMAND is not on this machine. Check that it exists on the nodes"
    )
    assert warned in got.err if program else "is not on this machine" not in got.err


ALONE = "import torch, nets\nloss = torch.ones(1)\nloss.backward()\n"


@pytest.mark.parametrize(
    ("text", "options", "warned"),
    [
        (ALONE, ["--tasks-per-node", "2"], True),
        (ALONE, ["--nodes", "2", "--setup", "true"], True),
        (ALONE, [], False),
        (ALONE.replace("nets", "my_ddp"), ["--nodes", "2"], False),
        (ALONE + "rank = 0\n", ["--nodes", "2"], False),
        (ALONE + "torch.distributed.barrier()\n", ["--nodes", "2"], False),
        (ALONE.replace("nets", "lightning"), ["--nodes", "2"], False),
        (ALONE + "if:\n", ["--nodes", "2"], False),
        ("print(1)\n", ["--nodes", "2"], False),
    ],
)
def test_a_training_for_one_device_is_warned_of_where_several_tasks_start_it(
    tree: Path, workplace: Workplace, text: str, options: list[str], warned: bool
) -> None:
    (tree / "alone.py").write_text(text)
    os.mkfifo(tree / "pipe.py")
    for name in ("alone.py", "pipe.py"):
        argv = ["submit", *options, "--run-name", name[:4], "--", sys.executable, name]
        got = workplace.invoke(*argv)
        assert got.code == 0, got.err
        said = f"{name} trains on one device: each of the 2 tasks trains the full model"
        assert (said in got.err) == (warned and name == "alone.py")


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ("litgpt finetune x", "--devices 2 --num_nodes 3"),
        ("litgpt finetune x --devices=2", "--devices 2 --num_nodes 3"),
        ("litgpt finetune x --devices 2 --num_nodes 3", ""),
        ("litgpt finetune x --config a.yaml", ""),
        ("echo litgpt finetune x", ""),
    ],
)
def test_litgpt_without_its_counts_trains_alone_in_each_task(
    workplace: Workplace, words: str, missing: str
) -> None:
    workplace.command("litgpt", "true")
    got = workplace.invoke(
        "submit", "--dry-run", "--nodes=3", "--tasks-per-node=2", "--", *words.split()
    )
    assert got.code == 0
    said = f"litgpt without {missing}: each of the 6 tasks trains a separate copy"
    assert (said in got.err, "litgpt without" in got.err) == (bool(missing), bool(missing))


@pytest.mark.parametrize("name", ["train.sh", "linked/train.sh"])
def test_a_file_behind_a_link_may_be_on_the_nodes(
    tree: Path, workplace: Workplace, name: str
) -> None:
    (tree / Path(name).parts[0]).symlink_to("/of/the/nodes")
    got = workplace.invoke("submit", "--run-name", "one", "--", f"./{name}")
    assert got.code == 0
    assert (
        f"warning: ./{name} of COMMAND is not on this machine. Check that it exists on the nodes"
        in got.err
    )


def test_a_template_of_ones_own_may_bring_the_file_whatever_its_name(
    tree: Path, workplace: Workplace, tmp_path: Path
) -> None:
    templates = tmp_path / "templates"
    templates.mkdir()
    shipped = sbatch.shipped_folder() / DEFAULT_TEMPLATE
    (templates / DEFAULT_TEMPLATE).write_text(f"{shipped.read_text()}# ours\n")
    argv = ("--template-dir", str(templates), "--", "./train.sh")
    assert workplace.invoke("submit", "--run-name", "one", *argv).code == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--", "nets.py"], "COMMAND: nets.py is a file in {}, not a program on the PATH"),
        (["--", "nets.py"], "Use: python nets.py."),
        (["--module", "cuda", "--", "nets.py"], "Use: python nets.py."),
        (["--", "env", "LR=1", "nets.py"], "Use: python nets.py."),
        (["--", "python-of-the-site"], "Use: ./python-of-the-site."),
        (["--", "run.sh"], "Use: bash run.sh, or ./run.sh."),
        (["--", "./nets.py"], "COMMAND: ./nets.py cannot be run directly"),
        (["--", "./nets.py"], "directly: it has no execute permission. Use: python"),
        (["--", "./bare.py"], "directly: its first line names no interpreter (#!…). Use"),
        (["--", "./bare.py"], "Use: python ./bare.py"),
        (["--", "weights"], "Use: INTERPRETER weights."),
        (["--", "./pkg"], "COMMAND: ./pkg is a directory and cannot be run."),
        (["--", "/usr"], "COMMAND: /usr is a directory and cannot be run."),
        (["--", "/usr/bin/python3"], "COMMAND: /usr/bin/python3 has nothing to run"),
        (["--", "env", "LR=1", "bash"], "Use: bash FILE"),
    ],
)
def test_a_file_that_is_typed_as_if_it_were_a_program_is_refused_with_what_to_type(
    tree: Path, workplace: Workplace, argv: list[str], words: str
) -> None:
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "bare.py").write_text("import torch\n")
    (tree / "weights").write_text("")
    for name in ("run.sh", "bare.py"):
        (tree / name).chmod(0o755)
    got = workplace.invoke("submit", "--run-name", "one", *argv)
    assert (got.code, workplace.calls) == (2, [])
    assert words.format(tree) in got.err


@pytest.mark.parametrize(
    "argv",
    [
        ["--", "train.py"],  # it is on the PATH, too
        ["--module", "cuda", "--", "train"],  # a module may bring it
        ["--setup", "PATH=$PWD:$PATH", "--", "nets.py"],
    ],
)
def test_a_file_that_may_be_a_program_as_well_is_none_of_our_business(
    tree: Path, workplace: Workplace, argv: list[str]
) -> None:
    for name in ("train.py", "train"):
        (tree / name).write_text("")
    workplace.command("train.py", "true")
    got = workplace.invoke("submit", "--run-name", "one", *argv)
    assert got.code == 0, got.err


@pytest.mark.parametrize("option", ["--python", "--controller-python"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("venv/bin/python", "there is no file"),
        ("pkg/", "cannot run: it is a directory."),
        ("nets.py/../nets.py", "cannot run: it has no execute permission."),
        ("./nets.py", "cannot run: it has no execute permission."),
    ],
)
def test_an_interpreter_that_cannot_run_is_refused(
    tree: Path, workplace: Workplace, option: str, value: str, words: str
) -> None:
    got = workplace.invoke("submit", "--run-name", "one", option, value, "--", "/bin/true")
    assert (got.code, workplace.calls) == (2, [])
    assert got.err.startswith(f"clusterddp: {option}")
    assert f"{tree}/" in got.err and words in got.err


@pytest.mark.parametrize("value", ["/of/the/nodes/python", "linked/python", "python-of-a-module"])
def test_an_interpreter_that_only_the_nodes_may_have_is_a_warning(
    tree: Path, workplace: Workplace, value: str
) -> None:
    (tree / "linked").symlink_to("/of/the/nodes")
    got = workplace.invoke("submit", "--run-name", "one", "--python", value, "--", "/bin/true")
    assert got.code == 0
    assert "warning: --python " in got.err and "Check that" in got.err


@pytest.mark.parametrize(
    ("name", "is_warned_of"), [("70", True), ("70_1", True), ("run-70", False), ("70b", False)]
)
def test_a_name_that_can_be_taken_for_a_jobs_id_is_warned_of(
    tree: Path, workplace: Workplace, name: str, is_warned_of: bool
) -> None:
    got = workplace.invoke("submit", "--run-name", name, "--", "/bin/true")
    assert got.code == 0
    assert (f"--run-name {name} looks like a job id" in got.err) == is_warned_of


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--notify", "nosuchprog x"], "no such program on the PATH"),
        (["--notify", "./tell x"], "no such program in {tree} on this machine"),
        (["--notify", "nets.py"], "no such program on the PATH"),
        (["--notify", "pkg/run.py x"], ""),
        (["--notify", "sbatch x"], ""),
        (["--notify", "run.py", "--env", "PATH=pkg"], ""),
        (["--notify", "nosuchprog", "--env", "PATH=pkg"], "no such program on the PATH"),
        # It starts outside the lines that load modules and set up.
        (["--notify", "nosuchprog", "--module", "x"], "no such program on the PATH"),
        (["--notify", "nosuchprog", "--setup", "true"], "no such program on the PATH"),
    ],
)
def test_a_program_to_be_told_that_is_not_here_is_warned_of(
    tree: Path, workplace: Workplace, argv: list[str], words: str
) -> None:
    got = workplace.invoke("submit", "--run-name", "one", *argv, "--", "/bin/true")
    assert got.code == 0
    assert ("warning: --notify" in got.err) == bool(words), got.err
    assert words.format(tree=tree) in got.err


def test_the_pythons_of_the_tasks_are_started_only_where_that_is_asked_for(
    tree: Path, workplace: Workplace
) -> None:
    workplace.command("python", "echo ModuleNotFoundError: No module named \\'torch\\' >&2; exit 1")
    typed = ("--run-name", "one", "--", "python", "nets.py")
    got = workplace.invoke("submit", "--check-python", *typed)
    assert got.code == 2
    assert "--check-python: python fails: ModuleNotFoundError: No module named 'torch'" in got.err
    assert [call.split()[:2] for call in workplace.calls] == [["python", "-c"]]
    got = workplace.invoke("submit", "--check-python", "--module", "torch", *typed)
    assert got.code == 0 and "warning: --check-python: python fails here: Module" in got.err
    asked = len(workplace.calls)
    got = workplace.invoke("submit", "--run-name", "two", "--", "python", "nets.py")
    assert got.code == 0
    assert [call.split()[0] for call in workplace.calls[asked:]] == ["sbatch"]


def test_a_python_that_does_not_start_is_refused_and_one_that_has_torch_is_not(
    tree: Path, workplace: Workplace
) -> None:
    (tree / "broken").write_text("#!/no/such/interpreter\n")
    (tree / "broken").chmod(0o755)
    argv = ("submit", "--run-name", "one", "--check-python")
    got = workplace.invoke(*argv, "--python", "./broken", "--", "/bin/true")
    assert got.code == 2
    assert f"--check-python: --python {tree}/broken cannot run: No such file" in got.err
    got = workplace.invoke(*argv, "--", sys.executable, "nets.py")
    assert got.code == 0, got.err


def test_the_oldest_python_is_that_of_our_own_tasks_and_not_of_a_command(
    tree: Path, workplace: Workplace
) -> None:
    """A stand-in for Python 3.9, with a torch."""
    old = "import sys; sys.version_info = (3, 9, 1); sys.modules['torch'] = sys; exec(sys.argv[1])"
    (tree / "python3.9").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{old}" "$2"\n')
    (tree / "python3.9").chmod(0o755)
    argv = ("submit", "--run-name", "one", "--check-python")
    got = workplace.invoke(*argv, "--python", "./python3.9", "--", "/bin/true")
    assert (got.code, workplace.calls) == (2, [])
    assert "python3.9 fails: it is Python 3.9; the tasks need 3.10 or later." in got.err
    got = workplace.invoke(*argv, "--", "./python3.9", "nets.py")
    assert got.code == 0, got.err


def test_the_python_of_an_image_is_not_started(tree: Path, workplace: Workplace) -> None:
    argv = ("submit", "--run-name", "one", "--check-python", "--container-image", "docker://torch")
    got = workplace.invoke(*argv, "--", "python", "nets.py")
    assert got.code == 0, got.err
    assert "warning: --check-python: not checked, because the tasks use" in got.err


@pytest.mark.parametrize("sweep", [NO_SWEEP, Sweep(("lr",), (("0.1",), ("0.2",)))])
def test_an_image_that_is_not_here_is_warned_of(
    sweep: Sweep, capfd: pytest.CaptureFixture[str]
) -> None:
    check_commands(spec(container_image="/absent.sif", python="python3", sweep=sweep), "")
    warned = "the image /absent.sif is not on this machine. Check that it exists on the nodes"
    assert warned in capfd.readouterr().err


def test_a_controller_python_that_needs_the_shells_variables_is_refused_where_they_stay_behind(
    tmp_path: Path,
) -> None:
    """As one whose libpython a module brings, which the set-up lines load too late for it."""
    python = tmp_path / "python3"
    words = "libpython3.11.so.1.0: cannot open shared object file"
    python.write_text(f'#!/bin/sh\n[ "$LD_LIBRARY_PATH" ] || {{ echo "{words}" >&2; exit 127; }}\n')
    python.chmod(0o755)
    check_pythons(spec(controller_python=str(python)))
    with pytest.raises(RequestError, match=f"--controller-python.*does not start without.*{words}"):
        check_pythons(spec(controller_python=str(python), export="NONE"))
