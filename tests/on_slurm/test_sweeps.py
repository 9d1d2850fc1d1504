"""Sweeps on a real Slurm, typed as a user would type them."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from clusterddp.checkpoints.catalog import name_of
from clusterddp.run.attempt import attempts
from clusterddp.run.run_dir import RunDir
from tests.on_slurm import test_notify as notices
from tests.on_slurm.campaign.stops import WITHOUT_GRACE
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.held import HOOKS
from tests.on_slurm.test_life import typed
from tests.on_slurm.test_submit import WHO, submit, told
from tests.training.ranks import run_ranks
from tests.training.trainings import config, train_rank
from tests.waiting import wait_for

TRAINING = [
    "--dataset", "synthetic", "--threads", "1", "--batch-size", "32", "--max-steps", "40",
    "--warmup-steps", "2", "--eval-every", "1000epochs", "--save-every", "10steps",
    "--precision", "fp32",
]  # fmt: skip
TRIALS = [(lr, str(seed)) for lr in ("0.002", "0.005") for seed in range(4)]
FAILING = 6
FAILS_ONCE = (
    "echo start {n}; if [ {n} = a ] || [ -e ok ]; then exit 0; fi; "
    "until [ -e go ]; do sleep 0.2; done; touch ok; exit 4"
)
LONG = 240
"""Seconds for many trainings on a machine that others use as well."""
UNTIL_GO = 'until [ -e "$0/go" ]; do sleep 0.1; done'


def status(cluster: SlurmCluster, folder: Path, name: str) -> Any:
    answer = typed(cluster, folder, "status", name, "--json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_each_trial_of_a_command_is_a_run_with_its_own_values(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    done = submit(
        cluster, tmp_path, "--run-name", "s", "--wait", "--sweep", "lr=0.1,it's $HOME",
        "--sweep", "seed=0..1", "--max-concurrent", "2",
        "--", sys.executable, "-c", WHO, "--lr={lr}", "{seed}", "{other}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [tmp_path / f"jobs/s-{index}" for index in range(4)]
    trials = [(lr, seed) for lr in ("0.1", "it's $HOME") for seed in "01"]
    for run, (lr, seed) in zip(runs, trials, strict=True):
        task = told(run, 0)
        assert task["argv"] == [f"--lr={lr}", seed, "{other}"]
        assert task["env"]["SLURM_ARRAY_TASK_ID"] == run.name[-1]
    assert len({told(run, 0)["env"]["MASTER_PORT"] for run in runs}) == 4


def test_a_sweep_is_one_line_of_jobs_and_is_stopped_and_cancelled_as_one(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    submit(
        cluster, tmp_path, "--run-name", "s", "--sweep", "t=300,301,302,303,304",
        "--max-concurrent", "2", "--", "sleep", "{t}", check=True,
    )  # fmt: skip
    wait_for(lambda: len([*tmp_path.glob("jobs/s-*/logs/rank-0.log")]) == 2, "two trials run")
    row = typed(cluster, tmp_path, "runs").stdout.splitlines()[1]
    assert row.split()[:2] == ["s", "running"]
    assert row.endswith("5 trials: 3 queued, 2 running")
    assert len(typed(cluster, tmp_path, "runs", "s-[0-3]").stdout.splitlines()) == 1 + 4
    before = all_say(cluster, tmp_path, "s")
    assert sorted(before.values()) == ["queued"] * 3 + ["running"] * 2
    one = typed(cluster, tmp_path, "cancel", "s-3")
    assert one.returncode == 0, one.stderr
    assert all_say(cluster, tmp_path, "s") == before | {"s-3": "cancelled"}
    asked = typed(cluster, tmp_path, "cancel", "s")
    assert asked.returncode == 2
    assert "Cancel 4 runs (2 running, 2 queued)?" in asked.stderr
    done = typed(cluster, tmp_path, "cancel", "s", "--yes")
    assert done.returncode == 0, done.stderr
    assert "s-3 has already ended: cancelled" in done.stdout

    def left() -> str:
        return str(cluster.run(["squeue", "-h", "-r"], check=True).stdout)

    wait_for(lambda: not left(), "the queue is empty")
    assert not [*tmp_path.glob("jobs/s-[23]/logs/rank-0.log")]  # none began meanwhile
    assert {*all_say(cluster, tmp_path, "s").values()} == {"cancelled"}


def all_say(cluster: SlurmCluster, folder: Path, name: str) -> dict[str, str]:
    """The states of a sweep's trials, on which Slurm, `status`, `runs` and `report` agree."""
    sweep = status(cluster, folder, name)
    of_status = {trial["run"]: trial["state"] for trial in sweep["trials"]}
    lines = typed(cluster, folder, "runs", name, check=True).stdout.splitlines()[1:]
    of_jobs = dict(line.split()[:2] for line in lines)
    report = json.loads(typed(cluster, folder, "report", name, "--json", check=True).stdout)
    of_report = {run["run"]: run["state"] for row in report["rows"] for run in row["trials"]}
    [array] = sweep["job_ids"]
    asked = ["squeue", "-h", "-r", "-t", "all", "-j", array, "-o", "%K %T"]
    words = {"PENDING": "queued", "RUNNING": "running", "CANCELLED": "cancelled"}
    shown = [line.split() for line in cluster.run(asked).stdout.splitlines()]
    # Slurm forgets an element that is cancelled before it starts, and calls the last of them N/A.
    of_slurm = dict.fromkeys(of_status, "cancelled")
    of_slurm |= {f"{name}-{i}": words[state] for i, state in shown if i.isdigit()}
    assert of_status == of_jobs == of_report == of_slurm
    return of_status


