"""`clusterddp exec`: really becomes the command, so each test looks at another process."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from clusterddp.dist_env import DistEnv
from tests.cli.test_env import STEP

ROOT = Path(__file__).parents[2]
PRINT_ENVIRON = "import json, os; print(json.dumps(dict(os.environ)))"


def run_exec(
    *arguments: str, environ: Mapping[str, str] = STEP
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterddp", "exec", *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        check=False,
        text=True,
    )


def test_the_command_sees_the_derived_variables_and_the_ones_it_had() -> None:
    done = run_exec("--", sys.executable, "-c", PRINT_ENVIRON, environ={**STEP, "KEPT": "a\nb"})
    seen = json.loads(done.stdout)
    derived = DistEnv.from_environ(STEP).to_environ()
    assert {name: seen.get(name) for name in derived} == derived
    assert (seen["KEPT"], seen["SLURM_PROCID"]) == ("a\nb", "5")


def test_the_command_takes_the_place_of_the_process() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "clusterddp", "exec", "--", "sh", "-c", "echo $$"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **STEP},
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = child.communicate()
    assert int(out) == child.pid


@pytest.mark.parametrize("dashes", [("--",), ()])
def test_arguments_reach_the_command_untouched(dashes: tuple[str, ...]) -> None:
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    arguments = ["--help", "--run-dir", "", "a b", "it's", "$HOME", "x\ny", "--", "-c"]
    done = run_exec(*dashes, sys.executable, "-c", program, *arguments)
    assert json.loads(done.stdout) == arguments


def test_the_exit_code_is_the_commands() -> None:
    assert run_exec("--", "sh", "-c", "exit 37").returncode == 37


def test_the_command_dies_of_a_closed_pipe_as_under_a_shell() -> None:
    done = run_exec("--", "sh", "-c", "grep SigIgn /proc/self/status")
    assert int(done.stdout.split()[1], 16) == 0


@pytest.mark.parametrize("name", ["no-such-program", "./no-such-program", ""])
def test_a_command_that_is_not_there_exits_127(name: str) -> None:
    done = run_exec("--", name)
    assert done.returncode == 127
    assert done.stderr.startswith("clusterddp: ")
    assert name in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_interpreter_is_named_as_the_cause_and_exits_127(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)
    done = run_exec("--", str(script))
    assert done.returncode == 127
    assert "interpreter" in done.stderr


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_a_command_that_cannot_be_run_exits_126(tmp_path: Path, mode: int) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('no #! line')\n")
    script.chmod(mode)
    done = run_exec("--", str(script))
    assert done.returncode == 126
    assert "python SCRIPT" in done.stderr


def test_a_folder_exits_126(tmp_path: Path) -> None:
    assert run_exec("--", str(tmp_path)).returncode == 126


@pytest.mark.parametrize("arguments", [(), ("--",), ("--no-such-option",)])
def test_a_missing_command_is_a_wrong_request(arguments: tuple[str, ...]) -> None:
    done = run_exec(*arguments)
    assert done.returncode == 2
    assert "Usage:" in done.stderr


def test_a_contradiction_exits_1_and_nothing_runs() -> None:
    done = run_exec("--", "echo", "ran", environ={**STEP, "SLURM_PROCID": "8"})
    assert (done.returncode, done.stdout) == (1, "")


def test_without_slurm_the_command_is_rank_0_of_1() -> None:
    done = run_exec("--", "sh", "-c", "echo $RANK $WORLD_SIZE $MASTER_PORT", environ={})
    assert done.stdout.split() == ["0", "1", "0"]


STAND_IN = """
import json
def supervise(run_dir, env, child):
    print(json.dumps([str(run_dir), env.rank]), flush=True)
    return child()
"""


@pytest.fixture
def supervised(tmp_path: Path) -> dict[str, str]:
    """The environment in which a stand-in for clusterddp.supervise runs the child in place."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        f"module = types.ModuleType('clusterddp.supervise')\nexec({STAND_IN!r}, module.__dict__)\n"
        "sys.modules['clusterddp.supervise'] = module\n"
    )
    return {**STEP, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def test_under_a_run_directory_the_supervisor_gets_place_and_child(
    supervised: dict[str, str],
) -> None:
    done = run_exec("--run-dir", "/some/run", "--", "sh", "-c", "exit 7", environ=supervised)
    assert json.loads(done.stdout) == ["/some/run", 5]
    assert done.returncode == 7


def test_a_supervised_command_that_is_not_there_gives_127_to_the_supervisor(
    supervised: dict[str, str],
) -> None:
    done = run_exec("--run-dir", "/some/run", "--", "no-such-program", environ=supervised)
    assert done.returncode == 127
    assert "no-such-program" in done.stderr


def test_the_run_directory_is_no_concern_of_people() -> None:
    assert "--run-dir" not in run_exec("--help").stdout
