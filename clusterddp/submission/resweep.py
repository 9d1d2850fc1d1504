"""Submits points of a sweep once more, or further points, as one job array."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp import formatting, log
from clusterddp.errors import RequestError
from clusterddp.launchers import SentJob, notice_job
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import Sweep, is_array
from clusterddp.run import attempt as attempts
from clusterddp.run import bad_nodes, events
from clusterddp.run.run_dir import RunDir, SweepDir
from clusterddp.slurm.site import array_limits
from clusterddp.status import chain
from clusterddp.status.state import RunState
from clusterddp.status.status import statuses
from clusterddp.status.sweeps import has_failed
from clusterddp.submission import bundle, outlook, points
from clusterddp.submission.claim import Claim, claimed
from clusterddp.submission.inputs import make_sure
from clusterddp.submission.resubmit import (
    Terms,
    check_changes,
    check_fields,
    renewed_records,
    script_for,
    submission_folder_of,
)
from clusterddp.submission.submit import naming_the_job

_MOST_COMMANDS = 20


@dataclass(frozen=True)
class Resubmitted:
    """Points of a sweep that were submitted, or would be."""

    spec: JobSpec
    """Request of the sweep, further points included."""
    script: str
    indices: tuple[int, ...]
    submission: SentJob | None
    """None in a dry run; of a rehearsal, which runs the points in turn, without a job id."""


def resubmit_sweep(
    sweep: SweepDir,
    change: Callable[[JobSpec], JobSpec],
    more: Sweep,
    terms: Terms,
    *,
    dry_run: bool = False,
) -> Resubmitted:
    """Submit the points of a sweep that have not ended well, or these further ones alone.

    change: makes the new request from the recorded one. more: points of which those are added that
    the sweep does not have; none for a resubmission. Points that are done, queued or running are
    left alone. Raises RequestError where nothing was submitted; SlurmError where it may be queued.
    """
    sweep = SweepDir(sweep.path.absolute())
    if terms.new_code:
        raise RequestError(
            f"--code new: the points of {sweep.name} share one copy of the code, which those that "
            "are done were trained with, and further ones use it, too. Submit these as a new "
            "sweep. [CD0313]"
        )
    with contextlib.ExitStack() as stack:
        claim = None if dry_run else stack.enter_context(claimed(sweep))
        before = sweep.load_spec()
        stack.enter_context(submission_folder_of(sweep))
        after = change(before)
        if more:
            whole = after.sweep.with_points(more, trained=after.train is not None)
            after = dataclasses.replace(after, sweep=whole)
        after.check_points()
        check_fields(sweep, dataclasses.replace(before, sweep=after.sweep), after)
        check_changes(sweep, before, after, terms)
        script = script_for(sweep, before, after, terms)
        count = len(before.sweep)
        if more:
            indices = [*range(count, len(after.sweep))]
            if not indices:
                raise RequestError(
                    f"{sweep.name} has each of these points already. Those that have not ended "
                    f"well, or are missing: clusterddp resubmit {sweep.shown} [CD1103]"
                )
            points.refuse_existing(
                after,
                indices,
                "its further points keep to their numbers: submit these as a sweep of their own "
                "(clusterddp submit --run-name NAME --sweep …)",
            )
            missing = {*indices}
        else:
            indices = _to_repeat(sweep)
            missing = {i for i in indices if not os.path.lexists(sweep.element(i).path)}
        result = Resubmitted(after, script, tuple(indices), None)
        if claim is None:
            return result
        _check(after, len(indices))
        claims = {
            index: stack.enter_context(claimed(sweep.element(index)))
            for index in indices
            if index not in missing
        }
        if after != before or terms.new_clusterddp or not bundle.keeps(sweep):
            stack.enter_context(bundle.renewed(sweep))
        submission = _submit(claim, claims, before, after, script, indices, terms)
        chain.rejoin(sweep)
        return dataclasses.replace(result, submission=submission)


def _to_repeat(sweep: SweepDir) -> list[int]:
    """Return the indices of the points that have not ended well. Raises RequestError for none."""
    known = statuses(sweep.elements)
    unsure = next((s for s in known if s.state == RunState.UNKNOWN and not s.is_forgotten), None)
    if unsure:
        raise RequestError(
            f"whether {unsure.name} still waits or runs is not known: {unsure.detail}. Try again "
            "where Slurm answers; two jobs cannot train one run. [CD0509]"
        )
    indices = [index for index, status in enumerate(known) if has_failed(status)]
    own = {index: sweep.element(index) for index in indices if _has_own_script(sweep, index)}
    indices = [index for index in indices if index not in own]
    if own:
        commands = [f"clusterddp resubmit {run.shown}" for run in own.values()]
        words = (
            "points with options of their own are submitted each by itself: "
            f"{formatting.some(commands, _MOST_COMMANDS, ', ')}"
        )
        if not indices:
            raise RequestError(words, code="CD1103")
        log.info(words)
    if not indices:
        raise RequestError(
            f"every point of {sweep.name} is done, queued or running: there is nothing to submit "
            f"again. Add points with: clusterddp resubmit {sweep.shown} --sweep "
            "NAME=VALUES [CD1103]"
        )
    return indices


def _has_own_script(sweep: SweepDir, index: int) -> bool:
    """Return whether a point was submitted with other options; else its script is the sweep's."""
    script = sweep.element(index).script
    return script.is_file() and not script.is_symlink() and not is_array(script.read_text("utf-8"))


