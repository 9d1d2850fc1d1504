"""Submissions with sbatch, and its forecast for a script."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from clusterddp.errors import RequestError, SlurmError
from clusterddp.slurm.command import UNREACHABLE, ask, call
from clusterddp.slurm.queries import reaches, version

SBATCH_SECONDS = 60.0
"""Bound on sbatch; its own MessageTimeout is 10 s, and some sites set it to 60."""
LOOKUP_PAUSES_SECONDS = (0.0, 2.0, 5.0)
"""Waits before each look for a job whose sbatch gave no answer: it can be queued a little later."""
_EXPEDITE_SINCE = (25, 11)
"""First release whose sbatch takes --requeue=expedite (its release notes)."""
# Words of getopt, and so of sbatch, for an option that another release has.
_NO_SUCH_OPTION = re.compile(r"unrecognized option|doesn't allow an argument|invalid option")
_PARSABLE = re.compile(r"(\d+)(?:;\S+)?")


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
