"""Questions to Slurm: how jobs are doing, its partitions, its version, its RequeueExit."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from clusterddp.errors import SlurmError
from clusterddp.slurm.command import ask
from clusterddp.slurm.states import JobState, State, other_word, parse_exit_code, parse_state

COMPLETION_SECONDS = 3.0
MOST_SCONTROL_CALLS = 8
"""scontrol shows one job a call; it only adds the exit code of a job that recorded none."""
_JOB_ID = re.compile(r"\d+(_\d+)?")
_REQUEUE_EXIT = re.compile(r"^(RequeueExit(?:Hold)?)\s*=\s*([\d,-]+)\s*$", re.MULTILINE)
_UNKNOWN_JOB = re.compile(r"Invalid job id", re.IGNORECASE)
_SCONTROL = re.compile(
    r"JobState=(?P<state>\w+) Reason=(?P<reason>.*?) Dependency=.*"
    r" Reboot=\d+ ExitCode=(?P<exit_code>\d+:\d+) RunTime=",
    re.DOTALL,
)


def query(job_ids: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, JobState]:
    """Return the state of each job: from one squeue call, then scontrol and sacct.

    Never raises: a job that no command knows, an id that is none of Slurm's, and every job on a
    machine without Slurm are `State.UNKNOWN`; `problem` says when Slurm could not be asked.
    """
    valid_ids = [job_id for job_id in dict.fromkeys(job_ids) if _JOB_ID.fullmatch(job_id)]
    unknown = JobState(State.UNKNOWN)
    jobs: dict[str, JobState] = {}
    if valid_ids:
        try:
            jobs = _squeue(valid_ids, environ)
            _add_exit_codes(jobs, environ)
        except SlurmError as error:
            unknown = replace(unknown, problem=str(error))
        missing = [job_id for job_id in valid_ids if job_id not in jobs]
        if missing:
            jobs |= _sacct(missing, environ)
    return {job_id: jobs.get(job_id, unknown) for job_id in job_ids}


def partitions(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the partitions; none where no Slurm answers quickly."""
    try:
        answer = ask(["sinfo", "-h", "-o", "%R"], environ, COMPLETION_SECONDS)
    except SlurmError:
        return []
    return list(dict.fromkeys(answer.stdout.split())) if answer.returncode == 0 else []


def version(environ: Mapping[str, str] | None) -> str:
    """Return the version of sbatch, `22.05.8`; empty where it cannot be told."""
    try:
        answer = ask(["sbatch", "--version"], environ)
    except SlurmError:
        return ""
    number = re.search(r"\d+\.\d+(?:\.\d+)?", answer.stdout)
    return number[0] if number else ""


def reaches(version: str, first: tuple[int, int]) -> bool:
    """Return whether a version, such as `22.05.8`, is of that release or a later one."""
    year, month = version.split(".")[:2]
    return (int(year), int(month)) >= first


def requeue_exits(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return slurm.conf's RequeueExit and RequeueExitHold as written there: `RequeueExit=1-9,18`.

    They list exit codes for which Slurm requeues a job. Raises SlurmError where Slurm could not be
    asked.
    """
    answer = ask(["scontrol", "show", "config"], environ)
    return [f"{name}={codes}" for name, codes in _REQUEUE_EXIT.findall(answer.stdout)]


def lists_exit_code(setting: str, exit_code: int) -> bool:
    """Return whether a setting lists an exit code: `RequeueExit=1-9,18` has 3 and 18."""
    for part in setting.partition("=")[2].split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and int(first) <= exit_code <= int(last or first):
            return True
    return False


def _squeue(job_ids: Sequence[str], environ: Mapping[str, str] | None) -> dict[str, JobState]:
    """Return the jobs that the controller remembers, ended ones too; may raise SlurmError."""
    argv = ["squeue", "-h", "-a", "-t", "all", "-j", ",".join(job_ids), "-o", "%i %A|%T|%r|%k"]
    answer = ask(argv, environ)
    if answer.returncode and not _UNKNOWN_JOB.search(answer.stderr):
        raise SlurmError(f"squeue: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    jobs: dict[str, JobState] = {}
    exact: set[str] = set()
    for line in answer.stdout.splitlines():
        names, bar, rest = line.partition("|")
        state, second_bar, rest = rest.partition("|")
        reason, _, comment = rest.partition("|")
        if not (bar and second_bar):
            continue  # `CLUSTER: name` of a multi-cluster squeue, or a site's remark
        name, _, raw_id = names.partition(" ")
        array, underscore, _ = name.partition("_")
        job = JobState(
            parse_state(state),
            _reason(reason),
            source="squeue",
            comment=_reason(comment),
            element=name if underscore else "",
            word=other_word(state),
        )
        # The SLURM_JOB_ID of an array's element is its raw id; that of the last one is the array's.
        job_id = raw_id if raw_id in job_ids else name
        if job_id in job_ids:
            jobs[job_id] = job
            exact.add(job_id)
            continue
        # The job is the array, which is as alive as its liveliest element.
        livelier = array not in jobs or jobs[array].state.is_final
        if array in job_ids and array not in exact and livelier:
            jobs[array] = replace(job, element="")
    return jobs


def _add_exit_codes(jobs: dict[str, JobState], environ: Mapping[str, str] | None) -> None:
    ended = [job_id for job_id, job in jobs.items() if job.state.is_final]
    for job_id in ended[-MOST_SCONTROL_CALLS:]:
        try:
            name = jobs[job_id].element or job_id
            answer = ask(["scontrol", "show", "job", "-o", name], environ)
        except SlurmError:
            return  # the states are known; only their exit codes are not
        record = _SCONTROL.search(answer.stdout)
        # The state is squeue's: a job name with " JobState=" in it stands before the real one here.
        if answer.returncode == 0 and record:
            code = parse_exit_code(record["exit_code"])
            jobs[job_id] = replace(jobs[job_id], exit_code=code, source="scontrol")


def _sacct(job_ids: Sequence[str], environ: Mapping[str, str] | None) -> dict[str, JobState]:
    """Return the jobs that accounting remembers; none where it is off, as on many sites."""
    fields = ["-P", "-n", "-D", "-X", "-j", ",".join(job_ids), "-o", "JobIDRaw,State,ExitCode"]
    try:
        answer = ask(["sacct", *fields], environ)
    except SlurmError:
        return {}
    jobs: dict[str, JobState] = {}
    if answer.returncode == 0:
        for line in answer.stdout.splitlines():
            job_id, _, rest = line.partition("|")
            state, _, exit_code = rest.partition("|")
            if job_id in job_ids:  # requeues repeat the id: the last row is the latest
                word = parse_state(state)
                code = parse_exit_code(exit_code, "sacct") if word.is_final else None
                jobs[job_id] = JobState(word, "", code, "sacct", word=other_word(state))
    return jobs


def _reason(text: str) -> str:
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return "" if text in ("None", "null") else text