def _check(spec: JobSpec, count: int) -> None:
    """Check what the points need from here, as a first submission does."""
    if spec.after:  # ahead of the records
        chain.check(chain.look(spec), spec, has_queue=spec.launcher != "local")
    for name in spec.pass_environment:
        if name not in os.environ:
            raise RequestError(
                f"{name} is not set here, and the sweep passes it by name from where you submit; "
                "set it. [CD0106]"
            )
    for train in spec.trainings:
        make_sure(train, spec)
    if spec.launcher != "local":
        bad_nodes.refuse_demanded(Path(spec.run_dir).parent, spec.resources)
        outlook.check_array(spec, count, array_limits(spec.resources.account))


def _submit(
    claim: Claim,
    claims: Mapping[int, Claim],
    before: JobSpec,
    after: JobSpec,
    script: str,
    indices: Sequence[int],
    terms: Terms,
) -> SentJob:
    """Lay the records down, and submit; puts the former records back where that is refused.

    claims: on those of the points that are there already, by index; the others are made.
    """
    sweep = SweepDir(claim.run.path)
    for each in (claim, *claims.values()):
        each.use()
    records = {}
    if after != before:
        records = {sweep.spec: after.to_json(), sweep.script: script}
    with (
        naming_the_job(after),
        renewed_records(sweep, records),
        contextlib.ExitStack() as stack,
    ):
        missing = [index for index in indices if index not in claims]
        stack.enter_context(points.created(sweep, after, missing))
        for index, each in claims.items():
            run = each.run
            changed = {} if after == before else {run.spec: after.element(index).to_json()}
            stack.enter_context(renewed_records(run, changed))
            _note(run, terms)
        if after.launcher == "local":
            points.note_rehearsal(sweep, indices)
            return SentJob("")
        from clusterddp.launchers import sbatch  # and jinja2, which not every command needs

        runs = [sweep.element(index) for index in indices]
        submission = sbatch.submit(after, script, sweep, runs)
        notice_job.submit(after, sweep, submission.job_id)
        return submission


def _note(run: RunDir, terms: Terms) -> None:
    """Record that a person submits a point again, ahead of what its job records."""
    latest = attempts.latest(run) if terms.from_scratch else None
    if latest:
        events.add(run.events, events.Resubmitted(from_scratch=latest.number))
    else:
        events.add(run.events, events.Resubmitted())
