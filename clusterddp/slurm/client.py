"""Calls of Slurm's commands: sbatch, questions about jobs and the site, changes to a job."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterddp.errors import RequestError, SlurmError
from clusterddp.slurm.forms import NONCE_VARIABLE, RANK_VARIABLES
from clusterddp.slurm.states import JobState, State, other_word, parse_exit_code, parse_state

if TYPE_CHECKING:
    import subprocess

QUERY_SECONDS = 15.0
_QUERY_PREFIXES = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_")
UNREACHABLE = re.compile(
    r"Socket timed out|Unable to contact|connect failure|connection (?:refused|timed out)"
    # What scontrol says of a job when its controller refuses the connection (22.05).
    r"|Unexpected message received"
    r"|Communication connection failure|Zero Bytes were transmitted|Slurm backup controller",
    re.IGNORECASE,
)
_CONFIGURATION = (
    "SLURM_CONF SLURM_CONF_SERVER SLURM_CLUSTERS SLURM_JWT SLURM_SACK_JWKS SLURM_SACK_KEY"
)
"""Variables that name the Slurm to speak to, and the key: a login shell has these as well."""
_JOB_PREFIXES = "SLURM_ SLURMD_ SBATCH_ SRUN_ SALLOC_ PMI TORCHELASTIC_ OMPI_COMM_WORLD_"
_DEVICES = "CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK"
"""Slurm sets them in a job that was given devices; elsewhere they are the user's own choice."""
SBATCH_SECONDS = 60.0
"""Bound on sbatch; its own MessageTimeout is 10 s, and some sites set it to 60."""
LOOKUP_PAUSES_SECONDS = (0.0, 2.0, 5.0)
"""Waits before each look for a job whose sbatch gave no answer: it can be queued a little later."""
_EXPEDITE_SINCE = (25, 11)
"""First release whose sbatch takes --requeue=expedite (its release notes)."""
# Words of getopt, and so of sbatch, for an option that another release has.
_NO_SUCH_OPTION = re.compile(r"unrecognized option|doesn't allow an argument|invalid option")
_PARSABLE = re.compile(r"(\d+)(?:;\S+)?")
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


def sbatch(script: str, environ: Mapping[str, str], *, comment: str) -> str:
    """Queue a script and return the job id.

    comment: the job comment that the script itself sets; a submission whose answer was lost is
        looked for by it, among this user's jobs of the last minutes.

    Raises RequestError when there is no sbatch or it refuses, with its own words; SlurmError when
    it is not known whether the job was queued.
    """
    import subprocess

    started = time.time()
    try:
        answer = call(["sbatch", "--parsable"], environ, SBATCH_SECONDS, stdin=script)
    except FileNotFoundError:
        raise RequestError(
            "no sbatch on PATH: this machine has no Slurm. Submit from a login node of a cluster, "
            "use --launcher local to rehearse the run here, or --dry-run to see its script."
        ) from None
    except OSError as error:
        raise RequestError(f"sbatch does not start: {error.strerror}; nothing is queued.") from None
    except subprocess.TimeoutExpired:
        problem = f"sbatch gave no answer within {SBATCH_SECONDS:g} s"
        return _lost(problem, environ, comment, started)
    words = answer.stderr.strip()
    if answer.returncode:
        if UNREACHABLE.search(words):
            return _lost(words, environ, comment, started)
        words = explained(words, script, environ)
        raise RequestError(
            f"sbatch refused the job: {words or answer.stdout.strip() or 'it said nothing'} "
            f"(exit code {answer.returncode}). Nothing was queued."
        )
    for line in reversed(answer.stdout.splitlines()):  # a site's wrapper may print before it
        job_id = _PARSABLE.fullmatch(line.strip())
        if job_id:
            return job_id[1]
    printed = answer.stdout.strip() or "nothing"
    return _lost(f"sbatch printed {printed!r}, expected a job id", environ, comment, started)


