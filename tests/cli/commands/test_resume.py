"""`clusterddp resume`."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.commands import resume
from clusterddp.launchers import sbatch
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.run import events
from clusterddp.run.attempt import Attempt
from clusterddp.run.history import History, causes_by_attempt
from clusterddp.run.run_dir import RunDir, run_folders
from clusterddp.submission import bundle, snapshot
from clusterddp.submission import resume as resuming
from clusterddp.version import __version__
from tests.checkpoints import made_checkpoints
from tests.cli.made_runs import Outcome, Workplace, ended, started, submitted, workplace
from tests.event_lines import add_event, kinds, read_events
from tests.hostile import CARRIED

__all__ = ["workplace"]

FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id' >&2; exit 1"
STOPPED = {**ended("12", 75), "attempt": 1, "cause": "stopped", "why": "stopped", "step": 40}
BEGUN = {**started("12"), "attempt": 1}


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The trainings whose dataset was made sure of; what that does is tested elsewhere."""
    seen: list[TrainConfig] = []
    monkeypatch.setattr(resuming, "check_inputs", lambda config, *_, **__: seen.append(config))
    return seen


def stopped(workplace: Workplace, name: str = "one", step: int = 40, **request: Any) -> RunDir:
    """A training that was stopped, as `submit` and its script have left it."""
    workplace.command("squeue", FORGOTTEN)
    workplace.command("sacct", "exit 1")
    workplace.command("sbatch", "/bin/cat >sent; echo 13")
    run = workplace.run(name, submitted("12"), BEGUN, STOPPED)
    settings: dict[str, Any] = {
        "resources": Resources(nodes=2, tasks_per_node=2, time="60"), "train": TrainConfig(),
        "python": "python",
    } | request  # fmt: skip
    spec = JobSpec(run_name=name, run_dir=str(run.path), **settings)
    run.spec.write_text(spec.to_json())
    run.script.write_text(sbatch.prepare(spec, None))
    folder = Attempt(run, 1).checkpoints
    folder.mkdir(parents=True)
    if step:
        made_checkpoints.make(folder, step)
    run.current.symlink_to("attempts/0001")
    run.checkpoints.symlink_to("current/checkpoints")
    return run


def sent(workplace: Workplace) -> str:
    return (workplace.folder / "sent").read_text()


def refused(workplace: Workplace, run: RunDir, *argv: str) -> str:
    """What is said by a refusal, which leaves everything as it was."""
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    got = workplace.invoke("resume", run.name, *argv)
    assert (got.code, got.out) == (2, "")
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before
    assert not (workplace.folder / "sent").exists()
    return got.err


def accepted(workplace: Workplace, *argv: str) -> Outcome:
    got = workplace.invoke("resume", *argv)
    assert got.code == 0, got.err
    return got


# -- as it stands ------------------------------------------------------------------------------


def test_the_script_is_sent_as_it_stands(workplace: Workplace, data: list[TrainConfig]) -> None:
    run = stopped(workplace)
    run.script.write_text(run.script.read_text() + "# edited by hand\n")
    before = run.spec.read_bytes(), run.spec.stat().st_mtime
    got = accepted(workplace, "one")
    assert sent(workplace) == run.script.read_text()
    assert "submitted one again as job 13" in got.out
    assert "it resumes from step 40" in got.out
    assert "clusterddp logs -f one" in got.out
    assert (run.spec.read_bytes(), run.spec.stat().st_mtime) == before
    assert not list(run.path.glob("*-1.*"))
    assert len(data) == 1


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_named(
    workplace: Workplace, data: list[TrainConfig]
) -> None:
    damaged = made_checkpoints.make(Attempt(stopped(workplace), 1).checkpoints, 60)
    damaged.write_bytes(damaged.read_bytes() + b"x")
    got = accepted(workplace, "one")
    assert "it resumes from step 40" in got.out
    assert damaged.name in got.err


@pytest.mark.parametrize("harm", ["gone", "torn", "a dangling link", "a FIFO"])
def test_a_run_that_lost_its_checkpoints_begins_anew_only_where_that_is_asked_for(
    workplace: Workplace, data: list[TrainConfig], harm: str
) -> None:
    run = stopped(workplace)
    attempt = Attempt(run, 1)
    attempt.renew_liveness(50, saved=40)
    path = attempt.checkpoints / "step-00000040.pt"
    if harm == "gone":
        path.unlink()
    else:
        made_checkpoints.DAMAGE[harm][0](path)
    said = refused(workplace, run)
    assert ("are gone" if harm == "gone" else "no checkpoint of one is valid") in said
    assert "clusterddp resume one --from-scratch" in said
    assert workplace.invoke("resume", "one", "--dry-run").code == 2
    assert "it starts from the beginning" in accepted(workplace, "one", "--from-scratch").out
    [asked] = [event for event in read_events(run) if event["event"] == "resume_requested"]
    assert asked["from_scratch"] == 1


def test_a_command_has_no_scratch_to_begin_from(workplace: Workplace) -> None:
    run = stopped(workplace, step=0, train=None, command=("true",))
    assert "--from-scratch applies only to the built-in training" in refused(
        workplace, run, "--from-scratch"
    )


def test_the_starts_are_counted_anew(workplace: Workplace) -> None:
    run = stopped(workplace)
    assert list(causes_by_attempt(events.read(run.events))) == [1]
    accepted(workplace, "one")
    assert kinds(run)[-2:] == ["resume_requested", "submitted"]
    assert causes_by_attempt(events.read(run.events)) == {}
    assert "queued" in status(workplace, "echo '13|PENDING|None'")


def status(workplace: Workplace, squeue: str) -> str:
    workplace.command("squeue", squeue)
    return workplace.invoke("status", "one").out


def test_variables_and_site_cfg_change_nothing(workplace: Workplace) -> None:
    run = stopped(workplace)
    (workplace.folder / "site.cfg").write_text(
        "[defaults]\npartition = fast\nlr = 0.7\nnodes = many\n"
    )
    for name, value in (
        ("CLUSTERDDP_TIME", "5"), ("CLUSTERDDP_LR", "0.9"), ("CLUSTERDDP_EPOCHS", "x"),
        ("SBATCH_PARTITION", "slow"), ("SBATCH_ACCOUNT", "a"),
    ):  # fmt: skip
        workplace.monkeypatch.setenv(name, value)
    accepted(workplace, "one")
    assert sent(workplace) == run.script.read_text()
    assert "fast" not in sent(workplace)


