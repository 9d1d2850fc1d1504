"""`clusterddp compare`: on this workstation with a stand-in for the training, and once for real."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.commands import compare
from clusterddp.comparison import plan
from clusterddp.comparison.results import Row
from clusterddp.processes import hardware
from clusterddp.reporting import plots
from clusterddp.request.spec import JobSpec
from clusterddp.run.run_dir import RunDir
from clusterddp.submission import submit
from tests.cli.made_runs import Workplace, ended, started, submitted, workplace
from tests.hostile import CARRIED, REFUSED
from tests.waiting import PATIENCE, dying_with_us, processes_in, wait_for

__all__ = ["workplace"]

SAVE_SCALING = plots.save_scaling
# Ends as a training would that makes 100 images/s a rank, and does first what a test asks of it.
STAND_IN = """
import json, os, signal, sys, time
run, ranks, device, first = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
def say(event, **fields):
    with open(run + "/events.jsonl", "a") as file:
        json.dump({"event": event, "job_id": "1", "time": time.time(), **fields}, file)
        file.write("\\n")
say("submitted", launcher="local", pid=os.getpid(), host=os.uname().nodename)
say("started")
with open(run + "/environ.json", "w") as file:
    json.dump(dict(os.environ), file)
exec(first)
report = {"images_per_second": 100.0 * ranks, "train_seconds": 2.0, "accuracy": 0.5,
          "hosts": ["here"], "device": device, "threads": 1, "steps": 7}
with open(run + "/report.json", "w") as file:
    json.dump(report, file)
say("ended", exit_code=0)
"""
FAILS = """
print("Traceback"); print("RuntimeError: boom")
say("ended", exit_code=1); sys.exit(1)
"""
# As a person's Ctrl-C while the run is under way; it is passed on, and this leaves by it.
INTERRUPTED = """
def leave(*_):
    say("ended", exit_code=130)
    sys.exit(130)
