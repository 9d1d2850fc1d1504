"""Calls of Slurm's commands: sbatch, queries about jobs and the site, changes to a job.

Processes inside a job also ask here why the job is ending and how much time is left.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp import polling
from clusterddp.errors import RequestError, SlurmError
from clusterddp.formatting import setting
from clusterddp.slurm import forms
from clusterddp.slurm.states import JobState, State, other_word, parse_exit_code, parse_state

if TYPE_CHECKING:
    import subprocess

QUERY_SECONDS = 15.0
_CREDENTIAL_SECONDS = 121.0
"""Time that a requeued job waits unless AuthInfo sets cred_expire."""
_QUERY_PREFIXES = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_")
UNREACHABLE = re.compile(
    r"Socket timed out|Unable to contact|connect failure|connection (?:refused|timed out)"
    # scontrol's message if slurmctld refuses the connection (22.05).
    r"|Unexpected message received"
    r"|Communication connection failure|Zero Bytes were transmitted|Slurm backup controller",
    re.IGNORECASE,
)
_CONFIGURATION = (
    "SLURM_CONF SLURM_CONF_SERVER SLURM_CLUSTERS SLURM_JWT SLURM_SACK_JWKS SLURM_SACK_KEY"
)
"""Variables that select the Slurm cluster and its key: a login shell has these as well."""
_JOB_PREFIXES = "SLURM_ SLURMD_ SBATCH_ SRUN_ SALLOC_ PMI TORCHELASTIC_ OMPI_COMM_WORLD_"
_DEVICES = "CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK"
"""Slurm sets these in a job with devices; elsewhere the user has chosen their values."""
SBATCH_SECONDS = 60.0
"""Timeout of sbatch; its own MessageTimeout is 10 s, and some sites set it to 60."""
# getopt's, and so sbatch's, messages for an option of another release.
_NO_SUCH_OPTION = re.compile(r"unrecognized option|doesn't allow an argument|invalid option")
_PARSABLE = re.compile(r"(\d+)(?:;\S+)?")
COMPLETION_SECONDS = 3.0
MAX_SCONTROL_CALLS = 8
"""Limit of calls, one per job, that only add the exit codes of jobs without a recorded one."""
# execve(2) returns EACCES for an unsearchable directory or a non-executable file.
_NOT_ON_PATH = (FileNotFoundError, PermissionError)
_JOB_ID = re.compile(r"\d+(_\d+)?")
_REQUEUE_EXIT = re.compile(r"^(RequeueExit(?:Hold)?)\s*=\s*([\d,-]+)\s*$", re.MULTILINE)
_NO_CONFIGURATION = re.compile(
    "Could not establish a configuration source|Unable to process configuration file"
)
_UNCONFIGURED = "Slurm on this machine has no configuration (slurm.conf)"
_ELSEWHERE = (
    "Submit from a login node of a cluster, or to it with clusterddp --on HOST submit; use "
    "--launcher local to rehearse the run here, or --dry-run to print its script."
)
_SLURMD_PORT = 6818  # SlurmdPort of slurm.conf(5)
_CONF_FOLDERS = ("/run/slurm/conf", "/etc/slurm")  # slurm.conf(5); the first: configless
_DRAIN = {"DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING"}
_UNKNOWN_JOB = re.compile(r"Invalid job id", re.IGNORECASE)
_SCONTROL = re.compile(
    r"JobState=\w+ Reason=.*? Dependency=.* Reboot=\d+ ExitCode=(\d+:\d+) RunTime=", re.DOTALL
)
_RESTARTS = re.compile(r" Restarts=(\d+) BatchFlag=\d+ Reboot=\d+ ExitCode=\S+ RunTime=$")


def sbatch(
    script: str,
    environ: Mapping[str, str],
    *,
    comment: str,
    exclude: Sequence[str] = (),
    dependency: str = "",
    array: str = "",
    wait: float = 0.0,
) -> str:
    """Submit a script and return the job id.

    comment: the job comment that the script sets, or empty. It identifies a submission whose answer
        was lost among the user's jobs of the last minutes.
    exclude: nodes to exclude, instead of the script's own.
    dependency: jobs to wait for, instead of the script's own.
    array: array tasks to start, `0-3,7%2`, instead of the script's own; passes the comment, too.
    wait: seconds before which the job may not start.

    Raises RequestError if there is no sbatch or it refuses, with its message; SlurmError if it is
    unknown whether the job was queued.
    """
    import subprocess

    started = time.time()
    try:
        options = sbatch_options(comment, exclude=exclude, dependency=dependency, array=array)
        options += [f"--begin=now+{round(wait)}"] if wait else []
        answer = call(["sbatch", "--parsable", *options], environ, SBATCH_SECONDS, stdin=script)
    except _NOT_ON_PATH:
        raise RequestError(
            f"no sbatch on PATH: this machine has no Slurm. {_ELSEWHERE} [CD0402]"
        ) from None
    except OSError as error:
        raise RequestError(
            f"sbatch does not start: {error.strerror}; nothing is queued. [CD0402]"
        ) from None
    except subprocess.TimeoutExpired:
        problem = f"sbatch gave no answer within {setting(SBATCH_SECONDS)}"
        return _lost(problem, environ, comment, started)
    words = answer.stderr.strip()
    if answer.returncode:
        if UNREACHABLE.search(words):
            return _lost(words, environ, comment, started)
        words = words or answer.stdout.strip() or "it said nothing"
        raise refusal(words, script, environ, f" (exit code {answer.returncode})")
    for line in reversed(answer.stdout.splitlines()):  # a site's wrapper may print more
        job_id = _PARSABLE.fullmatch(line.strip())
        if job_id:
            return job_id[1]
    printed = answer.stdout.strip() or "nothing"
    return _lost(f"sbatch printed {printed!r}, expected a job id", environ, comment, started)


def refusal(words: str, script: str, environ: Mapping[str, str], code: str = "") -> RequestError:
    """Return the error for a script that sbatch has refused. words: what it printed."""
    if _NO_CONFIGURATION.search(words):
        return RequestError(f"{_UNCONFIGURED}. {_ELSEWHERE} [CD0402]")
    words = with_cause(words, script, environ)
    return RequestError(f"sbatch refused the job: {words}{code}. Nothing was queued. [CD0403]")


def sbatch_options(
    comment: str, *, exclude: Sequence[str] = (), dependency: str = "", array: str = ""
) -> list[str]:
    """Return the options with which `sbatch` overrides the script's directives."""
    options = [f"--exclude={','.join(exclude)}"] if exclude else []
    options += [f"--dependency={dependency}"] if dependency else []
    options += [f"--array={array}"] if array else []
    return options + ([f"--comment={comment}"] if array and comment else [])


