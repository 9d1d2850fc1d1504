"""`submit` as it is typed: what it prints, what it refuses, what it leaves behind."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from clusterddp.cli.commands.submit import command
from clusterddp.cli.main import cli
from clusterddp.errors import ClusterDDPError, coded
from clusterddp.launchers import sbatch
from clusterddp.request.options import GROUPS
from clusterddp.slurm import forms
from tests.hostile import CARRIED, REFUSED

GOLDEN = Path(__file__).parents[2] / "golden"
FIXED = ["--run-name", "demo", "--runs-dir", "/scratch/jobs"]
FIXED += ["--python", "/usr/bin/python3", "--controller-python", "/usr/bin/python3"]
EIGHT = ["--nodes", "2", "--gpus-per-node", "4"]

# One whole script for each shipped template and each group of options.
SCRIPTS: dict[str, list[str]] = {
    "ddp": EIGHT,
    "torchrun": [*EIGHT, "--cpus-per-task", "2", "--template", "torchrun.sbatch.j2"],
    "agents": [*EIGHT, "--template", "torchrun.sbatch.j2"],
    "submitit": [*EIGHT, "--launcher", "submitit"],
    "command": [*EIGHT, "--", "python", "train.py", "--lr", "0.1", "a b", "$(x)"],
    "sweep": [*EIGHT, "--sweep", "lr=0.1,0.3", "--sweep", "compile=yes,no",
              "--max-concurrent", "2"],
    "sweep-command": [
        "--sweep", "lr=0.1,it's $HOME", "--", "python", "train.py", "--lr={lr} {other}", "{lr}",
    ],
    "resources": [
        "--nodes", "3", "--gpus-per-node", "a100:4", "--tasks-per-node", "2",
        "--cpus-per-task", "8", "--mem", "64G", "--time", "1-02:30:00", "--partition", "gpu,long",
        "--account", "physics", "--qos", "high", "--constraint", "a100&nvlink",
        "--reservation", "maint", "--switches", "2@60", "--nodelist", "h[01-02]", "--exclude", "h9",
        "--dependency", "afterok:12", "--exclusive", "--mail-type", "END,FAIL",
        "--mail-user", "me@example.org", "--sbatch", "overcommit", "--sbatch", "nice=10",
        "--sbatch", 'comment=it\'s "quoted" \\ # $(x)', "--omit-directive", "mem",
        "--job-name", "my job",
    ],
    "spares": [*EIGHT, "--spare-nodes", "2"],
    "gres": [*EIGHT, "--gpu-directive", "gres"],
    "gpus-per-task": [*EIGHT, "--gpu-directive", "gpus-per-task"],
    "environment": [
        "--env", "A=it's $HOME", "--env", "EMPTY=", "--env", "HOME", "--export", "NONE",
        "--network-interface", "ib0",
    ],
    "start": [
        "--module", "cuda/12.4", "--module", "nccl", "--setup", "source /opt/env.sh",
        "--teardown", "rm -rf /tmp/stage", "--srun-args", "--label --comment='a b'",
        "--wrapper", "apptainer exec --nv 'my image.sif'",
    ],
    "interruptions": [
        "--no-requeue", "--max-requeues", "3", "--signal", "USR1@60", "--time", "10",
        "--keep-last", "5", "--allow-config-change", "--hang-timeout", "0",
    ],
    "container": [
        *EIGHT, "--container-image", "pytorch/pytorch:2.9", "--container-mount", "/scratch:/s:ro",
        "--container-workdir", "/s/it's here", "--env", "LD_LIBRARY_PATH=/opt/lib",
    ],
    "container-torchrun": [
        *EIGHT, "--container-image", "docker.io/pytorch:2", "--container-runtime", "podman",
        "--template", "torchrun", "--", "python", "train.py",
    ],
    "container-pyxis": [
        *EIGHT, "--container-image", "nvcr.io#nvidia/pytorch:25.01-py3", "--container-runtime",
        "pyxis", "--container-mount", "/scratch", "--", "python", "train.py",
    ],
    "code": [
        "--retries", "2", "--signal", "B:USR2@90", "--snapshot", "--", "python",
        "train.py",
    ],
    "training": [
        "--dataset", "synthetic", "--epochs", "5", "--batch-size", "32", "--lr", "0.1",
        "--lr-scaling", "sqrt", "--optimizer", "adamw", "--weight-decay", "0.01", "--seed", "7",
        "--backend", "gloo", "--device", "cpu", "--save-every", "500steps", "--max-steps", "10",
    ],
}  # fmt: skip


def run(*args: str, **kwargs: Any) -> Result:
    return CliRunner().invoke(cli, ["submit", *args], **kwargs)


def dry_run(*args: str) -> str:
    data = [] if "--" in args else ["--data-dir", "/scratch/data"]
    result = run("--dry-run", *FIXED, *data, *args)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*args: str) -> str:
    result = run(*args)
    assert result.exit_code != 0, result.output
    if isinstance(result.exception, ClusterDDPError):
        assert result.exception.exit_code == 2
        return str(result.exception)
    assert result.exit_code == 2, result.output
    return result.output


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to type in: no site.cfg, nothing left from another test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_whole_script_is_as_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbatch, "__version__", "VERSION")
    golden = GOLDEN / f"{name}.sbatch"
    script = dry_run(*SCRIPTS[name])
    if os.environ.get("CLUSTERDDP_TEST_UPDATE_GOLDEN"):
        golden.write_text(script)
    assert script == golden.read_text()


def test_the_script_stands_on_one_screen() -> None:
    project = "/lustre/scratch/project_465000123/users/somebody"
    long = run(
        *("--dry-run", "--nodes", "2", "--gpus-per-node", "4", "--run-name", "a-longer-name"),
        *("--runs-dir", f"{project}/experiments", "--data-dir", f"{project}/datasets/mnist"),
        *("--python", f"{project}/miniconda3/envs/training/bin/python"),
    )
    assert len(long.stdout.splitlines()) <= 45


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_dry_run_touches_nothing(name: str, elsewhere: Path) -> None:
    dry_run(*SCRIPTS[name])
    assert list(elsewhere.iterdir()) == []


def test_a_dry_run_says_on_stderr_what_the_request_wastes() -> None:
    result = run("--dry-run", *FIXED[:4], *EIGHT, "--tasks-per-node", "2")
    idle, cpus = result.stderr.splitlines()
    assert idle.startswith("clusterddp: warning: 2 of the 4 GPUs of each node stay idle")
    assert cpus.startswith("clusterddp: warning: each GPU rank gets one CPU")
    assert "--cpus-per-task 4" in cpus and "warning" not in result.stdout
    assert run("--dry-run", *FIXED[:4], *EIGHT, "--cpus-per-task", "8").stderr == ""


def test_without_a_run_name_only_the_name_differs_and_stands_on_stderr() -> None:
    first, second = run("--dry-run"), run("--dry-run")
    names = [result.stderr.removeprefix("run name: ").strip() for result in (first, second)]
    assert names[0] != names[1]
    assert first.stdout != second.stdout
    assert first.stdout.replace(names[0], "NAME") == second.stdout.replace(names[1], "NAME")


def test_a_dry_run_needs_neither_slurm_nor_torch_nor_a_writable_folder(
    elsewhere: Path, small_disk: Any
) -> None:
    code = (
        "import sys, click; with_click = set(sys.modules)\n"  # uuid, on Python 3.10
        "from clusterddp.cli.main import cli\n"
        "cli.main(['submit', '--dry-run', '--nodes', '2'], standalone_mode=False)\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'submitit', 'subprocess'} - with_click\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    argv = [sys.executable, "-c", code]
    if os.geteuid() == 0:  # whom no permission stops
        done = small_disk("ro", "env", "PATH=/nonexistent", *argv)
    else:
        elsewhere.chmod(0o500)
        done = subprocess.run(argv, cwd=elsewhere, capture_output=True, text=True, check=False)
        elsewhere.chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=run-")


@pytest.mark.parametrize("option", ["--avoid-bad-nodes-for", "--spare-nodes"])
@pytest.mark.parametrize(
    "value", [*CARRIED, *REFUSED, "nan", "inf", "-inf", "-1", "1e400", "1e308", "0x10", "1,5"]
)
def test_a_number_for_nodes_is_one_or_is_refused(option: str, value: str, elsewhere: Path) -> None:
    result = run("--dry-run", *FIXED, "--nodes", "2", f"{option}={value}")
    error = result.exception
    assert isinstance(error, ClusterDDPError | SystemExit)
    assert (error.exit_code if isinstance(error, ClusterDDPError) else error.code) == 2
    assert option in (str(error) if isinstance(error, ClusterDDPError) else result.stderr)
    assert "\x1b" not in result.stderr and result.stdout == ""
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("value", CARRIED)
def test_a_hostile_value_is_carried_or_refused_by_every_option(value: str, elsewhere: Path) -> None:
    quoted = shlex.quote(value)
    for option, given, expected in (
        ("--job-name", value, f"#SBATCH {sbatch.directive('job-name', value or 'demo')}"),
        ("--env", f"K={value}", f"export K={sbatch.shell_word(value)}"),
        ("--setup", f"echo {quoted}", f"\necho {quoted}\n"),
        ("--teardown", f"echo {quoted}", f"\ntear_down() (\n  echo {quoted}\n)\n"),
        ("--sbatch", f"comment={value}", f"#SBATCH {sbatch.directive('comment', value)}"),
        ("--srun-args", quoted, f" --open-mode=append {sbatch.shell_word(value)} --output="),
        ("--wrapper", quoted, f' -- {sbatch.shell_word(value)} /usr/bin/python3 "$own" '),
    ):
        for launcher in ("sbatch", "local"):
            result = run("--dry-run", *FIXED, "--launcher", launcher, f"{option}={given}")
            if value == "" and given == "":
                assert f"{option} is empty" in str(result.exception)
                continue
            assert result.exit_code == 0, option
            assert expected in result.stdout.replace(" \\\n  ", " "), option
    for option in (
        "--partition", "--account", "--qos", "--constraint", "--reservation", "--nodelist",
        "--exclude", "--dependency", "--mail-type", "--mail-user", "--mem", "--time", "--module",
        "--network-interface", "--gpus-per-node", "--run-name", "--omit-directive", "--template",
    ):  # fmt: skip
        result = run("--dry-run", *FIXED, f"{option}={value}")
        if result.exit_code == 0:
            lines = [line for line in result.stdout.splitlines() if line.startswith("#SBATCH")]
            plain = [line for line in dry_run().splitlines() if line.startswith("#SBATCH")]
            assert len(lines) <= len(plain) + 1, option
        else:
            assert isinstance(result.exception, (ClusterDDPError, SystemExit)), option
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("value", [v for v in REFUSED if "\0" not in v])
@pytest.mark.parametrize(
    "option",
    ["--job-name", "--env=K", "--setup", "--teardown", "--srun-args", "--python", "--module",
     "--controller-python", "--partition", "--wrapper", "--data-dir", "--runs-dir",
     "--sbatch=comment"],
)  # fmt: skip
def test_what_no_line_can_carry_is_refused_by_every_option(option: str, value: str) -> None:
    message = refusal("--dry-run", f"{option}={value}")
    assert option.split("=", maxsplit=1)[0].removeprefix("--") in message


REFUSALS: list[tuple[list[str], list[str]]] = [
    (["--nodes", "0"], ["--nodes", "0"]),
    (["--nodes", "two"], ["--nodes", "two"]),
    (["--tasks-per-node", "0"], ["--tasks-per-node", "0"]),
    (
        ["--gpus-per-node", "2", "--tasks-per-node", "4"],
        ["--tasks-per-node 4", "--gpus-per-node 2"],
    ),
    (["--sbatch", "mem=1G"], ["--mem"]),
    (["--sbatch", "ntasks=4"], ["--tasks-per-node"]),
    (["--sbatch", "gres=gpu:4"], ["--gpus-per-node"]),
    (["--sbatch", "part=gpu"], ["--partition"]),
    (["--sbatch", "error=x"], ["logs"]),
    (["--sbatch", "outpu=x"], ["logs"]),
    (["--sbatch", "arra=0-3"], ["--sweep NAME=VALUES"]),
    (["--omit-directive", "men"], ["men", "'mem'"]),
    (["--template", "_submitit.sbatch.j2"], ["_submitit.sbatch.j2"]),
    (["--save-every", "10S"], ["10S", "500steps"]),
    (["--sbatch", "array=0-3"], ["--sweep NAME=VALUES"]),
    (["--sbatch", "=x"], ["--sbatch"]),
    (["--omit-directive", "nodes"], ["nodes"]),
    (["--env", "NOT_SET_HERE"], ["NOT_SET_HERE", "not set in this shell"]),
    (["--env", "1A=x"], ["1A"]),
    (["--env", "RANK=0"], ["RANK"]),
    (["--template", "gone.j2"], ["gone.j2", "ddp.sbatch.j2"]),
    (["--template", "./gone.j2"], ["./gone.j2"]),
    (["--template-dir", "gone"], ["gone"]),
    (["--launcher", "submitit", "--template", "torchrun.sbatch.j2"], ["--launcher sbatch"]),
    (["--init-from", "gone"], ["gone"]),
    (["--site", "gone.cfg"], ["gone.cfg"]),
    (["--cluster", "big"], ["big", "site.cfg"]),
    (["--"], ["COMMAND"]),
    (["python", "train.py"], ["'--'"]),
    (["--lr", "1", "--", "python"], ["--lr", "'--'"]),
    (["--nonsense"], ["--nonsense"]),
    (["--runs-dir", "a%b"], ["%"]),
]


@pytest.mark.parametrize(("args", "words"), REFUSALS)
@pytest.mark.parametrize("mode", [["--dry-run"], []])
def test_a_wrong_request_is_refused_and_leaves_nothing(
    args: list[str], words: list[str], mode: list[str], elsewhere: Path
) -> None:
    message = refusal(*mode, *args)
    for word in words:
        assert word in message
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "checksum", "words"),
    [
        (b"torn", "0" * 64, "is not a checkpoint of clusterddp"),
        (b"PK\3\4 torn", "0" * 64, "damaged"),
        (b"torn", None, "no step-1.pt.sha256"),
        (None, None, "there is no valid checkpoint"),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_is_refused_before_it_queues(
    content: bytes | None, checksum: str | None, words: str, elsewhere: Path
) -> None:
    folder = elsewhere / "old" / "checkpoints"
    folder.mkdir(parents=True)
    if content:
        (folder / "step-1.pt").write_bytes(content)
    if checksum:
        (folder / "step-1.pt.sha256").write_text(f"{checksum}  step-1.pt\n")
    source = "old/checkpoints/step-1.pt" if content else "old"
    assert words in refusal("--init-from", source, "--dataset", "synthetic")
    assert [path.name for path in elsewhere.iterdir()] == ["old"]


def test_no_sbatch_is_said_and_leaves_nothing(elsewhere: Path) -> None:
    result = run("--", "/bin/true", env={"PATH": "/nonexistent"})
    assert isinstance(result.exception, ClusterDDPError)
    assert result.exception.exit_code == 2
    assert "no sbatch on PATH" in str(result.exception)
    assert "--launcher local" in str(result.exception)
    assert list(elsewhere.iterdir()) == []


def fake_sbatch(folder: Path, script: str) -> dict[str, str]:
    (folder / "bin").mkdir()
    (folder / "bin" / "sbatch").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "bin" / "sbatch").chmod(0o700)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def test_sbatchs_own_words_are_shown_and_nothing_is_left(tmp_path: Path, elsewhere: Path) -> None:
    env = fake_sbatch(tmp_path, "echo 'sbatch: error: Batch job submission failed: no' >&2; exit 1")
    result = run("--", "true", env=env)
    assert isinstance(result.exception, ClusterDDPError)
    assert "Batch job submission failed: no" in str(result.exception)
    assert not (elsewhere / "jobs").exists()


@pytest.mark.parametrize("name", ["MASTER_PORT", "SBATCH_WCKEY", "SRUN_DEBUG"])
def test_a_variable_that_would_not_arrive_cannot_be_passed_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert f"--env {name}=VALUE" in refusal("--dry-run", "--env", name)


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (["--log-per", "node"], ""),
        (["--sweep", "lr=1,2"], "--sweep"),
        (["--spare-nodes", "1"], "--spare-nodes"),
        (["--dependency", "afterok:7"], "--dependency"),
    ],
)
def test_in_a_shell_of_salloc_what_needs_the_queue_goes_there(
    argv: list[str], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    got = run("--dry-run", *FIXED, *argv)
    assert got.exit_code == 0, got.stderr
    assert ("--exact" in got.stdout) is (not option)
    assert (f"{option} needs Slurm's queue" in got.stderr) is bool(option)


@pytest.mark.parametrize(
    ("launcher", "node"), [("held", "CLUSTERDDP_NODES%%"), ("sbatch", "SLURMD")]
)
def test_torchruns_agents_meet_on_the_first_node_of_the_run(launcher: str, node: str) -> None:
    """In an allocation, the script may run on another node, or on the login host."""
    script = run("--dry-run", *FIXED, "--template", "torchrun", "--launcher", launcher).stdout
    [line] = [line for line in script.splitlines() if line.startswith("export MASTER_ADDR")]
    assert node in line


def test_sbatch_gets_the_dry_runs_bytes(tmp_path: Path, elsewhere: Path) -> None:
    env = fake_sbatch(tmp_path, f"cat >{tmp_path}/sent; echo 42")
    expected = run("--dry-run", "--run-name", "a", "--", "true", env=env).stdout
    result = run("--run-name", "a", "--json", "--", "true", env=env)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "sent").read_text() == expected
    assert (elsewhere / "jobs/a/script.sbatch").read_text() == expected
    assert json.loads(result.stdout)["job_id"] == "42"
    assert (elsewhere / "jobs/a").stat().st_mode & 0o777 == 0o700


def test_a_run_name_that_exists_is_refused_and_kept(tmp_path: Path, elsewhere: Path) -> None:
    env = fake_sbatch(tmp_path, "cat >/dev/null; echo 42")
    assert run("--run-name", "a", "--", "true", env=env).exit_code == 0
    before = sorted(p.name for p in (elsewhere / "jobs/a").iterdir())
    assert "already exists" in str(run("--run-name", "a", "--", "true", env=env).exception)
    assert sorted(p.name for p in (elsewhere / "jobs/a").iterdir()) == before


def test_an_runs_dir_that_cannot_be_written_is_refused(elsewhere: Path) -> None:
    (elsewhere / "file").write_text("")
    assert "--runs-dir" in refusal("--runs-dir", "file/jobs", "--", "true")
    assert "--runs-dir" in refusal("--runs-dir", "/proc/jobs", "--", "true")
    assert [p.name for p in elsewhere.iterdir()] == ["file"]


def test_the_submitters_own_sbatch_variables_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "30")
    monkeypatch.setenv("SBATCH_WCKEY", "key")
    monkeypatch.setenv("SBATCH_EXCLUSIVE", "")
    script = dry_run()
    for line in ("--account=physics", "--time=30", "--wckey=key", "--exclusive"):
        assert f"#SBATCH {line}\n" in script


GPUS = [*EIGHT, "--gpu-directive", "gres"]


@pytest.mark.parametrize(
    ("variables", "args", "there", "absent"),
    [
        ({"SBATCH_GRES": "gpu:2"}, [], ["--gres=gpu:2", "--ntasks=2"], []),
        ({"SBATCH_GRES": "gpu:a100:2"}, [], ["--gres=gpu:a100:2"], []),
        ({"SBATCH_GRES": "gpu:1"}, GPUS, ["--gres=gpu:4"], ["--gres=gpu:1"]),
        ({"SBATCH_GRES": "nvme:1"}, EIGHT, ["--gres=nvme:1", "--gpus-per-node=4"], []),
        ({"SBATCH_MEM_PER_CPU": "1G"}, ["--mem", "2G"], ["--mem=2G"], ["--mem-per-cpu=1G"]),
        ({"SBATCH_MEM_PER_CPU": "1G"}, [], ["--mem-per-cpu=1G"], []),
        ({"SBATCH_NO_KILL": "1", "SBATCH_OVERCOMMIT": "1"}, [], ["--no-kill", "--overcommit"], []),
        ({"SBATCH_REQ_SWITCH": "2"}, [], ["--switches=2"], []),
        ({"SBATCH_REQ_SWITCH": "2"}, ["--switches", "1@2:00"], ["--switches=1@2:00"],
         ["--switches=2"]),
        ({"SBATCH_REQUEUE": "expedite"}, [], ["--requeue=expedite"], []),
        ({"SBATCH_REQUEUE": "1"}, [], ["--requeue"], []),
        ({"SBATCH_REQUEUE": "expedite"}, ["--no-requeue"], ["--no-requeue"],
         ["--requeue=expedite"]),
        ({"CLUSTERDDP_REQUEUE": "expedite"}, [], ["--requeue=expedite"], []),
        ({"CLUSTERDDP_REQUEUE": "false"}, [], ["--no-requeue"], []),
        ({}, ["--requeue=expedite"], ["--requeue=expedite"], []),
        ({}, ["--requeue"], ["--requeue"], []),
        ({}, ["--requeue", "--", "true"], ["--requeue"], []),
        ({}, ["--requeue", "--no-requeue"], ["--no-requeue"], ["--requeue"]),
        ({"SBATCH_HINT": "a"}, ["--sbatch", "hint=b"], ["--hint=b"], ["--hint=a"]),
    ],
)  # fmt: skip
def test_sbatch_variables_stand_below_what_is_asked_for(
    variables: dict[str, str], args: list[str], there: list[str], absent: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script = dry_run(*args)
    for line in there:
        assert f"#SBATCH {line}\n" in script
    for line in absent:
        assert f"#SBATCH {line}\n" not in script


def test_no_requeue_takes_no_value() -> None:
    result = run("--dry-run", "--no-requeue=yes")
    assert (result.exit_code, "does not take a value" in result.stderr) == (2, True)


def test_an_sbatch_variable_that_has_no_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-3")
    assert "SBATCH_ARRAY_INX" in run("--dry-run").stderr


def test_settings_stand_in_their_order(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def partition(*args: str) -> str:
        line = next(x for x in dry_run(*args).splitlines() if "--partition" in x)
        return line.partition("=")[2]

    (elsewhere / "site.cfg").write_text("[defaults]\npartition = from-site\n")
    assert partition() == "from-site"
    monkeypatch.setenv("SBATCH_PARTITION", "from-sbatch")
    assert partition() == "from-sbatch"
    monkeypatch.setenv("CLUSTERDDP_PARTITION", "from-variable")
    assert partition() == "from-variable"
    assert partition("--partition", "from-flag") == "from-flag"


def test_lists_come_from_variables_and_site_one_item_a_line(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "site.cfg").write_text(
        "[defaults]\nsetup =\n    echo 'a b'\n    echo c\n[environment]\nA = 1\nB = 2\n"
    )
    script = dry_run("--env", "B=3")
    assert "echo 'a b'\necho c\n" in script
    assert "export A=1\nexport B=3\n" in script
    monkeypatch.setenv("CLUSTERDDP_SETUP", "echo d e\necho f")
    assert "echo d e\necho f\n" in dry_run()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[defaults]\npartitoin = x\n", ["partitoin", "partition"]),
        ("[defaults]\nnodes = many\n", ["many", "site.cfg [defaults]"]),
        ("[defaults]\ndry-run = yes\n", ["dry-run"]),
    ],
)
def test_a_mistake_in_site_cfg_is_named(elsewhere: Path, content: str, words: list[str]) -> None:
    (elsewhere / "site.cfg").write_text(content)
    message = refusal("--dry-run")
    for word in words:
        assert word in message


def test_a_sites_staging_applies_where_it_can_and_a_typed_one_is_refused(elsewhere: Path) -> None:
    (elsewhere / "site.cfg").write_text("[defaults]\nstage-env = auto\n")
    own = ("--python", "/shared/env/bin/python")
    assert "CLUSTERDDP_STAGED" in dry_run(*own)
    for other in (("--python", "/usr/bin/python3"), (*own, "--wrapper", "env")):
        assert "CLUSTERDDP_STAGED" not in dry_run(*other)
        assert "--stage-env" in refusal("--dry-run", *other, "--stage-env", "auto")
    (elsewhere / "site.cfg").write_text("[defaults]\nstage-env = tmp\n")
    assert "stage-env" in refusal("--dry-run", *own)


def test_a_run_from_a_staged_task_has_the_original_python() -> None:
    prefix = sys.executable.rsplit("/", 2)[0]
    staged = {"CLUSTERDDP_STAGED": prefix, "CLUSTERDDP_STAGED_FROM": "/shared/env"}
    script = subprocess.run(
        [sys.executable, "-m", "clusterddp", "submit", "--dry-run", "--", "true"],
        env={**os.environ, **staged}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert f"/shared/env/bin/{Path(sys.executable).name}" in script and sys.executable not in script


def test_help_shows_what_everybody_needs_and_help_all_groups_all_options() -> None:
    short, text = run("--help").output, run("--help-all").output
    shown = re.findall(r"^  (?:-\w, )?--(\S+)", short.partition("Precedence")[0], re.MULTILINE)
    assert shown[:2] == ["nodes", "gpus-per-node"] and len(shown) <= 12
    assert "help-all" in shown and "help" in shown
    assert re.findall(r"^(\S.*):$", text, re.MULTILINE) == [*GROUPS]
    assert "[default: ddp.sbatch.j2]" in text
    for option in (each for each in command.params if isinstance(each, click.Option)):
        assert option.hidden or option.opts[0].lstrip("-") in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_shipped_site_cfg_is_valid_with_every_line_uncommented(elsewhere: Path) -> None:
    shipped = (GOLDEN.parent.parent / "site.cfg").read_text()
    (elsewhere / "site.cfg").write_text(shipped)
    assert dry_run() == dry_run("--site", "/dev/null")
    uncommented = re.sub(r"^# (?=[\w-]+ =|\[|    )", "", shipped, flags=re.MULTILINE)
    (elsewhere / "site.cfg").write_text(uncommented)
    assert "#SBATCH --qos=long" in dry_run("--cluster", "big")


def test_json_stands_alone_on_stdout(tmp_path: Path, elsewhere: Path) -> None:
    shown = json.loads(run("--dry-run", "--json", "--run-name", "a", "--", "true").stdout)
    assert shown["script"] == run("--dry-run", "--run-name", "a", "--", "true").stdout
    done = subprocess.run(
        [sys.executable, "-m", "clusterddp", "submit", "--launcher", "local", "--json", "--",
         "sh", "-c", "echo from the task; exit 3"],
        cwd=elsewhere, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert json.loads(done.stdout)["exit_code"] == done.returncode == 1
    assert "from the task" in done.stderr


def test_a_value_that_nobody_typed_is_blamed_on_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERDDP_NODES", "-1")
    assert "(from CLUSTERDDP_NODES)" in refusal("--dry-run")
    monkeypatch.delenv("CLUSTERDDP_NODES")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "4h")
    assert "(from SBATCH_TIMELIMIT)" in refusal("--dry-run")


def test_a_time_limit_of_zero_is_none(elsewhere: Path) -> None:
    assert "#SBATCH --time=0\n" in run("--dry-run", "--time", "0", "--", "true").stdout
    assert run("--dry-run", "--time", "0", "--dataset", "synthetic").exit_code == 0


def test_a_template_is_found_by_its_short_name_or_as_a_file_here(elsewhere: Path) -> None:
    full = dry_run("--template", "torchrun.sbatch.j2")
    assert dry_run("--template", "torchrun") == full
    (elsewhere / "mine.j2").write_text("#!/bin/bash\necho mine\n")
    assert dry_run("--template", "mine.j2") == "#!/bin/bash\necho mine\n"
    copied = CliRunner().invoke(cli, ["templates", "copy", "torchrun"])
    assert "use it with: --template ./torchrun.sbatch.j2" in copied.output
    Path("torchrun.sbatch.j2").write_text("#!/bin/bash\necho edited\n")
    refused = refusal("--dry-run", "--template", "torchrun.sbatch.j2")
    assert "./torchrun.sbatch.j2 for the file or torchrun for the shipped" in refused
    assert dry_run("--template", "./torchrun.sbatch.j2") == "#!/bin/bash\necho edited\n"
    assert dry_run("--template", "torchrun") == full
    Path("ddp.sbatch.j2").write_text("#!/bin/bash\necho edited\n")
    assert "edited" not in dry_run()  # nothing was named
    (elsewhere / "tt").mkdir()
    for name in ("torchrun.sbatch.j2", "exact", "short.j2"):
        (elsewhere / "tt" / name).write_text(f"#!/bin/bash\necho {name}\n")
    for given in ("torchrun.sbatch.j2", "torchrun", "exact", "short", "short.j2"):
        assert f"echo {given}" in dry_run("--template", given, "--template-dir", "tt")
    assert "'shor' not found" in refusal("--dry-run", "--template=shor", "--template-dir=tt")


def sbatch_that_forecasts(folder: Path, monkeypatch: pytest.MonkeyPatch, forecast: str) -> Path:
    """A sbatch on PATH whose --test-only says so; gives the file that notes each call."""
    calls = folder / "calls"
    program = folder / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{calls}\n'
        f'if [ "$1" = --test-only ]; then {forecast}; fi\n/bin/cat >/dev/null\necho 7\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return calls


@pytest.mark.parametrize(
    ("forecast", "code", "words"),
    [
        ("echo 'sbatch: Job 9 to start at 2026-01-02T03:04:05 on nodes h1' >&2; exit 0", 0,
         "demo is valid, and was not submitted. Slurm says: to start at 2026-01-02T03:04:05 on "
         "nodes h1\n"),
        ("echo 'allocation failure: Requested node configuration is not available' >&2; exit 1", 2,
         "Slurm refuses the job: Requested node configuration is not available. If nodes"),
        ("echo 'allocation failure: Invalid partition name specified' >&2; exit 1", 2,
         "Slurm refuses the job: Invalid partition name specified. Change the option"),
        ("echo 'sbatch: error: Unable to contact slurm controller' >&2; exit 1", 1,
         "Unable to contact slurm controller"),
    ],
    ids=["would start", "no node", "refused", "no answer"],
)  # fmt: skip
def test_a_test_asks_slurm_and_leaves_nothing(
    forecast: str, code: int, words: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = sbatch_that_forecasts(elsewhere, monkeypatch, forecast)
    result = run("--test-only", "--run-name", "demo", "--", "true")
    if code:
        assert isinstance(result.exception, ClusterDDPError)
        assert result.exception.exit_code == code
        assert words in str(result.exception)
        assert result.stdout == ""
    else:
        assert (result.exit_code, result.stdout) == (0, words)
    assert calls.read_text() == "--test-only\n"
    assert {path.name for path in elsewhere.iterdir()} == {"bin", "calls"}


def test_a_test_as_json_and_of_a_training(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch_that_forecasts(elsewhere, monkeypatch, "echo 'Job 9 to start at noon' >&2; exit 0")
    for argv in (["--", "true"], ["--sweep", "lr=1,2", "--", "true", "{lr}"], []):
        result = run("--test-only", "--json", "--run-name", "demo", *argv)
        assert json.loads(result.stdout) == {
            "run": "demo", "run_dir": f"{elsewhere}/jobs/demo", "forecast": "to start at noon",
            "start_in_seconds": None,
        }  # fmt: skip
        assert {path.name for path in elsewhere.iterdir()} == {"bin", "calls"}  # no data either


@pytest.mark.parametrize(
    ("setting", "warned"), [("1-9,75", True), ("(null)", False)], ids=["set", "not set"]
)
def test_a_test_warns_of_codes_for_which_slurm_requeues(
    setting: str, warned: bool, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch_that_forecasts(elsewhere, monkeypatch, "echo found >&2; exit 0")
    scontrol = elsewhere / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho 'RequeueExit             = {setting}'\n")
    scontrol.chmod(0o755)
    result = run("--test-only", "--run-name", "demo", "--", "true")
    assert result.exit_code == 0, result.output
    assert (f"warning: slurm.conf has RequeueExit={setting}" in result.stderr) == warned


def test_without_a_test_and_in_a_dry_run_slurm_is_not_asked(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = sbatch_that_forecasts(elsewhere, monkeypatch, "exit 1")
    dry = refusal("--check-python", "--dry-run", "--", "true")
    assert "--dry-run conflicts with --check-python, because it starts no interpreter." in dry
    for other in ("--dry-run", "--wait"):
        message = refusal("--test-only", other, "--", "true")
        assert f"--test-only conflicts with {other}. Remove one of them." in message
    monkeypatch.setenv("CLUSTERDDP_CHECK_PYTHON", "yes")  # for submissions
    assert run("--dry-run", "--", "true").exit_code == 0
    monkeypatch.delenv("CLUSTERDDP_CHECK_PYTHON")
    assert not calls.exists()
    assert run("--run-name", "demo", "--no-snapshot", "--", "true").exit_code == 0
    assert calls.read_text() == "--parsable\n"


def test_a_rehearsal_is_not_tested_by_slurm(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = sbatch_that_forecasts(elsewhere, monkeypatch, "exit 1")
    message = refusal("--test-only", "--launcher", "local", "--", "true")
    assert "--test-only conflicts with --launcher local" in message
    assert not calls.exists()


def test_a_launcher_as_the_command_is_refused_unless_it_is_allowed(elsewhere: Path) -> None:
    for mode in (["--dry-run"], []):
        message = refusal(*mode, *EIGHT, "--", "torchrun", "--nproc-per-node=4", "train.py")
        assert "COMMAND starts torchrun" in message
        assert "Use: clusterddp submit --template torchrun -- python train.py (with" in message
        assert not list(elsewhere.iterdir())
    script = dry_run("--allow-launcher", "--", "torchrun", "train.py")
    assert script.endswith(' "$own" exec --run-dir="$run_dir" -- torchrun train.py\n')


def test_a_launcher_in_a_script_is_a_warning(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch_that_forecasts(elsewhere, monkeypatch, "exit 1")
    (elsewhere / "run.sh").write_text("cd /data\ntorchrun train.py\n")
    expected = "warning: run.sh, line 2, may start torchrun in every task"
    for mode in (["--dry-run"], ["--no-snapshot"]):
        result = run(*mode, "--run-name", "a", "--", "bash", "run.sh")
        assert result.exit_code == 0, result.output
        assert result.stderr.count(expected) == 1
    assert "may start" not in run("--dry-run", "--allow-launcher", "--", "bash", "run.sh").stderr


@pytest.mark.parametrize(
    ("argv", "words", "code"),
    [
        (["--", "python", "tain.py"], "COMMAND: there is no tain.py in", "CD0306"),
        (["--sweep", "a=1,2", "--", "./tain.sh", "{a}"], "there is no ./tain.sh in", "CD0306"),
        (["--python", "venv/bin/python"], "venv/bin/python'. Name an", "CD0310"),
        (["--data-dir", "dat"], "/dat does not exist", "CD0601"),
    ],
)
def test_a_dry_run_warns_of_what_a_submission_refuses_for_a_file_that_is_not_there(
    elsewhere: Path, argv: list[str], words: str, code: str
) -> None:
    got = run("--dry-run", "--run-name", "a", *argv)
    assert got.exit_code == 0, got.output
    said = "clusterddp: warning: a submission would be refused: "
    [line] = [line for line in got.stderr.splitlines() if line.startswith(said)]
    assert words in line and line.endswith(f" [{code}]")
    assert coded(run("--run-name", "a", *argv).exception) == line.removeprefix(said)
    assert got.stdout.startswith("#!/bin/bash\n") and not list(elsewhere.iterdir())


def test_a_dry_run_refuses_a_function_that_is_not_there_as_the_submission_does(
    elsewhere: Path,
) -> None:
    (elsewhere / "nets.py").write_text("def build(): ...\n")
    for option, value, words in (
        ("--model", "nets:bild", "nets.py defines no bild"),
        ("--model", "nests:build", "there is no module nests"),
        ("--dataset", "nets:digits", "nets.py defines no digits"),
    ):
        for mode in (["--dry-run"], []):
            message = refusal(*mode, "--model=nets:build", f"{option}={value}")
            assert f"{option} {value}" in message
            assert words in message
        assert words in refusal("--dry-run", "--launcher=local", f"{option}={value}")
    result = run("--dry-run", *FIXED, "--model=nets:build", "--dataset=nets:build")
    assert result.exit_code == 0, result.output
    assert f"model: nets:build of {elsewhere}/nets.py" in result.stderr
    assert [path.name for path in elsewhere.iterdir()] == ["nets.py"]
    elsewhere_python = run("--dry-run", "--python=/opt/python", "--model=nests:build")
    assert elsewhere_python.exit_code == 0, elsewhere_python.output
    assert "Check that it exists on the nodes" in elsewhere_python.stderr


def test_large_files_beside_a_command_are_linked_and_named(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch_that_forecasts(elsewhere, monkeypatch, "exit 1")
    (elsewhere / "train.py").write_text("")
    (elsewhere / "weights.bin").write_bytes(b"x" * 2_000_000)
    result = run("--snapshot-limit", "1", "--run-name", "demo", "--", "true")
    assert result.exit_code == 0, result.output
    assert "linked, not copied with your code, because of their size: weights.bin" in result.stderr
    code = elsewhere / "jobs/demo/code"
    assert (code / "train.py").is_file() and not (code / "train.py").is_symlink()
    assert (code / "weights.bin").readlink() == elsewhere / "weights.bin"


def test_the_place_of_the_code_and_its_files_are_named(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch_that_forecasts(elsewhere, monkeypatch, "exit 1")
    (elsewhere / "train.py").write_text("")
    (elsewhere / "nets.py").write_text("")
    files = sum(path.is_file() for path in elsewhere.rglob("*"))
    code = elsewhere / "jobs/a/code"
    copied = run("--run-name", "a", "--", "true")
    assert (
        f"\n  workdir    {code}: a copy of {files} files of {elsewhere}; relative output"
        in copied.stdout
    )
    told = json.loads(run("--run-name", "b", "--json", "--", "true").stdout)
    place = {"code": str(elsewhere / "jobs/b/code"), "is_copy": True}
    assert {name: told[name] for name in place} == place
    itself = run("--run-name", "c", "--no-snapshot", "--", "true")
    assert (
        f"\n  workdir    {elsewhere} itself, " in itself.stdout
        and ": not copied\n" in itself.stdout
    )
    assert "\n  code " not in run("--run-name", "d", "--dataset=synthetic", "--data-dir=.").stdout


def test_sbatchs_usual_forms_are_taken() -> None:
    theirs = shlex.split(
        "-N2 -p gpu -A ab -t 30 -J 'x y' -c 4 -q high -C a100 -w h[1-2] -x h9 -d afterok:1 "
        "--ntasks-per-node=3"
    )
    ours = shlex.split(
        "--nodes=2 --partition=gpu --account=ab --time=30 --job-name='x y' --cpus-per-task=4 "
        "--qos=high --constraint=a100 --nodelist=h[1-2] --exclude=h9 --dependency=afterok:1 "
        "--tasks-per-node=3"
    )
    assert dry_run(*theirs) == dry_run(*ours) != dry_run()


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        (["--gpus", "8"], "--gpus is an option of sbatch. Use --gpus-per-node [TYPE:]N"),
        (["--gpus=8"], "--gpus-per-node"),
        (["-G8"], "-G is an option of sbatch. Use --gpus-per-node"),
        (["-n", "4"], "--nodes N --tasks-per-node N"),
        (["--ntasks=4"], "--nodes N --tasks-per-node N"),
        (["--gres=gpu:4"], "--gpu-directive gres"),
        (["--array", "1-4"], "submit --dry-run … | sbatch --array=LIST"),
        (["--wrap", "hostname"], "the COMMAND after '--'"),
        (["job.sh", "3"], "job.sh is an sbatch file. 'clusterddp import job.sh' converts it into"),
    ],
)
def test_sbatchs_other_forms_are_answered_with_ours(typed: list[str], ours: str) -> None:
    Path("job.sh").write_text("#!/bin/bash\n# mine\n#SBATCH -N 2\nsrun x\n")
    assert ours in refusal(*typed)


def test_a_misspelt_variable_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*forms.TASK_VARIABLES, forms.BATCH_VARIABLE, "CLUSTERDDP_SITES", "CLUSTERDDP_X"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("CLUSTERDDP_NODEZ", "3")
    line = "warning: CLUSTERDDP_NODEZ is ignored. Did you mean CLUSTERDDP_NODES? [CD0206]"
    assert run("--dry-run", "--", "true").stderr.partition("\nrun name")[0] == f"clusterddp: {line}"


def test_utf_8_is_taken_in_a_locale_that_has_none(elsewhere: Path) -> None:
    argv = [sys.executable, "-m", "clusterddp", "submit", "--dry-run", "--env", "X=café"]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [*argv, "--", "/bin/true"], env={**os.environ, **locale}, capture_output=True, check=True
    )
    assert "export X='café'\n" in done.stdout.decode()