@pytest.mark.slow
def test_a_run_waits_for_all_trials_and_a_sweep_for_that_run_and_the_end_is_told_once(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = f"[ {{n}} != b ] || [ -e {tmp_path}/mended ] || exit 3; {UNTIL_GO}"
    tell = notices.program(tmp_path)
    submit(
        cluster, tmp_path, "--run-name", "s", "--sweep", "n=a,b,c", "--no-snapshot",
        "--notify", tell, "--", "bash", "-c", script, str(tmp_path), check=True,
    )  # fmt: skip
    submit(cluster, tmp_path, "--run-name", "b", "--after", "s", "--", "true", check=True)
    submit(
        cluster, tmp_path, "--run-name", "t", "--after", "b", "--sweep", "x=1,2",
        "--", "touch", f"{tmp_path}/t-{{x}}", check=True,
    )  # fmt: skip
    assert status(cluster, tmp_path, "t-1")["detail"] == "waits for b"
    wait_for(lambda: status(cluster, tmp_path, "s-1")["state"] == "failed", "the failed trial")
    assert status(cluster, tmp_path, "b")["detail"] == "waits for s"
    (tmp_path / "mended").touch()
    again = typed(cluster, tmp_path, "resume", "s-1")
    assert again.returncode == 0, again.stderr
    job = status(cluster, tmp_path, "b")["job_id"]
    assert f"b (job {job}) waits for it" in again.stderr
    [array] = status(cluster, tmp_path, "s")["job_ids"]
    own = status(cluster, tmp_path, "s-1")["array_task"]
    shown = cluster.run(["squeue", "-h", "-j", job, "-o", "%E"], check=True).stdout
    waits = {item.partition("(")[0] for item in shown.strip().split(",")}
    assert {item.removesuffix("_*") for item in waits} == {
        f"afterany:{array}", f"afterany:{own.partition('_')[0]}",
    }  # fmt: skip
    (tmp_path / "go").touch()
    wait_for(lambda: len([*tmp_path.glob("t-[12]")]) == 2, "both trials that wait", LONG)
    assert status(cluster, tmp_path, "b")["state"] == "done"
    assert len([*(tmp_path / "jobs/b/attempts").iterdir()]) == 1
    verdict, _, _ = notices.told(tmp_path)
    assert (verdict["sweep"], verdict["counts"]) == ("s", {"done": 3})
    notices.notice_job_is_gone(cluster, RunDir(tmp_path / "jobs/s"))
    assert not (tmp_path / "told-1.json").exists()


@pytest.mark.slow
def test_a_sweep_that_has_started_too_early_is_held_and_let_go_as_a_whole(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = f"trap 'exit 75' USR1 TERM; echo up; {UNTIL_GO}"
    submit(cluster, tmp_path, "--run-name", "a", "--no-snapshot", "--", "bash", "-c", script,
           str(tmp_path), check=True)  # fmt: skip
    submit(
        cluster, tmp_path, "--run-name", "t", "--after", "a", "--sweep", "x=1..3", "--",
        "touch", f"{tmp_path}/t-{{x}}", check=True,
    )  # fmt: skip
    log = tmp_path / "jobs/a/logs/rank-0.log"
    wait_for(lambda: log.exists() and "up" in log.read_text(), "the start of a")
    stopped = typed(cluster, tmp_path, "stop", "a", "--wait")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr

    def reasons() -> list[str]:
        return str(cluster.run(["squeue", "-h", "-r", "-o", "%r"], check=True).stdout).split("\n")

    wait_for(lambda: sum("held" in reason.lower() for reason in reasons()) == 3, "the holds")
    told = status(cluster, tmp_path, "t-2")
    assert told["state"] == "queued"
    assert told["detail"].startswith("waits for a (stopped"), told
    again = typed(cluster, tmp_path, "resume", "a")
    assert again.returncode == 0, again.stderr
    [array] = status(cluster, tmp_path, "t")["job_ids"]
    assert f"t (job {array}_[0-2]) waits for it" in again.stderr
    assert status(cluster, tmp_path, "t-2")["detail"] == "waits for a"
    (tmp_path / "go").touch()
    wait_for(lambda: len([*tmp_path.glob("t-[123]")]) == 3, "all trials", LONG)
    wait_for(lambda: status(cluster, tmp_path, "t")["counts"] == {"done": 3}, "all are done", LONG)
    assert not (tmp_path / "jobs/t-1/attempts/0002").exists()


@pytest.mark.slow
def test_a_trial_whose_requeue_is_refused_goes_on_as_its_element_of_another_array(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    done = submit(
        cluster, tmp_path, "--run-name", "c", "--sweep", "n=a,b", "--retries", "1",
        "--no-snapshot", "--", "bash", "-c", FAILS_ONCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = tmp_path / "jobs/c-1/logs/rank-0.log"
    wait_for(log.exists, "the trial has started")
    [first] = status(cluster, tmp_path, "c")["job_ids"]
    cluster.run(["scontrol", "update", f"JobId={first}_1", "Requeue=0"], check=True)
    (tmp_path / "go").touch()
    wait_for(lambda: log.read_text().count("start b") == 2, "it has started again")
    wait_for(lambda: status(cluster, tmp_path, "c")["counts"] == {"done": 2}, "both are done")
    told = status(cluster, tmp_path, "c-1")
    assert (told["state"], told["restart_reasons"]) == ("done", ["failed"])
    assert told["array_task"].endswith("_1")
    assert not told["array_task"].startswith(f"{first}_")
    assert not (tmp_path / "jobs/c-0/attempts/0002").exists()


@pytest.mark.slow
def test_a_failed_trial_is_submitted_again_and_others_are_added(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    words = ["--", "bash", "-c", f"echo at {{n}}; [ {{n}} != b ] || [ -e {tmp_path}/mended ]"]
    submit(cluster, tmp_path, "--run-name", "c", "--sweep", "n=a,b", "--wait", *words)
    assert status(cluster, tmp_path, "c")["counts"] == {"done": 1, "failed": 1}
    (tmp_path / "mended").touch()
    again = typed(cluster, tmp_path, "resume", "c", "--wait")
    assert again.returncode == 0, again.stderr
    more = typed(cluster, tmp_path, "resume", "c", "--sweep", "n=b,c,d", "--wait")
    assert more.returncode == 0, more.stderr
    assert status(cluster, tmp_path, "c")["counts"] == {"done": 4}
    logs = {i: (tmp_path / f"jobs/c-{i}/logs/rank-0.log").read_text() for i in range(4)}
    assert [text.count("at ") for text in logs.values()] == [1, 2, 1, 1]
    assert "at d" in logs[3]
    none = typed(cluster, tmp_path, "resume", "c")
    assert none.returncode == 2
    assert "every trial of c is done, queued or running" in none.stderr


def test_a_sweep_that_slurm_cannot_hold_is_refused_with_the_figures(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    done = submit(cluster, tmp_path, "--sweep", "n=0..1001", "--", "sleep", "{n}")
    assert done.returncode == 2
    assert "1002 trials have indices up to 1001, but MaxArraySize 1001 of this cluster" in (
        done.stderr
    )
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def three_hosts(slurm_available: None) -> Iterator[SlurmCluster]:
    """Hosts with room for two trials each; Slurm misses one that is lost after five seconds."""
    # What is preempted is told at once, and has the time to save on a busy machine.
    conf = {"SlurmdTimeout": "5", "KillWait": "60", "PartitionName=main": WITHOUT_GRACE}
    with SlurmCluster(hosts=3, cpus_per_host=2, conf=conf) as booted:
        yield booted


@pytest.mark.slow
@pytest.mark.timeout(600)  # thirteen trainings, each a process that imports torch
def test_a_sweep_that_is_struck_has_the_table_and_the_weights_of_single_runs(
    three_hosts: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    """Two trials are preempted, two lose their host, one comes to its limit, one fails."""
    training = [*TRAINING, "--data-dir", str(synthetic_dir)]
    strike(three_hosts, tmp_path, training)
    accuracies: dict[str, list[tuple[float, str]]] = {}
    for index, (lr, seed) in enumerate(TRIALS):
        if index == FAILING:
            continue
        settings = config(
            synthetic_dir, lr=float(lr), seed=int(seed), batch_size=32, warmup_steps=2,
            max_steps=40, eval_every="1000epochs", precision="fp32",
        )  # fmt: skip
        single = tmp_path / f"single-{index}"
        (result,) = run_ranks(1, train_rank, settings, single, None, False)
        same_weights(single, tmp_path / f"jobs/s-{index}")
        accuracies.setdefault(lr, []).append((result["accuracy"], f"s-{index}"))
    lr, seed = TRIALS[0]
    submitted = submit(three_hosts, tmp_path, *training, "--run-name", "one", "--lr", lr, "--seed",
                       seed, "--wait")  # fmt: skip
    assert submitted.returncode == 0, submitted.stderr
    same_weights(tmp_path / "jobs/one", tmp_path / "jobs/s-0")

    table = []
    for lr, known in accuracies.items():
        values = [accuracy for accuracy, _ in known]
        mean, spread = fmean(values), stdev(values)
        state = "4 done" if len(known) == 4 else "3 done, 1 failed"
        best = max(known, key=lambda each: each[0])[1]
        table.append((mean, [lr, f"{mean:.2%}", f"{spread:.2%}", str(len(known)), state, best]))
    table.sort(key=lambda row: -row[0])
    report = typed(three_hosts, tmp_path, "report", "s", check=True).stdout.rstrip("\n")
    head, *rows = [re.split("  +", line) for line in report.partition("\n\n")[2].splitlines()]
    names = ["lr", "TEST-ACCURACY", "STD", "N", "STATE", "BEST-TRIAL"]
    places = [head.index(name) for name in names]
    assert [[row[place] for place in places] for row in rows] == [row for _, row in table]


def strike(cluster: SlurmCluster, folder: Path, training: list[str]) -> None:
    """Train the sweep `s` of TRIALS, while most of what can happen to a trial does."""
    holds = [folder / "holds" / f"{lr}-{seed}" for lr, seed in TRIALS]
    for path in holds:
        path.mkdir(parents=True)
    for path in holds[:6]:
        (path / "want-step-20").write_text("until told")
    (holds[FAILING] / "fail-step-5.0").touch()
    hooks = os.pathsep.join(filter(None, [str(HOOKS), os.environ.get("PYTHONPATH")]))
    done = submit(
        cluster, folder, *training, "--run-name", "s", "--max-concurrent", "6",
        "--sweep", "lr=0.002,0.005", "--sweep", "seed=0..3",
        "--setup", f"export CAMPAIGN_HOLDS={folder}/holds/$trial_lr-$trial_seed",
        env={"PYTHONPATH": hooks, "CAMPAIGN_PACE": "0.05"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [array] = status(cluster, folder, "s")["job_ids"]

    def release(*trials: int) -> None:
        for index in trials:
            (holds[index] / "want-step-20").unlink()

    def told_to_stop(*trials: int) -> bool:
        return not any((holds[index] / "want-step-20").exists() for index in trials)

    wait_for(lambda: len([*folder.glob("holds/*/held-*")]) == 6, "six trials at step 20", LONG)
    running = cluster.run(["squeue", "-h", "-r", "-t", "R", "-o", "%N %K %M"], check=True).stdout
    places = sorted(line.split() for line in running.splitlines())
    preempted, lost, (limited, spared) = (
        [int(index) for host, index, _ in places if host == name] for name in cluster.hosts
    )
    release(spared)
    (holds[limited] / "want-step-20.0").touch()  # it stays there until its next limit is set
    # The signal is due two minutes ahead of the limit; a trial has run for minutes where others
    # use the machine.
    minutes = max(int(age.split(":")[-2]) for _, _, age in places)
    limit = ["scontrol", "update", f"JobId={array}_{limited}"]
    cluster.run([*limit, f"TimeLimit={minutes + 2}"], check=True)
    cluster.sbatch("#!/bin/sh\n", "-p", "high", "-w", "h01", "--exclusive", "-o", "/dev/null")
    wait_for(lambda: told_to_stop(*preempted), "the preemption", LONG)
    cluster.kill_host("h02")
    release(*lost)
    wait_for(lambda: told_to_stop(limited), "the signal ahead of the limit", LONG)
    cluster.run([*limit, f"TimeLimit={minutes + 30}"], check=True)
    (holds[limited] / "want-step-20.0").unlink()

    def states() -> dict[str, int]:
        counts: dict[str, int] = status(cluster, folder, "s")["counts"]
        return counts

    wait_for(lambda: {*states()} <= {"done", "failed"}, "the end of all trials", LONG)
    assert states() == {"done": 7, "failed": 1}
    for index in range(len(TRIALS)):
        assert status(cluster, folder, f"s-{index}")["array_task"] == f"{array}_{index}"
        later = attempts(RunDir(folder / f"jobs/s-{index}"))[1:]
        steps = [record.step for attempt in later if (record := attempt.read_record())]
        if index in lost:
            assert steps == [10]
        elif index in (*preempted, limited):
            assert len(steps) == 1
            assert steps[0] >= 20  # they saved when they were told
        else:
            assert steps == []
    failed = status(cluster, folder, f"s-{FAILING}")
    assert "an error of the program at step-5" in failed["first_failure"]


def same_weights(one: Path, other: Path) -> None:
    """Both runs have ended with the very same weights."""
    mine, theirs = (
        torch.load(RunDir(run).checkpoints / name_of(40), weights_only=True)["model"]
        for run in (one, other)
    )
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