def test_json_names_the_job(workplace: Workplace) -> None:
    run = stopped(workplace)
    before = run.spec.stat()
    got = json.loads(accepted(workplace, "one", "--json").out)
    assert got == {"run": "one", "run_dir": str(run.path), "job_id": "13"}
    # Not even its times: the record can be another person's, who shares the directory.
    assert run.spec.stat().st_ctime_ns == before.st_ctime_ns


def test_a_pattern_resumes_no_run_of_this_machine_which_would_end_with_the_command(
    workplace: Workplace,
) -> None:
    stopped(workplace, "one")
    there = stopped(workplace, "two", launcher="local")
    got = workplace.invoke("resume", "*")
    assert (got.code, "submitted one again as job 13" in got.out) == (2, True)
    assert "two runs on this machine. Resume it by name: clusterddp resume two" in got.err
    assert "submitted two" not in got.out and len(History.read(there).every(events.Submitted)) == 1


def test_a_dry_run_prints_what_would_be_sent_and_touches_nothing(workplace: Workplace) -> None:
    run = stopped(workplace)
    before = sorted(run.path.rglob("*")), run.events.read_bytes()
    assert accepted(workplace, "one", "--dry-run").out == run.script.read_text()
    changed = accepted(workplace, "one", "--dry-run", "--time", "5", "--json")
    assert "#SBATCH --time=5\n" in json.loads(changed.out)["script"]
    assert (sorted(run.path.rglob("*")), run.events.read_bytes()) == before
    assert workplace.calls == []
    assert workplace.invoke("resume", "one", "--dry-run", "--wait").code == 2


def test_a_refusal_of_sbatch_leaves_the_former_records(workplace: Workplace) -> None:
    run = stopped(workplace)
    before = run.spec.read_bytes(), run.script.read_bytes()
    workplace.command("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    got = workplace.invoke("resume", "one", "--partition", "nope")
    assert got.code == 2
    assert "invalid partition" in got.err
    assert (run.spec.read_bytes(), run.script.read_bytes()) == before
    assert not list(run.path.glob("*-1.*"))
    assert kinds(run)[-1] == "resume_requested"
    assert "state       stopped" in status(workplace, FORGOTTEN)


# -- with other options ------------------------------------------------------------------------


def test_what_is_typed_replaces_what_was_recorded(workplace: Workplace) -> None:
    run = stopped(workplace)
    old = run.script.read_text(), run.spec.read_text(), run.spec.stat().st_mtime
    accepted(
        workplace, "one", "--time", "20", "--partition", "gpu", "--exclude", "h01", "--mem", "4G",
        "--no-requeue", "--max-requeues", "3", "--max-restarts", "0", "--save-every",
        "7steps", "--preflight", "none",
    )  # fmt: skip
    script = sent(workplace)
    assert script == run.script.read_text()
    for words in (
        "#SBATCH --time=20\n", "#SBATCH --partition=gpu\n", "#SBATCH --exclude=h01\n",
        "#SBATCH --mem=4G\n", "#SBATCH --no-requeue\n", '"max_requeues": 3', "--save-every=7steps",
    ):  # fmt: skip
        assert words in script, words
    spec = run.load_spec()
    assert (spec.resources.nodes, spec.resources.time, spec.max_requeues) == (2, "20", 3)
    assert spec.node_checks == "none"
    assert spec.train is not None
    assert (spec.train.save_every, spec.train.allow_config_change) == ("7steps", False)
    assert (run.path / "script-1.sbatch").read_text() == old[0]
    assert (run.path / "spec-1.json").read_text() == old[1]
    assert run.spec.stat().st_mtime == old[2]  # the order of the runs stays
    changed = next(e for e in read_events(run) if e["event"] == "resume_requested")["changes"]
    assert "time 60, now 20" in changed


def of_command(workplace: Workplace, **request: Any) -> RunDir:
    """The run of a COMMAND that failed, with a little of everything that such a run can change."""
    settings: dict[str, Any] = {
        "train": None,
        "command": ("python", "-m", "old"),
        "environment": (("A", "1"), ("B", "2")),
        "pass_environment": ("HOME",),
        "modules": ("cuda/11", "nccl"),
        "setup": ("source old",),
        "sbatch": (("nice", "5"), ("hint", "x")),
    }
    return stopped(workplace, step=0, **{**settings, **request})


@pytest.mark.parametrize(
    ("argv", "changed"),
    [
        (["--env", "A=9"], {"environment": (("B", "2"), ("A", "9"))}),
        (["--env", "HOME=/x"], {"environment": (("A", "1"), ("B", "2"), ("HOME", "/x")),
                                "pass_environment": ()}),
        (["--env", "C="], {"environment": (("A", "1"), ("B", "2"), ("C", ""))}),
        (["--env", "PATH"], {"pass_environment": ("HOME", "PATH")}),
        (["--env", "", "--env", "C=3"], {"environment": (("C", "3"),), "pass_environment": ()}),
        (["--module", "cuda/12"], {"modules": ("cuda/12",)}),
        (["--module", ""], {"modules": ()}),
        (["--setup", "source new", "--setup", "b"], {"setup": ("source new", "b")}),
        (["--setup", ""], {"setup": ()}),
        (["--sbatch", "nice=9"], {"sbatch": (("nice", "9"), ("hint", "x"))}),
        (["--sbatch", "", "--sbatch", "hold"], {"sbatch": (("hold", None),)}),
        (["--", "python", "-m", "new", "--epochs", "3"],
         {"command": ("python", "-m", "new", "--epochs", "3")}),
        (["--time", "90", "--env", "A=9", "--", "python", "-m", "new"],
         {"command": ("python", "-m", "new"), "environment": (("B", "2"), ("A", "9"))}),
    ],
)  # fmt: skip
def test_what_belongs_to_a_command_can_be_changed(
    workplace: Workplace, argv: list[str], changed: dict[str, object]
) -> None:
    run = of_command(workplace)
    workplace.monkeypatch.setenv("CLUSTERDDP_ENV", "NOT=taken")
    workplace.monkeypatch.setenv("SBATCH_WCKEY", "not-taken")
    workplace.command("python", "true")
    before = vars(run.load_spec())
    accepted(workplace, "one", *argv)
    after = vars(run.load_spec())
    expected = {**before, **changed, "resources": after["resources"]}
    assert {n: v for n, v in after.items() if expected[n] != v} == {}
    assert sent(workplace) == sbatch.prepare(run.load_spec(), None)
    assert {*changed} <= {*[line.split(" ", 1)[0] for line in recorded_changes(run)[-1]]}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["torchrun", "train.py"], "COMMAND starts torchrun"),
        (["python", "trian.py"], "COMMAND: there is no trian.py in "),
        (["train.py"], "Use: python train.py."),
    ],
)
def test_another_command_is_checked_as_that_of_a_submission(
    workplace: Workplace, command: list[str], words: str
) -> None:
    run = of_command(workplace, setup=())
    workplace.command("python", "true")
    Path("train.py").write_text("")
    assert words in refused(workplace, run, "--setup", "", "--", *command)


