"""Submits a run once more, its records renewed; they are put back where that is refused."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from clusterddp import launchers
from clusterddp.errors import RequestError, SlurmError
from clusterddp.request.spec import JobSpec, submission_comment
from clusterddp.run import attempt as attempts
from clusterddp.run import events
from clusterddp.run.claim import Claim
from clusterddp.run.files import write_atomically
from clusterddp.run.run_dir import RunDir
from clusterddp.submission.changed_request import differences


def submit_again(
    claim: Claim,
    before: JobSpec,
    after: JobSpec,
    script: str,
    launcher: launchers.Launcher,
    code_changes: Sequence[str] = (),
    *,
    from_scratch: bool = False,
) -> launchers.Submission:
    """Lay the records down, submit, and put the former records back where that is refused.

    from_scratch: give up what the run's attempts have saved so far.
    """
    claim.use()
    run = claim.run
    kept: dict[Path, Path | None] = {}
    try:
        if after != before:
            kept = _renew_records(run, after, script)
        elif not run.script.is_file():  # of `debug`
            kept = {run.script: None}
            write_atomically(run.script, script.encode())
        # Before the submission: the job's first line may come before the record of its id.
        changes = [*differences(before, after), *(f"code: {line}" for line in code_changes)]
        latest = attempts.latest(run) if from_scratch else None
        given_up: dict[str, Any] = {"from_scratch": latest.number} if latest else {}
        events.add(run.events, events.Resubmitted, changes=tuple(changes), **given_up)
        return launcher.submit(after, script, run)
    except RequestError:
        _put_back(kept)
        raise
    except KeyboardInterrupt:
        click.echo(
            f"clusterddp: interrupted; the job may be queued. Look for it by its comment, "
            f"{submission_comment(after.run_name)}.",
            err=True,
        )
        raise
    except OSError as error:
        raise SlurmError(
            f"the run's records cannot be written: {error}. The job may be queued; look for it "
            f"by its comment, {submission_comment(after.run_name)}."
        ) from None


def _renew_records(run: RunDir, spec: JobSpec, script: str) -> dict[Path, Path | None]:
    """Write spec.json and the script anew; the former ones stay as spec-N.json, script-N.sbatch.

    Returns where the former ones are; None for one that was not there. Raises OSError.
    """
    number = 1
    while any(_former(path, number).exists() for path in (run.spec, run.script)):
        number += 1
    kept: dict[Path, Path | None] = {}
    created = run.spec.stat()
    for path, content in ((run.spec, spec.to_json()), (run.script, script)):
        kept[path] = None
        if path.is_file():
            shutil.copy2(path, _former(path, number))
            kept[path] = _former(path, number)
        write_atomically(path, content.encode())
    os.utime(run.spec, ns=(created.st_atime_ns, created.st_mtime_ns))  # runs are listed by it
    return kept


def _former(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def _put_back(kept: Mapping[Path, Path | None]) -> None:
    for path, former in kept.items():
        if former:
            former.replace(path)
        else:
            path.unlink(missing_ok=True)
