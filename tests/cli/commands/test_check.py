"""`clusterddp check`, run as a person runs it."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from clusterddp.scripts.findings import rule_name
from clusterddp.scripts.python_rules import PYTHON_RULES
from clusterddp.scripts.sbatch_rules import SBATCH_RULES
from tests import hostile
from tests.cli.commands.test_env import run_cli

ROOT = Path(__file__).parents[3]
WRONG = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID train.py
"""
RIGHT = "#!/bin/bash\n#SBATCH --ntasks=8\nsrun python train.py\n"

run_check = partial(run_cli, "check", environ={"LC_ALL": "C.UTF-8"})


def test_a_finding_has_the_line_the_reason_and_the_line_to_write(tmp_path: Path) -> None:
    job = tmp_path / "job.sbatch"
    job.write_text(WRONG)
    done = run_check(str(job))
    assert done.returncode == 1
    lines = done.stdout.decode().splitlines()
    assert lines[0].startswith(f"{job}:4: may go wrong [log-overwritten]: a requeued job")
    assert lines[1:4] == [
        "  is:    #SBATCH --requeue",
        "  write: #SBATCH --requeue",
        "         #SBATCH --open-mode=append",
    ]
    assert lines[4].startswith(
        f"{job}:5: will go wrong [batch-shell-rank]: the batch shell expands"
    )
    assert lines[6] == (
        r'  write: srun bash -c "torchrun --nnodes=2 --node_rank=\$SLURM_NODEID train.py"'
    )
    assert done.stderr.decode() == "clusterddp: 2 findings in 1 file: 1 certain, 1 possible\n"


def test_a_training_for_one_device_is_named_as_such() -> None:
    alone = "clusterddp: warning: examples/one_device.py trains on one device"
    for files in (["one_device.py"], ["one_device.py", "own_dataset.py"]):
        done = run_check(*(f"examples/{file}" for file in files))
        assert (done.returncode, done.stdout) == (0, b"")
        assert alone in done.stderr.decode()
    script = b"#!/usr/bin/env python\nimport torch\ntorch.ones(1).sum().backward()\n"
    done = run_check("--json", "-", stdin=script)
    assert (done.returncode, json.loads(done.stdout)) == (0, [])
    assert done.stderr.decode() == (
        "clusterddp: warning: - trains on one device: each of several tasks would train the full "
        "model on the full data. To distribute it, see docs/from-one-device.md. [CD1226]\n"
    )
    done = run_check("examples/many_devices.py")
    assert (done.returncode, b"one device" in done.stderr) == (0, False)


IN_A_CLASS = """\
import argparse
import torch
class Trainer:
    def __init__(self, model, gpu_id):
        self.gpu_id, self.model = gpu_id, model.to(gpu_id)
    def fit(self, loader):
        for x in loader:
            self.model(x.to(self.gpu_id)).sum().backward()
if __name__ == "__main__":
    argparse.ArgumentParser(description="a distributed training").parse_args()
    Trainer(torch.nn.Linear(2, 1), 0).fit([])
"""


def test_a_training_for_one_device_is_named_beside_the_job_whose_tasks_start_it(
    tmp_path: Path,
) -> None:
    job, script = tmp_path / "job.sbatch", tmp_path / "train.py"
    script.write_text(IN_A_CLASS)
    assert b"each of several tasks would train" in run_check(str(script)).stderr
    for step, said in {
        "srun python train.py": b"each of the 4 tasks trains the full model",
        "srun -n 1 python train.py": b"no findings in 2 files\n",
        "srun python other.py": b"no findings in 2 files\n",
    }.items():
        job.write_text(f"#!/bin/bash\n#SBATCH --ntasks=4\n{step}\n")
        done = run_check(str(job), str(script))
        assert (done.returncode, done.stdout) == (0, b"")
        assert said in done.stderr
        assert (b"[CD1226]" in done.stderr) == (b"4 tasks" in said)


def test_without_a_finding_it_ends_with_0_and_says_so() -> None:
    done = run_check("-", stdin=RIGHT.encode())
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr == b"clusterddp: no findings in 1 file\n"