def test_another_command_is_looked_for_in_the_runs_copy_of_the_code(workplace: Workplace) -> None:
    run = copied(workplace)
    workplace.command("python", "true")
    Path("new.py").write_text("")
    root = ("--runs-dir", str(workplace.root), "--dry-run")
    said = refused(workplace, run, *root, "--", "python", "new.py")
    assert f"COMMAND: there is no new.py in {run.code}" in said
    assert "Use the current files with --refresh-code, or" in said
    said = refused(workplace, run, *root, "--", "new.py")
    assert f"COMMAND: there is no new.py in {run.code}" in said
    accepted(workplace, "one", *root, "--refresh-code", "--", "python", "new.py")


def test_a_command_that_is_done_can_be_given_another_one(workplace: Workplace) -> None:
    run = of_command(workplace, setup=())
    add_event(run, **{**DONE, "time": time.time()})
    assert "Give another COMMAND" in refused(workplace, run, "--env", "A=9")
    workplace.command("python", "true")
    accepted(workplace, "one", "--", "python", "-m", "new")
    assert "-- python -m new\n" in sent(workplace)


@pytest.mark.parametrize("value", [value for value in CARRIED if value])
def test_every_value_of_a_command_is_carried(workplace: Workplace, value: str) -> None:
    run = of_command(workplace)
    workplace.command("python", "true")
    accepted(workplace, "one", f"--env=A={value}", "--", "python", "-m", "x", value)
    spec = run.load_spec()
    assert (dict(spec.environment)["A"], spec.command[-1]) == (value, value)


def test_a_container_can_be_changed_added_and_left(workplace: Workplace) -> None:
    run = stopped(workplace, container_image="/a.sif", container_workdir="/w", python="/opt/python")

    def asked() -> tuple[str, str, str, tuple[str, ...], str]:
        spec = run.load_spec()
        workplace.command("squeue", "echo '13|CANCELLED|None'")
        return (
            *(spec.container_image, spec.container_runtime, spec.container_workdir),
            *(spec.container_mounts, spec.python),
        )

    accepted(workplace, "one", "--container-image", "b.sif", "--container-mount", "data:/d:ro")
    here = str(Path.cwd())
    assert asked() == (f"{here}/b.sif", "auto", "/w", (f"{here}/data:/d:ro",), "/opt/python")
    assert f'"image": "{here}/b.sif"' in sent(workplace)
    accepted(
        workplace, "one", "--container-image", "torch", "--container-runtime", "podman",
        "--container-mount", "", "--container-workdir", "", "--python", "bin/python",
    )  # fmt: skip
    assert asked() == ("torch", "podman", "", (), f"{here}/bin/python")
    accepted(workplace, "one", "--container-image", "")
    assert asked() == ("", "auto", "", (), sys.executable)
    assert '"image"' not in sent(workplace)
    accepted(workplace, "one", "--container-image", "torch")
    assert asked() == ("torch", "auto", "", (), "python3"), "the image's"


def test_a_container_without_an_image_is_refused(workplace: Workplace) -> None:
    said = refused(workplace, stopped(workplace), "--container-runtime", "podman")
    assert "--container-runtime needs --container-image" in said


def test_every_set_of_former_records_is_kept(workplace: Workplace) -> None:
    run = stopped(workplace)
    for minutes in ("20", "30"):
        accepted(workplace, "one", "--time", minutes)
        workplace.command("squeue", "echo '13|CANCELLED|None'")
    names = sorted(path.name for path in run.path.glob("s*-*"))
    assert names == ["script-1.sbatch", "script-2.sbatch", "spec-1.json", "spec-2.json"]
    assert "--time=20" in (run.path / "script-2.sbatch").read_text()


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--requeue one", "--requeue"),
        ("one --requeue", "--requeue"),
        ("--requeue=expedite one", "--requeue=expedite"),
        ("--requeue=no one", "--no-requeue"),
        ("--requeue --no-requeue one", "--no-requeue"),
        ("--no-requeue --requeue -- one", "--requeue"),
    ],
)
def test_a_bare_requeue_leaves_the_next_word_alone(
    typed: str, line: str, workplace: Workplace
) -> None:
    stopped(workplace, requeue=line == "--no-requeue")
    assert f"#SBATCH {line}\n" in accepted(workplace, "--dry-run", *typed.split()).out


