"""Sweeps as they are typed, with stand-ins for what a healthy cluster cannot be made to say."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
import time

import pytest

from clusterddp import polling
from clusterddp.files import read_json_lines
from clusterddp.request.sweep import Sweep, parse
from clusterddp.request.train_config import TrainConfig
from clusterddp.run import events
from clusterddp.run.run_dir import RunDir, SweepDir, find_runs
from clusterddp.status import chain, follow, notify
from clusterddp.status.find import find_sweep, find_sweeps
from clusterddp.status.sweeps import sweep_status
from tests.cli.made_runs import Workplace, ended, started, submitted, workplace

__all__ = ["workplace"]

CONFIG = "MaxArraySize            = 1001\nMaxJobCount             = 10000\n"
PENDING = 'for i in 0 1 2 3 4 5 6 7 8 9; do echo "$N_$i $N|PENDING|Dependency"; done'
SCONTROL = f"""case "$*" in
*"show job"*) echo " JobId=1 JobState=PENDING Dependency=afterany:$N_*(unfulfilled),singleton(x)" ;;
*) echo '{CONFIG}' ;;
esac"""
TEN = ["submit", "--run-name", "s", "--sweep", "n=0..9", "--", "/bin/echo", "{n}"]


@pytest.fixture
def sweep(workplace: Workplace) -> SweepDir:
    """Ten trials of a COMMAND, submitted as array 7."""
    workplace.command("sbatch", "echo 7")
    workplace.command("scontrol", f"echo '{CONFIG}'")
    done = workplace.invoke(*TEN)
    assert done.code == 0, done.err
    return SweepDir(workplace.root / "s")


def record(run: RunDir, *lines: dict[str, object]) -> None:
    with run.events.open("a") as file:
        file.writelines(f"{json.dumps({'time': 1e9, **line})}\n" for line in lines)


def finish(sweep: SweepDir, index: int, code: int, job_id: str) -> None:
    """Record that a trial's job has started and ended."""
    record(sweep.trial(index), {**started(job_id), "array_task": f"7_{index}"}, ended(job_id, code))


def test_each_trial_is_a_run_that_shares_the_sweeps_files(
    sweep: SweepDir, workplace: Workplace
) -> None:
    assert [run.name for run in find_runs(workplace.root)] == [f"s-{i}" for i in range(10)]
    assert find_sweeps(workplace.root) == [sweep]
    run = sweep.trial(3)
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.load_spec() == sweep.load_spec().trial_spec(3)
    assert run.script.read_text() == sweep.script.read_text()
    assert run.bundle.resolve().parent == sweep.path
    assert run.sweep == sweep
    [event] = read_json_lines(run.events)
    assert (event["job_id"], event["launcher"]) == ("7_3", "sbatch")
    [event] = read_json_lines(sweep.events)
    assert (event["job_id"], event["indices"]) == ("7", [*range(10)])
    assert "sbatch --parsable --array=0-9 --comment=clusterddp:s" in workplace.calls


def test_a_refused_sweep_leaves_nothing(workplace: Workplace) -> None:
    workplace.command("scontrol", f"echo '{CONFIG}'")
    workplace.command("sbatch", "echo no >&2; exit 1")
    done = workplace.invoke(*TEN)
    assert done.code == 2
    assert "sbatch refused the job: no" in done.err
    assert not [*workplace.root.iterdir()]


def test_a_run_in_the_place_of_a_trial_is_left_alone(workplace: Workplace) -> None:
    workplace.run("s-4")
    done = workplace.invoke(*TEN)
    assert done.code == 2
    assert "the run s-4, a trial of the sweep s, already exists" in done.err
    assert [path.name for path in workplace.root.iterdir()] == ["s-4"]


@pytest.mark.parametrize(
    ("config", "submitted", "words"),
    [
        ("MaxArraySize = 10", "", ""),
        ("MaxArraySize = 9", "", "up to 9, but MaxArraySize 9 of this cluster"),
        ("SchedulerParameters = a=1,max_array_tasks=5", "", "10 trials exceed max_array_tasks in"),
        ("MaxJobCount = 9", "", "10 trials exceed MaxJobCount (9)"),
        (
            "AccountingStorageEnforce = associations,limits,qos",
            "12",
            "and your 3 queued or running",
        ),
        ("AccountingStorageEnforce = associations,limits,qos", "13", ""),
        ("AccountingStorageEnforce = associations", "1", ""),
        ("no words at all", "", ""),
    ],
)
def test_what_slurm_does_not_take_is_refused_with_the_figures(
    workplace: Workplace, config: str, submitted: str, words: str
) -> None:
    workplace.command("sbatch", "echo 7")
    workplace.command("scontrol", f"echo '{config}'")
    workplace.command("sacctmgr", f"echo; echo {submitted}")
    workplace.command("squeue", "echo 1; echo 2_0; echo 2_1")
    done = workplace.invoke(*TEN)
    assert (done.code, words in done.err) == (2 if words else 0, True), done.err


