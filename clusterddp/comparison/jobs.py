"""The runs of a comparison as Slurm jobs, each of which waits for the end of the one before."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from clusterddp import launchers, log
from clusterddp.comparison.results import Trial, results
from clusterddp.comparison.rows import Row
from clusterddp.comparison.table import figures
from clusterddp.comparison.trials import trial
from clusterddp.errors import ClusterDDPError, RequestError
from clusterddp.request.spec import JobSpec
from clusterddp.run.follow import wait_for_end
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import FAILED
from clusterddp.submission import submit


class Interrupted(Exception):
    """A Ctrl-C while the jobs were submitted or waited for; carries the runs that go on, or may."""

    def __init__(self, runs: Sequence[RunDir]) -> None:
        super().__init__()
        self.runs = runs


def carry_out(
    planned: Sequence[tuple[Row, JobSpec]],
    template_folder: Path | None,
    snapshot_limit_mb: float,
) -> list[Trial]:
    """Submit all, wait for their ends; returns what became of each.

    The caller has made sure of the dataset, which all of them read.

    A job that is refused after another was queued is a row that has failed. Raises RequestError
    or SlurmError when the first cannot be queued, Interrupted after a Ctrl-C.
    """
    ended: set[str] = set()
    trials = []
    try:
        submitted = _submit(planned, template_folder, snapshot_limit_mb)
        for number, (row, run) in enumerate(submitted, 1):
            which = f"[{number}/{len(planned)}] {row.label}"
            if isinstance(run, Trial):
                trials.append(run)
            else:
                log.info(f"{which} …")
                trials.append(trial(row, run, wait_for_end(run)))
                ended.add(run.name)
            log.info(f"{which}: {figures(results(trials[-1:])[0])}")
    except KeyboardInterrupt:
        left = [RunDir(Path(spec.run_dir)) for _, spec in planned if spec.run_name not in ended]
        raise Interrupted([run for run in left if run.path.is_dir()]) from None
    return trials


def _submit(
    planned: Sequence[tuple[Row, JobSpec]],
    template_folder: Path | None,
    snapshot_limit_mb: float,
) -> list[tuple[Row, RunDir | Trial]]:
    submitted: list[tuple[Row, RunDir | Trial]] = []
    before = ""
    for row, asked in planned:
        spec = after(asked, before)
        script = launchers.load(spec.launcher).prepare(spec, template_folder)
        try:
            run, submission = submit.submit(
                spec, script, snapshot_limit_mb=snapshot_limit_mb, inputs_are_sure=True
            )
        except ClusterDDPError as error:
            if not before:
                raise
            why = f"not submitted: {error}".partition("\n")[0]
            submitted.append((row, Trial(row, state=FAILED, why=why)))
        else:
            submitted.append((row, run))
            before = submission.job_id
    return submitted


def after(spec: JobSpec, job_id: str) -> JobSpec:
    """The request with the job to wait for as well, however that ends: two could share a node.

    Raises RequestError where that cannot be added to what it waits for already.
    """
    if not job_id:
        return spec
    asked = spec.resources.dependency
    if "?" in asked:
        raise RequestError(
            f"--dependency {asked}: the jobs wait for one another too, which cannot be added to a "
            "list of which any will do ('?'). Give one of which all must be met (',')."
        )
    dependency = ",".join(filter(None, (asked, f"afterany:{job_id}")))
    resources = dataclasses.replace(spec.resources, dependency=dependency)
    return dataclasses.replace(spec, resources=resources)
