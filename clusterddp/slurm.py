"""The Slurm client: submits a script, asks for the states of jobs, cancels, names the partitions.

Text comes from Slurm's commands and goes out as plain values; every call has a bound, because a
command waits 9 s and more for a controller that is down. What a run itself recorded is read
elsewhere (`run_status`): Slurm forgets a job MinJobAge (300 s) after its end.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from clusterddp.errors import RequestError, SlurmError
from clusterddp.forms import NONCE_VARIABLE, RANK_VARIABLES

if TYPE_CHECKING:
    import subprocess

SBATCH_SECONDS = 60.0
"""Bound on sbatch; its own MessageTimeout is 10 s, and some sites set it to 60."""
QUERY_SECONDS = 15.0
REHEARSAL_VARIABLE = "CLUSTERDDP_LOCAL_STEPS"
"""Set in the tasks of the local launcher: the folder in which its steps note their tasks."""
COMPLETION_SECONDS = 3.0
LOOKUP_PAUSES_SECONDS = (0.0, 2.0, 5.0)
"""Waits before each look for a job whose sbatch gave no answer: it can be queued a little later."""
MOST_SCONTROL_CALLS = 8
"""scontrol shows one job a call; it only adds the exit code of a job that recorded none."""

# Which Slurm to speak to, and with whose key: a login shell has these as well.
_CONFIGURATION = {
    "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_JWKS",
    "SLURM_SACK_KEY",
}  # fmt: skip
_JOB_PREFIXES = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "PMI", "TORCHELASTIC_", "OMPI_COMM_WORLD_",
)  # fmt: skip
# Slurm sets them in a job that was given devices; elsewhere they are the person's own choice.
_DEVICE_VARIABLES = {
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
}  # fmt: skip
_QUERY_PREFIXES = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_")

_JOB_ID = re.compile(r"\d+(_\d+)?")
_PARSABLE = re.compile(r"(\d+)(?:;\S+)?")
_UNREACHABLE = re.compile(
    r"Socket timed out|Unable to contact|connect failure|connection (?:refused|timed out)"
    # What scontrol says of a job when its controller refuses the connection (22.05).
    r"|Unexpected message received"
    r"|Communication connection failure|Zero Bytes were transmitted|Slurm backup controller",
    re.IGNORECASE,
)
_UNKNOWN_JOB = re.compile(r"Invalid job id", re.IGNORECASE)
_SCONTROL = re.compile(
    r"JobState=(?P<state>\w+) Reason=(?P<reason>.*?) Dependency=.*"
    r" Reboot=\d+ ExitCode=(?P<exit_code>\d+:\d+) RunTime=",
    re.DOTALL,
)
# sacct shows an exit code of 128 + signal without the 128; these are signals more often than codes.
_SACCT_SIGNALS = (6, 9, 11, 15)


class State(str, Enum):
    """What a job is doing, whatever the version of Slurm calls it."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETING = "completing"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    OUT_OF_MEMORY = "out_of_memory"
    DEADLINE = "deadline"
    BOOT_FAIL = "boot_fail"
    UNKNOWN = "unknown"

    @property
    def is_final(self) -> bool:
        """Whether the job is over, as far as this word can tell: a requeue may follow."""
        return self not in (
            State.PENDING, State.RUNNING, State.SUSPENDED, State.COMPLETING, State.UNKNOWN,
        )  # fmt: skip


# squeue(1), sacct(1), scontrol(1): JOB STATE CODES.
STATES = {
    "PENDING": State.PENDING,
    "CONFIGURING": State.PENDING,
    "REQUEUED": State.PENDING,
    "REQUEUE_FED": State.PENDING,
    "REQUEUE_HOLD": State.PENDING,
    "RESV_DEL_HOLD": State.PENDING,
    "SPECIAL_EXIT": State.PENDING,
    "RUNNING": State.RUNNING,
    "RESIZING": State.RUNNING,
    "SIGNALING": State.RUNNING,
    "SUSPENDED": State.SUSPENDED,
    "STOPPED": State.SUSPENDED,
    "COMPLETING": State.COMPLETING,
    "STAGE_OUT": State.COMPLETING,
    "COMPLETED": State.DONE,
    "FAILED": State.FAILED,
    "LAUNCH_FAILED": State.FAILED,
    "RECONFIG_FAIL": State.FAILED,
    "CANCELLED": State.CANCELLED,
    "REVOKED": State.CANCELLED,
    "TIMEOUT": State.TIMEOUT,
    "PREEMPTED": State.PREEMPTED,
    "NODE_FAIL": State.NODE_FAIL,
    "OUT_OF_MEMORY": State.OUT_OF_MEMORY,
    "DEADLINE": State.DEADLINE,
    "BOOT_FAIL": State.BOOT_FAIL,
}


