"""Submits points of a sweep once more, or further points, as one job array."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import RequestError
from clusterddp.launchers import SentJob, notice_job
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import Sweep
from clusterddp.run import attempt as attempts
from clusterddp.run import bad_nodes, chain, events
from clusterddp.run.attempt import Claim, claimed
from clusterddp.run.run_dir import RunDir, SweepDir
from clusterddp.run.state import UNKNOWN
from clusterddp.run.status import statuses
from clusterddp.run.sweeps import has_failed
from clusterddp.slurm.array_limits import array_limits
from clusterddp.submission import bundle, outlook, points
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
            "are done were trained with. Submit a new sweep, or give one point the new code: "
            f"clusterddp resubmit {sweep.shown}-0 --code new"
        )
    with contextlib.ExitStack() as stack:
        claim = None if dry_run else stack.enter_context(claimed(sweep))
        before = sweep.load_spec()
        stack.enter_context(submission_folder_of(sweep))
        after = change(before)
        if more:
            after = dataclasses.replace(after, sweep=after.sweep.with_points(more))
        after.check_points()
        check_fields(sweep, dataclasses.replace(before, sweep=after.sweep), after)
        check_changes(sweep, before, after, terms)
        script = script_for(sweep, before, after, terms)
        count = len(before.sweep)
        if more:
            indices = [*range(count, len(after.sweep))]
            if not indices:
                raise RequestError(f"{sweep.name} has each of these points already.")
            points.refuse_existing(after, indices)
        else:
            indices = _to_repeat(sweep)
        result = Resubmitted(after, script, tuple(indices), None)
        if claim is None:
            return result
        _check(after, len(indices))
        runs = [sweep.element(index) for index in indices]
        claims = [] if more else [stack.enter_context(claimed(run)) for run in runs]
        if after != before or terms.new_clusterddp:
            stack.enter_context(bundle.renewed(sweep))
        else:
            bundle.keep(sweep)
        submission = _submit(claim, claims, before, after, script, indices, terms)
        chain.rejoin(sweep)
        return dataclasses.replace(result, submission=submission)


def _to_repeat(sweep: SweepDir) -> list[int]:
    """Return the indices of the points that have not ended well. Raises RequestError for none."""
    known = statuses(sweep.elements)
    unsure = next((s for s in known if s.state == UNKNOWN and not s.is_forgotten), None)
    if unsure:
        raise RequestError(
            f"whether {unsure.name} still waits or runs is not known: {unsure.detail}. Try again "
            "where Slurm answers; two jobs cannot train one run."
        )
    indices = [index for index, status in enumerate(known) if has_failed(status)]
    if not indices:
        raise RequestError(
            f"every point of {sweep.name} is done, queued or running: there is nothing to submit "
            f"again. Add points with: clusterddp resubmit {sweep.shown} --sweep NAME=VALUES"
        )
    return indices


def _check(spec: JobSpec, count: int) -> None:
    """Check what the points need from here, as a first submission does."""
    if spec.after:  # ahead of the records
        chain.check(chain.look(spec), spec, has_queue=spec.launcher != "local")
    for name in spec.pass_environment:
        if name not in os.environ:
            raise RequestError(
                f"{name} is not set here, and the sweep passes it by name from where you submit; "
                "set it."
            )
    for train in spec.trainings:
        make_sure(train, spec)
    if spec.launcher != "local":
        bad_nodes.refuse_demanded(Path(spec.run_dir).parent, spec.resources)
        outlook.check_array(spec, count, array_limits(spec.resources.account))


def _submit(
    claim: Claim,
    claims: Sequence[Claim],
    before: JobSpec,
    after: JobSpec,
    script: str,
    indices: Sequence[int],
    terms: Terms,
) -> SentJob:
    """Lay the records down, and submit; puts the former records back where that is refused.

    claims: on the points that are there already; without them they are made.
    """
    sweep = SweepDir(claim.run.path)
    for each in (claim, *claims):
        each.use()
    records = {}
    if after != before:
        records = {sweep.spec: after.to_json(), sweep.script: script}
    with (
        naming_the_job(after),
        renewed_records(sweep, records),
        contextlib.ExitStack() as stack,
    ):
        if claims:
            runs = [each.run for each in claims]
            for index, run in zip(indices, runs, strict=True):
                changed = {} if after == before else {run.spec: after.element(index).to_json()}
                stack.enter_context(renewed_records(run, changed))
                _note(run, terms)
        else:
            runs = stack.enter_context(points.created(sweep, after, indices))
        if after.launcher == "local":
            points.note_rehearsal(sweep, indices)
            return SentJob("")
        from clusterddp.launchers import sbatch  # and jinja2, which not every command needs

        submission = sbatch.submit(after, script, sweep, runs)
        notice_job.submit(after, sweep, submission.job_id)
        return submission


def _note(run: RunDir, terms: Terms) -> None:
    """Record that a person submits a point again, ahead of what its job records."""
    latest = attempts.latest(run) if terms.from_scratch else None
    if latest:
        events.add(run.events, events.Resubmitted, from_scratch=latest.number)
    else:
        events.add(run.events, events.Resubmitted)