signal.signal(signal.SIGINT, leave)
os.kill(os.getppid(), signal.SIGINT)
while True: signal.pause()
"""
# Answers each Ctrl-C that is passed on with the next one.
STAYS = """
signal.signal(signal.SIGINT, lambda *_: os.kill(os.getppid(), signal.SIGINT))
os.kill(os.getppid(), signal.SIGINT)
while True: signal.pause()
"""

Answer = Callable[..., Any]


@pytest.fixture
def comparing(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """`clusterddp compare ARGV`; `first` is what the run of each name does before anything else."""

    def invoke(*argv: str, gpus: int = 0, first: dict[str, str] | None = None) -> Any:
        def stand_in(row: Row, spec: JobSpec) -> list[str]:
            does = (first or {}).get(spec.run_name, "")
            seen = [spec.run_dir, str(row.ranks), "cuda" if gpus else "cpu", does]
            return [sys.executable, "-SEc", STAND_IN, *seen]

        monkeypatch.setattr(plan, "_argv", stand_in)
        monkeypatch.setattr(hardware, "visible_gpus", lambda: gpus)
        return workplace.invoke("compare", *argv)

    for module in (compare, submit):
        monkeypatch.setattr(module, "check_inputs", lambda *_, **__: None)
    monkeypatch.setattr(plots, "save_scaling", lambda *_: None)
    return invoke


def rows_of(out: str) -> dict[str, dict[str, Any]]:
    return {f"{row['strategy']} {row['devices']}": row for row in json.loads(out)}


def test_each_row_is_a_run_and_a_line_of_the_table(comparing: Answer, workplace: Workplace) -> None:
    got = comparing("--run-name=a", "--world-sizes=1,4")
    assert got.code == 0
    head, single, dp, one, four = got.out.splitlines()[:5]
    assert head.split()[:3] == ["STRATEGY", "RANKS", "NODES"]
    assert single.split()[:2] == ["single", "1"]
    assert dp == "dp        1 (4 GPUs)      1  not run: needs 4 GPUs"
    assert "100%" in one and "100%" in four and "4.00" in four
    assert "[2/3] ddp, 1 rank …" in got.err
    assert "[3/3] ddp, 4 ranks: 400 images/s, test accuracy 50.00%" in got.err
    names = [run["name"] for run in json.loads(workplace.invoke("runs", "--json").out)]
    assert sorted(names) == ["a-ddp-1", "a-ddp-4", "a-single"]
    assert (workplace.root / "a-ddp-4").stat().st_mode & 0o777 == 0o700
    status = json.loads(workplace.invoke("status", "a-ddp-4", "--json").out)
    assert (status["state"], status["world_size"]) == ("done", 4)


def test_the_table_can_be_had_once_more_without_a_run(
    comparing: Answer, workplace: Workplace
) -> None:
    first = comparing("--run-name=a", "--strategies=ddp,single", "--repeat=2", "--json")
    assert (workplace.root / "a-ddp-2-r2").is_dir()
    turns = [line.partition("] ")[2] for line in first.err.splitlines() if "…" in line]
    assert turns == ["single …", "ddp, 2 ranks …"] * 2
    comparing("--run-name=a-ddp", "--strategies=single")  # another one, whose name begins like it
    again = comparing("--of=a", "--json")
    assert (again.code, again.err, rows_of(again.out)) == (0, "", rows_of(first.out))
    assert rows_of(again.out)["ddp 2"]["runs"] == ["a-ddp-2-r1", "a-ddp-2-r2"]
    one = rows_of(comparing("--of=a-ddp-2-r1", "--of=a-single-r2", "--json").out)
    assert one["ddp 2"]["runs"] == ["a-ddp-2-r1"]
    assert one["ddp 2"]["speedup"] == 2.0
    missing = comparing("--of=b")
    assert missing.code == 2 and "'b'" in missing.err


def test_a_run_that_fails_is_told_and_the_others_go_on(comparing: Answer) -> None:
    got = comparing("--run-name=a", "--strategies=single,ddp", "--json", first={"a-single": FAILS})
    assert got.code == 1
    rows = rows_of(got.out)
    assert (rows["single 1"]["state"], rows["single 1"]["why"]) == ("failed", "RuntimeError: boom")
    assert rows["single 1"]["images_per_second"] is None
    assert (rows["ddp 2"]["state"], rows["ddp 2"]["baseline"]) == ("done", True)
    assert rows_of(comparing("--of=a", "--json").out) == rows


def test_a_run_that_dies_before_it_begins_has_failed(comparing: Answer) -> None:
    dies = {"a-single": "os.unlink(run + '/events.jsonl'); sys.exit('no such module')"}
    got = comparing("--run-name=a", "--strategies=single", first=dies)
    assert got.code == 1
    assert "failed: no such module" in got.out


def test_ctrl_c_ends_the_run_under_way_and_shows_what_is_done(
    comparing: Answer, workplace: Workplace
) -> None:
    got = comparing(
        "--run-name=a", "--strategies=single,ddp", "--world-sizes=2,4,8", "--json",
        first={"a-ddp-4": INTERRUPTED},
    )  # fmt: skip
    assert got.code == 130
    rows = rows_of(got.out)
    assert [row["state"] for row in rows.values()] == ["done", "done", "interrupted", "not run"]
    assert rows["ddp 8"]["why"] == "interrupted"
    assert "Ctrl-C again ends it immediately" in got.err
    assert not (workplace.root / "a-ddp-8").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again = rows_of(comparing("--of=a", "--json").out)
    assert [row["state"] for row in again.values()] == ["done", "done", "interrupted"]


def test_the_third_ctrl_c_ends_a_run_that_answers_none(comparing: Answer) -> None:
    got = comparing("--run-name=a", "--strategies=single", first={"a-single": STAYS})
    assert got.code == 130
    assert "interrupted" in got.out


def test_dp_is_shown_as_many_gpus_as_it_is_to_drive(
    comparing: Answer, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(name: str) -> Any:
        environ = json.loads((workplace.root / name / "environ.json").read_text())
        return environ.get("CUDA_VISIBLE_DEVICES")

    got = rows_of(comparing("--run-name=a", "--world-sizes=2,4", "--json", gpus=3).out)
    assert (shown("a-dp-2"), shown("a-ddp-2"), shown("a-single")) == ("0,1", None, None)
    assert got["ddp 4"]["why"] == got["dp 4"]["why"] == "needs 4 GPUs"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    comparing("--run-name=b", "--strategies=dp", gpus=3)
    assert shown("b-dp-2") == "GPU-a,GPU-b"
    assert rows_of(comparing("--of=b", "--json").out)["dp 2"]["ranks"] == 1


def test_dp_that_came_to_train_on_the_cpu_is_no_result(comparing: Answer) -> None:
    got = comparing("--run-name=a", "--strategies=dp", gpus=2, first={"a-dp-2": "device = 'cpu'"})
    assert got.code == 1
    assert "failed: it saw no GPU, and the CPU has no DataParallel" in got.out


def test_runs_read_no_setting_but_what_the_command_line_gives(
    comparing: Answer, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERDDP_BATCH_SIZE", "9")
    monkeypatch.setenv("CLUSTERDDP_PROFILE", "0")
    comparing("--run-name=a", "--strategies=single", "--profile=")
    environ = json.loads((workplace.root / "a-single/environ.json").read_text())
    ours = {name: value for name, value in environ.items() if name.startswith("CLUSTERDDP_")}
    assert ours == {"CLUSTERDDP_SITE": os.devnull}
    train = RunDir(workplace.root / "a-single").load_spec().train
    assert train and (train.batch_size, train.profile) == (9, "")


def test_a_dry_run_prints_the_commands_and_touches_nothing(workplace: Workplace) -> None:
    (workplace.folder / "site.cfg").write_text("[defaults]\nlr = 0.5\n")
    got = workplace.invoke(
        "compare", "--run-name=a", "--dry-run", "--device=cpu", "--world-sizes=2", "--model=mlp"
    )
    assert got.code == 0, got.err
    missing, first, single, second, ddp = got.out.splitlines()
    assert missing == "# dp, 2 GPUs: not run: needs 2 GPUs"
    assert (first, second) == ("# [1/2] single: a-single", "# [2/2] ddp, 2 ranks: a-ddp-2")
    assert shlex.split(single)[1:5] == ["-m", "clusterddp", "debug", "--procs=1"]
    words = shlex.split(ddp)
    assert {"--procs=2", "--strategy=ddp", "--lr=0.5", "--model=mlp"} <= set(words)
    assert f"--run-dir={workplace.root}/a-ddp-2" in words
    assert list(workplace.root.iterdir()) == []


def test_under_slurm_a_dry_run_prints_the_scripts(workplace: Workplace) -> None:
    got = workplace.invoke(
        "compare", "--launcher=sbatch", "--run-name=a", "--dry-run", "--gpus-per-node=a100:2",
        "--world-sizes=2,4", "--partition=gpu", "--dependency=afterok:9",
    )  # fmt: skip
    assert got.code == 0, got.err
    scripts = got.out.split("# [")[1:]
    heads = [script.splitlines()[0] for script in scripts]
    assert heads == [
        "1/4] single: a-single", "2/4] dp, 2 GPUs: a-dp-2", "3/4] ddp, 2 ranks: a-ddp-2",
        "4/4] ddp, 4 ranks: a-ddp-4",
    ]  # fmt: skip
    for script, nodes, tasks, gpus in zip(
        scripts, (1, 1, 1, 2), (1, 1, 2, 2), (1, 2, 2, 2), strict=True
    ):
        for line in (
            f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--gpus-per-node=a100:{gpus}",
            "--partition=gpu",
        ):  # fmt: skip
            assert f"#SBATCH {line}\n" in script
    assert "#SBATCH --dependency=afterok:9\n" in scripts[0]
    assert "#SBATCH --dependency=afterok:9,afterany:3\n" in scripts[3]
    assert "# for afterany:3 in it: the job id of [3/4]\n" in scripts[3]
    assert "# dp, 4 GPUs: not run: needs 4 GPUs" in got.out
    assert list(workplace.root.iterdir()) == []


def test_rows_whose_ranks_share_a_gpu_ask_for_it(workplace: Workplace) -> None:
    got = workplace.invoke(
        "compare", "--launcher=sbatch", "--run-name=a", "--dry-run", "--gpus-per-node=1",
        "--tasks-per-node=2", "--backend=gloo", "--strategies=single,ddp", "--world-sizes=2,4",
    )  # fmt: skip
    assert got.code == 0, got.err
    scripts = got.out.split("# [")[1:]
    assert len(scripts) == 3
    assert all("#SBATCH --gpus-per-node=1\n" in script for script in scripts)
    assert got.err.count("gets one CPU") == 1  # as the submission says it


def test_a_comparison_of_what_no_graph_can_hold_says_so(workplace: Workplace) -> None:
    got = workplace.invoke(
        "compare", "--launcher=sbatch", "--run-name=a", "--dry-run", "--gpus-per-node=2",
        "--strategies=dp", "--cuda-graph=on",
    )  # fmt: skip
    assert got.code == 2
    assert "cannot be captured. Use --cuda-graph off" in got.err


SBATCH_3 = 'cat >"$0.$(date +%s%N)"; n=$(ls "$0".* | wc -l); [ $n = 2 ] && exit 1; echo $n'


def test_each_job_waits_for_the_one_before_and_a_refused_one_is_a_row_that_failed(
    comparing: Answer, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/bin:/bin")
    workplace.command("sbatch", SBATCH_3)
    monkeypatch.setattr(compare.plan, "wait_for_end", interrupt)
    made_sure: list[Any] = []
    for module in (compare, submit):
        monkeypatch.setattr(module, "check_inputs", lambda *args, **_: made_sure.append(args))
    got = comparing(
        "--launcher=sbatch", "--run-name=a", "--strategies=ddp", "--tasks-per-node=2",
        "--world-sizes=1,2,4", "--dependency=afterok:9",
    )  # fmt: skip
    assert got.code == 130
    assert len(made_sure) == 1  # one dataset for all
    names = ["a-ddp-1", "a-ddp-4"]
    assert sorted(path.name for path in workplace.root.iterdir()) == names
    waits = [RunDir(workplace.root / name).load_spec().resources.dependency for name in names]
    assert waits == ["afterok:9", "afterok:9,afterany:1"]
    assert "Print their table: clusterddp compare --of=a" in got.err
    assert "End them: clusterddp cancel a-ddp-1 a-ddp-4" in got.err


def interrupt(_run: RunDir) -> None:
    raise KeyboardInterrupt


def test_jobs_that_have_not_ended_are_shown_as_they_stand(workplace: Workplace) -> None:
    workplace.run("a-ddp-8", submitted("3"), started("3"))
    workplace.run("a-ddp-4", submitted("2"), started("2"), ended("2", 1), nodes=1)
    workplace.command("squeue", "echo '3|RUNNING|None|'; echo '2|FAILED|None|'")
    got = workplace.invoke("compare", "--of=a")
    assert got.code == 0
    lines = got.out.splitlines()
    assert lines[1].endswith("1  failed: exit code 1")
    assert lines[2].endswith("2  running")


def test_a_first_job_that_is_refused_is_an_error_and_leaves_nothing(
    comparing: Answer, workplace: Workplace
) -> None:
    workplace.command("sbatch", "echo 'invalid partition' >&2; exit 1")
    got = comparing("--launcher=sbatch", "--run-name=a")
    assert got.code == 2
    assert "invalid partition" in got.err
    assert list(workplace.root.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--strategies=ddp,fsdp"], "'fsdp' is not one of single, dp, ddp"),
        (["--strategies="], "'' is not one of"),
        (["--world-sizes=2,x"], "not a valid list of counts"),
        (["--world-sizes=0"], "not a valid list of counts"),
        (["--world-sizes=٢"], "not a valid list of counts"),
        (["--repeat=0"], "--repeat"),
        (["--strategies=dp"], "there is nothing to compare"),
        (["--strategies=single", "--world-sizes=4"], "needs --strategies with dp or ddp"),
        (["--fixed-global-batch", "--world-sizes=3"], "cannot be shared out among 3"),
        (["--partition=gpu"], "--partition needs --launcher sbatch"),
        (["--strategy=ddp"], "no such option"),
        (["--init-from=x"], "no such option"),
        (["--of=a", "--lr=1"], "--of conflicts with --lr: it only prints results"),
        (["--plot=a.gif"], "--plot"),
        (["--epochs=0"], "--epochs"),
        (["--dry-run", "--json"], "--dry-run conflicts with --json"),
        (["--world-sizes=2,5000"], "5000 ranks are more than one workstation starts, 1024"),
        (["--launcher=sbatch", "--dependency=afterok:1?afterok:2"], "--dependency afterok:1?after"),
        (["--launcher=sbatch", "--tasks-per-node=2", "--world-sizes=3"], "cannot fill nodes of 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_request_starts_nothing(
    argv: Sequence[str], said: str, comparing: Answer, workplace: Workplace
) -> None:
    got = comparing(*argv)
    assert got.code == 2
    assert said in got.err
    assert list(workplace.root.iterdir()) == []


@pytest.mark.parametrize("name", [*CARRIED, *REFUSED, "x" * 81])
def test_a_name_is_carried_as_it_is_or_refused(
    name: str, comparing: Answer, workplace: Workplace
) -> None:
    if "\0" in name:
        return  # no command line can hold it
    got = comparing(f"--run-name={name}", "--dry-run", "--strategies=single")
    if name == "plain":
        assert f"{workplace.root}/plain-single" in shlex.split(got.out)
    else:
        assert got.code == 2
        assert "--run-name" in got.err


@pytest.mark.parametrize("folder", [name for name in CARRIED if name.strip() == name and name])
def test_a_hostile_runs_dir_is_carried_as_it_is_or_refused(
    folder: str, comparing: Answer, workplace: Workplace
) -> None:
    got = comparing("--run-name=a", "--strategies=single", "--json", f"--runs-dir={folder}")
    if got.code == 2:
        assert "--runs-dir" in got.err
        assert set("%\\") & set(folder)
    else:
        assert got.code == 0, got.err
        assert (workplace.folder / folder / "a-single/report.json").is_file()
    assert not list(workplace.folder.rglob("pwned"))


def test_a_run_that_is_there_already_is_not_touched(comparing: Answer) -> None:
    assert comparing("--run-name=a", "--strategies=single").code == 0
    got = comparing("--run-name=a", "--strategies=ddp,single")
    assert got.code == 2
    assert "a-single already exists" in got.err and "--run-name" in got.err


def test_a_comparison_draws_a_plot(comparing: Answer, workplace: Workplace) -> None:
    workplace.monkeypatch.setattr(plots, "save_scaling", SAVE_SCALING)
    assert "the plot is in jobs/b.png" in comparing("--run-name=b", "--strategies=single,ddp").err
    assert (workplace.root / "b.png").read_bytes().startswith(b"\x89PNG")
    assert comparing("--of=b", "--plot=b.svg").code == 0
    drawn = (workplace.folder / "b.svg").read_text()
    for shown in ("<!-- b -->", "<!-- on ", "<!-- convnet on mnist, "):
        assert shown in drawn


def test_a_picture_of_runs_without_figures_is_not_claimed(workplace: Workplace) -> None:
    workplace.run("a-ddp-8", submitted("3"), started("3"))
    workplace.command("squeue", "echo '3|RUNNING|None|'")
    got = workplace.invoke("compare", "--of=a", "--plot=a.svg")
    assert got.code == 1
    assert "no plot is saved to a.svg: no run has results" in got.err
    assert not (workplace.folder / "a.svg").exists()


def test_a_run_with_a_damaged_request_is_left_out(comparing: Answer, workplace: Workplace) -> None:
    comparing("--run-name=a", "--strategies=single,ddp")
    (workplace.root / "a-single/spec.json").write_text("{}")
    got = comparing("--of=a", "--json")
    assert got.code == 0
    assert list(rows_of(got.out)) == ["ddp 2"]
    assert "left out: jobs/a-single: spec.json is not a valid record" in got.err
    alone = comparing("--of=a-single")
    assert alone.code == 2 and "a-single: spec.json is not a valid record of a run" in alone.err


def test_a_template_of_the_cluster_is_no_matter_of_this_workstation(
    comparing: Answer, workplace: Workplace
) -> None:
    (workplace.folder / "site.cfg").write_text("[defaults]\ntemplate-dir = /nowhere\n")
    assert comparing("--run-name=a", "--strategies=single", "--dry-run").code == 0
    assert comparing("--run-name=a", "--launcher=sbatch", "--dry-run").code == 2


def typed(folder: Path, data: Path, *argv: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            sys.executable, "-m", "clusterddp", "compare", "--dataset=synthetic", "--threads=1",
            f"--data-dir={data}", "--run-name=a", "--device=cpu", *argv,
        ],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads here
    )  # fmt: skip


def test_one_rank_against_two_for_real(synthetic_dir: Path, tmp_path: Path) -> None:
    process = typed(tmp_path, synthetic_dir, "--json", "--max-steps=30")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    rows = rows_of(out)
    assert {key: row["state"] for key, row in rows.items()} == {
        "single 1": "done", "dp 2": "not run", "ddp 2": "done",
    }  # fmt: skip
    single, ddp = rows["single 1"], rows["ddp 2"]
    assert single["steps"] == ddp["steps"] == 30
    assert ddp["speedup"] == pytest.approx(ddp["images_per_second"] / single["images_per_second"])
    assert ddp["peak_memory_bytes"] > 50e6
    assert "images/s" not in err.partition("[1/2]")[2].partition("[1/2] single:")[0]
    run = RunDir(tmp_path / "jobs/a-ddp-2")
    report = json.loads(run.report.read_text())
    assert (report["world_size"], report["strategy"]) == (2, "ddp")
    assert "rank 1 of 2" in run.rank_log(1).read_text()
    assert "done: test accuracy" in RunDir(tmp_path / "jobs/a-single").rank_log(0).read_text()


@pytest.mark.slow
def test_ctrl_c_has_a_training_save_and_leave(synthetic_dir: Path, tmp_path: Path) -> None:
    process = typed(tmp_path, synthetic_dir, "--epochs=5000", "--log-every=20")
    run = RunDir(tmp_path / "jobs/a-single")
    wait_for(lambda: run.metrics.exists() and run.metrics.stat().st_size, "the training")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert out.splitlines()[1].endswith("1  interrupted")
    assert out.splitlines()[3].endswith("1  not run: interrupted")
    assert list(run.checkpoints.glob("*.pt"))
    assert json.loads((run.attempts / "0001/end.json").read_text())["cause"] == "stopped"
    wait_for(lambda: not processes_in(tmp_path), "no process left")