def test_json_is_for_scripts(tmp_path: Path) -> None:
    job = tmp_path / "job.sbatch"
    job.write_text(WRONG)
    done = run_check("--json", str(job), str(job))
    assert done.returncode == 1
    findings = json.loads(done.stdout)
    assert [(each["rule"], each["line"], each["sure"]) for each in findings] == [
        ("log-overwritten", 4, False),
        ("batch-shell-rank", 5, True),
    ]
    assert findings[0].keys() == {"rule", "file", "line", "sure", "why", "text", "instead"}
    assert findings[0]["file"] == str(job)
    none = run_check("--json", "-", stdin=RIGHT.encode())
    assert (none.returncode, json.loads(none.stdout)) == (0, [])


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.txt", b"hello\n", "neither an sbatch file"),
        ("a.sh", b"", "neither an sbatch file"),
        ("a.py", b"def f(:\n", "line 1: not valid Python"),
        ("a.sh", b"#!/bin/bash\n\xff\n", "not UTF-8"),
        ("a.sh", b"#!/bin/bash\nsrun a\0\n", "NUL bytes"),
        ("a.sh", b"#!/bin/bash\n" + b"#" * (1 << 20), "larger than 1,048,576 bytes"),
    ],
)
def test_what_cannot_be_read_ends_with_2_and_says_why(
    tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    script = tmp_path / name
    script.write_bytes(data)
    done = run_check(str(script))
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert said in line and name in line


def test_a_file_that_is_not_there_and_a_folder_end_with_2(tmp_path: Path) -> None:
    for path, code in ((tmp_path / "no.sh", b"[CD0317]"), (tmp_path, b"[CD0315]")):
        done = run_check(str(path))
        assert code in done.stderr
        assert done.returncode == 2
        assert str(path) in done.stderr.decode() and b"Traceback" not in done.stderr


def test_a_byte_order_mark_before_python_is_none_of_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(b"\xef\xbb\xbfimport torch\n")
    assert run_check(str(script)).returncode == 0


def test_a_file_whose_name_has_a_line_end_is_named_in_one_line(tmp_path: Path) -> None:
    job = tmp_path / "a\nforged.sh:1: will.sh"
    job.write_text(WRONG)
    done = run_check(str(job))
    assert rb"a\nforged.sh:1: will.sh:4: may" in done.stdout
    assert b"\nforged" not in done.stdout


def test_a_script_is_data(tmp_path: Path) -> None:
    values = [*hostile.CARRIED, "escape\x1b[31m", "bell\a", "carriage\rreturn"]
    for number, value in enumerate(values):
        quoted = "'" + value.replace("'", "'\\''") + "'"
        (tmp_path / f"{number}.sh").write_text(
            f"#!/bin/bash\n#SBATCH -N 2\n#SBATCH --ntasks-per-node=1\n#SBATCH -J {quoted}\n"
            f"A={quoted}\nexport MASTER_ADDR=localhost NAME=$A\n"
            f"srun torchrun --node_rank=$SLURM_NODEID t.py {quoted}\necho {value}\n"
        )
    names = sorted(str(path) for path in tmp_path.iterdir())
    done = run_check(*names)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count(b"[batch-shell-rank]") == len(values)
    assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", done.stdout)
    assert sorted(str(path) for path in tmp_path.iterdir()) == names
    assert not (ROOT / "pwned").exists()


def test_the_documentation_has_each_rule_with_its_source() -> None:
    text = (ROOT / "docs" / "check.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \| (.*) \|$", text, re.MULTILINE)
    rules = (*SBATCH_RULES, *PYTHON_RULES)
    for (name, mistake, source), rule in zip(rows, rules, strict=True):
        said = " ".join((rule.__doc__ or "").split())
        assert name == rule_name(rule)
        assert f"{mistake}. Source: {source}.".lower() == said.lower()


def test_our_own_scripts_and_examples_have_no_finding() -> None:
    paths = [*(ROOT / "tests" / "golden").glob("*.sbatch"), *(ROOT / "examples").glob("*.py")]
    done = run_check(*(str(path) for path in sorted(paths)))
    assert (done.returncode, done.stdout) == (0, b"")