def test_who_no_longer_waits_for_a_sweep_is_told_that_it_goes_on(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: RunDir) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "wait_for_end", interrupt)
    workplace.command("sbatch", "cat >/dev/null; echo 7")
    got = workplace.invoke("submit", "--run-name=lr", "--no-snapshot", "--wait", "--sweep=n=1,2",
                           "--", "/bin/true", "{n}")  # fmt: skip
    assert got.code == 130
    assert "lr continues. To follow it: clusterddp runs --watch lr." in got.err
    assert "To end it: clusterddp cancel lr\n" in got.err


def test_one_line_of_jobs_counts_the_trials(sweep: SweepDir, workplace: Workplace) -> None:
    for index in range(4):
        finish(sweep, index, code=int(index == 2), job_id=str(10 + index))
    record(sweep.trial(4), {**started("14"), "array_task": "7_4"})
    lines = ["7_4 14|RUNNING|None", *(f"7_{i} 7|PENDING|JobArrayTaskLimit" for i in range(5, 10))]
    workplace.command("squeue", "; ".join(f"echo '{line}'" for line in lines))
    [_, row] = workplace.invoke("runs").out.splitlines()
    assert row.split()[:4] == ["s", "running", "7", "1x1"]
    assert row.endswith("10 trials: 5 queued, 1 running, 3 done, 1 failed")
    assert len(workplace.invoke("runs", "s-[2-4]").out.splitlines()) == 1 + 3
    [listed] = json.loads(workplace.invoke("runs", "--json").out)
    assert listed["counts"] == {"queued": 5, "running": 1, "done": 3, "failed": 1}
    assert "s-2    failed   2" in workplace.invoke("status", "s").out
    assert "squeue -h -a -r -t all -j 12,14,7 -o" in " ".join(workplace.calls)


