"""An sbatch file is read as sbatch reads it: directives, steps, and what they start."""

import pytest

from clusterddp.scripts import sbatch_file
from clusterddp.scripts.sbatch_file import SbatchFile


def read(text: str) -> SbatchFile:
    return sbatch_file.read(f"#!/bin/bash\n{text}\n")


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("#SBATCH --nodes=2", [("nodes", "2")]),
        ("#SBATCH --nodes 2", [("nodes", "2")]),
        ("#SBATCH -N 2 -n8 --exclusive", [("nodes", "2"), ("ntasks", "8"), ("exclusive", None)]),
        ("#SBATCH--nodes=2", [("nodes", "2")]),
        ("#SBATCH --job-name='a b' # why", [("job-name", "a b")]),
        ('#SBATCH --comment="it\'s"#x', [("comment", "it's")]),
        ("#SBATCH --comment=a\\ b", [("comment", "a b")]),
        ("#SBATCH --tasks-per-node=4", [("ntasks-per-node", "4")]),
        ("#SBATCH --cpus-per-t=4", [("cpus-per-task", "4")]),
        ("#SBATCH -W -J x", [("wait", None), ("job-name", "x")]),
        ("#SBATCH -HO", [("hold", None), ("overcommit", None)]),
        ("#SBATCH --requeue --time=1", [("requeue", None), ("time", "1")]),
        ("#SBATCH --nodes", [("nodes", "")]),
        ("#SBATCH hetjob", []),
        ("# SBATCH --nodes=2", []),
        ("##SBATCH --nodes=2", []),
        (" #SBATCH --nodes=2", []),
        ("#sbatch --nodes=2", []),
    ],
)
def test_a_directive_is_read_as_sbatch_reads_it(
    line: str, options: list[tuple[str, str | None]]
) -> None:
    assert [(each.name, each.value) for each in read(line).directives] == options


def test_directives_end_with_the_first_command() -> None:
    file = read("# why\n\n#SBATCH -N 2\n   # more\n#SBATCH -n 4\nset -e\n#SBATCH -N 3")
    assert [(each.line, each.is_read) for each in file.directives] == [
        (4, True),
        (6, True),
        (8, False),
    ]
    assert file.value("nodes") == "2"


def test_of_a_heterogeneous_job_the_first_component_is_read() -> None:
    file = read("#SBATCH -N 1\n#SBATCH hetjob\n#SBATCH -N 2\n#SBATCH -n 4\nsrun a")
    assert (file.value("nodes"), file.value("ntasks")) == ("1", None)


def test_the_last_directive_of_a_name_is_in_force() -> None:
    assert read("#SBATCH -N 2\n#SBATCH --nodes=3").value("nodes") == "3"


@pytest.mark.parametrize(
    "line",
    [
        "srun -N2 --ntasks 4 -l -K --wait=60 --gres=gpu:1 python train.py",
        "time srun -N2 -n4 -lK1 -W 60 --gres gpu:1 python train.py",
        "timeout 60 /usr/bin/srun --nodes=2 --ntasks=4 --label -K --wait 60 --gres=gpu:1 -- python "
        "train.py",
        "ARGS='-N 2 -n 4'\nRUN=srun\n$RUN $ARGS --gres=gpu:1 python train.py",
        "if true; then srun \\\n -N 2 \\\n -n 4 --gres=gpu:1 python train.py & fi",
    ],
)
def test_a_step_has_the_options_of_srun_and_the_program_of_its_tasks(line: str) -> None:
    (step,) = read(line).steps
    assert (step.value("nodes"), step.value("ntasks"), step.value("gres")) == ("2", "4", "gpu:1")
    assert step.value("cpus-per-task") is None
    assert step.texts == ("python", "train.py")


def test_the_lines_end_as_windows_ends_them() -> None:
    file = sbatch_file.read("#!/bin/bash\r\n#SBATCH -N 2\r\nsrun python a.py\r\n")
    assert file.value("nodes") == "2"
    assert file.steps[0].texts == ("python", "a.py")
