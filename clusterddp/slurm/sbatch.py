"""Submits a script with sbatch, or asks what would become of one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

from clusterddp.errors import RequestError, SlurmError
from clusterddp.slurm.command import QUERY_SECONDS, UNREACHABLE, ask, call
from clusterddp.slurm.release import explained

SBATCH_SECONDS = 60.0
"""Bound on sbatch; its own MessageTimeout is 10 s, and some sites set it to 60."""
LOOKUP_PAUSES_SECONDS = (0.0, 2.0, 5.0)
"""Waits before each look for a job whose sbatch gave no answer: it can be queued a little later."""
_PARSABLE = re.compile(r"(\d+)(?:;\S+)?")


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
        answer = call(["sbatch", "--parsable"], environ, SBATCH_SECONDS, stdin=script)
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
        if UNREACHABLE.search(words):
            return _lost(words, environ, comment, started)
        words = explained(words, script, environ)
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
    answer = ask(["sbatch", "--test-only"], environ, QUERY_SECONDS, stdin=script)
    lines = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
    # `Job 24`: the number is not the one that it will have.
    lead = r"(?:sbatch: |error: |allocation failure: |Job \d+ )*"
    words = re.sub(lead, "", lines[-1], count=1) if lines else ""
    return answer.returncode == 0, words or f"exit code {answer.returncode}"


def _lost(seen: str, environ: Mapping[str, str], comment: str, started: float) -> str:
    """The id of a job that was queued although sbatch did not say so; SlurmError when unknown."""
    # %V is local time; two minutes of grace for a controller whose clock is behind ours.
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(started - 120))
    for pause in LOOKUP_PAUSES_SECONDS:
        time.sleep(pause)  # the controller may still be working on the submission
        try:
            argv = ["squeue", "-h", "-a", "--me", "-t", "all", "-o", "%i|%V|%k"]
            answer = ask(argv, environ, QUERY_SECONDS)
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
