"""What a run is asked for now against what it was asked for before, and what of it may change."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from clusterddp import launchers
from clusterddp.errors import RequestError
from clusterddp.request import global_batch
from clusterddp.request.options import COUNT
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig, changes
from clusterddp.run.progress import is_finished, newest_checkpoint, recorded_batch
from clusterddp.run.run_dir import RunDir, run_folders
from clusterddp.slurm import forms
from clusterddp.submission import code_renewal

_MOST_CHANGES = 20


def changed_request(
    before: JobSpec, given: Mapping[str, Any], trained: Mapping[str, Any], allow_changed: bool
) -> JobSpec:
    """The request with what was typed in the place of what was recorded; raises RequestError."""
    fields: dict[str, Any] = {}
    resources = _resources(before.resources, given)
    if resources != before.resources:
        fields["resources"] = resources
    for name in ("job_name", "requeue", "max_requeues", "restart_on_failure", "restart_in_job"):
        if name in given:
            fields[name] = given[name]
    if "signal" in given:
        fields["signal"] = "" if given["signal"] == "none" else given["signal"]
    elif "resources" in fields and dataclasses.replace(before, signal=None) == before:
        fields["signal"] = None  # the default follows the time limit
    if before.train is not None:
        values = dict(trained)
        if values.get("data_dir"):
            values["data_dir"] = os.path.abspath(values["data_dir"])
        if allow_changed:
            values["allow_changed"] = True
        fields["train"] = dataclasses.replace(before.train, **values)
    return dataclasses.replace(before, **fields)


def check_changes(
    run: RunDir, before: JobSpec, after: JobSpec, allow_changed: bool, code: str = "kept"
) -> None:
    """Refuse, with the difference shown, what would train to other weights.

    code: whether the run uses its copy of the code as it was `kept`, which is told where the folder
    differs by now, or takes the folder `new`.
    """
    if not allow_changed and before.train and after.train:
        changed = changes(dataclasses.asdict(before.train), after.train)
        if changed:
            raise RequestError(
                f"{run.name} was trained with another configuration: {'; '.join(changed)}. Leave "
                "the options as they were, add --allow-changed, or submit a new run."
            )
    if code == "new" or not run.code_record.is_file():
        return
    if run.code.is_dir():
        compared = code_renewal.compare(before, run)
        told = code_renewal.describe(run, compared) if compared else ""
        if told:
            click.echo(f"clusterddp: {told}", err=True)
    elif not allow_changed:
        _check_code(run)


def _check_code(run: RunDir) -> None:
    """Refuse changed code of a run that uses its folder itself."""
    from clusterddp.submission import snapshot

    recorded = snapshot.Snapshot.from_json(run.code_record.read_text(errors="replace"))
    now = snapshot.fingerprint(Path.cwd(), leave_out=run_folders(run))
    if now is None:
        click.echo(
            f"clusterddp: warning: the code in {Path.cwd()} cannot be compared with what was "
            "submitted",
            err=True,
        )
        return
    changed = snapshot.difference(recorded, now)
    if changed:
        more = f" and {len(changed) - _MOST_CHANGES} more" if len(changed) > _MOST_CHANGES else ""
        raise RequestError(
            f"the code in {Path.cwd()} is not what {run.name} was submitted with: "
            f"{', '.join(changed[:_MOST_CHANGES])}{more}. Put it back, or use --code new to "
            "run the current files."
        )


def check_steps(run: RunDir, spec: JobSpec) -> None:
    """Refuse a --max-steps that lies below the step from which the run goes on."""
    reached = newest_checkpoint(run)
    if spec.train and reached and 0 < spec.train.max_steps < reached[0]:
        raise RequestError(
            f"--max-steps {spec.train.max_steps}: {run.name} has trained {reached[0]} steps "
            "already, as its newest checkpoint says. Give as many or more, or submit a new run."
        )


def check_ranks(run: RunDir, spec: JobSpec) -> None:
    """Refuse ranks that cannot share the run's batch, as its rank 0 would on the node."""
    recorded = recorded_batch(run)
    if spec.train is None or recorded is None:
        return
    images, step_size = recorded
    reference = images // step_size
    if newest_checkpoint(run):
        reference = global_batch.reference_world_size(
            spec.train, spec.world_size, images, step_size
        )
    elif spec.train.resume:
        return  # it starts from another run's checkpoint, and `inputs` looks at that one
    problem = global_batch.uneven(spec.train, reference, spec.world_size)
    if problem:
        raise RequestError(f"--nodes and --tasks-per-node: {spec.layout}: {problem}")


def check_template(
    run: RunDir,
    before: JobSpec,
    launcher: launchers.Launcher,
    template_dir: Path | None,
    allow_changed: bool,
) -> None:
    """The script is rendered anew: nothing else in it may change unseen."""
    if allow_changed or not run.script.is_file():
        return
    old, again = recorded_script(run), launcher.prepare(before, template_dir)
    if old != again and _version(old) == _version(again):
        raise RequestError(
            f"{run.script} is not what template {before.template} gives for this run: it was "
            "edited, or rendered from a template of your own, or by another state of "
            "clusterddp. Name its folder with --template-dir, "
            "edit the script and resubmit without options, or add --allow-changed to have it "
            "rendered anew."
        )


def recorded_script(run: RunDir) -> str:
    """The script that was sent last; raises RequestError when it cannot be read."""
    try:
        return run.script.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{run.script} cannot be read: {error}.") from None


def has_more(run: RunDir, before: JobSpec, after: JobSpec) -> bool:
    """Whether a training that is done has something left to train by the new options."""
    if before.train is None or after.train is None:
        return False
    reached = newest_checkpoint(run)
    if reached and is_finished(run, reached[0], before.train, after.train):
        return False
    old = dataclasses.asdict(before.train)
    return bool(changes(old, after.train)) or before.train.max_steps != after.train.max_steps


def differences(before: JobSpec, after: JobSpec) -> list[str]:
    """What the request was changed in, `time 1:00:00, now 2:00:00`."""
    lines = []
    for one, other in (
        (before, after),
        (before.resources, after.resources),
        (before.train, after.train),
    ):
        if one is None or other is None:
            continue
        for field in dataclasses.fields(one):
            old, new = getattr(one, field.name), getattr(other, field.name)
            if old != new and not isinstance(old, Resources | TrainConfig):
                lines.append(f"{field.name} {old}, now {new}")
    return lines


def _resources(before: Resources, given: Mapping[str, Any]) -> Resources:
    names = {field.name for field in dataclasses.fields(Resources)}
    fields = {name: value for name, value in given.items() if name in names}
    if "gpus_per_node" in fields:
        fields["gpu_type"], fields["gpus_per_node"] = forms.gpus(
            "--gpus-per-node", fields["gpus_per_node"]
        )
        usual = before.tasks_per_node == (before.gpus_per_node or 1)
        if usual and "tasks_per_node" not in fields:
            fields["tasks_per_node"] = 0  # one a GPU, as before
    if "tasks_per_node" in given:
        COUNT.check("--tasks-per-node", given["tasks_per_node"])
    return dataclasses.replace(before, **fields)


def _version(script: str) -> str:
    """The line that says which version has rendered a script."""
    return next((line for line in script.splitlines() if "rendered by clusterddp" in line), "")