def outlook(script: str, environ: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether Slurm would find nodes for a script now, and its words; queues nothing.

    A no is no refusal: seen on 22.05, `sbatch --test-only` says "Requested node configuration is
    not available" of a job that asks for more than there is, and the same of one that would wait
    for a drained node or a partition that is down. What it can tell for certain, such as an unknown
    feature, sbatch itself refuses. Raises SlurmError when Slurm could not be asked.
    """
    answer = ask(["sbatch", "--test-only"], environ, stdin=script)
    lines = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
    # `Job 24`: the number is not the one that it will have.
    lead = r"(?:sbatch: |error: |allocation failure: |Job \d+ )*"
    words = re.sub(lead, "", lines[-1], count=1) if lines else ""
    return answer.returncode == 0, words or f"exit code {answer.returncode}"


def check_expedite(environ: Mapping[str, str]) -> None:
    """Refuse --requeue=expedite where Slurm is too old for it; raises RequestError."""
    here = version(environ)
    if here and not reaches(here, _EXPEDITE_SINCE):
        since = "{}.{:02}".format(*_EXPEDITE_SINCE)
        raise RequestError(
            f"--requeue=expedite came with Slurm {since}; this is Slurm {here}. Use --requeue."
        )


def explained(words: str, script: str, environ: Mapping[str, str]) -> str:
    """Return sbatch's words, with the cause where they do not name it.

    An option that this release lacks gets the release; an expedited requeue that the site has
    switched off (seen on 26.05: "not supported on this system") the setting that allows it.
    """
    if _NO_SUCH_OPTION.search(words) and (here := version(environ)):
        return f"{words} (this is Slurm {here})"
    if "not supported on this system" in words and "--requeue=expedite" in script:
        return (
            f"{words} (--requeue=expedite needs SlurmctldParameters=enable_expedited_requeue in "
            "this site's slurm.conf; use --requeue)"
        )
    return words


def _lost(problem: str, environ: Mapping[str, str], comment: str, started: float) -> str:
    """Return the id of a job that was queued without an answer; SlurmError when unknown."""
    # %V is local time; two minutes of grace for a controller whose clock is behind ours.
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(started - 120))
    for pause in LOOKUP_PAUSES_SECONDS:
        time.sleep(pause)  # the controller may still be working on the submission
        try:
            argv = ["squeue", "-h", "-a", "--me", "-t", "all", "-o", "%i|%V|%k"]
            answer = ask(argv, environ)
        except SlurmError:
            continue
        rows = [line.split("|", 2) for line in answer.stdout.splitlines()]
        ids = [row[0] for row in rows if len(row) == 3 and row[1] >= since and row[2] == comment]
        if ids:
            return max(ids, key=lambda job_id: int(re.sub(r"\D.*", "", job_id) or 0))
    raise SlurmError(
        f"{problem}. Slurm shows no job with the comment {comment!r}, so it is not known whether "
        "the job was queued. Before you submit again, look with: "
        "squeue --me -t all -o '%i %T %V %k'"
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


class RequeueRefused(SlurmError):
    """This cluster, or this job, allows no requeue; carries scontrol's words."""


def ask(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    seconds: float | None = None,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command that shows, tries or cancels jobs.

    environ: os.environ by default. seconds: QUERY_SECONDS by default. Raises SlurmError when the
    command is missing or silent.
    """
    import subprocess

    environ = os.environ if environ is None else environ
    seconds = QUERY_SECONDS if seconds is None else seconds
    # A user's own SQUEUE_PARTITION, say, would hide jobs: seen on 22.05.
    plain = {n: v for n, v in environ.items() if not n.startswith(_QUERY_PREFIXES)}
    try:
        answer = call(argv, plain, seconds, stdin)
    except FileNotFoundError:
        raise SlurmError(f"no {argv[0]} on PATH: this machine has no Slurm") from None
    except OSError as error:
        raise SlurmError(f"{argv[0]} does not start: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{argv[0]} gave no answer within {seconds:g} s: is the Slurm controller down? "
            "Try 'scontrol ping'"
        ) from None
    if answer.returncode and UNREACHABLE.search(answer.stderr):
        raise SlurmError(f"{argv[0]}: {answer.stderr.strip()}")
    return answer


def call(
    argv: Sequence[str], environ: Mapping[str, str], seconds: float, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as from a login shell; raises what subprocess.run does."""
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


def cancel(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Cancel a job. One that Slurm has forgotten is passed over, as scancel itself does.

    Raises SlurmError with scancel's own words.
    """
    argv = ["scancel", job_id]
    answer = ask(argv, environ)
    if answer.returncode:
        raise _refusal(argv, answer)


def signal_script(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Send USR1 to a job's batch script alone. Raises SlurmError with scancel's own words."""
    argv = ["scancel", "--batch", "--signal=USR1", job_id]
    answer = ask(argv, environ)
    # For a job that does not run, scancel complains and may yet exit with 0.
    if answer.returncode or "error" in answer.stderr.lower():
        raise _refusal(argv, answer)


def forbid_requeue(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Forbid Slurm to requeue a job. Raises SlurmError with scontrol's own words."""
    argv = ["scontrol", "update", f"JobId={job_id}", "Requeue=0"]
    answer = ask(argv, environ)
    if answer.returncode:
        raise _refusal(argv, answer)


def requeue(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Put a job back into the queue; one that is there already stays.

    Raises RequeueRefused where that is not allowed, SlurmError where Slurm does not answer.
    """
    answer = ask(["scontrol", "requeue", job_id], environ)
    words = f"{answer.stdout} {answer.stderr}".strip()
    if answer.returncode and "pending execution" not in words:
        raise RequeueRefused(words or f"scontrol requeue: exit code {answer.returncode}")


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which sbatch runs, as a login shell would have it.

    SBATCH_* would override the script's directives, and the SLURM_* and rank variables of a
    surrounding job would reach the new one (an inherited SLURM_CPU_BIND crowds its tasks).
    """
    kept, prefixes = _CONFIGURATION.split(), tuple(_JOB_PREFIXES.split())
    dropped = {*RANK_VARIABLES, NONCE_VARIABLE}
    if "SLURM_JOB_ID" in environ:
        dropped.update(_DEVICES.split())
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not (name.startswith(prefixes) or name in dropped)
    }


def _program(name: str, environ: Mapping[str, str]) -> str:
    """Return the program's path on the given environment's PATH, not on this process's."""
    import shutil

    path = shutil.which(name, path=environ.get("PATH", os.defpath))
    if path is None:
        raise FileNotFoundError(name)
    return path


def _refusal(argv: Sequence[str], answer: subprocess.CompletedProcess[str]) -> SlurmError:
    words = answer.stderr.strip() or f"exit code {answer.returncode}"
    return SlurmError(f"{' '.join(argv)}: {words}")
