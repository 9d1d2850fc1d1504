"""The Slurm client against stand-in commands, for what a healthy cluster cannot be made to say."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp import polling
from clusterddp.errors import RequestError, SlurmError
from clusterddp.slurm import client
from clusterddp.slurm.client import (
    check_expedite,
    partitions,
    query,
    sbatch,
    submission_environment,
)
from clusterddp.slurm.states import JobState, State, parse_exit_code, parse_state

SCRIPT = "#!/bin/bash\n#SBATCH --comment=clusterddp:one\ntrue\n"
COMMENT = "clusterddp:one"

Fake = Callable[..., dict[str, str]]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """`fake(sbatch="echo 1")` makes a PATH that holds these shell scripts and nothing else."""

    def make(**commands: str) -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, body in commands.items():
            path = folder / name
            path.write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/calls\n{body}\n')
            path.chmod(0o755)
        return {"PATH": str(folder), "HOME": "/"}

    return make


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "SUBMITTED_SECONDS", 0.01)
    monkeypatch.setattr(polling, "SUBMITTED_POLL_SECONDS", 0.01)


# -- the environment of a submission ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("PATH", True),
        ("HOME", True),
        ("MY_SLURM_NOTE", True),
        ("SQUEUE_FORMAT", True),
        ("SLURM_CONF", True),
        ("SLURM_CONF_SERVER", True),
        ("SLURM_CLUSTERS", True),
        ("SLURM_JWT", True),
        ("NCCL_DEBUG", True),
        ("OMP_NUM_THREADS", True),
        ("CUDA_VISIBLE_DEVICES", True),
        ("SLURM_CPU_BIND", False),
        ("CLUSTERDDP_LOOP", False),
        ("SLURM_EXPORT_ENV", False),
        ("SLURM_NTASKS", False),
        ("SLURMD_NODENAME", False),
        ("SBATCH_PARTITION", False),
        ("SRUN_CPUS_PER_TASK", False),
        ("SALLOC_ACCOUNT", False),
        ("PMI_RANK", False),
        ("PMI2_FD", False),
        ("PMIX_RANK", False),
        ("RANK", False),
        ("WORLD_SIZE", False),
        ("LOCAL_RANK", False),
        ("LOCAL_WORLD_SIZE", False),
        ("NODE_RANK", False),
        ("GROUP_RANK", False),
        ("GROUP_WORLD_SIZE", False),
        ("ROLE_RANK", False),
        ("ROLE_WORLD_SIZE", False),
        ("ROLE_NAME", False),
        ("MASTER_ADDR", False),
        ("MASTER_PORT", False),
        ("TORCHELASTIC_RUN_ID", False),
        ("OMPI_COMM_WORLD_RANK", False),
        ("CLUSTERDDP_RUN_CODE", False),
        ("CLUSTERDDP_RUN_CODE_OF", False),
        ("CLUSTERDDP_RUN_STACKS", False),
    ],
)
def test_submission_environment_keeps_what_a_login_shell_has(name: str, kept: bool) -> None:
    assert (name in submission_environment({name: "x"})) is kept


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"]
)
def test_devices_of_a_surrounding_job_are_not_handed_on(name: str) -> None:
    assert submission_environment({name: "0", "SLURM_JOB_ID": "7", "A": "b"}) == {"A": "b"}


def test_a_job_from_a_staged_task_has_the_original_environment() -> None:
    environ = {
        "CLUSTERDDP_STAGED": "/tmp/copy/env", "CLUSTERDDP_STAGED_FROM": "/shared/env",
        "PATH": "/tmp/copy/env/bin:/tmp/copy/env2:/bin", "VIRTUAL_ENV": "/tmp/copy/env",
    }  # fmt: skip
    assert submission_environment(environ) == {
        "PATH": "/shared/env/bin:/tmp/copy/env2:/bin", "VIRTUAL_ENV": "/shared/env",
    }  # fmt: skip


# -- sbatch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "job_id"),
    [
        ("echo 1234", "1234"),
        ("echo '1234;west'", "1234"),
        ("echo Welcome to the cluster; echo 1234", "1234"),
    ],
)
def test_sbatch_gives_the_job_id(fake: Fake, printed: str, job_id: str) -> None:
    assert sbatch(SCRIPT, fake(sbatch=printed), comment=COMMENT) == job_id


def test_sbatch_gets_the_script_on_stdin_and_a_clean_environment(
    fake: Fake, tmp_path: Path
) -> None:
    body = f'/bin/cat >{tmp_path}/stdin; echo "$SLURM_NTASKS$RANK$KEPT" >{tmp_path}/env; echo 1'
    environ = {**fake(sbatch=body), "SLURM_NTASKS": "8", "RANK": "3", "KEPT": "kept"}
    sbatch(SCRIPT, environ, comment=COMMENT)
    assert (tmp_path / "stdin").read_text() == SCRIPT
    assert (tmp_path / "env").read_text() == "kept\n"
    assert calls(tmp_path) == ["sbatch --parsable"]


def test_no_sbatch_on_path_says_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no sbatch on PATH.*--launcher local.*--dry-run"):
        sbatch(SCRIPT, {"PATH": str(tmp_path)}, comment=COMMENT)


def test_a_file_that_may_not_be_run_is_no_sbatch(tmp_path: Path) -> None:
    (tmp_path / "sbatch").touch(0o644)
    with pytest.raises(RequestError, match="no sbatch on PATH"):
        sbatch(SCRIPT, {"PATH": str(tmp_path)}, comment=COMMENT)


def test_a_refusal_carries_sbatchs_own_words(fake: Fake) -> None:
    environ = fake(sbatch="echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    with pytest.raises(RequestError, match="invalid partition specified: nope") as caught:
        sbatch(SCRIPT, environ, comment=COMMENT)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "words", ["option '--requeue' doesn't allow an argument", "unrecognized option '--mem-update'"]
)
def test_an_option_that_this_slurm_lacks_is_refused_with_the_version(
    fake: Fake, words: str
) -> None:
    body = f"""[ "$1" = --version ] && echo 'slurm-wlm 24.11.5' && exit 0