def predict_start(script: str, environ: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether Slurm would find nodes for a script now, and its message; queue nothing.

    False does not mean that sbatch would refuse: seen on 22.05, `sbatch --test-only` reports
    "Requested node configuration is not available" both for a request that no node can satisfy and
    for a job that would wait for a drained node or a partition that is down. sbatch itself refuses
    certain errors, such as an unknown feature. Raises SlurmError if Slurm cannot be asked.
    """
    answer = ask(["sbatch", "--test-only"], environ, stdin=script)
    lines = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
    # `Job 24`: not the number that the job will have.
    lead = r"(?:sbatch: |error: |allocation failure: |Job \d+ )*"
    words = re.sub(lead, "", lines[-1], count=1) if lines else ""
    return answer.returncode == 0, words or f"exit code {answer.returncode}"


def check_expedite(environ: Mapping[str, str]) -> None:
    """Raise RequestError if Slurm is too old for --requeue=expedite.

    sbatch accepts it since 25.11 (its release notes).
    """
    here = _version(environ)
    if here and not _reaches(here, (25, 11)):
        raise RequestError(
            f"--requeue=expedite came with Slurm 25.11; this is Slurm {here}. Use "
            "--requeue. [CD0403]"
        )


def with_cause(words: str, script: str, environ: Mapping[str, str]) -> str:
    """Return sbatch's message, with its cause added if the message does not name it.

    The cause is the release, for an option that it lacks, or the setting that enables expedited
    requeue, if the site has disabled it (seen on 26.05: "not supported on this system").
    """
    if _NO_SUCH_OPTION.search(words) and (here := _version(environ)):
        return f"{words} (this is Slurm {here})"
    if "not supported on this system" in words and "--requeue=expedite" in script:
        return (
            f"{words} (--requeue=expedite needs SlurmctldParameters=enable_expedited_requeue in "
            "this site's slurm.conf; use --requeue)"
        )
    return words


def _lost(problem: str, environ: Mapping[str, str], comment: str, started: float) -> str:
    """Return the id of a job queued without an answer. Raises SlurmError if it is not found."""
    # %V is local time; two minutes of grace for a slurmctld whose clock is late.
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(started - 120))
    seen = f"Slurm shows no job with the comment {comment!r}"
    if not comment:
        seen = "The job has no comment to look for"
    polls = polling.poll(polling.SUBMITTED_SECONDS, every=polling.SUBMITTED_POLL_SECONDS)
    for _ in polls if comment else ():
        argv = ["squeue", "-h", "-a", "--me", "-t", "all", "-o", "%i|%V|%k"]
        try:
            answer = ask(argv, environ)
        except SlurmError:  # slurmctld is away; each further query would take 9 s to fail
            seen = "squeue does not reach Slurm either"
            break
        rows = [line.split("|", 2) for line in answer.stdout.splitlines()]
        ids = [row[0] for row in rows if len(row) == 3 and row[1] >= since and row[2] == comment]
        numbers = [int(re.sub(r"\D.*", "", job_id) or 0) for job_id in ids]  # 89 of 89_[0-3]
        if numbers:
            return str(max(numbers))
    raise SlurmError(
        f"{problem}. {seen}, so it is not known whether it was queued. Before you submit again, "
        "look with: squeue --me -t all -o '%i %T %V %k' [CD0404]"
    )


def query(
    job_ids: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    known: Mapping[str, JobState] | None = None,
) -> dict[str, JobState]:
    """Return the state of each job: from one squeue call, then scontrol and sacct.

    known: states from an earlier call; only squeue is called for these jobs.
    Never raises: a job that no command knows, an invalid id, and every job on a machine without
    Slurm are `State.UNKNOWN`; `problem` is set if Slurm cannot be queried.
    """
    valid_ids = [job_id for job_id in dict.fromkeys(job_ids) if _JOB_ID.fullmatch(job_id)]
    unknown = JobState(State.UNKNOWN)
    jobs: dict[str, JobState] = {}
    if valid_ids:
        try:
            jobs = _squeue(valid_ids, environ)
            same = [
                j for j, job in (known or {}).items() if j in jobs and jobs[j].state is job.state
            ]
            jobs |= {job_id: (known or {})[job_id] for job_id in same}
            _add_exit_codes(jobs, environ, besides=same)
        except SlurmError as error:
            unknown = replace(unknown, problem=str(error))
        if not unknown.problem:
            jobs = {**(known or {}), **jobs}
        missing = [job_id for job_id in valid_ids if job_id not in jobs]
        if missing:
            jobs |= _sacct(missing, environ)
    return {job_id: jobs.get(job_id, unknown) for job_id in job_ids}


def partitions(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the partitions; none if Slurm does not answer quickly."""
    names = output_of(["sinfo", "-h", "-o", "%R"], environ, COMPLETION_SECONDS)
    return list(dict.fromkeys(names.split()))


def _version(environ: Mapping[str, str]) -> str:
    """Return the version of sbatch, `22.05.8`; empty if unknown."""
    number = re.search(r"\d+\.\d+(?:\.\d+)?", output_of(["sbatch", "--version"], environ))
    return number[0] if number else ""


def _reaches(version: str, first: tuple[int, int]) -> bool:
    """Return whether a version, for example `22.05.8`, is at least this release."""
    year, month = version.split(".")[:2]
    return (int(year), int(month)) >= first


def requeue_exits() -> list[str]:
    """Return slurm.conf's RequeueExit and RequeueExitHold lines: `RequeueExit=1-9,18`.

    They list the exit codes for which Slurm requeues a job; empty if Slurm cannot be asked.
    """
    return [f"{name}={codes}" for name, codes in _REQUEUE_EXIT.findall(slurm_conf())]


def lists_exit_code(setting: str, exit_code: int) -> bool:
    """Return whether a setting lists an exit code: `RequeueExit=1-9,18` has 3 and 18."""
    ranges = (part.partition("-") for part in setting.partition("=")[2].split(","))
    return any(
        first.isdigit() and int(first) <= exit_code <= int(last or first)
        for first, _, last in ranges
    )


def _squeue(job_ids: Sequence[str], environ: Mapping[str, str] | None) -> dict[str, JobState]:
    """Return the jobs that slurmctld remembers, including ended ones. Raises SlurmError."""
    # Pending array tasks have no job ids yet, and share one line without -r.
    asked = [*dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)]
    each = ["-r"] if any("_" in job_id for job_id in job_ids) else []
    ids, form = ",".join(asked), "%i %A %S|%T|%r|%k"
    answer = ask(["squeue", "-h", "-a", *each, "-t", "all", "-j", ids, "-o", form], environ)
    if answer.returncode and not _UNKNOWN_JOB.search(answer.stderr):
        raise SlurmError(f"squeue: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    jobs: dict[str, JobState] = {}
    arrays: dict[str, JobState] = {}
    for line in answer.stdout.splitlines():
        names, state, reason, comment = [*line.split("|", 3), "", "", ""][:4]
        if not state:
            continue  # `CLUSTER: name` of a multi-cluster squeue, or a site's remark
        name, raw_id, start = [*names.split(" "), "", ""][:3]
        array, underscore, _ = name.partition("_")
        job = JobState(
            parse_state(state),
            _reason(reason),
            comment=_reason(comment),
            element=name if underscore else "",
            start=_expected(start) if parse_state(state) is State.PENDING else None,
            word=other_word(state),
        )
        # An array task's SLURM_JOB_ID is its raw id; the last task's is the array's id.
        job_id = raw_id if raw_id in job_ids else name
        if job_id in job_ids:
            jobs[job_id] = job
        elif array in job_ids and (array not in arrays or arrays[array].state.is_final):
            # The job is the array, which lives as long as any of its tasks.
            arrays[array] = replace(job, element="")
    return arrays | jobs


def _add_exit_codes(
    jobs: dict[str, JobState], environ: Mapping[str, str] | None, besides: Sequence[str]
) -> None:
    ended = [j for j, job in jobs.items() if job.state.is_final and j not in besides]
    for job_id in ended[-MAX_SCONTROL_CALLS:]:
        try:
            name = jobs[job_id].element or job_id
            answer = ask(["scontrol", "show", "job", "-o", name], environ)
        except SlurmError:
            return  # the states are known; only their exit codes are not
        record = _SCONTROL.search(answer.stdout)
        # The state comes from squeue: here a job name containing " JobState=" would come first.
        if answer.returncode == 0 and record:
            code, restarts = parse_exit_code(record[1]), _RESTARTS.search(record[0])
            count = int(restarts[1]) if restarts else None
            jobs[job_id] = replace(jobs[job_id], exit_code=code, restarts=count)


def _sacct(job_ids: Sequence[str], environ: Mapping[str, str] | None) -> dict[str, JobState]:
    """Return the jobs that accounting remembers; none if it is off, which is common."""
    names = [job_id for job_id in job_ids if "_" in job_id]  # JobIDRaw has no underscore
    if names and len(names) < len(job_ids):
        others = [job_id for job_id in job_ids if job_id not in names]
        return _sacct(names, environ) | _sacct(others, environ)
    arrays = ",".join(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))
    number = "JobID" if names else "JobIDRaw"
    fields = ["-P", "-n", "-D", "-X", "-j", arrays, "-o", f"{number},State,ExitCode"]
    jobs: dict[str, JobState] = {}
    for line in output_of(["sacct", *fields], environ).splitlines():
        job_id, state, exit_code = [*line.split("|", 2), "", ""][:3]
        if job_id in job_ids:  # requeues repeat the id: the last row is the latest
            word = parse_state(state)
            code = parse_exit_code(exit_code, "sacct") if word.is_final else None
            jobs[job_id] = JobState(word, exit_code=code, comment=None, word=other_word(state))
    return jobs