def test_the_runs_own_clusterddp_is_kept_until_another_is_asked_for(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(workplace)
    former = bundle.bundle_into(run)
    monkeypatch.setattr(bundle, "__version__", "9.9")
    monkeypatch.setattr(bundle, "_MAIN", f"{bundle._MAIN}# newer\n")
    assert f"keeps its clusterddp {former}; 9.9 (" in accepted(workplace, "one").err
    assert bundle.find(run) == former
    workplace.command("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    assert workplace.invoke("resume", "one", "--time", "20").code == 2
    assert bundle.find(run) == former
    workplace.command("sbatch", "echo 14")
    accepted(workplace, "one", "--time", "20")
    made = bundle.find(run)
    assert made and made.version == "9.9"
    assert f"clusterddp {former}, now {made}" in recorded_changes(run)[-1]


@pytest.mark.parametrize("options", [(), ("--upgrade-clusterddp",)])
def test_one_that_was_altered_is_replaced(workplace: Workplace, options: tuple[str, ...]) -> None:
    run = stopped(workplace)
    made = bundle.bundle_into(run)
    made.path.write_bytes(b"")
    accepted(workplace, "one", *options)
    assert bundle.find(run) == made
    assert [*map(list, recorded_changes(run))] == [[]]
    assert sent(workplace) == run.script.read_text()


def recorded_changes(run: RunDir) -> list[list[str]]:
    """What changed with each."""
    return [event["changes"] for event in read_events(run) if event["event"] == "resume_requested"]


def test_a_script_of_another_version_is_rendered_anew_with_other_options(
    workplace: Workplace,
) -> None:
    run = stopped(workplace)
    header = f"rendered by clusterddp {__version__}: "
    script = run.script.read_text()
    assert header in script
    run.script.write_text(script.replace(header, "rendered by clusterddp 9.9: "))
    accepted(workplace, "one", "--time", "20")
    assert header in sent(workplace)


def test_the_interpreter_of_the_batch_script_can_be_changed(workplace: Workplace) -> None:
    run = stopped(workplace, controller_python="python3")
    workplace.command("python3.13", "true")
    accepted(workplace, "one", "--controller-python", "bin/python3.13")
    python = str(workplace.folder / "bin/python3.13")
    assert f' {python} "$own" batch ' in sent(workplace).replace(" \\\n    ", " ")
    assert run.load_spec().python == "python"
    assert f"controller_python python3, now {python}" in recorded_changes(run)[-1]


# -- what else is typed ------------------------------------------------------------------------


def test_none_drops_a_binding_and_its_record(workplace: Workplace) -> None:
    run = stopped(workplace, train=TrainConfig(numa_binding="node"))
    assert "--numa-binding=node" in run.script.read_text()
    accepted(workplace, "one", "--numa-binding", "none")
    assert "numa" not in sent(workplace) + run.spec.read_text()


def test_an_empty_value_drops_an_option(workplace: Workplace) -> None:
    run = stopped(workplace, resources=Resources(dependency="afterok:9", qos="high"))
    assert "--dependency" in run.script.read_text()
    accepted(workplace, "one", "--dependency", "", "--qos", "")
    assert "--dependency" not in sent(workplace)
    assert "--qos" not in sent(workplace)


def test_the_default_signal_follows_the_time_limit(workplace: Workplace) -> None:
    stopped(workplace)
    script = accepted(workplace, "one", "--dry-run", "--time", "1").out
    assert "#SBATCH --signal=B:USR1@12\n" in script
    mine = accepted(workplace, "one", "--dry-run", "--time", "1", "--signal", "B:USR1@33").out
    assert "#SBATCH --signal=B:USR1@33\n" in mine
    assert "#SBATCH --signal" not in accepted(workplace, "one", "--dry-run", "--signal", "none").out


def test_a_signal_that_was_chosen_stays(workplace: Workplace) -> None:
    stopped(workplace, signal="B:USR1@77")
    script = accepted(workplace, "one", "--dry-run", "--time", "2").out
    assert "#SBATCH --signal=B:USR1@77\n" in script


def test_tasks_follow_the_gpus_as_at_the_submission(workplace: Workplace) -> None:
    stopped(workplace, resources=Resources(nodes=1, gpus_per_node=4))
    script = accepted(workplace, "one", "--dry-run", "--gpus-per-node", "a100:2").out
    assert "#SBATCH --gpus-per-node=a100:2\n" in script
    assert "#SBATCH --ntasks-per-node=2\n" in script


def test_what_the_changed_request_wastes_is_said_and_what_it_wasted_before_is_not(
    workplace: Workplace,
) -> None:
    stopped(workplace, resources=Resources(nodes=1, gpus_per_node=2))
    said = accepted(workplace, "one", "--gpus-per-node", "4", "--tasks-per-node", "2").err
    assert "2 of the 4 GPUs of each node stay idle" in said
    assert "each GPU rank gets one CPU" not in said


def test_a_run_moves_between_the_queue_and_an_allocation(workplace: Workplace) -> None:
    stopped(workplace, launcher="held", hold="lab")
    assert "--exact" in accepted(workplace, "one", "--dry-run", "--in", "other").out
    assert "--exact" not in accepted(workplace, "one", "--launcher", "sbatch").out
    assert "--exact" not in sent(workplace)
    assert "--exact" in accepted(workplace, "one", "--dry-run", "--in", "lab").out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--time", "soon"], "--time"),
        (["--nodes", "0"], "--nodes"),
        (["--tasks-per-node", "0"], "--tasks-per-node"),
        (["--partition", "a b; touch pwned"], "--partition"),
        (["--max-requeues", "-1"], "--max-requeues"),
        (["--lr", "0", "--allow-config-change"], "--lr"),
        (["--sbatch", "comment=x"], "'resume' cannot change --sbatch of one. Submit a new run"),
        (["--env", "A=1"], "'resume' cannot change --env of one"),
        (["--module", "cuda"], "'resume' cannot change --module of one"),
        (["--setup", "true"], "'resume' cannot change --setup of one"),
        (["--launcher", "local"], "'resume' cannot change --launcher of one"),
        (["--in", "lab", "--launcher", "sbatch"], "--in lab conflicts with --launcher sbatch"),
        (["--in", "lab"], "there is no run 'lab'"),
        (["--", "python", "train.py"], "cannot be given: one runs the built-in training"),
        (["--init-from", "x"], "no such option"),
        (["--runs-dir", "nowhere"], "there is no run"),
    ],
)
def test_a_wrong_request_changes_nothing(workplace: Workplace, argv: list[str], words: str) -> None:
    assert words in refused(workplace, stopped(workplace), *argv)


@pytest.mark.parametrize("value", [value for value in CARRIED if value])
def test_every_value_is_carried_or_refused(workplace: Workplace, value: str) -> None:
    stopped(workplace)
    got = workplace.invoke("resume", "one", f"--job-name={value}")
    assert got.code == 0, got.err
    check = subprocess.run(
        ["/bin/bash", "-n"], input=sent(workplace), capture_output=True, text=True, check=False
    )
    assert (check.returncode, check.stderr) == (0, "")
    assert not list(workplace.folder.rglob("pwned"))


# -- a changed configuration -------------------------------------------------------------------