@dataclass(frozen=True)
class JobState:
    """What Slurm knows of one job."""

    state: State
    reason: str = ""
    """Slurm's reason for the state, such as Resources or NonZeroExitCode."""
    exit_code: int | None = None
    """Of an ended job, as a shell would show it: 128 + N for signal N."""
    source: str = ""
    """Which command said so: squeue, scontrol or sacct; empty for an unknown job."""
    problem: str = ""
    """Why Slurm could not be asked. Unknown without a problem: Slurm knows no such job."""
    comment: str = ""
    """The job's comment, by which a run knows a job of its own."""


class Ending(str, Enum):
    """Why a job whose script is still there is coming to its end, as the controller sees it."""

    NONE = "none"
    """It is not: it runs."""
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    """It is in the queue again already."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class RequeueRefused(SlurmError):
    """This cluster, or this job, allows no requeue; carries scontrol's words."""


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which sbatch runs: what a login shell would hand to it.

    SBATCH_* would override the script's directives, and the SLURM_* and rank variables of a
    surrounding job would reach the new one (an inherited SLURM_CPU_BIND crowds its tasks).
    """
    in_job = "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if name in _CONFIGURATION
        or not (
            name.startswith(_JOB_PREFIXES)
            or name in RANK_VARIABLES
            or (in_job and name in _DEVICE_VARIABLES)
            or name == NONCE_VARIABLE
        )
    }


def sbatch(
    script: str,
    environ: Mapping[str, str],
    *,
    comment: str,
    say: Callable[[str], None] | None = None,
) -> str:
    """Queue a script and return the job id.

    comment: the job comment that the script itself sets; a submission whose answer was lost is
        looked for by it, among this user's jobs of the last minutes.
    say: receives what sbatch said on stderr although it queued the job (a site's notes).

    Raises RequestError when there is no sbatch or it refuses, with its own words; SlurmError when
    it is not known whether the job was queued.
    """
    import subprocess

    started = time.time()
    try:
        answer = _call(["sbatch", "--parsable"], environ, SBATCH_SECONDS, stdin=script)
    except FileNotFoundError:
        raise RequestError(
            "no sbatch on PATH: this machine has no Slurm. Submit from a login node of a cluster, "
            "use --launcher local to rehearse the run here, or --dry-run to see its script."
        ) from None
    except OSError as error:
        raise RequestError(f"sbatch does not start: {error.strerror}; nothing is queued.") from None
    except subprocess.TimeoutExpired:
        seen = f"sbatch gave no answer within {SBATCH_SECONDS:g} s"
        return _lost(seen, environ, comment, started)
    words = answer.stderr.strip()
    if answer.returncode:
        if _UNREACHABLE.search(words):
            return _lost(words, environ, comment, started)
        raise RequestError(
            f"sbatch refused the job: {words or answer.stdout.strip() or 'it said nothing'} "
            f"(exit code {answer.returncode}). Nothing was queued."
        )
    for line in reversed(answer.stdout.splitlines()):  # a site's wrapper may print before it
        found = _PARSABLE.fullmatch(line.strip())
        if found:
            if words and say:
                say(words)
            return found[1]
    seen = answer.stdout.strip() or "nothing"
    return _lost(f"sbatch printed {seen!r}, expected a job id", environ, comment, started)


def outlook(script: str, environ: Mapping[str, str]) -> tuple[bool, str]:
    """Whether Slurm would find nodes for a script as things stand, and its words; queues nothing.

    A no is no refusal: seen on 22.05, `sbatch --test-only` says "Requested node configuration is
    not available" of a job that asks for more than there is, and the same of one that would wait
    for a drained node or a partition that is down. What it can tell for certain, such as an unknown
    feature, sbatch itself refuses. Raises SlurmError when Slurm could not be asked.
    """
    answer = _ask(["sbatch", "--test-only"], environ, QUERY_SECONDS, stdin=script)
    lines = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
    # `Job 24`: the number is not the one that it will have.
    lead = r"(?:sbatch: |error: |allocation failure: |Job \d+ )*"
    words = re.sub(lead, "", lines[-1], count=1) if lines else ""
    return answer.returncode == 0, words or f"exit code {answer.returncode}"


def query(job_ids: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, JobState]:
    """The state of each job, from one squeue call, then scontrol and sacct for what it lacks.

    Never raises: a job that no command knows, an id that is none of Slurm's, and every job on a
    machine without Slurm are `State.UNKNOWN`; `problem` says when Slurm could not be asked.
    """
    environ = os.environ if environ is None else environ
    asked = [job_id for job_id in dict.fromkeys(job_ids) if _JOB_ID.fullmatch(job_id)]
    unknown = JobState(State.UNKNOWN)
    found: dict[str, JobState] = {}
    if asked:
        try:
            found = _squeue(asked, environ)
            _add_exit_codes(found, environ)
        except SlurmError as error:
            unknown = replace(unknown, problem=str(error))
        missing = [job_id for job_id in asked if job_id not in found]
        if missing:
            found |= _sacct(missing, environ)
    return {job_id: found.get(job_id, unknown) for job_id in job_ids}


def cancel(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Cancel a job. One that Slurm has forgotten is passed over, as scancel itself does.

    Raises SlurmError with scancel's own words.
    """
    environ = os.environ if environ is None else environ
    answer = _ask(["scancel", job_id], environ, QUERY_SECONDS)
    if answer.returncode:
        words = answer.stderr.strip() or f"exit code {answer.returncode}"
        raise SlurmError(f"scancel {job_id}: {words}")


def signal_script(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Send USR1 to a job's batch script alone. Raises SlurmError with scancel's own words."""
    environ = os.environ if environ is None else environ
    answer = _ask(["scancel", "--batch", "--signal=USR1", job_id], environ, QUERY_SECONDS)
    # For a job that does not run, scancel complains and may yet exit with 0.
    if answer.returncode or "error" in answer.stderr.lower():
        words = answer.stderr.strip() or f"exit code {answer.returncode}"
        raise SlurmError(f"scancel --batch --signal=USR1 {job_id}: {words}")


def own_name(environ: Mapping[str, str], job_id: str) -> str:
    """By what Slurm's commands know the job that this process is in.

    The SLURM_JOB_ID of an array's last element is that of the array, and means all of it.
    """
    array, element = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array and element else job_id


def is_rehearsal(environ: Mapping[str, str]) -> bool:
    """Whether the local launcher plays the part of Slurm, so that no controller can be asked."""
    return REHEARSAL_VARIABLE in environ


def ending(job_id: str, restart: int, environ: Mapping[str, str] | None = None) -> Ending:
    """Why the job is ending; asked from inside, it shows COMPLETING for every reason.

    restart: the SLURM_RESTART_COUNT of the start that asks. Seen on 22.05: a requeue has raised
    Restarts by then, preemption with a grace leaves the job RUNNING with a PreemptTime, and the
    time limit and scancel differ only in how long the job ran.
    """
    environ = os.environ if environ is None else environ
    try:
        answer = _ask(["scontrol", "show", "job", "-o", job_id], environ, QUERY_SECONDS)
    except SlurmError:
        return Ending.UNKNOWN
    # The last of each name: a job's name and comment, which can hold anything, stand before them.
    fields = dict(re.findall(r" ([A-Za-z]+)=(\S*)", answer.stdout.partition(" Command=")[0]))
    if answer.returncode or "JobState" not in fields:
        return Ending.UNKNOWN
    if int(fields.get("Restarts") or 0) > restart or parse_state(fields["JobState"]) is (
        State.PENDING
    ):
        return Ending.REQUEUED
    if fields.get("PreemptTime", "None") not in ("None", ""):
        return Ending.PREEMPTED
    state = parse_state(fields["JobState"])
    if state is State.RUNNING:
        return Ending.NONE
    if state is State.TIMEOUT:
        return Ending.TIME_LIMIT
    ran, limit = _seconds(fields.get("RunTime", "")), _seconds(fields.get("TimeLimit", ""))
    if ran is not None and limit is not None and ran >= limit:
        return Ending.TIME_LIMIT
    return Ending.CANCELLED


def seconds_left(job_id: str, environ: Mapping[str, str] | None = None) -> float | None:
    """Seconds until the job's time limit; None where it has none or nobody can say."""
    environ = os.environ if environ is None else environ
    try:
        answer = _ask(["squeue", "-h", "-j", job_id, "-o", "%L"], environ, QUERY_SECONDS)
    except SlurmError:
        return None
    return _seconds(answer.stdout.strip())


def requeue(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Put a job back into the queue; one that is there already stays.

    Raises RequeueRefused where that is not allowed, SlurmError where Slurm does not answer.
    """
    environ = os.environ if environ is None else environ
    answer = _ask(["scontrol", "requeue", job_id], environ, QUERY_SECONDS)
    words = f"{answer.stdout} {answer.stderr}".strip()
    if answer.returncode and "pending execution" not in words:
        raise RequeueRefused(words or f"scontrol requeue: exit code {answer.returncode}")


def partitions(environ: Mapping[str, str] | None = None) -> list[str]:
    """The names of the partitions, or none where no Slurm answers quickly."""
    environ = os.environ if environ is None else environ
    try:
        answer = _ask(["sinfo", "-h", "-o", "%R"], environ, COMPLETION_SECONDS)
    except SlurmError:
        return []
    return list(dict.fromkeys(answer.stdout.split())) if answer.returncode == 0 else []


def parse_state(text: str) -> State:
    """The state behind Slurm's word, which may be decorated: `CANCELLED by 0`, `RUNNING+`."""
    words = re.findall(r"[A-Z_]+", text.upper())
    return STATES.get(words[0], State.UNKNOWN) if words else State.UNKNOWN


def parse_exit_code(text: str, source: str = "scontrol") -> int | None:
    """`CODE:SIGNAL` as a shell shows it, the same number from scontrol and from sacct.

    For a job whose srun was killed by signal 9, scontrol shows 137:0 and sacct 9:0: sacct takes
    128 off, so that its 9:0 can be either. The signals that end ranks are taken for signals.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if not found:
        return None
    code, signal = int(found[1]), int(found[2])
    if signal:
        return 128 + signal
    return code + 128 if source == "sacct" and code in _SACCT_SIGNALS else code


def _squeue(job_ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, JobState]:
    """The jobs that the controller remembers, ended ones included; SlurmError when it is silent."""
    argv = ["squeue", "-h", "-a", "-t", "all", "-j", ",".join(job_ids), "-o", "%i|%T|%r|%k"]
    answer = _ask(argv, environ, QUERY_SECONDS)
    if answer.returncode and not _UNKNOWN_JOB.search(answer.stderr):
        raise SlurmError(f"squeue: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    found: dict[str, JobState] = {}
    for line in answer.stdout.splitlines():
        job_id, bar, rest = line.partition("|")
        state, second_bar, rest = rest.partition("|")
        reason, _, comment = rest.partition("|")
        if not (bar and second_bar):
            continue  # `CLUSTER: name` of a multi-cluster squeue, or a site's remark
        if job_id not in job_ids:
            job_id = job_id.partition("_")[0]  # an element of an array: the job is the array
        seen = JobState(
            parse_state(state), _reason(reason), source="squeue", comment=_reason(comment)
        )
        if job_id in job_ids and (job_id not in found or found[job_id].state.is_final):
            found[job_id] = seen
    return found


def _add_exit_codes(found: dict[str, JobState], environ: Mapping[str, str]) -> None:
    ended = [job_id for job_id, seen in found.items() if seen.state.is_final]
    for job_id in ended[-MOST_SCONTROL_CALLS:]:
        try:
            answer = _ask(["scontrol", "show", "job", "-o", job_id], environ, QUERY_SECONDS)
        except SlurmError:
            return  # the states are known; only their exit codes are not
        record = _SCONTROL.search(answer.stdout)
        # The state is squeue's: a job name with " JobState=" in it stands before the real one here.
        if answer.returncode == 0 and record:
            code = parse_exit_code(record["exit_code"])
            found[job_id] = replace(found[job_id], exit_code=code, source="scontrol")


def _sacct(job_ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, JobState]:
    """What accounting remembers; nothing where it is switched off, as on many sites."""
    fields = ["-P", "-n", "-D", "-X", "-j", ",".join(job_ids), "-o", "JobIDRaw,State,ExitCode"]
    try:
        answer = _ask(["sacct", *fields], environ, QUERY_SECONDS)
    except SlurmError:
        return {}
    found: dict[str, JobState] = {}
    if answer.returncode == 0:
        for line in answer.stdout.splitlines():
            job_id, _, rest = line.partition("|")
            state, _, exit_code = rest.partition("|")
            if job_id in job_ids:  # requeues repeat the id: the last row is the latest
                word = parse_state(state)
                code = parse_exit_code(exit_code, "sacct") if word.is_final else None
                found[job_id] = JobState(word, "", code, "sacct")
    return found


def _lost(seen: str, environ: Mapping[str, str], comment: str, started: float) -> str:
    """The id of a job that was queued although sbatch did not say so; SlurmError when unknown."""
    # %V is local time; two minutes of grace for a controller whose clock is behind ours.
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(started - 120))
    for pause in LOOKUP_PAUSES_SECONDS:
        time.sleep(pause)  # the controller may still be working on the submission
        try:
            argv = ["squeue", "-h", "-a", "--me", "-t", "all", "-o", "%i|%V|%k"]
            answer = _ask(argv, environ, QUERY_SECONDS)
        except SlurmError:
            continue
        rows = [line.split("|", 2) for line in answer.stdout.splitlines()]
        ids = [row[0] for row in rows if len(row) == 3 and row[1] >= since and row[2] == comment]
        if ids:
            return max(ids, key=lambda job_id: int(re.sub(r"\D.*", "", job_id) or 0))
    raise SlurmError(
        f"{seen}. Slurm shows no job with the comment {comment!r}, so it is not known whether the "
        "job was queued. Before you submit again, look with: "
        "squeue --me -t all -o '%i %T %V %k'"
    )


def _seconds(text: str) -> float | None:
    """Slurm's [D-]HH:MM:SS or MM:SS in seconds; None for UNLIMITED and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _reason(text: str) -> str:
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return "" if text in ("None", "null") else text


def _ask(
    argv: Sequence[str], environ: Mapping[str, str], seconds: float, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that shows, tries or cancels jobs; SlurmError when it is missing or silent."""
    import subprocess

    # A person's own SQUEUE_PARTITION, say, would hide jobs from us: seen on 22.05.
    plain = {n: v for n, v in environ.items() if not n.startswith(_QUERY_PREFIXES)}
    try:
        answer = _call(argv, plain, seconds, stdin)
    except FileNotFoundError:
        raise SlurmError(f"no {argv[0]} on PATH: this machine has no Slurm") from None
    except OSError as error:
        raise SlurmError(f"{argv[0]} does not start: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{argv[0]} gave no answer within {seconds:g} s: is the Slurm controller down? "
            "Try 'scontrol ping'"
        ) from None
    if answer.returncode and _UNREACHABLE.search(answer.stderr):
        raise SlurmError(f"{argv[0]}: {answer.stderr.strip()}")
    return answer


def _call(
    argv: Sequence[str], environ: Mapping[str, str], seconds: float, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    import subprocess

    return subprocess.run(
        [_program(argv[0], environ), *argv[1:]],
        env=submission_environment(environ),
        input=stdin if stdin is not None else "",
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=False,
    )


def _program(name: str, environ: Mapping[str, str]) -> str:
    """The program's path on the given environment's PATH, not on this process's."""
    import shutil

    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    if found is None:
        raise FileNotFoundError(name)
    return found