echo "sbatch: {words}" >&2; exit 255"""
    with pytest.raises(RequestError, match=r"(?s)option .*\(this is Slurm 24\.11\.5\)"):
        sbatch(SCRIPT, fake(sbatch=body), comment=COMMENT)


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("slurm-wlm 22.05.8", True),
        ("slurm 25.05.9", True),
        ("slurm 25.11.0-1rc1", False),
        ("slurm-wlm 26.05.5", False),
        ("a site's own words", False),
    ],
)
def test_expedite_is_refused_with_the_version_where_slurm_is_older(
    fake: Fake, said: str, refused: bool
) -> None:
    environ = fake(sbatch=f'echo "{said}"')
    if refused:
        version = said.split()[1]
        with pytest.raises(RequestError, match=rf"25\.11; this is Slurm {version}\. Use --requeue"):
            check_expedite(environ)
    else:
        check_expedite(environ)


def test_a_silent_refusal_names_the_exit_code(fake: Fake) -> None:
    with pytest.raises(RequestError, match=r"it said nothing \(exit code 255\)"):
        sbatch(SCRIPT, fake(sbatch="exit 255"), comment=COMMENT)


LOST = [
    pytest.param(
        "echo 'sbatch: error: job submission failed: Socket timed out on send/recv' >&2; exit 1",
        "Socket timed out", id="socket-timed-out",
    ),
    pytest.param(
        "echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
        "Unable to contact", id="unable-to-contact",
    ),
    pytest.param("echo thank you", "printed 'thank you', expected a job id", id="garbage"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "seen"), LOST)
def test_a_lost_submission_is_found_by_its_comment(fake: Fake, answer: str, seen: str) -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    old = "2001-01-01T00:00:00"
    rows = [f"9|{old}|{COMMENT}", f"41|{now}|other", f"42|{now}|{COMMENT}", f"43|{now}|(null)"]
    squeue = "\n".join(f"echo '{row}'" for row in rows)
    assert sbatch(SCRIPT, fake(sbatch=answer, squeue=squeue), comment=COMMENT) == "42"


@pytest.mark.parametrize(("answer", "seen"), LOST)
def test_a_submission_that_is_not_found_is_called_unknown(
    fake: Fake, tmp_path: Path, answer: str, seen: str
) -> None:
    with pytest.raises(SlurmError, match=rf"(?s){seen}.*not known whether.*squeue --me"):
        sbatch(SCRIPT, fake(sbatch=answer, squeue="exit 0"), comment=COMMENT)
    assert len([call for call in calls(tmp_path) if call.startswith("squeue")]) == 2


def test_a_slurmctld_that_is_away_is_asked_once_for_the_job_and_that_is_said(
    fake: Fake, tmp_path: Path
) -> None:
    away = "echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    with pytest.raises(SlurmError, match=r"squeue does not reach Slurm either, so it is not known"):
        sbatch(SCRIPT, fake(sbatch=away, squeue=DOWN), comment=COMMENT)
    assert len([call for call in calls(tmp_path) if call.startswith("squeue")]) == 1


def test_an_sbatch_that_hangs_is_given_up(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clusterddp.slurm.client.SBATCH_SECONDS", 0.3)
    environ = fake(sbatch="exec /bin/sleep 100", squeue="exit 1")
    with pytest.raises(SlurmError, match=r"no answer within 0.3s.*not known whether"):
        sbatch(SCRIPT, environ, comment=COMMENT)


# -- states ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("PENDING", State.PENDING),
        ("CONFIGURING", State.PENDING),
        ("REQUEUED", State.PENDING),
        ("REQUEUE_HOLD", State.PENDING),
        ("SPECIAL_EXIT", State.PENDING),
        ("RUNNING", State.RUNNING),
        ("SUSPENDED", State.SUSPENDED),
        ("COMPLETING", State.COMPLETING),
        ("COMPLETED", State.DONE),
        ("completed", State.DONE),
        ("FAILED", State.FAILED),
        ("CANCELLED", State.CANCELLED),
        ("CANCELLED by 0", State.CANCELLED),
        ("CANCELLED+", State.CANCELLED),
        ("TIMEOUT", State.TIMEOUT),
        ("PREEMPTED", State.PREEMPTED),
        ("NODE_FAIL", State.NODE_FAIL),
        ("OUT_OF_MEMORY", State.OUT_OF_MEMORY),
        ("DEADLINE", State.DEADLINE),
        ("BOOT_FAIL", State.BOOT_FAIL),
        ("EXPEDITING", State.PENDING),
        ("SOMETHING_NEW", State.OTHER),
        ("", State.UNKNOWN),
        ("???", State.UNKNOWN),
    ],
)
def test_state_words(text: str, state: State) -> None:
    assert parse_state(text) is state


def test_only_ended_states_are_final() -> None:
    going_on = {"pending", "running", "suspended", "completing", "other", "unknown"}
    assert {state.value for state in State if not state.is_final} == going_on


@pytest.mark.parametrize(
    ("text", "source", "code"),
    [
        ("0:0", "scontrol", 0),
        ("3:0", "scontrol", 3),
        ("3:0", "sacct", 3),
        ("0:9", "scontrol", 137),
        ("0:9", "sacct", 137),
        ("137:0", "scontrol", 137),
        ("9:0", "sacct", 137),
        ("15:0", "sacct", 143),
        ("9:0", "scontrol", 9),
        ("", "sacct", None),
        ("x:y", "scontrol", None),
    ],
)
def test_exit_codes_are_the_same_from_each_command(
    text: str, source: str, code: int | None
) -> None:
    assert parse_exit_code(text, source) == code


# -- query -----------------------------------------------------------------------------------

NO_JOB = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
NO_ACCOUNTING = "echo 'Slurm accounting storage is disabled' >&2; exit 1"
DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
FORGETFUL = {"squeue": NO_JOB, "scontrol": NO_JOB, "sacct": NO_ACCOUNTING}


def test_a_ping_that_fails_takes_nothing_from_the_configuration(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = fake(scontrol="echo 'RequeueExit = 3'; echo 'Slurmctld(primary) is DOWN'; exit 1")
    monkeypatch.setenv("PATH", environ["PATH"])
    assert client.requeue_exits() == ["RequeueExit=3"]


@pytest.mark.parametrize(
    ("answer", "seconds"), [("1:00", 60), ("INVALID", 0), ("UNLIMITED", None), ("", None)]
)
def test_after_the_time_limit_no_time_is_left(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, answer: str, seconds: float | None
) -> None:
    """squeue(1) prints INVALID for a negative time."""
    monkeypatch.setenv("PATH", fake(squeue=f"echo '{answer}'")["PATH"])
    assert client.seconds_left("7") == seconds


def test_one_squeue_call_answers_for_all_jobs(fake: Fake, tmp_path: Path) -> None:
    environ = fake(
        squeue="echo '1|PENDING|(Resources, or so)'; echo '2|RUNNING|None'", sacct=NO_ACCOUNTING
    )
    assert query(["1", "2"], environ) == {
        "1": JobState(State.PENDING, "Resources, or so"),
        "2": JobState(State.RUNNING),
    }
    assert len(calls(tmp_path)) == 1


def test_an_ended_job_gets_its_exit_code_from_scontrol(fake: Fake) -> None:
    record = (
        "JobId=1 JobName=x JobState=COMPLETED UserId=me JobState=FAILED Reason=NonZeroExitCode "
        "Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=137:0 RunTime=0"
    )
    environ = fake(squeue="echo '1|FAILED|NonZeroExitCode'", scontrol=f"echo '{record}'")
    assert query(["1"], environ)["1"] == JobState(State.FAILED, "NonZeroExitCode", 137, restarts=0)


def test_accounting_answers_for_what_the_controller_forgot(fake: Fake, tmp_path: Path) -> None:
    sacct = "echo '1|NODE_FAIL|0:0'; echo '1|CANCELLED by 0|0:15'; echo '2|COMPLETED|0:0'"
    environ = fake(squeue=NO_JOB, sacct=sacct)
    assert query(["1", "2", "3"], environ) == {
        "1": JobState(State.CANCELLED, "", 143, comment=None),  # the last row: it was requeued
        "2": JobState(State.DONE, "", 0, comment=None),
        "3": JobState(State.UNKNOWN),
    }
    assert [call.split()[0] for call in calls(tmp_path)] == ["squeue", "sacct"]


def test_a_forgotten_job_without_accounting_is_unknown_and_never_done(fake: Fake) -> None:
    assert query(["1"], fake(**FORGETFUL)) == {"1": JobState(State.UNKNOWN)}


@pytest.mark.parametrize("body", [DOWN, "exit 7", "exec /bin/sleep 100"])
def test_a_silent_controller_is_a_problem_and_not_a_forgotten_job(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr("clusterddp.slurm.client.QUERY_SECONDS", 0.5)
    seen = query(["1"], fake(squeue=body, sacct=NO_ACCOUNTING))["1"]
    assert seen.state is State.UNKNOWN
    assert seen.problem.startswith("squeue")


def test_garbage_is_unknown(fake: Fake) -> None:
    squeue = "echo 'CLUSTER: west'; echo '1'; echo '|'; echo '2|WEIRD|None'; echo 'x|RUNNING|None'"
    states = query(["1", "2"], fake(squeue=squeue, sacct="echo '1'; echo '|||'"))
    assert states["1"].state is State.UNKNOWN
    assert (states["2"].state, states["2"].word) == (State.OTHER, "WEIRD")


def test_an_array_is_as_alive_as_its_liveliest_element(fake: Fake) -> None:
    squeue = "echo '7_1|COMPLETED|None'; echo '7_2|RUNNING|None'; echo '7_3|FAILED|None'"
    assert query(["7"], fake(squeue=squeue))["7"].state is State.RUNNING


def test_an_element_of_an_array_is_known_by_its_raw_id_as_well(fake: Fake) -> None:
    squeue = "echo '7_0 8|RUNNING|None|clusterddp:a'; echo '7_1 7|COMPLETING|None|clusterddp:a'"
    states = query(["7", "8"], fake(squeue=squeue))
    assert [(states[i].state, states[i].element) for i in ("7", "8")] == [
        (State.COMPLETING, "7_1"),
        (State.RUNNING, "7_0"),
    ]


def test_no_slurm_on_path_leaves_every_job_unknown(tmp_path: Path) -> None:
    states = query(["1", "local-5", ""], {"PATH": str(tmp_path)})
    assert {state.state for state in states.values()} == {State.UNKNOWN}
    assert "no squeue on PATH" in states["1"].problem
    assert set(states) == {"1", "local-5", ""}


def test_ids_that_are_none_of_slurms_are_never_passed_to_it(fake: Fake, tmp_path: Path) -> None:
    query(["local-5", "--me", "1;x"], fake(squeue="exit 0"))
    assert calls(tmp_path) == []


def test_a_persons_own_squeue_settings_hide_no_job(fake: Fake, tmp_path: Path) -> None:
    environ = {**fake(squeue=f'echo "$SQUEUE_PARTITION." >{tmp_path}/env', sacct=NO_ACCOUNTING)}
    query(["1"], {**environ, "SQUEUE_PARTITION": "high"})
    assert (tmp_path / "env").read_text() == ".\n"


# -- scancel and sinfo -----------------------------------------------------------------------


def test_cancel_passes_scancels_words_on(fake: Fake) -> None:
    words = "scancel: error: Kill job error on job id 1: Access/permission denied"
    environ = fake(scancel=f"echo '{words}' >&2; exit 1")
    with pytest.raises(SlurmError, match=f"scancel 1: {words}"):
        client.cancel("1", environ)


def test_cancel_without_slurm_says_so(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="no scancel on PATH"):
        client.cancel("1", {"PATH": str(tmp_path)})


def test_partitions_are_named_once(fake: Fake) -> None:
    assert partitions(fake(sinfo="echo main; echo high; echo main")) == ["main", "high"]


@pytest.mark.parametrize("body", ["echo half; exit 1", "exec /bin/sleep 100", None])
def test_partitions_are_none_where_no_slurm_answers(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, body: str | None
) -> None:
    monkeypatch.setattr("clusterddp.slurm.client.COMPLETION_SECONDS", 0.3)
    assert partitions(fake(**({"sinfo": body} if body else {}))) == []


# -- changes to a job ------------------------------------------------------------------------


def test_what_scontrol_writes_into_its_folder_stays_out_of_the_persons(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr("os.environ", fake(scontrol="echo >slurm_job_7_resize.sh"))
    client.release_nodes("7", ["h01", "h02"])
    assert calls(tmp_path) == ["scontrol update JobId=7 NodeList=h01,h02"]
    assert list(work.iterdir()) == []


def test_slurmds_port_is_asked_for_until_it_is_known_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = ["", "SlurmdPort = 7000\n"]
    monkeypatch.setattr(client, "output_of", lambda *_: "NodeName=h01 NodeAddr=10.0.0.1\n")
    monkeypatch.setattr(client, "slurm_conf", lambda: answers.pop(0))
    ports = [client.node_addresses(["h01"])["h01"][1] for _ in range(3)]
    assert ports == [6818, 7000, 7000]


@pytest.mark.parametrize(
    ("config", "seconds"),
    [
        ("KillOnBadExit=0\n  killwait = 45\n", 45),
        ("#KillWait=45\n", 30),  # Slurm's default
        ("Include more.conf\n", None),
        (None, None),
    ],
)
def test_kill_wait_is_read_without_a_request(
    tmp_path: Path, config: str | None, seconds: int | None
) -> None:
    file = tmp_path / "slurm.conf"
    if config is not None:
        file.write_text(config)
    assert client.kill_wait({}, [str(tmp_path / "none"), str(tmp_path)]) == seconds
    assert client.kill_wait({"SLURM_CONF": str(file)}, ()) == seconds


def test_drained_nodes_are_those_that_an_administrator_takes_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = {
        "h01": "State=MIXED+DRAIN Partitions=a Reason=fan [3] State=IDLE [me@2026-11-27T10:00]",
        "h02": "State=IDLE+MAINT Partitions=a ReservationName=drain",
        "h03": "State=FAILING Partitions=a Reason=gone Comment=x",
        "h04": "State=ALLOCATED Partitions=a Comment=State=DRAIN",
    }
    lines = "".join(f"NodeName={name} Arch=x86_64 {state} \n" for name, state in shown.items())
    monkeypatch.setattr(client, "output_of", lambda _: lines)
    assert client.drained_nodes([*shown]) == {"h01": "fan [3] State=IDLE", "h03": "gone"}


PUT_BACK = r"""
case "$*" in
    *"show job"*) echo ' Requeue=%s Command=x' ;;
    *Dependency=afterany:5*) echo 'Job dependency problem' >&2; exit 1 ;;
esac
"""


@pytest.mark.parametrize(("may_requeue", "others"), [("1", []), ("0", ["1", "0"])])
def test_a_job_is_held_in_the_queue_until_it_waits_for_others(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_requeue: str, others: list[str]
) -> None:
    monkeypatch.setattr("os.environ", fake(scontrol=PUT_BACK % may_requeue))
    client.requeue_with_dependency("5", "afterany:4")
    with pytest.raises(client.StillHeld, match="Job dependency problem"):
        client.requeue_with_dependency("5", "afterany:5")
    allowing, forbidding = [f"update JobId=5 Requeue={each}" for each in others] or ["", ""]
    begin = ["show job -o 5", allowing, "requeuehold 5", forbidding]
    told = [*begin, "update JobId=5 Dependency=afterany:4", "release 5"]
    told += [*begin, "update JobId=5 Dependency=afterany:5"]
    assert calls(tmp_path) == [f"scontrol {words}" for words in told if words]
