"""`clusterddp report` on the terminal and as JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.files import write_record
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import GpuUse, SlowRank, SlowRanks, Spent
from clusterddp.run.run_dir import RunDir
from tests.cli.made_reports import achieve, attempt, measure
from tests.cli.made_runs import BOOM, FAILURE, Workplace, ended, started, submitted, workplace
from tests.cli.test_imports import HEAVY, folder, watched
from tests.event_lines import add_event

__all__ = ["folder", "workplace"]

DONE = (submitted("12"), started("12"), ended("12", 0))


def account(workplace: Workplace, *argv: str) -> dict[str, str]:
    """The lines of the terminal by their labels; of a label that comes twice the last."""
    got = workplace.invoke("report", *argv)
    assert (got.code, got.err) == (0, "")
    return {line[:11].strip(): line[11:] for line in got.out.splitlines()}


def objects(workplace: Workplace, *argv: str) -> list[dict[str, Any]]:
    got = workplace.invoke("report", "--json", *argv)
    assert (got.code, got.err) == (0, "")
    found: list[dict[str, Any]] = json.loads(got.out)
    return found


def test_one_run_is_told_at_length(workplace: Workplace) -> None:
    achieve(workplace.run("one", *DONE), warnings=["no GPU was found"])
    lines = account(workplace)
    assert lines["run"] == "one"
    assert lines["state"] == "done"
    assert lines["result"] == "test accuracy 98.76%, test loss 0.0432, step 50, epoch 1"
    assert lines["training"] == "12.5s, 3,604 images/s, latest attempt 20.2s in total"
    assert lines["ranks"] == "4 ranks on h01 h02"
    assert lines["device"] == "cpu, fp32, gloo, ddp, 1 thread per rank"
    assert lines["memory"] == "peak of any rank 1.0 GiB"
    assert lines["model"].startswith("convnet, 28,938 parameters, mnist, 60,000 training")
    assert lines["versions"] == "python 3.11.7, torch 2.9.0"
    assert lines["confusions"] == "4 predicted as 9: 12 times; 7 predicted as 2: once"
    assert lines["warning"] == "no GPU was found"
    assert lines["files"] == str(workplace.root / "one")
    assert not {"straggler", "starts", "failure"} & lines.keys()


def test_a_training_that_has_diverged_says_so(workplace: Workplace) -> None:
    achieve(workplace.run("one", *DONE), loss=float("nan"))
    assert "test loss nan" in account(workplace)["result"]
    assert objects(workplace)[0]["loss"] is None


def test_several_runs_are_a_table_in_the_order_given(workplace: Workplace) -> None:
    achieve(workplace.run("small", *DONE), rates=(1000.0,))
    achieve(workplace.run("large", *DONE), loss=float("nan"))
    workplace.run("bad", submitted("1"), started("1"), ended("1", 1))
    got = workplace.invoke("report", "large", "small", "bad", "small")
    header, *rows = [line.split() for line in got.out.splitlines()]
    assert header == [
        "NAME", "STATE", "MODEL", "RANKS", "NODES", "TEST-ACCURACY", "TRAIN-LOSS", "TRAIN-SECONDS",
        "IMAGES/S", "PEAK-MEMORY", "ATTEMPTS",
    ]  # fmt: skip
    assert rows == [
        [
            "large",
            "done",
            "convnet",
            "4",
            "2",
            "98.76%",
            "0.4000",
            "12.5",
            "3,604",
            "1.0",
            "GiB",
            "1",
        ],
        [
            "small",
            "done",
            "convnet",
            "1",
            "1",
            "98.76%",
            "0.4000",
            "12.5",
            "900",
            "1.0",
            "GiB",
            "1",
        ],
        ["bad", "failed", "convnet", "8", "2", "-", "-", "-", "-", "-", "1"],
    ]
    columns = {line.index(word) for line, word in zip(got.out.splitlines(), ("STATE", "done",
               "done", "failed"), strict=True)}  # fmt: skip
    assert len(columns) == 1


def test_a_table_has_no_column_of_which_nothing_is_known(workplace: Workplace) -> None:
    for name in ("a", "b"):
        run = workplace.run(name, *DONE)
        spec = replace(run.load_spec(), train=None, command=("true",))
        run.spec.write_text(spec.to_json())
    header = workplace.invoke("report", "a", "b").out.splitlines()[0].split()
    assert header == ["NAME", "STATE", "RANKS", "NODES", "ATTEMPTS"]


def test_json_is_a_list_with_stable_names(workplace: Workplace) -> None:
    achieve(workplace.run("one", *DONE))
    workplace.run("two", *DONE)
    one, two = objects(workplace, "one", "two")
    assert set(one) == set(two) == {
        "name", "state", "detail", "first_failure", "directory", "job_id", "launcher", "complete",
        "command", "model", "dataset", "strategy", "parameters", "train_images", "test_images",
        "accuracy", "loss", "train_loss", "step", "epoch", "train_seconds", "total_seconds",
        "capture_seconds",
        "images_per_second", "world_size", "num_nodes", "hosts", "where", "preflight", "device",
        "switches",
        "precision", "backend", "threads", "cuda_graph", "versions", "peak_memory_bytes", "ranks",
        "stragglers", "num_attempts", "repeated_steps", "lost_seconds", "attempts", "usage",
        "confusions", "settings", "warnings", "weights_sha256", "finished",
    }  # fmt: skip
    assert (one["name"], one["complete"], one["accuracy"]) == ("one", True, 0.9876)
    assert one["ranks"][3] == {
        "rank": 3, "host": "h02", "images_per_second": 1005.0, "peak_memory_bytes": 1 << 30,
    }  # fmt: skip
    assert one["confusions"][0] == {"label": 4, "predicted": 9, "count": 12}
    assert (two["complete"], two["accuracy"], two["ranks"]) == (False, None, [])


def test_a_straggler_is_named_with_its_host(workplace: Workplace) -> None:
    achieve(workplace.run("one", *DONE), rates=(1000.0, 1000.0, 1000.0, 600.0))
    told = "rank 3 on h02: 600 images/s, 60% of the other ranks' median, 1,000"
    assert account(workplace)["straggler"] == told
    [report] = objects(workplace)
    assert report["stragglers"] == [
        {"rank": 3, "host": "h02", "images_per_second": 600.0, "median_of_others": 1000.0}
    ]


def test_a_straggler_shows_while_the_run_trains(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("12"), started("12"))
    measure(run, (1000.0, 500.0), tested=False)
    made = attempt(run, 1, step=0, last=50)
    fields = dict.fromkeys(("rank", "local_rank", "node_rank", "pid", "restart"), 1)
    words = {"host": "h07", "job_id": "12", "step_id": "0", "started": 1.0}
    (made.outcomes / "rank-1.json").write_text(json.dumps({**fields, **words}))
    workplace.command("squeue", "echo '12|RUNNING|None'")
    lines = account(workplace)
    assert lines["state"] == "running"
    assert lines["result"] == "training loss 0.4000, at step 50, epoch 1"
    assert lines["training"] == "12.5s, 1,500 images/s"
    assert lines["straggler"].startswith("rank 1 on h07: 500 images/s, 50%")


def test_starts_are_told_with_why_each_ended(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("12"))
    for number, cause in ((1, "time limit"), (2, ""), (3, "")):
        add_event(run, "started", job_id="12", restart=number - 1, attempt=number, nodelist="h01")
        if cause:
            add_event(run, "ended", job_id="12", attempt=number, exit_code=75, cause=cause)
    attempt(run, 1, step=0, last=40, cause="stopped", reason="signal")
    attempt(run, 2, step=40, last=70)
    attempt(run, 3, step=60, last=80)
    measure(run)
    workplace.command("squeue", "echo '12|RUNNING|None'")
    got = workplace.invoke("report")
    assert (
        "attempts   3, 10 steps repeated, 1m40s from checkpoint to restart\n"
        "           1  steps 0 to 40; time limit\n"
        "           2  steps 40 to 70; killed\n"
        "           3  steps 60 to 80; running\n"
    ) in got.out
    [report] = objects(workplace)
    assert [one["cause"] for one in report["attempts"]] == ["time limit", "killed", "running"]
    assert (report["num_attempts"], report["repeated_steps"]) == (3, 10)


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ({"cause": "preempted"}, "preempted"),
        ({"cause": "failed", "how": "all hang"}, "failed: all hang"),
        ({"cause": "node lost", "first_failure": FAILURE}, "node lost"),
        ({"cause": "failed", "first_failure": FAILURE}, f"failed: {BOOM}"),
        ({}, "failed: rank 1 on h02 failed first: killed by SIGTERM (cancelled, time limit or "
         "preempted) (logs/rank-1.log)"),
    ],
)  # fmt: skip
def test_an_attempt_in_which_no_ranks_met_has_the_recorded_cause(
    workplace: Workplace, end: dict[str, Any], shown: str
) -> None:
    run = workplace.run("one", submitted("12"))
    for number in (1, 2):
        add_event(run, "started", job_id="12", restart=number - 1, attempt=number)
    if end:
        add_event(run, "ended", job_id="12", attempt=1, exit_code=143, **end)
    outcomes = Attempt(run, 1).outcomes
    outcomes.mkdir(parents=True)
    Attempt(run, 2).outcomes.mkdir(parents=True)
    record = {
        "rank": 1, "local_rank": 0, "node_rank": 1, "host": "h02", "pid": 1, "job_id": "12",
        "restart": 0, "step_id": "0", "started": 1.0, "ended": 2.0, "exit_code": 143,
        "signal": "SIGTERM", "error": None,
    }  # fmt: skip
    (outcomes / "rank-1.json").write_text(json.dumps(record))
    workplace.command("squeue", "echo '12|RUNNING|None'")
    assert f"           1  no training step; {shown}\n" in workplace.invoke("report").out


def test_what_was_paid_and_who_was_slow_stand_in_the_account(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("12"))
    began = 1_700_000_000.0
    for number, hour in ((1, 0), (2, 10)):
        times = {"attempt": number, "job_id": "12", "restart": number - 1}
        add_event(run, "started", time=began + 3600 * hour, nodelist="h[01-02]", **times)
        add_event(run, "ended", time=began + 3600 * (hour + 5), cause="failed", **times)
    slow = SlowRank(3, "h\033[31m02", 0.412, 92.0, 610, 690, began)
    first, second = Spent(began + 3600, 7200, 1800, 60), Spent(began + 36000, waiting=0.0)
    for number, spent in ((1, first), (2, second)):
        made = attempt(run, number, step=0 if number == 1 else 30, last=40)
        made.renew_liveness(40, None, spent)
        write_record(made.stragglers, SlowRanks((slow,) if number == 1 else ()))
    lines = account(workplace)
    assert lines["usage"] == (
        "20.00 node-hours, 80.00 GPU-hours: computing 11.2%, waiting for other ranks 3.8%, "
        "startup 10.0%, checkpointing 0.2%, repeated steps 5.0%, other 69.8%"
    )
    assert lines["slow rank"] == (
        "rank 3 on h\\x1b[31m02, attempt 1: 41% of the other ranks' median speed for 1m32s (610 "
        "steps from step 690)"
    )
    [report] = objects(workplace)
    assert report["usage"]["node_hours"] == 20.0
    assert report["usage"]["gpu_hours"] == 80.0
    assert report["attempts"][0]["stragglers"][0]["host"] == "h\033[31m02"


def test_of_a_command_the_whole_is_told_and_how_busy_its_gpus_were(workplace: Workplace) -> None:
    run = workplace.run("mine", submitted("12"))
    spec = json.loads(run.spec.read_text())
    run.spec.write_text(json.dumps({**spec, "train": None, "command": ["python", "mine.py"]}))
    for event, began in (("started", 1_700_000_000.0), ("ended", 1_700_001_800.0)):
        add_event(run, event, time=began, job_id="12", attempt=1, nodelist="h01")
    folder = Attempt(run, 1).outcomes
    folder.mkdir(parents=True)
    assert account(workplace)["usage"] == "0.5000 node-hours, 2.00 GPU-hours"
    write_record(folder / "gpus-0.json", GpuUse("h01", 4, 360, 0.631))
    told = "0.5000 node-hours, 2.00 GPU-hours; GPU utilization 63.1% (NVML)"
    assert account(workplace)["usage"] == told
    write_record(folder / "gpus-0.json", GpuUse("h01", 4, 360, 0.631, 411.7, 61 << 30))
    gpus = "GPU utilization 63.1%, peak memory 61.0 GiB, 412 W per GPU (NVML)"
    assert account(workplace)["usage"].endswith(f"; {gpus}")


def test_a_start_that_was_interrupted_or_failed_by_hand_says_so(workplace: Workplace) -> None:
    run = workplace.run("one", *DONE)
    attempt(run, 1, step=0, last=40, cause="stopped", reason="interrupt")
    failed = attempt(run, 2, step=40, last=40)
    (failed.outcomes / "rank-3.json").write_text(
        json.dumps(
            {"rank": 3, "local_rank": 1, "node_rank": 1, "host": "h02", "pid": 1, "job_id": "",
             "restart": 0, "step_id": "", "started": 1.0, "ended": 2.0, "exit_code": 1,
             "error": {"type": "ValueError", "message": "boom"}}
        )
    )  # fmt: skip
    attempt(run, 3, step=40, last=50, cause="done", reason="")
    out = workplace.invoke("report").out
    assert "\n           1  steps 0 to 40; stopped: interrupt\n" in out
    assert f"\n           2  steps 40 to 40; failed: {BOOM}\n" in out
    assert "\n           3  steps 40 to 50; done\n" in out
    failed.record.unlink()  # as where its checkpoint was refused
    out = workplace.invoke("report").out
    assert f"\n           2  no training step; failed: {BOOM}\n" in out


def test_a_failed_run_is_told_with_what_its_metrics_hold(workplace: Workplace) -> None:
    end = ended("1", 1, first_failure=FAILURE)
    measure(workplace.run("bad", submitted("1"), started("1"), end))
    lines = account(workplace, "bad")
    assert lines["state"] == "failed: exit code 1"
    assert lines["failure"] == BOOM
    told = "test accuracy 98.76%, test loss 0.0432, training loss 0.4000, at step 50, epoch 1"
    assert lines["result"] == told


def test_a_run_of_a_command_is_told_by_its_state(workplace: Workplace) -> None:
    run = workplace.run("mine", *DONE)
    spec = json.loads(run.spec.read_text())
    run.spec.write_text(json.dumps({**spec, "train": None, "command": ["python", "my train.py"]}))
    lines = account(workplace)
    assert (lines["state"], lines["command"]) == ("done", "python 'my train.py'")
    assert "model" not in lines


def test_settings_that_differ_from_the_defaults_are_told_as_flags(workplace: Workplace) -> None:
    run = workplace.run("one", *DONE)
    spec = json.loads(run.spec.read_text())
    spec["train"] |= {"batch_size": 128, "compile": True, "data_dir": "/my data"}
    run.spec.write_text(json.dumps(spec))
    assert account(workplace)["settings"] == "'--data-dir=/my data' --batch-size=128 --compile"
    [report] = objects(workplace)
    assert report["settings"] == {"data_dir": "/my data", "batch_size": 128, "compile": True}


DAMAGE = {
    "empty": b"",
    "torn": b"{",
    "another type": b"[]",
    "no UTF-8": b"\xff\x00\xfe",
    "wrong parts": b'{"attempts": [1, {"attempt": "x"}], "ranks": {"a": 1}, "train": 5}',
    "wrong values": b"""{"accuracy": "high", "loss": "low", "world_size": 1e999, "hosts": 3,
        "versions": [], "ranks": [{"rank": null}, {"rank": 0, "images_per_second": "fast"}],
        "warnings": {"a": 1}, "confusion": [[1, "x"], [2]], "step": 50, "steps": "x",
        "worst": [{"shape": "x"}, 5, {"index": 1, "label": 1, "predicted": 2, "shape": [-1, 3]}],
        "began": "x", "cause": 3}""",
    "huge": b'{"kind": "train", "step": 1' + b"0" * 400 + b', "rank_images_per_second": 5}',
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "record", ["report", "evaluation", "metrics", "resolved", "spec", "attempt.json", "end.json"]
)
def test_a_damaged_record_takes_nothing_from_the_others(
    workplace: Workplace, record: str, damage: str
) -> None:
    run = workplace.run("one", *DONE)
    achieve(run)
    made = attempt(run, 1, step=0, last=50, cause="done", reason="")
    path = made.path / record if record.endswith(".json") else getattr(run, record)
    path.write_bytes(DAMAGE[damage])
    lines = account(workplace, "one")
    assert lines["state"] == "done"
    assert lines["result"] == "test accuracy 98.76%, test loss 0.0432" + (
        ", training loss 0.4000, at step 50, epoch 1"
        if record == "report" and not damage.startswith("wrong") and damage != "huge"
        else ", step 50, epoch 1"
    )


def test_a_report_of_an_earlier_start_is_not_shown_for_a_later_one(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("12"), started("12"))
    achieve(run, attempt=1)
    attempt(run, 1, step=0, last=50, cause="done", reason="")
    attempt(run, 2, step=50, last=60)
    run.metrics.write_text('{"kind": "train", "step": 60, "loss": 0.5}\n')
    workplace.command("squeue", "echo '12|RUNNING|None'")
    [report] = objects(workplace)
    assert (report["complete"], report["step"], report["accuracy"]) == (False, 60, None)
    assert report["confusions"] == []


HOSTILE = "h\x1b[31m<script>\u202e\u2028x\nrun forged\r"


def test_what_strangers_wrote_neither_moves_the_cursor_nor_forges_lines(
    workplace: Workplace,
) -> None:
    run = workplace.run("one", *DONE)
    achieve(
        run, hosts=[HOSTILE], warnings=[HOSTILE], device=HOSTILE, model=HOSTILE,
        versions={"torch": HOSTILE},
    )  # fmt: skip
    achieve(workplace.run("two", *DONE))
    for argv in (["one"], ["one", "two"], ["--json"]):
        out = workplace.invoke("report", *argv).out
        assert not any(character in out for character in "\x1b\u202e\u2028\r")
        assert "\nrun forged" not in out
    assert "\\x1b[31m<script>\\u202e" in workplace.invoke("report", "one").out


def test_runs_are_found_by_job_id_and_directory_too(workplace: Workplace) -> None:
    achieve(workplace.run("one", *DONE))
    assert account(workplace, "12")["run"] == "one"
    assert account(workplace, "jobs/one")["run"] == "one"


def test_neither_torch_nor_matplotlib_is_loaded(folder: Path) -> None:
    watched(folder, ["submit", "--run-name=x", "--no-snapshot", "--", "/bin/true"])
    achieve(RunDir(folder / "jobs/x"))
    for argv in (["report", "x"], ["report", "x", "--json"], ["report", "--help"]):
        loaded, _ = watched(folder, argv)
        assert not loaded & {"jinja2", "matplotlib", "PIL", *HEAVY}
