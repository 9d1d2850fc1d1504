"""The default launcher: hands the rendered script to sbatch."""

import os
from pathlib import Path

from clusterddp.launchers import Submission
from clusterddp.launchers import script as rendering
from clusterddp.request.spec import EXPEDITE, JobSpec, submission_comment
from clusterddp.run import events
from clusterddp.run.run_dir import RunDir


def prepare(spec: JobSpec, template_folder: Path | None) -> str:
    """The script, rendered from the chosen template."""
    return rendering.render(spec, template_folder)


def submit(spec: JobSpec, script: str, run: RunDir) -> Submission:
    """Queue the script; its job id is recorded in the run."""
    from clusterddp.slurm.release import check_expedite  # not needed for a dry run
    from clusterddp.slurm.sbatch import sbatch

    if spec.requeue == EXPEDITE:
        check_expedite(os.environ)
    comment = dict(spec.sbatch).get("comment") or submission_comment(spec.run_name)
    job_id = sbatch(script, os.environ, comment=comment)
    events.add(
        run.events, events.Submitted, job_id=job_id, launcher="sbatch", folder=str(Path.cwd())
    )
    return Submission(job_id)