def test_another_configuration_is_refused_with_the_difference(workplace: Workplace) -> None:
    said = refused(workplace, stopped(workplace), "--lr", "0.5", "--seed", "3", "--keep-last", "9")
    assert "--lr 0.001, now 0.5; --seed 0, now 3." in said
    assert "keep-last" not in said  # it decides nothing
    assert "--allow-config-change" in said


def test_allowed_on_purpose_it_reaches_the_tasks(workplace: Workplace) -> None:
    run = stopped(workplace)
    accepted(workplace, "one", "--lr", "0.5", "--allow-config-change")
    assert "--lr=0.5" in sent(workplace)
    assert "--allow-config-change" in sent(workplace)
    train = run.load_spec().train
    assert train is not None
    assert (train.lr, train.allow_config_change) == (0.5, True)


def test_a_recipe_is_refused_or_taken_with_all_that_it_says(workplace: Workplace) -> None:
    run = stopped(workplace)
    said = refused(workplace, run, "--recipe", "fast", "--lr", "0.5")
    assert "--model convnet, now fastnet" in said
    assert "--lr 0.001, now 0.5;" in said
    assert "is not one of fast" in refused(workplace, run, "--recipe", "slow")
    accepted(workplace, "one", "--recipe", "fast", "--lr", "0.5", "--allow-config-change")
    assert "--batch-size=250" in sent(workplace)
    assert "--lr=0.5" in sent(workplace)


def test_the_same_value_is_no_change(workplace: Workplace) -> None:
    run = stopped(workplace)
    accepted(workplace, "one", "--lr", "0.001")
    assert not list(run.path.glob("*-1.*"))


@pytest.mark.parametrize(
    ("step", "words"), [(40, "its command, which resumes from step 40\n"), (0, "its command\n")]
)
def test_a_command_says_the_step_of_its_loop(workplace: Workplace, step: int, words: str) -> None:
    stopped(workplace, step=step, train=None, command=("true",))
    assert f"; it reruns {words}" in accepted(workplace, "one").out


def code_run(workplace: Workplace) -> RunDir:
    """A command's run without a copy of the tree, which is `tree` below the workplace."""
    run = stopped(workplace, train=None, command=("python", "train.py"))
    tree = workplace.folder / "tree"
    tree.mkdir()
    (tree / "train.py").write_text("print(1)\n")
    now = snapshot.fingerprint(tree, exclude=run_folders(run))
    assert now is not None
    now.write(run.code_record)
    workplace.monkeypatch.chdir(tree)
    workplace.command("sbatch", "/bin/cat >../sent; echo 13")
    return run


def test_changed_code_is_refused_with_the_difference(workplace: Workplace) -> None:
    run = code_run(workplace)
    root = ["--runs-dir", str(workplace.root)]
    Path("train.py").write_text("print(2)\n")
    Path("it's \n new.py").write_text("")
    said = refused(workplace, run, *root)
    assert "changed train.py" in said
    assert "new.py" not in said  # what the run leaves in the tree is no change of the code
    accepted(workplace, "one", *root, "--allow-config-change")
    assert sent(workplace) == run.script.read_text()


def test_unchanged_code_or_a_copy_of_it_is_no_matter(workplace: Workplace) -> None:
    run = code_run(workplace)
    root = ["--runs-dir", str(workplace.root)]
    accepted(workplace, "one", *root, "--dry-run")
    run.code.mkdir()
    Path("train.py").write_text("print(2)\n")
    accepted(workplace, "one", *root, "--dry-run")


def copied(workplace: Workplace) -> RunDir:
    """A command's run with a copy of the tree, in which it has written its state."""
    run = code_run(workplace)
    snapshot.take(Path.cwd(), run.code, exclude=run_folders(run))
    (run.code / "state").write_text("step 7")
    return run


def code_of(run: RunDir) -> dict[str, str]:
    return {path.name: path.read_text() for path in run.code.iterdir()}


def test_a_copy_that_is_older_than_the_folder_is_said(workplace: Workplace) -> None:
    run = copied(workplace)
    root = ["--runs-dir", str(workplace.root)]
    assert "copy" not in accepted(workplace, "one", *root, "--dry-run").err
    Path("train.py").write_text("print(2)\n")
    Path("it's \n new.py").write_text("")
    said = accepted(workplace, "one", *root).err
    assert f"one runs its copy of the code ({run.code}, of " in said
    assert f'2 files differ in {Path.cwd()}: changed train.py, new "it\'s \\n new.py"' in said
    assert "To run the current files, use --refresh-code." in said
    assert code_of(run) == {"train.py": "print(1)\n", "state": "step 7"}