def test_a_watch_has_one_line_a_sweep_and_one_squeue_a_look(
    sweep: SweepDir, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace.run("one", submitted("3"), started("3"), age=20)
    looks: list[float] = []

    def pass_by(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt
        finish(sweep, len(looks), code=0, job_id=str(10 + len(looks)))

    workplace.command("squeue", f"{PENDING.replace('$N', '7')}; echo '3 3|RUNNING|None'")
    monkeypatch.setattr(polling, "pause", pass_by)
    got = workplace.invoke("runs", "--watch")
    assert got.code == 130
    rows = [line for line in got.out.splitlines() if line.startswith("s ")]
    assert [row.partition("trials: ")[2] for row in rows] == [
        "10 queued", "9 queued, 1 done", "8 queued, 2 done",
    ]  # fmt: skip
    assert sum(call.startswith("squeue") for call in workplace.calls) == 3
    assert "trials      2 of 10 done" in workplace.invoke("status", "s").out


def test_a_cancelled_sweep_asks_once_and_slurm_once(sweep: SweepDir, workplace: Workplace) -> None:
    finish(sweep, 0, code=0, job_id="10")
    record(sweep.trial(1), {**started("11"), "array_task": "7_1"})
    lines = ["7_1 11|RUNNING|None", *(f"7_{i} 7|PENDING|None" for i in range(2, 10))]
    workplace.command("squeue", "; ".join(f"echo '{line}'" for line in lines))
    workplace.command("scancel", "")
    asked = workplace.invoke("cancel", "s")
    assert asked.code == 2
    assert "Cancel 9 runs (1 running, 8 queued)?" in asked.err
    assert not any(call.startswith("scancel") for call in workplace.calls)
    done = workplace.invoke("cancel", "--yes", "s")
    assert done.code == 0, done.err
    sent = [call for call in workplace.calls if call.startswith("scancel")]
    assert sent == ["scancel 7_[2-9]", "scancel 7_[1]"]  # those that wait ahead of the others
    assert events.read(sweep.trial(5).events)[-1].kind == "cancelled"
    workplace.command("squeue", "")
    assert sweep_status(sweep).counts == {"done": 1, "cancelled": 9}


def test_a_mistyped_name_beside_a_sweep_spares_no_question(
    sweep: SweepDir, workplace: Workplace
) -> None:
    workplace.command("squeue", PENDING.replace("$N", "7"))
    asked = workplace.invoke("cancel", "s", *(f"typo{index}" for index in range(9)))
    assert "Cancel 10 runs (10 queued)?" in asked.err
    assert not any(call.startswith("scancel") for call in workplace.calls)


def test_a_sweep_whose_name_is_a_number_is_known_by_it(workplace: Workplace) -> None:
    workplace.command("sbatch", "echo 7")
    workplace.command("scontrol", f"echo '{CONFIG}'")
    assert workplace.invoke("submit", "--run-name", "2024", *TEN[3:]).code == 0
    workplace.command("squeue", PENDING.replace("$N", "7"))
    workplace.command("scancel", "")
    assert "2024-9" in workplace.invoke("runs", "2024").out
    for name in ("2024", "7"):
        assert "Cancel 10 runs (10 queued)?" in workplace.invoke("cancel", name).err
    assert workplace.invoke("cancel", "-y", "2024").code == 0
    assert workplace.calls[-1] == "scancel 7_[0-9]"


def test_a_cancellation_that_slurm_refuses_is_taken_back(
    sweep: SweepDir, workplace: Workplace
) -> None:
    workplace.command("squeue", 'for i in 0 1 2 3 4 5 6 7 8 9; do echo "7_$i 7|PENDING"; done')
    workplace.command("scancel", "echo denied >&2; exit 1")
    done = workplace.invoke("cancel", "-y", "s")
    assert done.code == 1
    assert done.err.count("denied") == 1
    assert events.read(sweep.trial(5).events)[-1].kind == "cancel_failed"
    assert sweep_status(sweep).counts == {"queued": 10}


def test_the_trials_that_have_failed_are_one_array(sweep: SweepDir, workplace: Workplace) -> None:
    for index in range(10):
        finish(sweep, index, code=int(index in (2, 3, 7)), job_id=str(10 + index))
    workplace.command("sbatch", "echo 30")
    workplace.command("squeue", "")
    done = workplace.invoke("resume", "s", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["indices"] == [2, 3, 7]
    assert "sbatch --parsable --array=2-3,7 --comment=clusterddp:s" in workplace.calls
    kinds = [event.kind for event in events.read(sweep.trial(3).events)]
    assert kinds[-2:] == ["resume_requested", "submitted"]
    assert len(events.read(sweep.trial(4).events)) == 3
    assert find_sweep(workplace.root, "30") == sweep


def test_a_trial_by_itself_is_its_element_unless_its_request_is_another(
    sweep: SweepDir, workplace: Workplace
) -> None:
    finish(sweep, 3, code=1, job_id="13")
    workplace.command("squeue", "")
    workplace.command("sbatch", "echo 30")
    sent = "--array=3 --comment=clusterddp:s-3"
    assert f"sbatch gets {sent}\n" in workplace.invoke("resume", "s-3", "--dry-run").err
    again = workplace.invoke("resume", "s-3")
    assert again.code == 0, again.err
    assert f"sbatch --parsable {sent}" in workplace.calls
    record(sweep.trial(3), {**started("30"), "array_task": "30_3"}, ended("30", 1))
    workplace.command("sbatch", "echo 40")
    more = workplace.invoke("resume", "s-3", "--mem", "64G")
    assert more.code == 0, more.err
    assert workplace.calls[-1] == "sbatch --parsable"
    script = sweep.trial(3).script.read_text()
    assert "#SBATCH --mem=64G" in script
    assert "#SBATCH --array" not in script
    assert "-- /bin/echo 3\n" in script
    assert "#SBATCH --mem" not in sweep.script.read_text()
    assert sweep.trial(3).load_spec().trial == (("n", "3"),)


def test_a_trial_with_options_of_its_own_is_left_to_a_submission_of_its_own(
    sweep: SweepDir, workplace: Workplace
) -> None:
    for index in range(10):
        finish(sweep, index, code=int(index in (3, 5)), job_id=str(10 + index))
    workplace.command("squeue", "")
    workplace.command("sbatch", "echo 40")
    assert workplace.invoke("resume", "s-3", "--mem", "64G").code == 0
    record(sweep.trial(3), started("40"), ended("40", 1))
    history = sweep.trial(3).events.read_bytes()
    workplace.command("sbatch", "echo 50")
    again = workplace.invoke("resume", "s")
    assert again.code == 0, again.err
    assert "must be resumed separately: clusterddp resume s-3\n" in again.err
    assert "sbatch --parsable --array=5 --comment=clusterddp:s" in workplace.calls
    record(sweep.trial(5), {**started("51"), "array_task": "50_5"}, ended("51", 0))
    none = workplace.invoke("resume", "s", "--mem", "32G")
    assert none.code == 2
    assert "must be resumed separately: clusterddp resume s-3 [CD1103]\n" in none.err
    assert sweep.trial(3).events.read_bytes() == history
    assert sweep.trial(3).load_spec().resources.mem == "64G"


def test_a_run_waits_for_a_sweep_and_for_a_trial_that_is_submitted_again(
    sweep: SweepDir, workplace: Workplace
) -> None:
    workplace.command("squeue", PENDING.replace("$N", "7"))
    for number, text in enumerate(("s", "7", f"{workplace.root}/s:any")):
        name = f"b{number}"
        workplace.command("sbatch", f"echo 2{number}")
        done = workplace.invoke("submit", "--run-name", name, "--after", text, "--", "/bin/true")
        assert done.code == 0, done.err
        assert f"{name} waits for s (queued: 10 queued), currently job 7" in done.err
        assert "sbatch --parsable --dependency=afterany:7" in workplace.calls
        [(path, _)] = RunDir(workplace.root / name).load_spec().after
        assert path == str(sweep.path)
    for index in range(10):
        finish(sweep, index, code=int(index == 2), job_id=str(10 + index))
    queued = "echo '20 20|PENDING|Dependency'; echo '{0} 1|PENDING|None'"
    workplace.command("squeue", queued.format("30_2"))
    workplace.command("scontrol", SCONTROL.replace("$N", "7"))
    workplace.command("sbatch", "echo 30")
    refused = workplace.invoke("submit", "--after", "s", "--", "/bin/true")
    assert refused.code == 2
    assert "--after s: s (failed: 9 done, 1 failed) has not ended as requested" in refused.err
    again = workplace.invoke("resume", "s-2")
    assert again.code == 0, again.err
    assert "b0 (job 20) waits for it" in again.err
    record(sweep.trial(2), {**started("35"), "array_task": "30_2"}, ended("35", 1))
    workplace.command("squeue", queued.format("31_2"))
    workplace.command("sbatch", "echo 31")
    assert workplace.invoke("resume", "s").code == 0
    # Of what stood there its own part is replaced, and another's stays.
    sent = [call for call in workplace.calls if "Dependency=" in call]
    assert sent == [
        f"scontrol update JobId=20 Dependency=singleton,afterany:{job}" for job in (30, 31)
    ]


def test_a_sweep_waits_as_a_whole_and_is_rejoined_as_a_whole(workplace: Workplace) -> None:
    workplace.run("a", submitted("5"), started("5"))
    workplace.command("scontrol", SCONTROL.replace("$N_*", "5"))
    workplace.command("squeue", "echo '5 5|RUNNING|None'")
    workplace.command("sbatch", "echo 7")
    done = workplace.invoke(*TEN[:3], "--after", "a", *TEN[3:])
    assert done.code == 0, done.err
    assert (
        "sbatch --parsable --dependency=afterany:5 --array=0-9 --comment=clusterddp:s"
        in workplace.calls
    )
    squeue = PENDING.replace("$N", "7")
    workplace.command("squeue", f"{squeue}; echo '5 5|RUNNING|None'")
    told = json.loads(workplace.invoke("status", "--json", "s-4").out)
    assert (told["detail"], told["dependencies"]) == ("waits for a", ["a"])
    awaited = RunDir(workplace.root / "a")
    record(awaited, ended("5", 75), {**submitted("8"), "in_place_of": "5"})
    workplace.command("squeue", f"{squeue}; echo '8 8|PENDING|None'")
    chain.update_waiting_jobs(awaited)
    sent = [call for call in workplace.calls if "Dependency=" in call]
    assert sent == ["scontrol update JobId=7_[0-9] Dependency=singleton,afterany:8"]
    kept = events.read(RunDir(workplace.root / "s-9").events)
    assert [event.kind for event in kept] == ["submitted", "waits", "waits"]
    [by] = [e.by for e in events.read(awaited.events) if isinstance(e, events.DependentAdded)]
    assert by == str(workplace.root / "s")


def test_the_end_of_a_sweep_is_told_once_by_a_job_behind_all_its_trials(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "NOTIFY_POLL_SECONDS", 0.01)
    tell = workplace.folder / "tell.py"
    tell.write_text("import sys; open('told', 'a').write(sys.stdin.read())")
    workplace.command("sbatch", "cat >/dev/null; echo 7")
    workplace.command("scontrol", f"echo '{CONFIG}'")
    done = workplace.invoke(*TEN[:3], "--notify", f"{sys.executable} tell.py", *TEN[3:])
    assert done.code == 0, done.err
    assert [call for call in workplace.calls if call.startswith("sbatch")] == [
        "sbatch --parsable --array=0-9 --comment=clusterddp:s",
        "sbatch --parsable --dependency=afterany:7",
    ]
    sweep = SweepDir(workplace.root / "s")
    assert sweep.load_spec().notify
    assert not sweep.trial(3).load_spec().notify
    for index in range(10):
        finish(sweep, index, code=int(index in (2, 3)), job_id=str(10 + index))
    workplace.command("squeue", "echo '30_2 30|PENDING|Priority'")
    workplace.command("sbatch", "cat >/dev/null; echo 30")
    assert workplace.invoke("resume", "s-2").code == 0
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # of the job that waits
    notify.notify_from_job(sweep)
    assert workplace.calls[-1] == "sbatch --parsable --dependency=afterany:30"
    record(sweep.trial(2), {**started("31"), "array_task": "30_2"}, ended("31", 0))
    workplace.command("squeue", "")
    for _ in range(2):
        notify.notify_from_job(sweep)
    [told] = (workplace.folder / "told").read_text().splitlines()
    verdict = json.loads(told)
    assert (verdict["sweep"], verdict["state"]) == ("s", "failed")
    assert verdict["counts"] == {"done": 9, "failed": 1}
    assert verdict["notified_by"] == "dependent job"
    why = "exit code 1 [CD1219]"
    assert verdict["trials"][3] == {
        "run": "s-3", "state": "failed", "reason": why, "params": {"n": "3"},
    }  # fmt: skip
    workplace.command("sbatch", "cat >/dev/null; echo 40")
    assert workplace.invoke("resume", "s").code == 0
    assert workplace.calls[-1] == "sbatch --parsable --dependency=afterany:40"
    assert notify.marker(sweep).name == "notified-0002.json"


def test_what_trials_share_is_removed_once_none_could_go_on(
    sweep: SweepDir, workplace: Workplace
) -> None:
    workplace.command("squeue", "")
    workplace.command("sacct", "exit 1")
    for index in range(10):
        finish(sweep, index, code=int(index == 2), job_id=str(10 + index))
    bundle = sweep.bundle.resolve()
    (sweep.path / "code").mkdir(exist_ok=True)
    (sweep.code / "train.py").write_text("print()")
    digest = hashlib.sha256(b"print()").hexdigest()
    entry = {"files": 1, "bytes": 7, "commit": "", "digests": {"train.py": digest}, "large": []}
    sweep.code_record.write_text(json.dumps(entry))
    for name in ("code", "code.json"):
        for run in sweep.trials:
            if not os.path.lexists(run.path / name):
                (run.path / name).symlink_to(f"../s/{name}")
    # A COMMAND that has failed can start again.
    for argv in (["s"], [], ["s-*"], ["s-0"]):
        done = workplace.invoke("clean", "--yes", *argv)
        assert done.code == 0, done.err
        assert bundle.exists(), argv
        assert (sweep.code / "train.py").exists()
    assert "s is skipped: trials that use its files can resume: s-2" in (
        workplace.invoke("clean", "--yes", "s").err
    )
    workplace.command("sbatch", "echo 30")
    assert workplace.invoke("resume", "s-2").code == 0
    record(sweep.trial(2), {**started("31"), "array_task": "30_2"}, ended("31", 0))
    shown = workplace.invoke("clean", "--dry-run", "s")
    assert [row.split()[0] for row in shown.out.splitlines()[1:3]] == ["s", "s"]
    assert workplace.invoke("clean", "--yes", "s-*").code == 0
    assert bundle.exists()
    assert workplace.invoke("clean", "--yes", "s").code == 0
    assert not bundle.exists()
    assert not (sweep.code / "train.py").exists()
    assert sweep.spec.exists()
    assert [event.kind for event in events.read(sweep.events)][-1] == "cleaned"
    record(sweep.trial(2), {"event": "resume_requested"}, {**started("32")}, ended("32", 1))
    again = workplace.invoke("resume", "s-2")
    assert again.code == 2
    assert "'clusterddp clean' removed the copy of the code of" in again.err


def test_a_script_that_is_not_known_as_an_arrays_is_refused(workplace: Workplace) -> None:
    got = workplace.invoke(*TEN[:5], "--omit-directive", "array", *TEN[5:])
    assert got.code == 2
    assert "has no line '#SBATCH --array='" in got.err


def test_a_sweep_that_is_being_submitted_keeps_its_clusterddp(workplace: Workplace) -> None:
    sweep = workplace.sweep("z", ("n",), ("0",))
    shutil.rmtree(sweep.trial(0).path)
    own = sweep.path / "clusterddp-0.1.1-abcdef012345.pyz"
    own.write_text("")
    sweep.bundle.symlink_to(own.name)
    assert workplace.invoke("clean", "--yes", "--older-than", "30d").code == 0
    assert own.exists()


def test_what_trials_share_is_there_for_one_whose_directory_is_gone(
    sweep: SweepDir, workplace: Workplace
) -> None:
    workplace.command("squeue", "")
    for index in range(10):
        finish(sweep, index, code=0, job_id=str(10 + index))
    shutil.rmtree(sweep.trial(3).path)
    bundle = sweep.bundle.resolve()
    every = workplace.invoke("clean", "--yes")
    assert (every.code, bundle.exists()) == (0, True), every.out
    assert "some of its trials have no directory and could be resumed" in every.err
    named = workplace.invoke("clean", "--yes", "s")
    assert "s-3 is skipped: its directory is missing; its sweep's shared files" in named.err
    assert not bundle.exists()


def test_added_trials_are_behind_the_others(sweep: SweepDir, workplace: Workplace) -> None:
    workplace.command("sbatch", "echo 30")
    before = sweep.trial(0).spec.read_bytes()
    argv = ["resume", "s", "--sweep", "n=8..11", "--max-concurrent", "1"]
    shown = workplace.invoke(*argv, "--dry-run")
    assert [line.split()[0] for line in shown.err.splitlines()[-3:-1]] == ["s-10", "s-11"]
    sent = "--array=10-11%1 --comment=clusterddp:s"
    assert shown.err.endswith(f"\nclusterddp: sbatch gets {sent}\n")
    told = json.loads(workplace.invoke(*argv, "--dry-run", "--json").out)
    assert told["sbatch_options"] == sent.split()
    assert not sweep.trial(10).path.exists()
    done = workplace.invoke(*argv)
    assert done.code == 0, done.err
    assert f"sbatch --parsable {sent}" in workplace.calls
    assert sweep.load_spec().sweep.trials[10:] == (("10",), ("11",))
    assert "\n11) trial_n=11 ;;\n" in sweep.trial(0).script.read_text()
    assert sweep.trial(0).spec.read_bytes() == before
    none = workplace.invoke("resume", "s", "--sweep", "n=3")
    assert (none.code, "already has all of these trials" in none.err) == (2, True)


def test_trials_go_without_the_comment_that_the_site_leaves_out(workplace: Workplace) -> None:
    workplace.command("sbatch", "echo 30")
    first = workplace.invoke(*TEN[:5], "--omit-directive", "comment", *TEN[5:])
    assert first.code == 0, first.err
    more = workplace.invoke("resume", "s", "--sweep", "n=8..11")
    assert more.code == 0, more.err
    assert [call for call in workplace.calls if "--array" in call]
    assert not [call for call in workplace.calls if "comment" in call]


def test_a_run_in_the_place_of_a_further_trial_is_named_with_a_way_out(
    sweep: SweepDir, workplace: Workplace
) -> None:
    workplace.run("s-11")
    done = workplace.invoke("resume", "s", "--sweep", "n=10..12")
    assert done.code == 2
    assert "the run s-11, a trial of the sweep s, already exists" in done.err
    assert "Submit them as a new sweep: clusterddp submit --run-name NAME" in done.err
    assert not sweep.trial(10).path.exists()


def test_a_damaged_request_of_a_sweep_is_named(workplace: Workplace) -> None:
    workplace.sweep("s", ("n",), ("0",)).spec.write_text("{}")
    done = workplace.invoke("status", "s")
    assert (done.code, "sweep.json is not a valid record" in done.err) == (2, True), done.err


def test_trials_that_are_refused_leave_the_sweep_as_it_was(
    sweep: SweepDir, workplace: Workplace
) -> None:
    kept = {path: path.read_bytes() for path in (sweep.spec, sweep.script)}
    workplace.command("sbatch", "echo no >&2; exit 1")
    assert workplace.invoke("resume", "s", "--sweep", "n=10").code == 2
    assert {path: path.read_bytes() for path in kept} == kept
    assert not sweep.trial(10).path.exists()


def test_a_trial_whose_directory_is_gone_is_made_again(
    sweep: SweepDir, workplace: Workplace
) -> None:
    for index in range(10):
        finish(sweep, index, code=int(index == 5), job_id=str(10 + index))
    shutil.rmtree(sweep.trial(3).path)
    workplace.command("squeue", "")
    workplace.command("sbatch", "echo no >&2; exit 1")
    refused = workplace.invoke("resume", "s", "--mem", "8G")
    assert (refused.code, "refused the job: no" in refused.err) == (2, True)
    assert not sweep.trial(3).path.exists()
    workplace.command("sbatch", "echo 40")
    done = workplace.invoke("resume", "s", "--mem", "8G")
    assert done.code == 0, done.err
    assert "sbatch --parsable --array=3,5 --comment=clusterddp:s" in workplace.calls
    assert sweep.trial(3).load_spec() == sweep.load_spec().trial_spec(3)
    kinds = [[e.kind for e in events.read(sweep.trial(i).events)] for i in (3, 5)]
    assert [each[-2:] for each in kinds] == [["submitted"], ["resume_requested", "submitted"]]
    has = workplace.invoke("resume", "s", "--sweep", "n=3")
    assert "failed and missing trials: clusterddp resume s" in has.err


def test_a_trial_of_a_rehearsal_that_has_not_begun_says_so(workplace: Workplace) -> None:
    run = workplace.sweep("s", ("n",), ("0",)).trial(0)
    run.events.unlink()
    run.spec.write_text(dataclasses.replace(run.load_spec(), launcher="local").to_json())
    told = json.loads(workplace.invoke("status", "--json", "s-0").out)
    assert told["state"] == "created"
    assert told["detail"].startswith("waits for its turn: --launcher local runs one trial")


def test_a_trial_whose_turn_in_a_rehearsal_is_to_come_is_not_removed(workplace: Workplace) -> None:
    sweep = workplace.sweep("s", ("n",), ("0",))
    run = sweep.trial(0)
    run.events.unlink()
    run.spec.write_text(dataclasses.replace(run.load_spec(), launcher="local").to_json())
    local = {"launcher": "local", "job_id": "1", "pid": os.getpid(), "host": os.uname().nodename}
    line = {**submitted("1"), **local, "indices": [0], "time": time.time()}
    sweep.events.write_text(f"{json.dumps(line)}\n")
    done = workplace.invoke("rm", "--yes", "s-0")
    assert done.code == 2
    assert "s-0 is created and is not removed. Cancel it first: clusterddp cancel s-0" in done.err
    assert workplace.invoke("cancel", "s-0").code == 0
    assert workplace.invoke("rm", "--yes", "s-0").code == 0


def test_a_value_that_is_written_otherwise_is_no_further_trial(workplace: Workplace) -> None:
    sweep = workplace.sweep("s", ("n",), ("0",))
    trials = Sweep(("lr",), (("0.1",),))
    asked = {"train": TrainConfig(), "command": (), "hang_timeout": None, "sweep": trials}
    sweep.spec.write_text(dataclasses.replace(sweep.load_spec(), **asked).to_json())
    none = workplace.invoke("resume", "s", "--dry-run", "--sweep", "lr=0.10")
    assert (none.code, "s already has all of these trials" in none.err) == (2, True)
    more = workplace.invoke("resume", "s", "--dry-run", "--json", "--sweep", "lr=0.10,0.2")
    assert json.loads(more.out)["indices"] == [1], more.err


@pytest.fixture
def coded(workplace: Workplace) -> SweepDir:
    """Three trials of a script, of which the first is done and the others have failed."""
    workplace.command("sbatch", "echo 7")
    workplace.command("scontrol", f"echo '{CONFIG}'")
    workplace.command("squeue", "")
    (workplace.folder / "train.py").write_text("print(1)\n")
    workplace.monkeypatch.setenv("PATH", f"{workplace.folder}/bin:/usr/bin:/bin")
    argv = ["--run-name", "s", "--sweep", "n=0..2", "--", sys.executable, "train.py", "{n}"]
    done = workplace.invoke("submit", *argv)
    assert done.code == 0, done.err
    sweep = SweepDir(workplace.root / "s")
    for index in range(3):
        finish(sweep, index, code=int(index > 0), job_id=str(10 + index))
    (workplace.folder / "train.py").write_text("print(2)\n")
    return sweep


def test_changed_code_leads_to_a_new_sweep_or_to_copies_for_those_that_failed(
    coded: SweepDir, workplace: Workplace
) -> None:
    again = workplace.invoke("resume", "s")
    assert again.code == 0, again.err
    assert "submit a new sweep, or give each failed trial a separate copy" in again.err
    assert "clusterddp resume s --refresh-code.\n" in again.err


def test_the_trials_that_failed_start_together_with_changed_code(
    coded: SweepDir, workplace: Workplace
) -> None:
    again = workplace.invoke("resume", "s", "--refresh-code")
    assert again.code == 0, again.err
    assert [line.split(" ", 2)[1] for line in again.out.splitlines()] == ["s-1", "s-2"]
    texts = [(coded.trial(n).code / "train.py").read_text() for n in range(3)]
    assert texts == ["print(1)\n", "print(2)\n", "print(2)\n"]


def test_the_status_of_a_sweep_has_the_reasons_of_trials_that_failed(
    coded: SweepDir, workplace: Workplace
) -> None:
    shown = workplace.invoke("status", "s").out.splitlines()
    assert shown[-4].split() == ["TRIAL", "STATE", "n", "REASON"]
    assert [line.split()[:3] for line in shown[-3:]] == [
        ["s-0", "done", "0"], ["s-1", "failed", "1"], ["s-2", "failed", "2"],
    ]  # fmt: skip
    assert shown[-3].split()[3:] == [] and "exit code 1" in shown[-1]
    trials = json.loads(workplace.invoke("status", "s", "--json").out)["trials"]
    assert [bool(trial["reason"]) for trial in trials] == [False, True, True]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["resume", "s", "--sweep", "m=1"], "varies n, but the new trials vary m"),
        (["resume", "s", "--refresh-code", "--sweep", "n=11"], "share one copy of the code"),
        (["resume", "s", "--refresh-code", "--max-concurrent=1"],
         "need one job, but s means several"),
        (["resume", "s-3", "--sweep", "n=1"], "s-3 is not a sweep"),
        (["resume", "s-3", "--", "/bin/true"], "the values of s-3 (n=3) cannot be changed"),
        (["resume", "nope", "--sweep", "n=1"], "there is no run 'nope'"),
        (["resume", "x-*"], "no run in 'jobs' matches"),
        (["logs", "-f", "s"], "-f follows one run, but s matches 10"),
        (["status", "x" * 300], "there is no run 'xxx"),
        (["submit", "--after", f"{'x' * 300}:any"], "--after: there is no run 'xxx"),
        (["checkpoints", "s"], "s is a sweep, but this command needs one run"),
        (["submit", "--max-concurrent", "2"], "--max-concurrent needs --sweep NAME=VALUES."),
        (["submit", "--launcher", "local", "--max-concurrent", "2", "--sweep", "lr=1,2"],
         "--max-concurrent 2 conflicts with --launcher local"),
        (["submit", "--num-samples", "2"], "--num-samples needs --sweep NAME=VALUES."),
        (["submit", "--lr", "1", "--sweep", "lr=1,2"], "--lr conflicts with --sweep lr"),
        (["submit", "--nodes", "1", "--sweep", "nodes=1,2"], "--nodes conflicts with --sweep"),
        (["submit", "--launcher", "submitit", "--sweep", "lr=1,2"],
         "conflicts with --launcher submitit"),
    ],
)  # fmt: skip
def test_what_does_not_go_is_refused_with_the_reason(
    sweep: SweepDir, workplace: Workplace, argv: list[str], words: str
) -> None:
    finish(sweep, 3, code=1, job_id="13")
    workplace.command("squeue", "")
    done = workplace.invoke(*argv)
    assert done.code == 2
    assert words in done.err


