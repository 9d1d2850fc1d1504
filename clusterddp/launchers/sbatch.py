"""Launches by sbatch, the default: hands it the rendered script."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.launchers import Submission
from clusterddp.launchers import script as rendering
from clusterddp.request.spec import EXPEDITE, JobSpec, submission_comment

if TYPE_CHECKING:
    from clusterddp.run.run_dir import RunDir


def prepare(spec: JobSpec, template_folder: Path | None) -> str:
    """Render the script from the chosen template."""
    return rendering.render(spec, template_folder)


def submit(spec: JobSpec, script: str, run: "RunDir") -> Submission:
    """Queue the script, and record its job id in the run."""
    from clusterddp.run import events  # these three: not needed for a dry run
    from clusterddp.slurm.sbatch import check_expedite, sbatch

    if spec.requeue == EXPEDITE:
        check_expedite(os.environ)
    comment = dict(spec.sbatch).get("comment") or submission_comment(spec.run_name)
    job_id = sbatch(script, os.environ, comment=comment)
    events.add(
        run.events, events.Submitted, job_id=job_id, launcher="sbatch", folder=str(Path.cwd())
    )
    return Submission(job_id)