def test_the_folder_is_taken_as_it_is_now(workplace: Workplace) -> None:
    run = copied(workplace)
    root = ["--runs-dir", str(workplace.root)]
    Path("train.py").write_text("print(2)\n")
    Path("new.py").write_text("")
    got = accepted(workplace, "one", *root, "--refresh-code")
    assert code_of(run) == {"train.py": "print(2)\n", "new.py": "", "state": "step 7"}
    assert f"copied {Path.cwd()} to {run.code}: " in got.err
    assert ": changed train.py, new new.py\n" in got.err
    assert read_events(run)[-2]["changes"] == ["code: changed train.py", "code: new new.py"]
    assert sorted(path.name for path in run.path.glob("*code*")) == ["code", "code.json"]
    workplace.command("squeue", "echo '13|CANCELLED|None'")
    assert "copy" not in accepted(workplace, "one", *root, "--dry-run").err


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_carried_tree_is_used_and_not_the_former_one(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    run, former, trees = copied(workplace), Path.cwd(), workplace.folder / "trees"
    first, *others = read_events(run)
    lines = [json.dumps(each) for each in ({**first, "folder": str(former)}, *others)]
    run.events.write_text("\n".join([*lines, ""]))
    carried = trees / "abc"
    carried.mkdir(parents=True)
    (carried / "train.py").write_text("print(3)\n")
    (trees / "abc.json").write_text(json.dumps({"train.py": ["", 0o644]}))
    monkeypatch.setenv("CLUSTERDDP_TREE", str(carried))
    monkeypatch.chdir(carried)
    if is_gone:
        former.rename(former.with_name("gone"))
    accepted(workplace, "one", "--runs-dir", str(workplace.root), "--refresh-code")
    assert code_of(run) == {"train.py": "print(3)\n", "state": "step 7"}


def test_a_refused_submission_has_its_former_code_back(workplace: Workplace) -> None:
    run = copied(workplace)
    root = ["--runs-dir", str(workplace.root)]
    before = code_of(run), run.code_record.read_bytes()
    Path("train.py").write_text("print(2)\n")
    workplace.command("sbatch", "echo 'sbatch: error: no' >&2; exit 1")
    assert workplace.invoke("resume", "one", *root, "--refresh-code").code == 2
    assert (code_of(run), run.code_record.read_bytes()) == before
    for name in ("images", "more"):  # neither is large enough to be linked for its size
        Path(name).write_bytes(bytes(900_000))
    said = refused(workplace, run, *root, "--refresh-code", "--snapshot-limit", "1")
    assert "--snapshot-limit" in said
    assert sorted(path.name for path in run.path.glob("*code*")) == ["code", "code.json"]


@pytest.mark.parametrize("has_record", [True, False])
def test_a_refused_submission_of_a_run_without_a_copy_leaves_none(
    has_record: bool, workplace: Workplace
) -> None:
    run = code_run(workplace)
    if not has_record:
        run.code_record.unlink()
    before = sorted(run.path.glob("*code*")), run.spec.read_bytes()
    Path("train.py").write_text("print(2)\n")
    workplace.command("sbatch", "echo 'sbatch: error: no' >&2; exit 1")
    root = ["--runs-dir", str(workplace.root)]
    assert workplace.invoke("resume", "one", *root, "--refresh-code").code == 2
    assert (sorted(run.path.glob("*code*")), run.spec.read_bytes()) == before


def test_a_submission_without_an_answer_keeps_the_new_code_alone(workplace: Workplace) -> None:
    run = copied(workplace)
    root = ["--runs-dir", str(workplace.root)]
    Path("train.py").write_text("print(2)\n")
    workplace.command("sbatch", "echo 'sbatch: error: Socket timed out' >&2; exit 1")
    workplace.monkeypatch.setattr("clusterddp.polling.SUBMITTED_SECONDS", 0.0)
    got = workplace.invoke("resume", "one", *root, "--refresh-code")
    assert (got.code, "it is not known whether" in got.err) == (1, True)
    assert code_of(run)["train.py"] == "print(2)\n"
    assert sorted(path.name for path in run.path.glob("*code*")) == ["code", "code.json"]


def test_an_interrupt_while_the_code_is_renewed_leaves_the_former(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(workplace)
    before = code_of(run), run.code_record.read_bytes()
    Path("train.py").write_text("print(2)\n")

    def interrupted(path: Path, content: bytes) -> None:
        patched.undo()
        raise KeyboardInterrupt

    root = ["--runs-dir", str(workplace.root)]
    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "write_atomically", interrupted)
        assert workplace.invoke("resume", "one", *root, "--refresh-code").code == 130
    assert (code_of(run), run.code_record.read_bytes()) == before
    assert sorted(path.name for path in run.path.glob("*code*")) == ["code", "code.json"]


@pytest.mark.parametrize("flags", [("--refresh-code",), ()])
def test_a_swap_that_was_killed_between_two_renames_is_mended(
    flags: tuple[str, ...], workplace: Workplace
) -> None:
    run = copied(workplace)
    root = ["--runs-dir", str(workplace.root)]
    run.code.rename(run.path / ".code-former")
    (run.path / ".code-new").mkdir()
    accepted(workplace, "one", *root, *flags)
    assert code_of(run) == {"train.py": "print(1)\n", "state": "step 7"}
    assert sorted(path.name for path in run.path.glob("*code*")) == ["code", "code.json"]


def test_without_a_copy_the_changed_folder_is_taken_on_purpose(workplace: Workplace) -> None:
    run = code_run(workplace)
    run.spec.write_text(dataclasses.replace(run.load_spec(), snapshot=False).to_json())
    root = ["--runs-dir", str(workplace.root)]
    Path("train.py").write_text("print(2)\n")
    assert "--refresh-code" in refused(workplace, run, *root)
    accepted(workplace, "one", *root, "--refresh-code")
    assert not run.code.exists()
    workplace.command("squeue", "echo '13|CANCELLED|None'")
    accepted(workplace, "one", *root, "--dry-run")


def test_a_run_without_code_of_its_own_has_none_to_take(workplace: Workplace) -> None:
    assert "uses no code from" in refused(workplace, stopped(workplace), "--refresh-code")


def test_training_options_are_not_for_a_command(workplace: Workplace) -> None:
    run = stopped(workplace, train=None, command=("true",))
    assert "--lr applies only to the built-in training" in refused(workplace, run, "--lr", "1")
    other = refused(workplace, run, "--snapshot-every", "30s")
    assert "In the script, use Loop(snapshot_every=…) or resume(…, snapshot_every=…)." in other


def test_a_script_of_another_template_is_not_replaced_unseen(workplace: Workplace) -> None:
    run = stopped(workplace)
    run.script.write_text(run.script.read_text() + "echo mine\n")
    assert "differs from the output of template ddp.sbatch.j2" in refused(
        workplace, run, "--time", "5"
    )
    own = workplace.folder / "own"
    own.mkdir()
    (own / "ddp.sbatch.j2").write_text(
        "{% extends 'shipped/ddp.sbatch.j2' %}{% block setup %}echo mine{% endblock %}\n"
    )
    run.script.write_text(sbatch.prepare(run.load_spec(), own))
    assert "--template-dir" in refused(workplace, run, "--time", "5")
    accepted(workplace, "one", "--time", "5", "--template-dir", str(own))
    assert "echo mine" in sent(workplace)


@pytest.mark.parametrize(
    ("train", "images"),
    [(TrainConfig(), 256), (TrainConfig(batch_size=32, gradient_accumulation_steps=2), 256)],
    ids=["batch", "gradient_accumulation_steps"],
)
@pytest.mark.parametrize("step", [0, 40], ids=["no checkpoint", "checkpoint"])
def test_ranks_that_cannot_share_the_batch_are_refused(
    workplace: Workplace, train: TrainConfig, images: int, step: int
) -> None:
    """As `start` refuses them on the node, whether or not there is a checkpoint yet."""
    run = stopped(workplace, train=train, step=step)
    run.resolved.write_text(json.dumps({"global_batch_size": images, "reference_world_size": 4}))
    assert "256 images over all ranks" in refused(workplace, run, "--nodes", "3")
    accepted(workplace, "one", "--nodes", "1", "--dry-run")


def test_a_batch_size_that_was_changed_counts_for_the_ranks_that_there_are(
    workplace: Workplace,
) -> None:
    run = stopped(workplace)
    run.resolved.write_text(json.dumps({"global_batch_size": 256, "reference_world_size": 4}))
    changed = ["--nodes", "3", "--gradient-accumulation-steps", "2", "--allow-config-change"]
    accepted(workplace, "one", "--dry-run", *changed)


def test_fewer_steps_than_were_trained_are_refused(workplace: Workplace) -> None:
    said = refused(workplace, stopped(workplace), "--max-steps", "39")
    assert "--max-steps 39: the newest checkpoint of one is already at step 40" in said
    accepted(workplace, "one", "--dry-run", "--max-steps", "40")  # it is evaluated there


# -- whether it may start ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "state"), [("12|PENDING|Resources", "queued"), ("12|RUNNING|None", "running")]
)
def test_a_run_that_is_queued_or_running_is_left(
    workplace: Workplace, answer: str, state: str
) -> None:
    run = stopped(workplace)
    events = run.events.read_text().splitlines()
    run.events.write_text("\n".join(events[: 1 if state == "queued" else 2]) + "\n")
    workplace.command("squeue", f"echo '{answer}'")
    said = refused(workplace, run)
    assert f"one is already {state}" in said
    assert "clusterddp stop --wait one" in said


