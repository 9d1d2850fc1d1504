"""Queue the job that sends the notification of a run's end if its script cannot (`status.notify`).

A sweep has no script of its own, so this job always sends its notification.
"""

from clusterddp import log
from clusterddp.errors import ClusterDDPError
from clusterddp.files import write_atomically
from clusterddp.request.spec import IN_ALLOCATION, JobSpec
from clusterddp.run.run_dir import RunDir
from clusterddp.status import notify

_MINUTES = 10
_PASSED_ON = ("partition", "account", "qos", "reservation")
"""Options of the request that decide whether and where a job of this user may run."""


def render(spec: JobSpec) -> str:
    """Render the script. Its dependency is an argument of sbatch."""
    from clusterddp.launchers.sbatch import directive, shell_word  # which imports jinja2

    wanted: dict[str, str | None] = {
        "job-name": f"{spec.job_name or spec.run_name}-notify",
        "comment": notify.job_comment(spec),
        "output": "/dev/null",
        "nodes": "1",
        "ntasks": "1",
        "time": str(_MINUTES),
    }
    for name in _PASSED_ON:
        if value := getattr(spec.resources, name):
            wanted[name] = value
    if "clusters" in dict(spec.sbatch):
        wanted["clusters"] = dict(spec.sbatch)["clusters"]
    if spec.export == "NONE":
        wanted["export"] = ",".join(spec.pass_environment) or "NONE"
    lines = [directive(k, v) for k, v in wanted.items() if k not in spec.omit_directives]
    run_dir = shell_word(spec.run_dir)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            f"# Runs the notification program of {spec.run_name}, unless its script has.",
            f"run_dir={run_dir}",
            'exec >>"$run_dir/logs/notify.log" 2>&1',
            'own=("$run_dir/clusterddp.pyz"); [ -e "${own[0]}" ] || own=(-m clusterddp)',
            # If the run's interpreter is missing, its script sends no notification.
            f"python={shell_word(spec.controller_python)}",
            'command -v "$python" >/dev/null || python=python3',
            'exec "$python" "${own[@]}" notify "$run_dir"',
            "",
        ]
    )


def submit(spec: JobSpec, run: RunDir, job_id: str) -> None:
    """Queue the job after the run's; if that fails, a warning says what is missing.

    run: the run, or the sweep whose array is `job_id`.
    """
    if not spec.notify or spec.launcher in ("local", IN_ALLOCATION):
        return
    try:
        run.logs.mkdir(mode=0o700, exist_ok=True)  # of a sweep
        write_atomically(run.notice_script, render(spec).encode())
        notify.queue(run, spec, job_id)
    except (ClusterDDPError, OSError) as error:
        words = (
            "so no notification is sent"
            if spec.sweep
            else "so none is sent if its script cannot send it, e.g. after a cancellation in "
            "the queue"
        )
        log.warning(
            f"--notify: the notification job of {run.name} is not queued, {words}: {error} [CD1108]"
        )