def _expected(text: str) -> float | None:
    """Return the time of squeue's %S, in this machine's time zone; None for N/A."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def _reason(text: str) -> str:
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return "" if text in ("None", "null") else text


class RequeueRefused(SlurmError):
    """The cluster or the job does not allow a requeue; carries scontrol's message."""

    code = "CD0406"


def ask(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    seconds: float | None = None,
    stdin: str = "",
    folder: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command that shows, tests or changes jobs.

    environ: os.environ by default. seconds: QUERY_SECONDS by default. directory: the current one by
    default. Raises SlurmError if the command is missing or does not answer.
    """
    import subprocess

    environ = os.environ if environ is None else environ
    seconds = QUERY_SECONDS if seconds is None else seconds
    # A user's SQUEUE_PARTITION, for example, would hide jobs: seen on 22.05.
    plain = {n: v for n, v in environ.items() if not n.startswith(_QUERY_PREFIXES)}
    try:
        answer = call(argv, plain, seconds, stdin, folder)
    except _NOT_ON_PATH:
        missing = f"no {argv[0]} on PATH: this machine has no Slurm. Use a login node. [CD0402]"
        raise SlurmError(missing) from None
    except OSError as error:
        raise SlurmError(f"{argv[0]} does not start: {error.strerror} [CD0402]") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{argv[0]} gave no answer within {setting(seconds)}: is slurmctld down? "
            "Try 'scontrol ping'"
        ) from None
    if answer.returncode and _NO_CONFIGURATION.search(answer.stderr):
        raise SlurmError(f"{_UNCONFIGURED}. Use a login node. [CD0402]")
    if answer.returncode and UNREACHABLE.search(answer.stderr):
        raise SlurmError(f"{argv[0]}: {answer.stderr.strip()}")
    return answer


def slurm_conf() -> str:
    """Return slurmctld's slurm.conf; empty if it does not answer.

    The command ends with a ping; its exit code does not invalidate the preceding output.
    """
    try:
        return ask(["scontrol", "show", "config"]).stdout
    except SlurmError:
        return ""


def slurmd_timeout() -> float:
    """Return the seconds after which slurmctld marks a silent node DOWN.

    300 by default; also for 0, which means never.
    """
    found = re.search(r"^SlurmdTimeout\s*=\s*(\d+)", slurm_conf(), re.MULTILINE)
    return float(found[1]) or 300.0 if found else 300.0


def output_of(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, seconds: float | None = None
) -> str:
    """Return a command's output, run as by `ask`; empty if it fails."""
    try:
        answer = ask(argv, environ, seconds)
    except SlurmError:
        return ""
    return "" if answer.returncode else answer.stdout


def call(
    argv: Sequence[str],
    environ: Mapping[str, str],
    seconds: float,
    stdin: str = "",
    folder: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command as from a login shell. Raises the errors of subprocess.run."""
    import subprocess

    return subprocess.run(  # searches the PATH of `env`, not of this process
        argv,
        env=submission_environment(environ),
        cwd=folder,
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=False,
    )


def cancel(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Cancel a job; like scancel, ignore a job that Slurm has forgotten.

    Raises SlurmError with scancel's message.
    """
    _change(["scancel", job_id], environ)


def cancel_all(job_ids: Sequence[str]) -> None:
    """Cancel jobs in one call, so that no array task starts when another one ends.

    Raises SlurmError as `cancel` does.
    """
    _change(["scancel", *join_array_tasks(job_ids)])


def join_array_tasks(job_ids: Sequence[str]) -> list[str]:
    """Return jobs for scancel and scontrol, with the tasks of each array joined: `89_[0-3,7]`.

    Other jobs come first.
    """
    elements: dict[str, list[int]] = {}
    for array, _, index in (job_id.partition("_") for job_id in job_ids if "_" in job_id):
        elements.setdefault(array, []).append(int(index))
    listed = {array: forms.array_indices(sorted(indices)) for array, indices in elements.items()}
    jobs = [job_id for job_id in job_ids if "_" not in job_id]
    return [*jobs, *(f"{array}_[{indices}]" for array, indices in listed.items())]


def terminate_step(step: str) -> None:
    """Send SIGTERM to a step's tasks and their parents. Raises SlurmError with scancel's message.

    Without --signal, scancel kills a step's processes immediately (seen on 22.05).
    """
    signal_step(step, "TERM")


def kill_step(step: str) -> None:
    """Kill a step's tasks immediately. Raises SlurmError with scancel's message."""
    signal_step(step, "KILL")


def signal_step(step: str, name: str) -> None:
    """Send a signal to a step's tasks and their parents. Raises SlurmError."""
    _change(["scancel", f"--signal={name}", step])


def release_nodes(job_id: str, kept: Sequence[str]) -> None:
    """Shrink a job to these nodes; its steps end on the others. Raises SlurmError.

    Seen on 22.05: it takes effect at once, even with a lost node, whose loss then ends no job.
    """
    import tempfile

    argv = ["scontrol", "update", f"JobId={job_id}", f"NodeList={','.join(kept)}"]
    # scontrol writes slurm_job_ID_resize.sh and .csh into its directory if SLURM_JOBID is set.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        _change(argv, folder=folder)


def node_addresses(hosts: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return the address of each node's slurmd; none if slurmctld does not answer.

    Slurm shows a node's port only if it differs from slurm.conf's (seen on 22.05).
    """
    try:
        usual = _slurmd_port()
    except SlurmError:
        usual = _SLURMD_PORT
    addresses = {}
    for line in output_of(["scontrol", "show", "node", "-o", ",".join(hosts)]).splitlines():
        fields = dict(re.findall(r"\b(NodeName|NodeAddr|Port)=(\S+)", line))
        if fields.get("NodeName") in hosts and "NodeAddr" in fields:
            addresses[fields["NodeName"]] = fields["NodeAddr"], int(fields.get("Port") or usual)
    return addresses


def drained_nodes(hosts: Sequence[str]) -> dict[str, str]:
    """Return the nodes that an administrator drains, or takes out of service, with Slurm's reason.

    Returns none if slurmctld does not answer. A node that runs a job shows `ALLOCATED+DRAIN`.
    """
    drained = {}
    for record in output_of(["scontrol", "show", "node", "-o", ",".join(hosts)]).splitlines():
        # The reason, any text, comes late, and its author and time after it.
        fields = re.search(r"^NodeName=(\S+) .*? State=(\S+)", record)
        if fields and fields[1] in hosts and _DRAIN.intersection(re.split(r"\W", fields[2])):
            reason = re.search(r" Reason=(.*?)(?: \[\S+@\S+\]| Comment=|\s*$)", record)
            drained[fields[1]] = reason[1] if reason else "no reason given"
    return drained


def kill_wait(environ: Mapping[str, str], folders: Sequence[str] = _CONF_FOLDERS) -> int | None:
    """Return KillWait of this node's slurm.conf: the seconds from SIGTERM to SIGKILL.

    slurmctld is not asked, since each job would. None if the file is missing, or includes others.
    """
    paths = [Path(folder, "slurm.conf") for folder in folders]
    if named := environ.get("SLURM_CONF"):
        paths = [Path(named)]
    text = "include"
    with contextlib.suppress(OSError):
        text = next((path.read_text(errors="replace") for path in paths if path.is_file()), text)
    if found := re.search(r"^\s*KillWait\s*=\s*(\d+)", text, re.MULTILINE | re.IGNORECASE):
        return int(found[1])
    return None if re.search(r"^\s*include\b", text, re.MULTILINE | re.IGNORECASE) else 30


@functools.cache
def _slurmd_port() -> int:
    """Return slurmd's port from slurm.conf; cached, since slurmd keeps it. Raises SlurmError."""
    config = slurm_conf()
    if not config:
        raise SlurmError("slurmctld does not show its configuration")
    usual = re.search(r"^SlurmdPort\s*=\s*(\d+)", config, re.MULTILINE)
    return int(usual[1]) if usual else _SLURMD_PORT


def signal_script(job_id: str) -> None:
    """Send USR1 only to a job's batch script. Raises SlurmError with scancel's message."""
    # For a job that does not run, scancel prints an error but may exit with 0.
    _change(["scancel", "--batch", "--signal=USR1", job_id], may_complain=False)


def forbid_requeue(job_id: str) -> None:
    """Forbid Slurm to requeue a job. Raises SlurmError with scontrol's message."""
    _change(["scontrol", "update", f"JobId={job_id}", "Requeue=0"])


@dataclass(frozen=True)
class JobNodes:
    """Partition of a job and its excluded nodes."""

    partition: str = ""
    excluded: tuple[str, ...] = ()


def job_nodes(job_id: str) -> JobNodes:
    """Return where a job may start. Raises SlurmError if Slurm does not report it."""
    fields = _job_fields(job_id)
    if "Partition" not in fields:
        raise SlurmError(f"Slurm does not report the partition of job {job_id}")
    hosts = forms.hosts_of(fields.get("ExcNodeList", "").replace("(null)", ""))
    return JobNodes(fields["Partition"], tuple(hosts))


def exclude_nodes(job_id: str, hosts: Sequence[str]) -> None:
    """Exclude exactly these nodes from a job's next start on.

    Slurm accepts this for the user's pending or completing job (after a requeue), and refuses it
    for a running one (seen on 22.05). Raises SlurmError with scontrol's message.
    """
    _change(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(hosts)}"])


def delay_start(job_id: str, seconds: float) -> None:
    """Let a requeued job start in `seconds` at the earliest, and not before Slurm would start it.

    Slurm accepts it as soon as the job is requeued (seen on 22.05). Without it, Slurm waits until
    the job's former credential has expired. Raises SlurmError with scontrol's message.
    """
    expiry = re.search(r"^AuthInfo\s*=.*\bcred_expire=(\d+)", slurm_conf(), re.MULTILINE)
    seconds = max(seconds, float(expiry[1]) + 1 if expiry else _CREDENTIAL_SECONDS)
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
    _change(["scontrol", "update", f"JobId={job_id}", f"StartTime={start}"])


def set_node_count(job_id: str, count: int, tasks: int) -> None:
    """Set the exact number of nodes and of tasks that a pending job requests.

    Slurm accepts this as soon as a job is requeued (seen on 22.05). Raises SlurmError with
    scontrol's message.
    """
    sizes = f"NumNodes={count}-{count}", f"NumTasks={tasks}"
    _change(["scontrol", "update", f"JobId={job_id}", *sizes])


def dependency_of(job_id: str) -> list[str]:
    """Return a job's open dependencies, for example `afterany:12`.

    Fulfilled ones are gone (seen on 22.05). Raises SlurmError if Slurm does not report them.
    """
    fields = _job_fields(job_id)
    if "Dependency" not in fields:
        raise SlurmError(f"Slurm does not report the dependencies of job {job_id}")
    named = fields["Dependency"].replace("(null)", "").split(",")
    return [re.sub(r"\(.*", "", item) for item in named if item]


def set_dependency(job_id: str, dependency: str) -> None:
    """Replace the dependencies of a queued job.

    Slurm also accepts this for a job that is held, in DependencyNeverSatisfied, or completing after
    a requeue, and refuses it for a running one (seen on 22.05). Raises SlurmError with scontrol's
    message.
    """
    _change(["scontrol", "update", f"JobId={job_id}", f"Dependency={dependency}"])


def release(job_id: str) -> None:
    """Release a held job; it may still be completing after a requeue (seen on 22.05 and 24.11).

    No effect on a job that is not held. Raises SlurmError with scontrol's message.
    """
    _change(["scontrol", "release", job_id])


class StillHeld(SlurmError):
    """The job is requeued but stays held: Slurm refused its dependency."""


def requeue_with_dependency(job_id: str, dependency: str) -> None:
    """Requeue this running job with a dependency; without one it stays held.

    The job is held until Slurm has accepted the dependency. --no-requeue is lifted and restored,
    which the owner may do (seen on 22.05); that is safe here, because no task has started. Raises
    StillHeld if the job is requeued but stays held, SlurmError for other failures.
    """
    allowed = _job_fields(job_id).get("Requeue") == "1"
    if not allowed:
        _change(["scontrol", "update", f"JobId={job_id}", "Requeue=1"])
    requeue(job_id, hold=True)
    try:
        if not allowed:
            forbid_requeue(job_id)
        if dependency:
            set_dependency(job_id, dependency)
            release(job_id)
    except SlurmError as error:
        raise StillHeld(str(error)) from None


def requeue(job_id: str, *, hold: bool = False) -> None:
    """Requeue a job; no effect on a pending one.

    hold: hold it until it is released. Raises RequeueRefused if requeues are not allowed,
    SlurmError if Slurm does not answer.
    """
    answer = ask(["scontrol", "requeuehold" if hold else "requeue", job_id])
    words = f"{answer.stdout} {answer.stderr}".strip()
    if answer.returncode and "pending execution" not in words:
        raise RequeueRefused(words or f"scontrol requeue: exit code {answer.returncode}")


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch, like that of a login shell.

    Without this, SBATCH_* would override the script's directives, and the new job would inherit the
    SLURM_* and rank variables of a surrounding one (SLURM_CPU_BIND crowds its tasks).
    """
    kept, prefixes = _CONFIGURATION.split(), tuple(_JOB_PREFIXES.split())
    dropped = {*forms.RANK_VARIABLES, *forms.TASK_VARIABLES}
    if "SLURM_JOB_ID" in environ:
        dropped.update(_DEVICES.split())
    active = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX")  # a staged task has its copy's
    return {
        name: forms.unstaged(value, environ) if name in active else value
        for name, value in environ.items()
        if name in kept or not (name.startswith(prefixes) or name in dropped)
    }


def _change(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    may_complain: bool = True,
    folder: str | None = None,
) -> None:
    """Run a command that changes a job. may_complain: exit code 0 overrides errors on stderr."""
    answer = ask(argv, environ, folder=folder)
    complains = "error" in answer.stderr.lower()
    if answer.returncode or (complains and not may_complain):
        silent = f"exit code {answer.returncode} without a message; the job may have ended"
        raise SlurmError(f"{' '.join(argv)}: {answer.stderr.strip() or silent}")


class Ending(str, Enum):
    """Reason why a job ends while its script still runs, according to slurmctld."""

    NONE = "none"
    """The job runs."""
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    """The job is already requeued."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


_ENDINGS = {
    State.RUNNING: Ending.NONE,
    State.OTHER: Ending.UNKNOWN,
    State.TIMEOUT: Ending.TIME_LIMIT,
    State.PREEMPTED: Ending.PREEMPTED,
}


def ending(job_id: str, restart: int) -> Ending:
    """Return why the job is ending; from inside, Slurm shows COMPLETING for every reason.

    restart: SLURM_RESTART_COUNT of the calling attempt. Seen on 22.05: a requeue has already
    incremented Restarts, preemption with a grace time leaves the job RUNNING with a PreemptTime,
    and time limit and scancel differ only in the job's run time.
    """
    fields = _job_fields(job_id)
    if "JobState" not in fields:
        return Ending.UNKNOWN
    state = parse_state(fields["JobState"])
    if int(fields.get("Restarts") or 0) > restart or state is State.PENDING:
        return Ending.REQUEUED
    if fields.get("PreemptTime", "None") not in ("None", ""):
        return Ending.PREEMPTED
    if state in _ENDINGS:
        return _ENDINGS[state]
    ran, limit = (forms.time_seconds(fields.get(name, "")) for name in ("RunTime", "TimeLimit"))
    is_over = ran is not None and limit is not None and ran >= limit
    return Ending.TIME_LIMIT if is_over else Ending.CANCELLED


def requeued_after_grace(job_id: str) -> bool:
    """Return whether Slurm requeues a preempted job that ends within its grace time.

    It does since 24.05 (slurmctld's proc_req.c, GRACE_PREEMPT; seen on 24.11.5) if the job's
    PreemptMode is REQUEUE. If the job requeued itself, Slurm's mark would remain and requeue it
    again at its next end, even after success. False if unknown, for example if a QOS sets the mode.
    """
    config = slurm_conf()
    version = re.search(r"^SLURM_VERSION\s*=\s*(\d+\.\d+)", config, re.MULTILINE)
    if not version or not _reaches(version[1], (24, 5)):
        return False
    if not re.search(r"^PreemptType\s*=\s*(preempt/)?partition_prio\b", config, re.MULTILINE):
        return False
    fields = _job_fields(job_id)
    if fields.get("Requeue") != "1" or "Partition" not in fields:
        return False
    partition = output_of(["scontrol", "show", "partition", "-o", fields["Partition"]])
    mode = re.search(r" PreemptMode=(\S*)", partition)
    return mode is not None and "REQUEUE" in mode[1].split(",")


def _job_fields(job_id: str) -> dict[str, str]:
    """Return the fields of `scontrol show job`; none for an unknown job."""
    record = output_of(["scontrol", "show", "job", "-o", job_id])
    # The last of each name counts: the job's name and comment, with arbitrary text, come earlier.
    return dict(re.findall(r" ([A-Za-z]+)=(\S*)", record.partition(" Command=")[0]))


def seconds_left(job_id: str) -> float | None:
    """Return the seconds until the job's time limit, 0 after it; None without one or if unknown."""
    left = output_of(["squeue", "-h", "-j", job_id, "-o", "%L"]).strip()
    return 0.0 if left == "INVALID" else forms.time_seconds(left)  # the word for less than none