def test_one_that_waits_to_be_requeued_is_left(workplace: Workplace) -> None:
    run = stopped(workplace)
    # By somebody's scontrol requeue.
    workplace.command("squeue", "echo '12|PENDING|BeginTime|clusterddp:one'")
    assert "one is already queued (requeued: BeginTime)" in refused(workplace, run)


def test_without_an_answer_of_slurm_nothing_is_submitted(workplace: Workplace) -> None:
    run = stopped(workplace)
    run.events.write_text("".join(run.events.read_text().splitlines(keepends=True)[:2]))
    workplace.command("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    said = refused(workplace, run)
    assert "cannot tell whether job 12 of one" in said
    assert "squeue -j 12" in said


def test_a_job_that_slurm_has_forgotten_is_gone_on_with(workplace: Workplace) -> None:
    run = stopped(workplace)
    run.events.write_text("".join(run.events.read_text().splitlines(keepends=True)[:2]))
    got = accepted(workplace, "one")
    assert "Slurm no longer knows the job" in got.err
    assert "as job 13" in got.out


DONE = {**ended("12", 0), "attempt": 1, "cause": "done", "why": ""}


def test_a_run_that_is_done_has_nothing_left(workplace: Workplace) -> None:
    run = stopped(workplace)
    add_event(run, **{**DONE, "time": time.time()})
    for more in ([], ["--time", "5", "--allow-config-change"], ["--dry-run"]):
        assert "one is done: there is nothing left to train" in refused(workplace, run, *more)
    assert "--epochs 2, now 5" in refused(workplace, run, "--epochs", "5")
    accepted(workplace, "one", "--epochs", "5", "--allow-config-change")
    assert "--epochs=5" in sent(workplace)


def test_more_steps_are_something_left(workplace: Workplace) -> None:
    run = stopped(workplace, train=TrainConfig(max_steps=40))
    add_event(run, **{**DONE, "time": time.time()})
    run.report.write_text(json.dumps({"steps": 40, "epochs": 1, "attempt": 1}))
    said = refused(workplace, run, "--epochs", "9", "--allow-config-change")
    assert "To train further, add a larger --max-steps N, or" in said
    accepted(workplace, "one", "--max-steps", "80")


def test_steps_and_epochs_that_a_done_run_has_are_nothing_more(workplace: Workplace) -> None:
    run = stopped(workplace)
    add_event(run, **{**DONE, "time": time.time()})
    run.report.write_text(json.dumps({"steps": 40, "epochs": 2, "attempt": 1}))
    for more in (["--max-steps", "80"], ["--epochs", "1"], ["--lr", "0.5"]):
        assert "nothing left to train" in refused(workplace, run, *more, "--allow-config-change")
    accepted(workplace, "one", "--epochs", "3", "--allow-config-change", "--dry-run")
    accepted(workplace, "one", "--epochs", "3", "--allow-config-change")


def test_a_command_that_is_done_is_done(workplace: Workplace) -> None:
    run = copied(workplace)
    Path("train.py").write_text("print(2)\n")
    add_event(run, **{**DONE, "time": time.time()})
    got = workplace.invoke("resume", "one", "--runs-dir", str(workplace.root))
    assert "its command ended with exit code 0" in got.err
    assert "copy of the code" not in got.err
    assert "--even-if-done" in got.err
    accepted(workplace, "one", "--even-if-done", *["--runs-dir", str(workplace.root)])
    assert kinds(run)[-2:] == ["resume_requested", "submitted"]


def test_a_failed_and_a_cancelled_run_go_on(workplace: Workplace) -> None:
    run = stopped(workplace)
    for cause in ("failed", "cancelled"):
        add_event(run, **{**STOPPED, "cause": cause, "exit_code": 1, "time": time.time()})
        accepted(workplace, "one", "--dry-run")
    accepted(workplace, "one")


@pytest.mark.parametrize("what", ["spec", "attempt"])
def test_a_directory_of_a_newer_version_is_refused(workplace: Workplace, what: str) -> None:
    run = stopped(workplace)
    path = run.spec if what == "spec" else Attempt(run, 1).record
    content = json.loads(path.read_text()) if path.exists() else {"step": 0}
    path.write_text(json.dumps({**content, "format": 99}))
    assert "newer clusterddp" in refused(workplace, run)


def test_an_element_of_an_array_is_pointed_to_its_own_command(workplace: Workplace) -> None:
    run = stopped(workplace)
    element = RunDir(run.path.rename(run.path.with_name("one-3")))
    shown = f"sbatch --array=3 {element.path.absolute()}/script.sbatch"
    assert shown in refused(workplace, element)


def test_a_moved_directory_is_not_written_elsewhere(workplace: Workplace) -> None:
    run = stopped(workplace)
    moved = RunDir(run.path.rename(run.path.with_name("two")))
    assert "the directory of two was moved" in refused(workplace, moved)


def test_a_variable_that_is_passed_by_name_must_be_set(workplace: Workplace) -> None:
    run = stopped(workplace, pass_environment=("TOKEN",))
    assert "TOKEN is not set in your shell" in refused(workplace, run)
    workplace.monkeypatch.setenv("TOKEN", "secret")
    accepted(workplace, "one")
    assert "secret" not in sent(workplace)


def test_a_run_without_a_checkpoint_starts_from_the_beginning(
    workplace: Workplace, data: list[TrainConfig]
) -> None:
    stopped(workplace, step=0, train=TrainConfig(init_from="/elsewhere"))
    assert "it starts from /elsewhere" in accepted(workplace, "one").out
    assert data[0].init_from == "/elsewhere"  # which it would need then


# -- on this workstation -----------------------------------------------------------------------


def rehearsal(workplace: Workplace) -> RunDir:
    """A command that was stopped in a rehearsal, with the shell's own PATH."""
    workplace.monkeypatch.setenv("PATH", f"{workplace.folder}/bin:/usr/bin:/bin")
    run = stopped(
        workplace, "here", step=0, train=None, python=sys.executable, launcher="local",
        resources=Resources(), command=(sys.executable, "-c", "print('again')"),
    )  # fmt: skip
    gone = submitted("99999999", launcher="local", pid=99999999, host=os.uname().nodename, time=1.0)
    run.events.write_text(json.dumps(gone) + "\n")
    return run


def test_a_rehearsal_is_rehearsed_again(workplace: Workplace) -> None:
    run = rehearsal(workplace)
    got = workplace.invoke("resume", "here")
    assert got.code == 0, got.err + got.out
    assert run.rank_log(0).read_text() == "again\n"
    assert "here: done" in got.err
    assert kinds(run)[:4] == ["submitted", "resume_requested", "submitted", "started"]
    assert "nothing" not in workplace.calls
    assert workplace.invoke("resume", "here").code == 2


def test_new_code_of_a_command_runs_where_its_state_lies(workplace: Workplace) -> None:
    """From the first submission on, as it is typed, by the bytes that the command prints."""
    path = f"{workplace.folder}/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
    workplace.monkeypatch.setenv("PATH", path)
    program = Path("job.sh")
    program.write_text("echo first; echo 7 >state; exit 3\n")
    argv = ["--launcher", "local", "--run-name", "own", "--", "sh", "job.sh"]
    assert workplace.invoke("submit", *argv).code == 1
    program.write_text("echo second; cat state; exit 3\n")
    got = workplace.invoke("resume", "own")
    assert "changed job.sh" in got.err
    assert "--refresh-code" in got.err
    log = RunDir(workplace.root / "own").rank_log(0)
    assert "second" not in log.read_text()
    got = workplace.invoke("resume", "own", "--refresh-code")
    assert got.code == 1
    # The parts of the attempts, and of the last one alone what is shown when it has failed.
    *_, divider, second, state = log.read_text().splitlines()
    assert divider.startswith("--- attempt 3, job ")
    assert (second, state) == ("second", "7")
    job_log = RunDir(workplace.root / "own").job_log.read_text()
    assert job_log.count("--- attempt 3, job ") == 1
    assert re.search(r"^--- attempt 3, job [^\n]*---\nclusterddp: own, job ", job_log, re.M)
    assert job_log.count("\nclusterddp: own, job ") == 2  # and the very first line
    shown = job_log.rpartition("--- last lines of logs/rank-0.log:\n")[2]
    assert shown.startswith("second\n7\nclusterddp: rank 0 on 127.0.0.1 failed first")


def test_a_rehearsal_that_runs_is_named_as_a_process(workplace: Workplace) -> None:
    run, pid = rehearsal(workplace), os.getpid()
    here = {"launcher": "local", "pid": pid, "host": os.uname().nodename, "time": time.time()}
    run.events.write_text(json.dumps(submitted(str(pid), **here)) + "\n")
    assert f") as pid:{pid}. Follow it with" in refused(workplace, run)


def test_one_that_runs_on_another_machine_is_left_while_it_lives(workplace: Workplace) -> None:
    run = rehearsal(workplace)
    there = submitted("5", launcher="local", pid=1, host="elsewhere", time=1.0)
    run.events.write_text(json.dumps(there) + "\n")
    attempt = Attempt(run, 1)
    attempt.renew_liveness(3)
    assert "is still training" in refused(workplace, run)
    os.utime(attempt.alive, (1, 1))
    assert workplace.invoke("resume", "here").code == 0


def test_options_cover_what_submit_asks_slurm_for() -> None:
    """A new option of a request is taken here as well, or left out on purpose."""
    mine = {parameter.name for parameter in resume.command.params}
    fields = {field.name for field in dataclasses.fields(Resources)} - {"gpu_type"}
    assert fields <= mine
    assert {field.name for field in dataclasses.fields(TrainConfig)} - {"init_from"} <= mine


def test_a_resumed_run_may_stage_its_environment_elsewhere_or_not_at_all(
    workplace: Workplace,
) -> None:
    run = stopped(workplace, python="/shared/env/bin/python", stage_env="/full")
    accepted(workplace, "one", "--stage-env", "/local")
    assert '"stage_env": "/local"' in sent(workplace)
    accepted(workplace, "one", "--stage-env", "off")
    assert "CLUSTERDDP_STAGED" not in sent(workplace)
    assert not run.load_spec().stages
    got = workplace.invoke("resume", "one", "--dry-run", "--stage-env", "auto", "--python", "py")
    assert got.code == 2 and "--stage-env auto needs --python" in got.err


def test_a_command_that_hung_is_resumed_with_another_watch(workplace: Workplace) -> None:
    stopped(workplace, train=None, command=("python", "train.py"))
    accepted(
        workplace,
        "one",
        "--no-stacks",
        "--hang-timeout",
        "5m",
        "--on-hang",
        "end",
        "--refresh-code",
    )
    script = sent(workplace)
    assert "--no-stacks -- python train.py" in script
    assert '"hang_timeout": 300' in script
    assert '"on_hang": "end"' in script
