"""The rehearsal on this workstation: the whole path of a run without a Slurm."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import RequestError
from clusterddp.files import read_json
from clusterddp.launchers import local, srun
from clusterddp.launchers.local import Limit, job_environment
from clusterddp.request.resources import Resources
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import read_outcome
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.made_events import ended, started
from tests.request.test_spec import spec
from tests.training.trainings import weights_in_one_piece
from tests.waiting import dying_with_us, processes_in, wait_for

CLUSTERDDP = [sys.executable, "-m", "clusterddp"]
# --no-snapshot: a command works in the test's own directory.
SUBMIT = ["submit", "--launcher", "local", "--run-name", "a", "--no-snapshot"]


def typed(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLUSTERDDP, *argv],
        cwd=folder, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def submit(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return typed(folder, *SUBMIT, *args)


Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Submits and does not wait; what still runs at the end of the test is killed."""
    begun: list[subprocess.Popen[str]] = []

    def submit_one(*args: str) -> subprocess.Popen[str]:
        begun.append(
            subprocess.Popen(
                [*CLUSTERDDP, *SUBMIT, *args],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads here
            )
        )
        return begun[-1]

    yield submit_one
    for process in begun:
        process.kill()
        process.communicate()


def status(folder: Path) -> dict[str, Any]:
    shown = subprocess.run(
        [*CLUSTERDDP, "status", "a", "--json"],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def test_a_command_runs_on_every_rank_of_every_host(tmp_path: Path) -> None:
    show = "echo $RANK of $WORLD_SIZE on $SLURMD_NODENAME"
    done = submit(tmp_path, "--nodes", "2", "--tasks-per-node", "2", "--", "sh", "-c", show)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("started a as pid:")
    logs = [(tmp_path / f"jobs/a/logs/rank-{rank}.log").read_text() for rank in range(4)]
    hosts = ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2"]
    assert logs == [f"{rank} of 4 on {host}\n" for rank, host in enumerate(hosts)]
    assert status(tmp_path)["state"] == "done"


@pytest.mark.parametrize(
    "template", ["ddp.sbatch.j2", pytest.param("torchrun.sbatch.j2", marks=pytest.mark.slow)]
)
def test_the_rank_that_failed_first_is_named_everywhere(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    fail = 'if [ "$RANK" = 1 ]; then echo its own words; exit 7; fi; sleep 600'
    done = submit(
        tmp_path, "--nodes", "2", "--template", template, "--", "sh", "-c", fail
    )  # fmt: skip
    named = "rank 1 on 127.0.0.2 failed first: exit code 7 (logs/rank-1.log)"
    assert done.returncode == 1
    assert named in done.stderr
    assert "its own words" in done.stderr
    assert named in (tmp_path / "jobs/a/logs/job.log").read_text()
    found = status(tmp_path)
    assert (found["state"], found["first_failure"]) == ("failed", named)
    assert found["next_command"] == "clusterddp logs --rank 1 a"
    names = [path.name for path in (tmp_path / "jobs").rglob("*")] + [
        path.name for path in temporary.iterdir()
    ]
    assert [n for n in names if n.startswith((".", "torchelastic")) or n == "reserve"] == []


# Rank 0 loses rank 1 and ends first; rank 1 says why only when that is on record.
LOSES_A_PEER = """
import os, pathlib, signal, time
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
dist.barrier()
if rank == 0:
    dist.all_reduce(torch.ones(1))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.destroy_process_group()
from clusterddp.run.outcome import read_outcome
records = pathlib.Path("jobs/a/attempts/0001/outcomes")
deadline = time.monotonic() + 60
while read_outcome(records, 0).ended is None and time.monotonic() < deadline:
    time.sleep(0.05)
raise ValueError("boom\\nof two lines")
"""


def test_a_failure_that_a_cluster_would_start_again_is_one_here(tmp_path: Path) -> None:
    done = submit(tmp_path, "--retries", "2", "--", "sh", "-c", "exit 7")
    assert done.returncode == 1
    assert "--retries 2 has no effect here" in done.stderr
    found = status(tmp_path)
    named = "rank 0 on 127.0.0.1 failed first: exit code 7 (logs/rank-0.log)"
    assert (found["state"], found["first_failure"]) == ("failed", named)
    assert found["next_command"] == "clusterddp logs --job a"  # the rank printed nothing


def test_the_exception_of_a_command_is_named_everywhere(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOSES_A_PEER)
    done = submit(tmp_path, "--tasks-per-node", "2", "--", sys.executable, "train.py")
    named = "rank 1 on 127.0.0.1 failed first: ValueError: boom (logs/rank-1.log)"
    assert done.returncode == 1
    assert named in done.stderr, done.stderr
    lost = read_outcome(tmp_path / "jobs/a/attempts/0001/outcomes", 0)
    assert lost is not None
    assert lost.peer_lost, lost
    for argv in (["status"], ["runs"], ["report"], ["status", "--json"], ["runs", "--json"],
                 ["report", "--json"]):  # fmt: skip
        shown = subprocess.run(
            [*CLUSTERDDP, *argv], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert named in shown.stdout, argv


@pytest.mark.slow
def test_a_task_killed_with_its_parent_is_still_named(tmp_path: Path) -> None:
    kill = 'if [ "$RANK" = 1 ]; then kill -9 $PPID $$; fi; sleep 600'
    done = submit(tmp_path, "--nodes", "2", "--", "sh", "-c", kill)
    assert done.returncode == 1
    assert "rank 1 on 127.0.0.2 failed first: killed by SIGKILL" in done.stderr
    assert "rank 1 on 127.0.0.2 failed first" in status(tmp_path)["first_failure"]


def test_cancelling_during_the_set_up_starts_no_task(tmp_path: Path, begin: Begin) -> None:
    job = begin(
        "--setup", "touch setting-up", "--setup", "sleep 600", "--", "touch", "ran",
    )  # fmt: skip
    wait_for((tmp_path / "setting-up").exists, "the set-up begins")
    assert subprocess.run([*CLUSTERDDP, "cancel", "a"], cwd=tmp_path, check=False).returncode == 0
    job.communicate(timeout=120)
    assert job.returncode == 1
    assert not (tmp_path / "ran").exists()
    assert status(tmp_path)["state"] == "cancelled"


def test_a_cancelled_job_starts_no_further_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / srun.CANCELLED).touch()
    done = subprocess.run(
        [sys.executable, "-m", "clusterddp.launchers.srun", "--ntasks=1", "--", "true"],
        env={**os.environ, srun.REHEARSAL_VARIABLE: str(tmp_path), **JOB},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Unable to create step" in done.stderr


def test_a_step_of_fewer_hosts_knows_only_those(tmp_path: Path) -> None:
    own = f"srun -N1 -n1 {sys.executable} -m clusterddp env --json >env.json"
    done = submit(tmp_path, "--nodes", "2", "--setup", own, "--", "true")
    assert done.returncode == 0, done.stderr
    derived = json.loads((tmp_path / "env.json").read_text())
    assert (derived["world_size"], derived["hostnames"]) == (1, ["127.0.0.1"])


def test_tear_down_runs_after_a_failure_and_cannot_hide_it(tmp_path: Path) -> None:
    done = submit(tmp_path, "--teardown", "touch torn", "--teardown", "exit 0", "--", "false")
    assert done.returncode == 1
    assert (tmp_path / "torn").exists()
    assert status(tmp_path)["exit_code"] == 1


def test_an_interpreter_that_is_not_here_is_named(tmp_path: Path) -> None:
    done = submit(tmp_path, "--python", "/nowhere/python", "--", "true")
    assert done.returncode == 1
    assert "--python /nowhere/python: there is no such interpreter" in done.stderr


def test_folders_of_rehearsals_that_were_killed_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    monkeypatch.setenv("TMPDIR", str(temporary))
    here = f"clusterddp-local-{socket.gethostname()}@"
    elsewhere = "clusterddp-local-elsewhere@killed"
    for name in (f"{here}killed", f"{here}alive", f"{here}beginning", elsewhere):
        (temporary / name / "steps").mkdir(parents=True)
    for name in (f"{here}killed", elsewhere):
        (temporary / name / "alive").touch()
    with (temporary / f"{here}alive" / "alive").open("w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        assert submit(tmp_path, "--", "true").returncode == 0
    left = {path.name for path in temporary.iterdir()}
    assert left == {f"{here}alive", f"{here}beginning", elsewhere}


def test_where_no_file_can_be_locked_a_folder_has_no_mark_that_it_could_be_removed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with local._kept(tmp_path):
        assert not (tmp_path / "alive").exists()


@pytest.mark.slow
def test_a_python_that_only_a_container_has_still_ends_well(tmp_path: Path) -> None:
    (tmp_path / "wrap").write_text(f'#!/bin/sh\nshift\nexec {sys.executable} "$@"\n')
    (tmp_path / "wrap").chmod(0o700)
    done = submit(
        tmp_path, "--python", "no-such-python", "--wrapper", str(tmp_path / "wrap"),
        "--", "true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert status(tmp_path)["state"] == "done"


def test_a_step_ends_what_its_tasks_leave_in_sessions_of_their_own(tmp_path: Path) -> None:
    """As torchrun's ranks are, of an agent that was ended while it started them."""
    left = "setsid sh -c 'touch up; exec sleep 600' & while [ ! -e up ]; do sleep 0.05; done"
    done = submit(tmp_path, "--", "sh", "-c", left)
    assert done.returncode == 0, done.stderr
    assert processes_in(tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_ctrl_c_cancels_the_run_and_leaves_no_process(
    tmp_path: Path, number: int, code: int, begin: Begin
) -> None:
    wait = "trap 'echo told; exit 1' TERM; echo up; while :; do sleep 0.1; done"
    job = begin(
        "--nodes", "2",
        "--", "bash", "-c", wait,
    )  # fmt: skip
    logs = [tmp_path / f"jobs/a/logs/rank-{rank}.log" for rank in (0, 1)]
    wait_for(lambda: all(log.exists() and "up" in log.read_text() for log in logs), "tasks up")
    job.send_signal(number)
    job.communicate(timeout=120)
    assert job.returncode == code
    wait_for(lambda: not processes_in(tmp_path), "no process left")
    assert all("told" in log.read_text() for log in logs)
    assert status(tmp_path)["state"] == "cancelled"


@pytest.mark.parametrize("victim", ["submit", "controller"])
def test_a_rehearsal_ends_with_whoever_controls_it(
    tmp_path: Path, victim: str, begin: Begin
) -> None:
    job = begin(
        "--nodes", "2",
        "--", "bash", "-c", "echo up; while :; do sleep 0.1; done",
    )  # fmt: skip
    logs = [tmp_path / f"jobs/a/logs/rank-{rank}.log" for rank in (0, 1)]
    wait_for(lambda: all(log.exists() and "up" in log.read_text() for log in logs), "tasks up")
    submitted = json.loads((tmp_path / "jobs/a/events.jsonl").read_text().splitlines()[0])
    os.kill(job.pid if victim == "submit" else submitted["pid"], signal.SIGKILL)
    wait_for(lambda: not [p for p in processes_in(tmp_path) if "submit" not in p], "tasks gone")
    job.communicate(timeout=120)
    assert job.returncode == (-signal.SIGKILL if victim == "submit" else 1)


# Found by Python where PYTHONPATH leads to it: the clock of the controller stands still, and jumps
# once those files are there. What tells the seconds of a job is read there alone.
CLOCK = """
import os, subprocess, sys, time  # what subprocess itself waits for keeps its clock
if "clusterddp.launchers.local" in sys.orig_argv:
    time.monotonic = lambda: float({seconds} * all(map(os.path.exists, {files})))
exec(open({holds!r}).read(), {{}})
"""
HOLDS = Path(__file__).parents[1] / "on_slurm/campaign/hooks/sitecustomize.py"


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has a job be so many seconds old as soon as files are in the directory that it runs in."""

    def jumps(seconds: int, *files: str) -> None:
        hooks = tmp_path / "hooks"
        hooks.mkdir()
        (hooks / "sitecustomize.py").write_text(
            CLOCK.format(seconds=seconds, files=files, holds=str(HOLDS))
        )
        monkeypatch.setenv("PYTHONPATH", str(hooks), prepend=os.pathsep)

    return jumps


# Says when it is up; on USR1 or TERM it saves, and asks to be started again.
SAVES = """
import os, signal, sys
from pathlib import Path

def save(number, _):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(75)

signal.signal(signal.SIGUSR1, save)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
Path("up-" + os.environ["RANK"]).touch()
while True:
    signal.pause()
"""
UP = ("up-0", "up-1")


@pytest.mark.parametrize("wanted", ["B:USR1@40", "USR1@40"])
def test_the_signal_ahead_of_the_limit_reaches_a_command(
    tmp_path: Path, clock: Callable[..., None], wanted: str
) -> None:
    clock(570, *UP)
    (tmp_path / "saves.py").write_text(SAVES)
    done = submit(
        tmp_path, "--nodes", "2", "--time", "10:00", "--signal", wanted, "--requeue",
        "--", sys.executable, "saves.py",
    )  # fmt: skip
    assert done.returncode == 75, done.stderr
    run = RunDir(tmp_path / "jobs/a")
    assert [run.rank_log(rank).read_text() for rank in (0, 1)] == ["up\ngot SIGUSR1\n"] * 2
    assert "a cluster would requeue the job now" in run.job_log.read_text()
    assert "Resume with: clusterddp resume a" in run.job_log.read_text()
    assert read_events(run)[-1]["cause"] == "signal"


def test_the_time_limit_ends_a_rehearsal(tmp_path: Path, clock: Callable[..., None]) -> None:
    clock(600, *UP)
    (tmp_path / "saves.py").write_text(SAVES)
    done = submit(tmp_path, "--nodes", "2", "--time", "10:00", "--", sys.executable, "saves.py")
    assert done.returncode == 75, done.stderr
    run = RunDir(tmp_path / "jobs/a")
    assert [run.rank_log(rank).read_text() for rank in (0, 1)] == ["up\ngot SIGTERM\n"] * 2
    events = [event["event"] for event in read_events(run)]
    assert events == ["submitted", "started", "time_limit", "ended"]
    assert read_events(run)[-1]["cause"] == "time limit"


def test_a_training_stopped_by_its_limit_goes_on_to_the_same_weights(
    tmp_path: Path, synthetic_dir: Path, clock: Callable[..., None], begin: Begin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    clock(560, "go")
    training = [
        "--nodes", "2", "--dataset", "synthetic", "--data-dir", str(synthetic_dir), "--threads",
        "1", "--batch-size", "8", "--max-steps", "40", "--epochs", "100", "--warmup-steps", "2",
        "--log-every", "5", "--eval-every", "100epochs", "--save-every", "1000steps",
    ]  # fmt: skip
    whole = weights_in_one_piece(
        tmp_path / "whole", synthetic_dir, 2, batch_size=8, max_steps=40, eval_every="100epochs"
    )
    # However fast or slow the machine is, it is in the middle of its training when the signal
    # comes: the CONT that comes with it lets it go on.
    holds = tmp_path / "holds"
    holds.mkdir()
    (holds / "want-step-5").write_text("until told")
    monkeypatch.setenv("CAMPAIGN_HOLDS", str(holds))
    limited = begin(
        *training,
        "--time", "10:00", "--signal", "USR1@50",
    )  # fmt: skip
    run = RunDir(tmp_path / "jobs/a")
    first = Attempt(run, 1)
    wait_for(lambda: len([*holds.glob("held-step-5.*")]) == 2, "the fifth step")
    os.kill(first.read_record().pid, signal.SIGSTOP)
    (tmp_path / "go").touch()
    limited.communicate(timeout=240)
    assert limited.returncode == 75
    left = read_json(first.end)
    assert left is not None
    assert (left["cause"], left["reason"]) == ("stopped", "signal")
    assert 5 <= left["step"] < 40
    assert list(first.checkpoints.glob(f"step-{left['step']:08d}.pt"))
    again = subprocess.run(
        [*CLUSTERDDP, "resume", "a", "--time", "10:00"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert Attempt(run, 2).read_record().step == left["step"]
    report = read_json(run.report)
    assert report is not None
    assert report["weights_sha256"] == whole


@pytest.mark.parametrize(
    ("lines", "limit"),
    [
        ([], Limit()),
        (["--signal=USR1@10"], Limit()),
        (["--time=2"], Limit(120)),
        (["--time=0:20", "--signal=B:USR1@4"], Limit(20, signal.SIGUSR1, 4, to_script=True)),
        (["--time=0:20", "--signal=TERM@4"], Limit(20, signal.SIGTERM, 4)),
        (["--time=0:20", "--signal=RB:10"], Limit(20, signal.SIGUSR1, 60, to_script=True)),
        (["--time=UNLIMITED", "--signal=USR1@4"], Limit()),
    ],
)
def test_the_limit_is_that_of_the_directives(lines: list[str], limit: Limit) -> None:
    script = "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines)
    assert Limit.of(script) == limit


@pytest.mark.parametrize("template", ["ddp.sbatch.j2", "./own.sbatch.j2"])
def test_a_restart_in_the_job_needs_an_agent(tmp_path: Path, template: str) -> None:
    (tmp_path / "own.sbatch.j2").write_text('{% extends "shipped/ddp.sbatch.j2" %}')
    done = submit(tmp_path, "--max-restarts", "1", "--template", template, "--", "true")
    assert done.returncode == 2
    assert "--max-restarts 1" in done.stderr
    assert "--template torchrun" in done.stderr
    assert not (tmp_path / "jobs").exists()


@pytest.mark.slow
def test_an_agent_of_an_own_template_starts_a_failed_command_again(tmp_path: Path) -> None:
    (tmp_path / "own.sbatch.j2").write_text('{% extends "shipped/torchrun.sbatch.j2" %}')
    (tmp_path / "rank.sh").write_text(
        'if [ "$RANK" = 0 ]; then while ! [ -e again ]; do sleep 0.1; done\n'
        "elif [ -e failed ]; then touch again\n"
        "else touch failed; exit 7; fi\n"
        "echo $RANK ends\n"
    )
    done = submit(
        tmp_path, "--nodes", "2", "--template", "./own.sbatch.j2", "--max-restarts", "1",
        "--", "sh", "rank.sh",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "jobs/a")
    divider, *lines = run.rank_log(1).read_text().splitlines()
    assert divider.startswith("--- attempt 1, ") and "start 2 in it" in divider
    assert lines == ["1 ends"]
    assert [event["event"] for event in read_events(run)] == ["submitted", "started", "ended"]


def test_more_hosts_than_loopback_has_are_refused(tmp_path: Path) -> None:
    done = submit(tmp_path, "--nodes", "251", "--", "true")
    assert done.returncode == 2
    assert "at most 250" in done.stderr
    assert list(tmp_path.iterdir()) == []


JOB = job_environment(
    "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n", 77, Path("/")
)


@pytest.mark.parametrize(
    ("directives", "gpus"),
    [
        (["--gpus-per-node=2"], "0,1"),
        (["--gpus-per-node=a100:2"], "0,1"),
        (["--gres=gpu:a100:2"], "0,1"),
        (["--gres=nvme:100G,gpu:2"], "0,1"),
        (["--ntasks-per-node=2", "--gpus-per-task=1"], "0,1"),
        (["--gres=nvme:100G"], None),
        (["--gres=shard:2"], None),
        ([], None),
    ],
)
def test_a_jobs_gpus_are_those_its_directives_ask_for(
    directives: list[str], gpus: str | None
) -> None:
    script = "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in directives)
    assert job_environment(script, 77, Path("/")).get("SLURM_JOB_GPUS") == gpus


@pytest.mark.parametrize(
    ("inherited", "directive", "shown"),
    [
        (None, "gpus-per-node=2", ["0,1", "0,1", "2,3", "2,3"]),
        ("3,5,6,7", "gpus-per-node=2", ["3,5", "3,5", "6,7", "6,7"]),
        ("3,5,6,7", "gpus-per-task=1", ["3", "5", "6", "7"]),
        ("GPU-x,GPU-y,GPU-z", "gpus-per-node=1", ["GPU-x", "GPU-x", "GPU-y", "GPU-y"]),
        ("5", "gpus-per-node=1", ["5"] * 4),  # hosts share it
        ("5,6", "gpus-per-node=4", ["5,6"] * 4),  # CUDA sees none in a list that repeats one
        ("", "gpus-per-node=2", [""] * 4),
        ("5,6", "mem=1G", ["5,6"] * 4),
    ],
)
def test_hosts_of_a_rehearsal_share_out_the_gpus_that_its_shell_has(
    inherited: str | None, directive: str, shown: list[str]
) -> None:
    script = f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --{directive}\n#SBATCH --ntasks-per-node=2\n"
    own = {} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}
    job = {**own, **job_environment(script, 77, Path("/"), inherited)}
    options = srun.parse(["--nodes=2", "--ntasks=4", "--", "true"])
    seen = [srun.task_environment(job, options, rank, 0) for rank in range(4)]
    assert [task["CUDA_VISIBLE_DEVICES"] for task in seen] == shown


def test_a_rehearsals_gpus_are_those_of_its_shell_or_of_the_workstation(tmp_path: Path) -> None:
    def found(**environ: str) -> list[str] | None:
        return local.own_gpus(environ, tmp_path)

    assert found() is None
    assert found(CUDA_VISIBLE_DEVICES="2,3") == ["2", "3"]
    assert found(CUDA_VISIBLE_DEVICES="") == found(CUDA_VISIBLE_DEVICES="-1") == []
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert found() == ["0", "1"]
    assert found(CUDA_VISIBLE_DEVICES="1") == ["1"]
    assert found(CUDA_VISIBLE_DEVICES="0,-1,1") == ["0"]
    with pytest.raises(RequestError, match="CUDA_VISIBLE_DEVICES=0,1,0 names a GPU twice"):
        found(CUDA_VISIBLE_DEVICES="0,1,0")


@pytest.mark.parametrize(("gpus", "shown"), [(0, None), (1, "0,1")])
def test_a_rehearsal_is_granted_gpus_where_it_asks_for_them_alone(
    gpus: int, shown: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str | None] = []

    def begin(*_: object, env: dict[str, str], **__: object) -> None:
        given.append(env.get("CUDA_VISIBLE_DEVICES"))
        raise InterruptedError

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local, "own_gpus", lambda _: ["0", "1"])
    monkeypatch.setattr(local.subprocess, "Popen", begin)
    request = spec(resources=Resources(nodes=2, gpus_per_node=gpus), launcher="local")
    with pytest.raises(InterruptedError):
        local.submit(request, "", RunDir(tmp_path))
    assert given == [shown]


def test_hosts_that_find_their_gpus_hidden_say_that_they_compute_on_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    done = submit(tmp_path, "--gpus-per-node", "2", "--wait", "--", "true")
    assert done.returncode == 0
    assert "CUDA_VISIBLE_DEVICES=-1 hides all GPUs: the ranks compute on CPUs" in done.stderr


def test_tasks_have_their_gpus_where_set_up_lines_unset_the_variable() -> None:
    script = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=2\n"
    job = job_environment(script, 77, Path("/"))
    del job["CUDA_VISIBLE_DEVICES"]
    options = srun.parse(["--nodes=2", "--ntasks=2", "--", "true"])
    seen = [srun.task_environment(job, options, rank, 0) for rank in range(2)]
    assert [task["CUDA_VISIBLE_DEVICES"] for task in seen] == ["0,1", "2,3"]


@pytest.mark.parametrize(
    ("fields", "gpus", "is_refused"),
    [
        ({}, ["0"], True),
        ({}, ["0", "1"], False),
        ({}, [], False),  # all are hidden
        ({"train": TrainConfig(device="cpu")}, ["0"], False),
        ({"train": TrainConfig(backend="gloo")}, ["0"], False),
        ({"command": ("true",)}, ["0"], True),
    ],
)
def test_a_rehearsal_of_more_gpus_than_there_are_is_refused_unless_it_can_be(
    fields: dict[str, Any], gpus: list[str], is_refused: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    class Begun(Exception):
        """Ends the launch ahead of its process."""

    def begin(*_: object, **__: object) -> None:
        raise Begun

    monkeypatch.setattr(local, "own_gpus", lambda _: gpus)
    monkeypatch.setattr(local.subprocess, "Popen", begin)
    request = spec(resources=Resources(nodes=2, gpus_per_node=1), launcher="local", **fields)
    with pytest.raises(RequestError if is_refused else Begun):
        local.submit(request, "", RunDir(tmp_path))


def test_a_rehearsal_takes_no_gpu_but_those_of_its_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = ["--", sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    refused = submit(tmp_path, "--nodes", "3", "--gpus-per-node", "1", *show)
    assert refused.returncode == 2
    assert "the rehearsal needs 3 GPUs, this machine has 2" in refused.stderr
    assert "CUDA_VISIBLE_DEVICES=2,3" in refused.stderr and "NCCL_MULTI_RANK" in refused.stderr
    assert not (tmp_path / "jobs/a").exists()
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # in the shell of salloc, whose GPUs these are
    done = submit(tmp_path, "--nodes", "2", "--gpus-per-node", "1", "--wait", *show)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "jobs/a")
    assert [run.rank_log(rank).read_text().split()[-1] for rank in (0, 1)] == ["2", "3"]


@pytest.mark.parametrize(
    ("tasks", "nodes", "layout"), [(4, 2, "2(x2)"), (5, 2, "3,2"), (1, 1, "1")]
)
def test_tasks_are_dealt_out_in_blocks(tasks: int, nodes: int, layout: str) -> None:
    options = srun.parse([f"--nodes={nodes}", f"--ntasks={tasks}", "true"])
    last = srun.task_environment(JOB, options, tasks - 1, 0)
    assert last["SLURM_STEP_TASKS_PER_NODE"] == layout
    assert last["SLURM_NODEID"] == str(nodes - 1)


def test_a_jobs_variables_count_what_its_script_asks_for() -> None:
    script = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks=6\n#SBATCH --ntasks-per-node=3\n"
    environ = job_environment(script, 77, Path("/x"))
    assert environ["SLURM_NTASKS"] == "6"
    assert environ["SLURM_TASKS_PER_NODE"] == "3(x2)"
    assert environ["SLURM_JOB_NODELIST"] == "127.0.0.[1-2]"


def test_a_trial_with_a_script_of_its_own_stays_in_its_directory(tmp_path: Path) -> None:
    fails_first = "[ {n} != 1 ] || [ -e mended ]"
    submitted = submit(tmp_path, "--sweep", "n=0..1", "--", "sh", "-c", fails_first)
    assert submitted.returncode == 1, submitted.stderr
    (tmp_path / "mended").touch()
    again = subprocess.run(
        [*CLUSTERDDP, "resume", "a-1", "--time", "5"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == ["a", "a-0", "a-1"]


def test_trials_that_wait_are_stopped_and_cancelled_as_their_sweep_is(
    tmp_path: Path, begin: Begin
) -> None:
    until_go = "echo at {n}; until [ -e go ]; do sleep 0.1; done"
    rehearsal = begin(
        "--sweep", "n=0..3", "--notify", f"cp /dev/stdin {tmp_path}/told",
        "--", "sh", "-c", until_go,
    )  # fmt: skip
    logs = [tmp_path / f"jobs/a-{index}/logs/rank-0.log" for index in range(4)]
    wait_for(lambda: logs[0].exists() and logs[0].read_text() == "at 0\n", "the first trial")
    stopped = typed(tmp_path, "stop", "--wait", "a-3")
    assert "a-3: cancelled before it started" in stopped.stdout, stopped.stderr
    cancelled = typed(tmp_path, "cancel", "-y", "a")
    assert cancelled.returncode == 0, cancelled.stderr
    _, words = rehearsal.communicate(timeout=240)
    assert rehearsal.returncode == 1, words
    assert [f"a-{index}: cancelled before it started" in words for index in range(4)] == [
        False, True, True, True,
    ]  # fmt: skip
    assert not any(log.exists() for log in logs[1:])
    (tmp_path / "go").touch()
    late = typed(tmp_path, "cancel", "a-2")
    assert "a-2 has already ended: cancelled" in late.stdout
    told = json.loads((tmp_path / "told").read_text())
    assert (told["state"], told["counts"]) == ("cancelled", {"cancelled": 4})
    again = typed(tmp_path, "resume", "a")
    assert again.returncode == 0, again.stderr
    assert [log.read_text().splitlines()[-1] for log in logs] == [f"at {n}" for n in range(4)]


@pytest.mark.parametrize("over", [False, True])
def test_a_rehearsal_whose_verdict_is_recorded_is_not_cancelled_any_more(
    tmp_path: Path, over: bool
) -> None:
    run = RunDir(tmp_path / "a")
    run.path.mkdir()
    verdict = json.dumps(ended(0)) if over else json.dumps(started())
    run.script.write_text(f"echo '{verdict}' >>{run.events}\ntouch {tmp_path}/up\nsleep 600\n")
    argv = [sys.executable, "-m", "clusterddp.launchers.local", str(run.path)]
    with subprocess.Popen(argv, cwd=tmp_path, preexec_fn=dying_with_us()) as stand_in:  # noqa: PLW1509
        wait_for((tmp_path / "up").exists, "the script to tell its verdict")
        stand_in.terminate()
    assert [event["event"] for event in read_events(run)][1:] == ([] if over else ["cancelled"])
