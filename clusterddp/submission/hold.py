"""Submission of a hold: a run whose script only keeps its nodes (`batch.hold`)."""

import dataclasses
import os

from clusterddp.launchers import sbatch
from clusterddp.request.options import FLAG, Given
from clusterddp.request.spec import OPTIONS, JobSpec
from clusterddp.run import events, hold
from clusterddp.run.run_dir import RunDir
from clusterddp.submission import bundle, slurm_checks
from clusterddp.submission.fields import job_spec
from clusterddp.submission.submit import ask_for_partitions, reporting_queued_job
from clusterddp.version import __version__


def hold_spec(given: Given, name: str) -> JobSpec:
    """Return the request for a hold. Raises RequestError."""
    usual = {row.parameter: () if row.type is tuple else row.default for row in OPTIONS.values()}
    sources = {**given.sources, "launcher": FLAG}  # in a shell of salloc as well
    values = {**usual, **{k: v for k, v in given.values.items() if k in usual}}
    asked = dataclasses.replace(given, values=values, sources=sources, command=("clusterddp",))
    return dataclasses.replace(
        job_spec(asked, name), requeue=False, sbatch=(("no-kill", None),), signal=""
    )


def submit_hold(spec: JobSpec, idle_seconds: float, *, force: bool = False) -> RunDir:
    """Submit the job of a hold, and return its directory.

    idle_seconds: time without a run after which it ends. force: see `submit.submit`. Raises
    RequestError if nothing is queued, SlurmError if it may be.
    """
    question = ask_for_partitions(spec)
    if question:
        slurm_checks.check_partitions(spec, question.answer(), force=force)
    script = render(spec, idle_seconds)
    with RunDir.create(spec, script) as run, reporting_queued_job(spec):
        hold.prepare(run)
        bundle.bundle_into(run)
        job = sbatch.submit(spec, script, run)
        here = os.getcwd()  # noqa: PTH109 -- light
        sent = events.Submitted(job_id=job.job_id, launcher=spec.launcher, folder=here)
        events.add(run.events, sent)
    return run


def render(spec: JobSpec, idle_seconds: float) -> str:
    """Return the script of a hold."""
    run_dir, python = map(sbatch.shell_word, (spec.run_dir, spec.controller_python))
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in sbatch.directives(spec)),
            f"# Hold {spec.run_name}, rendered by clusterddp {__version__}.",
            f"run_dir={run_dir}",
            "trap '' USR1  # until Python handles it",
            f'exec {python} "$run_dir/clusterddp.pyz" held --idle={idle_seconds:g} "$run_dir"',
            "",
        ]
    )