def test_a_trial_can_be_swept_further_and_a_sweep_is_no_request_for_from(
    sweep: SweepDir, workplace: Workplace
) -> None:
    file = workplace.folder / "base.toml"
    for argv, words in (
        (
            ["submit", "--save-config", str(file), *TEN[3:]],
            "a file contains the request of a single run",
        ),
        (["submit", "--config", sweep.name], "s is a sweep, but this command needs one run"),
    ):
        done = workplace.invoke(*argv)
        assert done.code == 2
        assert words in done.err
    assert not file.exists()
    argv = ["submit", "--dry-run", "--json", "--run-name", "t"]
    shown = workplace.invoke(*argv, "--config", "s-3")
    assert "-- /bin/echo 3\n" in json.loads(shown.out)["script"]
    assert "trials" not in json.loads(shown.out)
    file.write_text("lr = 0.5\nseed = 3\n")
    shown = workplace.invoke(*argv, "--config", str(file), "--sweep", "lr=0.1,0.2")
    assert shown.code == 0, shown.err
    script = json.loads(shown.out)["script"]
    assert "--lr=0.1" in script
    assert "--lr=0.5" not in script
    assert "--seed=3" in script


def test_draws_show_their_seed(workplace: Workplace) -> None:
    argv = ["submit", "--dry-run", "--json", "--num-samples", "3", "--sweep", "lr=log:1e-4..1e-1"]
    made_up = json.loads(workplace.invoke(*argv).out)
    seed = str(made_up["sample_seed"])
    assert (
        json.loads(workplace.invoke(*argv, "--sample-seed", seed).out)["trials"]
        == (made_up["trials"])
    )
    assert (
        f"--sample-seed {seed}" in workplace.invoke(*argv[:2], *argv[3:], "--sample-seed", seed).err
    )


def test_the_example_of_draws_in_the_help_draws_fractions(workplace: Workplace) -> None:
    words = " ".join(workplace.invoke("submit", "--help-all").out.split())
    [example] = re.findall(r"lin:\S+[0-9]", words)
    trials = parse([f"lr={example}"], num_samples=9, seed=1).trials
    assert any(float(text) % 1 for (text,) in trials)
