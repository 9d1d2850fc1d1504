"""One request, every launcher: the same weights; and the stand-in for srun against the real one."""

import json
import re
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from clusterddp.checkpoints.catalog import name_of
from clusterddp.files import read_json
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import read_outcome
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP, submit
from tests.training.trainings import weights_in_one_piece
from tests.waiting import PATIENCE, wait_for

# Sixteen processors a rank's worth of arithmetic would differ by the number of threads: pin it.
TRAINING = ["--dataset", "synthetic", "--max-steps", "8", "--threads", "1", "--warmup-steps", "2",
            "--batch-size", "32"]  # fmt: skip
HOOKS = Path(__file__).parent / "campaign/hooks"
FOUR = ["--nodes", "2", "--tasks-per-node", "2"]
MORE = [pytest.mark.slow, pytest.mark.release]
LAUNCHERS = {
    "sbatch": [],
    "torchrun": ["--template", "torchrun.sbatch.j2"],
    "submitit": ["--launcher", "submitit"],
    "local": ["--launcher", "local"],
}


def by_hand(
    cluster: SlurmCluster, folder: Path, data: Path, tasks_per_node: int, *options: str
) -> None:
    """Ranks on two hosts, each started by itself with torch's variables, the last one first."""
    ranks = [
        cluster.popen_on(
            cluster.hosts[rank // tasks_per_node],
            [*CLUSTERDDP, "train", "--run-dir", str(folder / "hand"), "--data-dir", str(data),
             *TRAINING, *options],
            cwd=folder,
            env={
                "RANK": str(rank), "WORLD_SIZE": str(2 * tasks_per_node),
                "LOCAL_RANK": str(rank % tasks_per_node),
                "LOCAL_WORLD_SIZE": str(tasks_per_node),
                "MASTER_ADDR": cluster.hosts[0], "MASTER_PORT": "12345",
            },
            stdout=PIPE, stderr=PIPE,
        )
        for rank in reversed(range(2 * tasks_per_node))
    ]  # fmt: skip
    for rank in ranks:
        out, err = rank.communicate(timeout=200)
        assert rank.returncode == 0, out + err


def weights(run: Path, world_size: int = 4) -> str:
    report = read_json(run / "report.json")
    assert report is not None
    assert report["world_size"] == world_size
    return str(report["weights_sha256"])


# Each of them by itself: ranks by hand and torchrun's in cli/commands/test_train.py, a rehearsal's
# in launchers/test_local.py, torchrun's and submitit's on Slurm in test_signals.py, sbatch's in
# test_life.py.
@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(600)  # five trainings in a row
@pytest.mark.parametrize(
    ("tasks_per_node", "bucket_cap_mb"),
    [pytest.param(1, "25", id="one bucket"), pytest.param(2, "0.01", id="several buckets")],
)
def test_one_request_trains_to_the_same_weights_under_every_launcher(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path, tasks_per_node: int,
    bucket_cap_mb: str,
) -> None:  # fmt: skip
    buckets = ["--bucket-cap-mb", bucket_cap_mb]
    by_hand(cluster, tmp_path, synthetic_dir, tasks_per_node, *buckets)
    seen = {"by hand": weights(tmp_path / "hand", 2 * tasks_per_node)}
    for name, options in LAUNCHERS.items():
        done = submit(
            cluster, tmp_path, "--nodes", "2", "--tasks-per-node", str(tasks_per_node), "--wait",
            *options, *TRAINING, *buckets, "--run-name", name, "--data-dir", str(synthetic_dir),
        )  # fmt: skip
        assert done.returncode == 0, name + done.stdout + done.stderr
        seen[name] = weights(tmp_path / "jobs" / name, 2 * tasks_per_node)
    assert len(set(seen.values())) == 1, seen
    left = [p for p in (tmp_path / "jobs").rglob("*") if p.name.startswith((".", "torchelastic"))]
    assert left == []


def test_submitit_sends_what_the_dry_run_shows(cluster: SlurmCluster, tmp_path: Path) -> None:
    args = ["--launcher", "submitit", "--run-name", "a", "--job-name", "it's \\ #1"]
    shown = submit(cluster, tmp_path, *args, "--dry-run", "--", "true").stdout
    done = submit(cluster, tmp_path, *args, "--json", "--wait", "--", "true")
    job_id = json.loads(done.stdout.splitlines()[0])["job_id"]
    sent = tmp_path / f"jobs/a/submitit/{job_id}_submission.sh"
    assert sent.read_text() == shown


# Of one job alone, of this machine, or of the way in which the real one was configured.
OWN = re.compile(
    r"SLURM_(CLUSTER_NAME|CONF|JOB_?ID|JOB_(NAME|NODELIST|PARTITION|UID|GID|USER|QOS|ACCOUNT"
    r"|END_TIME|START_TIME)|LAUNCH_NODE_IPADDR|NODELIST|STEP_NODELIST|SUBMIT_\w+|TASK_PID"
    r"|(STEP_)?TOPOLOGY\w*|NODE_ALIASES|WORKING_CLUSTER|SRUN_COMM_\w+|STEP_LAUNCHER_PORT|UMASK"
    r"|PRIO_PROCESS|CPUS_ON_NODE|JOB_CPUS_PER_NODE\w*|OOM_KILL_STEP)|SLURMD_(NODENAME|DEBUG)"
)


def variables(log: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(log.read_text().splitlines()[-1])
    wanted = ("SLURM", "CUDA_VISIBLE_DEVICES")
    return as_22_05(
        {k: v for k, v in found.items() if k.startswith(wanted) and not OWN.fullmatch(k)}
    )


def as_22_05(step: dict[str, str]) -> dict[str, str]:
    """A step's variables in the words of Slurm 22.05, which the stand-in uses.

    24.11 has a task's share in one variable, SLURM_TRES_PER_TASK=cpu=2,gres/gpu=1, and says twice
    to which of its devices a task is bound.
    """
    shares = step.pop("SLURM_TRES_PER_TASK", "")
    for share in filter(None, shares.split(",")):
        kind, _, count = share.rpartition("=")
        name = {"cpu": "SLURM_CPUS_PER_TASK", "gres/gpu": "SLURM_GPUS_PER_TASK"}[kind]
        assert step.setdefault(name, count) == count, shares
    bound = step.get("SLURMD_TRES_BIND")
    assert step.pop("SLURM_TRES_BIND", bound) == bound
    if bound:
        step["SLURMD_TRES_BIND"] = bound.removeprefix("gres/")
    return step


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(["--nodes", "2", "--tasks-per-node", "2"], marks=pytest.mark.slow),
        pytest.param(["--nodes", "2", "--tasks-per-node", "3", "--cpus-per-task", "2"], marks=MORE),
        pytest.param(["--nodes", "1", "--gpus-per-node", "2"], marks=pytest.mark.slow),
        pytest.param(
            ["--nodes", "1", "--gpus-per-node", "2", "--gpu-directive", "gres"], marks=MORE
        ),
        pytest.param(
            ["--nodes", "1", "--gpus-per-node", "2", "--gpu-directive", "gpus-per-task"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_the_stand_in_gives_the_variables_of_a_real_step(
    cluster: SlurmCluster, tmp_path: Path, request_: list[str]
) -> None:
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    for launcher in ("sbatch", "local"):
        done = submit(
            cluster, tmp_path, *request_, "--launcher", launcher, "--run-name", launcher, "--wait",
            "--preflight", "none", "--", sys.executable, "-c", show,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    ranks = sorted(p.name for p in (tmp_path / "jobs/sbatch/logs").glob("rank-*.log"))
    assert ranks
    for name in ranks:
        real = variables(tmp_path / "jobs/sbatch/logs" / name)
        assert variables(tmp_path / "jobs/local/logs" / name) == real, name
        gpus = "0,1" if "--gpus-per-node" in request_ else None  # all of the node, in each task
        assert real.get("CUDA_VISIBLE_DEVICES") == gpus


SAVED = [*TRAINING, "--max-steps", "80", "--epochs", "100", "--save-every", "30steps"]
HELD_AT = 40
"""The step after which ranks wait to be struck."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, synthetic_dir: Path) -> str:
    """The weights of `SAVED` on four ranks, in one piece."""
    folder = tmp_path_factory.mktemp("whole")
    return weights_in_one_piece(folder, synthetic_dir, 4, batch_size=32, max_steps=80)


@pytest.mark.slow
@pytest.mark.timeout(600)  # with the run in one piece, three trainings in a row
@pytest.mark.parametrize(
    "moment", [pytest.param("in its imports", marks=pytest.mark.release), "in the middle"]
)
def test_a_killed_rank_starts_again_inside_the_job(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path, whole: str, moment: str
) -> None:
    # One that is struck in its imports has at least not come further than this.
    held_at = HELD_AT if moment == "in the middle" else 1
    run, hold = RunDir(tmp_path / "jobs/a"), tmp_path / f"want-step-{held_at}"
    hold.touch()
    sent = submit(
        cluster, tmp_path, *FOUR, *SAVED, "--data-dir", str(synthetic_dir), "--run-name", "a",
        "--template", "torchrun.sbatch.j2", "--max-restarts", "2", "--json",
        env={"PYTHONPATH": str(HOOKS), "CAMPAIGN_HOLDS": str(tmp_path)},
    )  # fmt: skip
    assert sent.returncode == 0, sent.stderr
    records, log = Attempt(run, 1).outcomes, run.rank_log(0)
    if moment == "in the middle":
        held = f"held-step-{HELD_AT}.*"
        wait_for(lambda: len(list(tmp_path.glob(held))) == 4, "training")
        wait_for((run.checkpoints / name_of(30)).exists, "the checkpoint before")
    else:
        wait_for(lambda: read_outcome(records, 1), "rank 1 starts")
    victim = read_outcome(records, 1)
    assert victim is not None
    cluster.run_on("h01", ["kill", "-9", str(victim.pid)], check=True)
    hold.unlink()
    job_id = json.loads(sent.stdout)["job_id"]
    assert cluster.wait_job(job_id) == "COMPLETED", run.job_log.read_text()
    assert weights(run.path) == whole
    assert [e["event"] for e in read_events(run)] == ["submitted", "started", "ended"]
    assert read_events(run)[-1]["cause"] == "done"
    record = Attempt(run, 1).read_record()
    assert (record.step, record.resumed_from) == (0, None)
    agents = [path.read_text() for path in run.logs.glob("node-*.log")]
    # Which rank's end an agent sees first, the killed one's or one's that lost it, is chance.
    assert any("failed (exitcode: " in text for text in agents)
    # An agent gives its other ranks half a minute before it kills them: none of them needs it.
    assert not any("forcefully" in text for text in agents)
    if moment == "in the middle":
        assert record.agent_starts == 2
        own = r"resuming from .*/attempts/0001/checkpoints/step-0*[1-9]\d*\.pt"
        assert re.search(own, log.read_text())


# A person's own loop: saves when it is asked to stop, asks to be started again, goes on from there.
LOOP = """
import os, signal, sys
from pathlib import Path
state = Path(f"state-{os.environ['RANK']}")
def save(*_):
    state.write_text("saved")
    sys.exit(75 if os.environ["RANK"] == "0" else int(sys.argv[1]))
if state.exists():
    sys.exit(print("going on from what was", state.read_text()))
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "second", "goes_on"),
    [
        pytest.param("ddp.sbatch.j2", 75, True, id="saved", marks=pytest.mark.release),
        pytest.param("ddp.sbatch.j2", 0, True, id="done", marks=pytest.mark.release),
        pytest.param("ddp.sbatch.j2", 3, False, id="failed"),
        pytest.param("torchrun.sbatch.j2", 75, True, id="saved, torchrun"),
    ],
)
def test_a_command_that_saved_is_started_again_unless_a_rank_failed(
    cluster: SlurmCluster, tmp_path: Path, template: str, second: int, *, goes_on: bool
) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    sent = submit(
        cluster, tmp_path, "--nodes", "2", "--template", template, "--run-name", "a", "--json",
        "--requeue", "--time", "10", "--signal", "B:USR1@60",
        "--", sys.executable, "loop.py", str(second),
    )  # fmt: skip
    assert sent.returncode == 0, sent.stderr
    job_id, run = json.loads(sent.stdout)["job_id"], RunDir(tmp_path / "jobs/a")
    ready = [run.rank_log(rank) for rank in (0, 1)]
    wait_for(lambda: all(log.exists() and "ready" in log.read_text() for log in ready), "ready")
    cluster.run(["scancel", "--batch", "--signal=USR1", job_id], check=True)
    ended = cluster.wait_job(job_id)
    events = [event["event"] for event in read_events(run)]
    first = next(event for event in read_events(run) if event["event"] == "ended")
    if goes_on:
        assert ended == "COMPLETED", run.job_log.read_text()
        assert events == ["submitted", "started", "ended", "requeued", "started", "ended"]
        assert first["cause"] == "signal"
        assert read_events(run)[-1]["cause"] == "done"
        assert "going on from what was saved" in ready[0].read_text()
    else:
        assert ended == "FAILED"
        assert events == ["submitted", "started", "ended"]
        assert (first["cause"], first["exit_code"]) == ("failed", 3)


GONE = """
import contextlib, os, signal, sys, time
from pathlib import Path
def note(rank):
    path = Path(f"{os.environ['SLURM_JOB_ID']}-{rank}")
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
def gone(rank):
    path = Path(f"{os.environ['SLURM_JOB_ID']}-{rank}")
    while not path.exists():
        time.sleep(0.02)
    stat = Path(f"/proc/{path.read_text()}/stat")
    with contextlib.suppress(OSError):  # it has been reaped, perhaps between open and read
        while ") Z " not in stat.read_text():
            time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "code"),
    [
        pytest.param("sys.exit(0)", 0, marks=pytest.mark.release),
        # Rank 1 fails once rank 0 has gone, or the step's end would reach rank 0 first.
        ("rank == 1 and (gone(0), sys.exit(3))", 3),
        pytest.param("rank == 1 and sys.exit(3); signal.pause()", 143, marks=pytest.mark.release),
        ("rank == 1 and os.kill(os.getpid(), 9); signal.pause()", 143),
    ],
)
def test_the_stand_in_ends_with_the_code_of_the_real_srun(
    cluster: SlurmCluster, tmp_path: Path, program: str, code: int
) -> None:
    """The srun line alone, without the small parent that records outcomes."""
    (tmp_path / "task.py").write_text(
        f"{GONE}\nrank = int(os.environ['SLURM_PROCID'])\nnote(rank)\n{program}\n"
    )
    own = '{% extends "shipped/ddp.sbatch.j2" %}{% block launch %}\n'
    (tmp_path / "own.sbatch.j2").write_text(
        own + "srun --ntasks=2 --kill-on-bad-exit=1 -- {{ python | sh }} task.py || code=$?\n"
        'echo "srun ended with ${code:-0}"\nexit ${code:-0}\n{% endblock %}\n'
    )
    seen = {}
    for launcher in ("sbatch", "local"):
        submit(
            cluster, tmp_path, "--launcher", launcher, "--run-name", launcher, "--wait",
            "--tasks-per-node", "2", "--template", "./own.sbatch.j2", "--", "true",
        )  # fmt: skip
        log = (tmp_path / "jobs" / launcher / "logs/job.log").read_text()
        found = re.search(r"srun ended with (\d+)", log)
        assert found, log
        seen[launcher] = int(found[1])
    assert seen == {"sbatch": code, "local": code}


SIGNALLED = """
import os, signal, sys
def take(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for name in ("TERM", "USR1", "USR2", "INT"):
    signal.signal(getattr(signal, "SIG" + name), take)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["sbatch", "local"])
def test_signals_to_srun_reach_the_tasks_alike(
    cluster: SlurmCluster, tmp_path: Path, launcher: str
) -> None:
    """USR1 to srun goes to every task; TERM to it kills them without one."""
    (tmp_path / "task.py").write_text(SIGNALLED)
    (tmp_path / "own.sbatch.j2").write_text(
        '{% extends "shipped/ddp.sbatch.j2" %}{% block launch %}\n'
        'mkdir -p "$run_dir/logs"\n'
        'srun --ntasks=2 --output="$run_dir/logs/rank-%t.log" -- {{ python | sh }} task.py &\n'
        'echo $! >"$SLURM_SUBMIT_DIR/srun-pid"\n'
        'code=0\nwait $! || code=$?\necho "srun ended with $code"\n'
        "launch true\n{% endblock %}\n"
    )
    job = cluster.popen(
        [*CLUSTERDDP, "submit", "--launcher", launcher, "--run-name", "a", "--wait",
         "--tasks-per-node", "2", "--template", "./own.sbatch.j2", "--nodelist", "h01",
         "--", "true"],
        cwd=tmp_path, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    logs = [tmp_path / f"jobs/a/logs/rank-{rank}.log" for rank in (0, 1)]
    wait_for(lambda: all(log.is_file() and "ready" in log.read_text() for log in logs), "tasks up")
    job_log = tmp_path / "jobs/a/logs/job.log"
    srun = tmp_path / "srun-pid"  # the script writes it beside the tasks' start
    wait_for(lambda: srun.exists() and srun.read_text().endswith("\n"), "the process of srun")

    def signal_srun(name: str) -> None:
        run = cluster.run if launcher == "local" else lambda argv: cluster.run_on("h01", argv)
        assert run(["kill", f"-{name}", srun.read_text().strip()]).returncode == 0

    signal_srun("USR1")
    wait_for(lambda: all("SIGUSR1" in log.read_text() for log in logs), "USR1 at both tasks")
    signal_srun("TERM")
    job.communicate(timeout=PATIENCE)
    # The real one has been seen to end with either: which depends on who is heard of first.
    assert re.search(r"srun ended with (0|137)$", job_log.read_text(), re.MULTILINE)
    assert not [log for log in logs if "SIGTERM" in log.read_text()]
