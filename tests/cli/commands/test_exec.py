"""`clusterddp exec`: really becomes the command, so each test looks at another process."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterddp import version
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.run.attempt import begin
from clusterddp.run.run_dir import RunDir
from clusterddp.version import arming_folder
from tests.cli.commands.test_env import STEP
from tests.run.test_history import make_run

ROOT = Path(__file__).parents[3]
PRINT_ENVIRON = "import json, os; print(json.dumps(dict(os.environ)))"


def run_exec(
    *arguments: str, environ: Mapping[str, str] = STEP
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterddp", "exec", *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environ}, capture_output=True,
        check=False, text=True,
    )  # fmt: skip


def test_the_command_sees_the_derived_variables_and_the_ones_it_had() -> None:
    done = run_exec("--", sys.executable, "-c", PRINT_ENVIRON, environ={**STEP, "KEPT": "a\nb"})
    seen = json.loads(done.stdout)
    derived = DistEnv.from_environ(STEP).to_environ()
    assert {name: seen.get(name) for name in derived} == derived
    assert (seen["KEPT"], seen["SLURM_PROCID"]) == ("a\nb", "5")


@pytest.mark.parametrize(
    ("shown", "own"),
    [
        ("MIG-a,MIG-b,MIG-c,MIG-d", "MIG-b"),
        ("MIG-a", "MIG-a"),
        ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-a,GPU-b,GPU-c,GPU-d"),
    ],
)
def test_the_command_is_shown_its_own_mig_device(shown: str, own: str) -> None:
    environ = {**STEP, "CUDA_VISIBLE_DEVICES": shown}
    seen = json.loads(run_exec("--", sys.executable, "-c", PRINT_ENVIRON, environ=environ).stdout)
    assert (seen["LOCAL_RANK"], seen["CUDA_VISIBLE_DEVICES"]) == ("1", own)


def test_a_command_that_is_alone_on_its_host_keeps_all_mig_devices() -> None:
    """It may start ranks itself."""
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    done = run_exec("--", sys.executable, "-c", PRINT_ENVIRON, environ=environ)
    assert json.loads(done.stdout)["CUDA_VISIBLE_DEVICES"] == "MIG-a,MIG-b"


def test_gloo_is_given_an_interface_of_this_host(tmp_path: Path) -> None:
    show = 'echo "$NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"'
    environ = {**STEP, "NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "=none,lo"}
    assert run_exec("--", "sh", "-c", show, environ=environ).stdout == "=lo lo\n"
    environ["GLOO_SOCKET_IFNAME"] = "none"
    done = run_exec("--", "sh", "-c", show, environ=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "=lo none\n", "")
    done = run_exec("--", "sh", "-c", show, environ={**environ, "SLURM_LOCALID": "0"})
    assert "warning: GLOO_SOCKET_IFNAME=none: expected" in done.stderr
    assert done.returncode == 0 and "[CD0911]" in done.stderr
    run = make_run(tmp_path / "run", command=("sh",), network_interface="none")
    done = run_exec("--run-dir", str(run.path), "--", "sh", "-c", show, environ=environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert "which has lo" in done.stderr and "[CD0911]" in done.stderr


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
    ignored = int(run_exec("--", "sh", "-c", "grep SigIgn /proc/self/status").stdout.split()[1], 16)
    # Python ignores both; a test run may itself be started with others ignored, as by nohup.
    assert not [sign for sign in (signal.SIGPIPE, signal.SIGXFSZ) if ignored & 1 << sign - 1]


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
    assert done.stderr.startswith("clusterddp: ") and "clusterddp exec --help" in done.stderr


def test_a_contradiction_exits_1_and_nothing_runs() -> None:
    done = run_exec("--", "echo", "ran", environ={**STEP, "SLURM_PROCID": "8"})
    assert (done.returncode, done.stdout) == (1, "")


def test_without_slurm_the_command_is_rank_0_of_1() -> None:
    done = run_exec("--", "sh", "-c", "echo $RANK $WORLD_SIZE $MASTER_PORT", environ={})
    assert done.stdout.split() == ["0", "1", "0"]


def test_in_an_attempt_nccls_flight_recorder_is_dumped_there(tmp_path: Path) -> None:
    begin(RunDir(tmp_path))
    show = 'echo "$TORCH_FR_DUMP_TEMP_FILE $TORCH_NCCL_DUMP_ON_TIMEOUT"'
    done = run_exec("--run-dir", str(tmp_path), "--attempt", "1", "--", "sh", "-c", show)
    assert done.stdout == f"{tmp_path}/attempts/0001/nccl-trace- 1\n"


def test_under_a_run_directory_the_outcome_is_recorded(tmp_path: Path) -> None:
    done = run_exec("--run-dir", str(tmp_path), "--", "sh", "-c", "echo out; exit 7")
    assert (done.returncode, done.stdout) == (7, "out\n")
    outcome = json.loads((tmp_path / "outcomes/rank-5.json").read_text())
    assert (outcome["rank"], outcome["exit_code"]) == (5, 7)


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({"SLURM_CPUS_PER_TASK": "6"}, "6"),
        ({"SLURM_CPUS_PER_TASK": "6", "OMP_NUM_THREADS": "2"}, "2"),
        (
            {
                "SLURM_CPUS_PER_TASK": "7",
                "TORCHELASTIC_RUN_ID": "1",
                "RANK": "1",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "2000",
            },
            "3",
        ),
        ({}, None),
    ],
)
def test_the_command_has_as_many_threads_as_its_task_has_cpus(
    environ: dict[str, str], threads: str | None
) -> None:
    done = run_exec("--", sys.executable, "-c", PRINT_ENVIRON, environ={**STEP, **environ})
    assert json.loads(done.stdout).get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize("is_run", [False, True])
def test_the_command_may_open_as_many_files_as_the_hard_limit_allows(
    is_run: bool, tmp_path: Path
) -> None:
    """Rank 0's store has two connections per rank; the usual soft limit is 1,024."""
    done = subprocess.run(
        ["sh", "-c", 'ulimit -Sn 256; ulimit -Hn 3000; exec "$@"', "sh",
         sys.executable, "-m", "clusterddp", "exec",
         *(["--run-dir", str(tmp_path)] if is_run else []), "--", "sh", "-c", "ulimit -Sn"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **STEP}, capture_output=True,
        check=False, text=True,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("3000\n", 0), done.stderr


# Starts a rank of a world of its own, which waits until that is recorded.
STARTS_A_RANK = """
import os, pathlib, subprocess, sys, time
record = pathlib.Path(sys.argv[1])
if len(sys.argv) == 2:
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    argv = [sys.executable, __file__, *sys.argv[1:], "rank"]
    sys.exit(subprocess.run(argv, env=environ).returncode)
deadline = time.monotonic() + 90
while not record.exists() or "nested_world" not in record.read_text():
    assert time.monotonic() < deadline
    time.sleep(0.05)
"""


def test_a_world_that_the_commands_children_form_is_recorded(tmp_path: Path) -> None:
    record = tmp_path / "outcomes/rank-5.json"
    program = tmp_path / "torchrun"  # by whose name it is known
    program.write_text(STARTS_A_RANK)
    done = run_exec("--run-dir", str(tmp_path), "--", sys.executable, str(program), str(record))
    assert done.returncode == 0, done.stderr
    outcome = json.loads(record.read_text())
    assert outcome["nested_world"] == {"size": 1, "launcher": "torchrun"}
    assert outcome["exit_code"] == 0


# Loads what looks like torch, and waits until the parent of rank 0 has seen it.
LOADS_TORCH = """
import mmap, pathlib, sys, time
library, record = map(pathlib.Path, sys.argv[1:])
library.write_bytes(b"x")
with library.open("rb") as file:
    loaded = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
deadline = time.monotonic() + 90
while not record.exists() or '"listened": false' not in record.read_text():
    assert time.monotonic() < deadline
    time.sleep(0.05)
"""


def test_a_rank_0_that_nobody_could_meet_is_recorded(tmp_path: Path) -> None:
    record = tmp_path / "outcomes/rank-0.json"
    argv = (sys.executable, "-c", LOADS_TORCH, str(tmp_path / "libtorch.so"), str(record))
    environ = {**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    done = run_exec("--run-dir", str(tmp_path), "--", *argv, environ=environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(record.read_text())["listened"] is False


def test_a_recorded_command_that_is_not_there_gives_127(tmp_path: Path) -> None:
    done = run_exec("--run-dir", str(tmp_path), "--", "no-such-program")
    assert done.returncode == 127
    assert "PATH=/usr/bin:/bin\n" in done.stderr
    outcome = json.loads((tmp_path / "outcomes/rank-5.json").read_text())
    assert outcome["error"]["message"] == (
        "'no-such-program' is not on PATH. Give a program's name or path, with arguments "
        "as separate words."
    )


def test_with_a_log_of_its_own_nothing_is_left_to_the_agents(tmp_path: Path) -> None:
    done = run_exec("--run-dir", str(tmp_path), "--own-log", "--", "sh", "-c", "echo o; echo e >&2")
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "logs/rank-5.log").read_text() == "o\ne\n"


PRINT_HANDLER = (
    "import json, os, signal, sys\n"
    "held = [os.readlink(f'/proc/self/fd/{n}') for n in range(3, 9) if os.path.exists("
    "f'/proc/self/fd/{n}') or os.path.islink(f'/proc/self/fd/{n}')]\n"
    "print(json.dumps([os.environ['PYTHONPATH'], [h for h in held if 'clusterddp-stacks' in h]]))"
)


@pytest.mark.parametrize("own", ["", "/mine:/yours"])
def test_a_runs_python_is_armed_unless_that_was_refused(own: str, tmp_path: Path) -> None:
    environ = {**STEP, "PYTHONPATH": f"{ROOT}{':' if own else ''}{own}"}

    def shown(*options: str) -> list[Any]:
        done = run_exec(*options, "--", sys.executable, "-c", PRINT_HANDLER, environ=environ)
        value: list[Any] = json.loads(done.stdout)
        return value

    in_run = f"--run-dir={tmp_path}"
    path, held = shown(in_run)
    assert path == f"{arming_folder()}:{environ['PYTHONPATH']}"
    assert held == ["/memfd:clusterddp-stacks (deleted)"]
    assert shown(in_run, "--no-stacks") == [environ["PYTHONPATH"], []]
    assert shown() == [environ["PYTHONPATH"], []]  # a person's own srun line


def test_a_folder_that_parts_the_path_is_not_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "arming_folder", lambda: "/runs:old/armed")
    assert version.armed_path("/mine") == "/mine"


def test_the_run_directory_is_no_concern_of_people() -> None:
    assert "--run-dir" not in run_exec("--help").stdout


def test_a_shell_of_salloc_is_told_that_it_is_a_world_of_one() -> None:
    salloc = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "h[1-2]"}
    done = run_exec("--", "sh", "-c", "echo $RANK of $WORLD_SIZE", environ=salloc)
    assert (done.returncode, done.stdout) == (0, "0 of 1\n")
    assert "in job 4711 but not in a Slurm step" in done.stderr
    assert "COMMAND is rank 0 of 1" in done.stderr
    assert "srun clusterddp exec -- sh -c 'echo $RANK of $WORLD_SIZE'" in done.stderr
    by_hand = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for environ in ({}, {**salloc, **STEP}, {**salloc, **by_hand}):
        assert run_exec("--", "true", environ=environ).stderr == ""
