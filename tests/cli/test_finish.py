import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.finish import command
from clusterddp.run_dir import RunDir
from clusterddp.spec import JobSpec, Resources
from clusterddp.train_config import TrainConfig

REPORT = {
    "accuracy": 0.9876, "loss": 0.04, "train_seconds": 12.0, "total_seconds": 20.0,
    "images_per_second": 10000.0, "world_size": 4, "hosts": ["h01", "h02"], "finished": 200.0,
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "mnist", train=TrainConfig())


def make_run(path: Path, **request: Any) -> RunDir:
    spec = JobSpec(
        run_name=path.name, run_dir=str(path), resources=Resources(), python="python", **request
    )
    with RunDir.create(spec, "#!/bin/bash\n") as run:
        pass  # and it stays
    run.add_event("started", job_id="17", restart=0)
    run.outcomes.mkdir()
    return run


def record(run: RunDir, rank: int, code: int, **fields: Any) -> None:
    content = {
        "rank": rank, "local_rank": rank, "node_rank": 0, "host": "h01", "pid": 1, "job_id": "17",
        "restart": 0, "step_id": "0", "started": 100.0, "ended": 150.0 + rank, "exit_code": code,
        "signal": None, "error": None,
    }  # fmt: skip
    run.outcome(rank).write_text(json.dumps({**content, **fields}))


def report(run: RunDir, **fields: Any) -> None:
    run.report.write_text(json.dumps({**REPORT, "finished": 4e9, **fields}))


def finish(run: RunDir, srun_code: int, restart: int = 0) -> int:
    argv = [str(run.path), f"--exit-code={srun_code}", "--job-id=17", f"--restart={restart}"]
    code = command.main(argv, standalone_mode=False)
    assert isinstance(code, int)
    return code


def test_a_finished_run_is_told_in_one_line(run: RunDir, capsys: Any) -> None:
    record(run, 0, 0)
    report(run)
    assert finish(run, 0) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    for word in ("98.76%", "0.0400", "12.0 s", "10,000 images/s", "4 ranks of 2 hosts"):
        assert word in lines[0]
    event = run.read_events()[-1]
    assert (event["event"], event["job_id"], event["restart"], event["exit_code"]) == (
        "ended", "17", 0, 0,
    )  # fmt: skip
    assert event["first_failure"] is None


def test_the_first_failure_is_named_and_its_code_wins_over_sruns(run: RunDir, capsys: Any) -> None:
    error = {"type": "RuntimeError", "message": "boom", "peer_lost": False}
    record(run, 1, 1, error=error)
    record(run, 0, 143, signal="SIGTERM")
    assert finish(run, 143) == 1
    out = capsys.readouterr().out
    assert "rank 1 on h01 failed first: RuntimeError: boom (logs/rank-1.log)" in out
    assert "--rank 1" in out
    event = run.read_events()[-1]
    assert event["exit_code"] == 1
    assert event["first_failure"]["rank"] == 1


def test_a_task_killed_with_its_parent_is_found_in_the_job_log(run: RunDir, capsys: Any) -> None:
    record(run, 0, 1, error={"type": "PeerError", "message": "lost", "peer_lost": True})
    run.job_log.write_text(
        "clusterddp: mnist, job 16 on h01, Mon\nsrun: error: h01: task 0: Killed\n"
        "clusterddp: mnist, job 17 on h01, Tue\nsrun: error: h01: task 1: Killed\n"
    )
    assert finish(run, 137) == 137
    assert "rank 1 on h01 failed first: killed by SIGKILL" in capsys.readouterr().out


def test_sruns_zero_does_not_hide_a_failed_rank(run: RunDir) -> None:
    report(run)
    record(run, 0, 3)
    assert finish(run, 0) == 3


@pytest.mark.parametrize("older", [None, {"finished": 1.0}], ids=["none", "of an earlier start"])
def test_sruns_zero_without_a_report_is_a_failure(
    run: RunDir, capsys: Any, older: dict[str, float] | None
) -> None:
    """srun exits 0 when it was told to end (TERM), whatever the tasks did."""
    record(run, 0, 0)
    if older:
        report(run, **older)
    assert finish(run, 0) == 1
    assert "did not finish" in capsys.readouterr().out


def test_a_persons_own_command_needs_no_report(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "own", command=("python", "train.py"))
    record(run, 0, 0)
    assert finish(run, 0) == 0
    assert "done" in capsys.readouterr().out


def test_a_script_that_failed_before_its_tasks_keeps_its_code(run: RunDir, capsys: Any) -> None:
    assert finish(run, 7) == 7
    assert "no task has started" in capsys.readouterr().out


def test_records_of_an_earlier_start_do_not_count(run: RunDir) -> None:
    record(run, 0, 3)
    run.add_event("started", job_id="17", restart=1)
    report(run)
    assert finish(run, 0, restart=1) == 0


def test_a_damaged_run_directory_still_gives_a_verdict(tmp_path: Path, capsys: Any) -> None:
    assert finish(RunDir(tmp_path / "gone"), 9) == 9
    assert "cannot" in capsys.readouterr().err


def test_no_torch_is_needed(run: RunDir) -> None:
    program = (
        "import sys; from clusterddp.cli.finish import command; "
        "command.main(sys.argv[1:], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    argv = [sys.executable, "-c", program, str(run.path), "--exit-code=1"]
    assert subprocess.run(argv, check=False, timeout=30).returncode == 0
