"""Checks, before anything starts, the files that a training will read."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from clusterddp import files, log
from clusterddp.errors import CheckpointError, DataError, RequestError
from clusterddp.request import user_functions
from clusterddp.request.options import is_reference
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig, changes
from clusterddp.run.records import Agreement, Report
from clusterddp.run.run_dir import RunDir, checkpoint_step


def make_sure(
    config: TrainConfig, spec: JobSpec | None = None, *, code: Path | None = None
) -> None:
    """Check that the dataset is whole, or make or fetch it, and that the checkpoint is not torn.

    A person's own functions are found, without running them, from the folder `code`, which is the
    current one by default. spec: request of the job that trains, whose Python can have more
    installed, and whose ranks have to share the checkpoint's batch; None where ranks are started
    here, for which nothing is fetched.

    Says what it found. Raises RequestError: nothing has run yet that could have failed.
    """
    from clusterddp.checkpoints import catalog
    from clusterddp.data import mnist
    from clusterddp.data.synthetic import generate

    absent = config.missing_package()
    if absent and not _in_another_python(spec):
        raise RequestError(absent, code="CD0803")
    find_own_functions(config, spec, code=code)
    try:
        if config.init_from and spec and config.init_from in dict(spec.after):
            _check_awaited(RunDir(Path(config.init_from)), config, spec)
        elif config.init_from:
            _check_checkpoint(catalog.find(config.init_from), config, spec)
        if is_reference(config.dataset):
            return
        sources: dict[str, Callable[[str], object]] = {"synthetic": generate}
        if spec:
            check_folder(config)
            sources["mnist"] = _fetch
        info = mnist.ensure(config.dataset, config.data_dir, sources)
    except (CheckpointError, DataError) as error:
        raise RequestError(str(error), code=error.code) from None
    log.info(f"dataset: {info.describe()}")


def _fetch(data_dir: str) -> None:
    from clusterddp.data.download import fetch  # and tarfile, http.client …

    fetch(data_dir)


def check_folder(config: TrainConfig) -> None:
    """Refuse to download into a folder that is not there: its name may be mistyped.

    The default one is excepted, which nobody has typed. Raises RequestError.
    """
    usual = Path(TrainConfig().data_dir).absolute()
    is_named = config.dataset == "mnist" and Path(config.data_dir).absolute() != usual
    if is_named and not Path(config.data_dir).expanduser().exists():
        place = shlex.quote(config.data_dir)
        raise RequestError(
            f"--data-dir: {place} does not exist. Name the folder that holds MNIST/raw, or have it "
            f"made: clusterddp data fetch --data-dir {place}; --dataset synthetic needs none. "
            "[CD0601]"
        )


def find_own_functions(
    config: TrainConfig, spec: JobSpec | None, *, code: Path | None = None
) -> None:
    """Find a person's own model and dataset without running them, as `make_sure` does.

    Touches nothing. Raises RequestError where one is not there.
    """
    folder = code or Path.cwd()
    for option, reference in config.own_functions:
        if _in_another_python(spec) and user_functions.find(reference, folder) is None:
            log.warning(f"{option} {reference} is not in {folder}: the tasks need it [CD0317]")
        else:
            file = user_functions.locate(option, reference, folder)
            log.info(f"{option.strip('-')}: {reference} of {file}")


def _in_another_python(spec: JobSpec | None) -> bool:
    """Return whether the tasks can have modules installed that are not installed here."""
    if spec is None:
        return False
    return spec.python != sys.executable or bool(spec.wrapper or spec.container_image)


def _check_awaited(run: RunDir, config: TrainConfig, spec: JobSpec) -> None:
    """Check a request against a run that goes on, from whose last checkpoint it is to start."""
    before = run.read_spec()
    for train in before.trainings if before else ():
        _check_run(run, train, None, config, spec)
    log.info(f"--init-from: from the newest checkpoint that {run.name} has once it has ended")


def _check_checkpoint(checkpoint: Path, config: TrainConfig, spec: JobSpec | None) -> None:
    """Refuse a checkpoint that its ranks would refuse, or that leaves them nothing to train."""
    step = checkpoint_step(checkpoint)
    if step is not None and config.max_steps and config.max_steps <= step:
        raise RequestError(
            f"--init-from {config.init_from}: it has trained {step} steps already, and --max-steps "
            f"{config.max_steps} ends there: nothing is left to train. Give more steps. [CD0510]"
        )
    for folder in checkpoint.resolve().parents[1:4]:  # only a run keeps records
        before = RunDir(folder).read_spec()
        if before:
            for train in before.trainings:
                _check_run(RunDir(folder), train, step, config, spec)
            return


def _check_run(
    run: RunDir, before: TrainConfig, step: int | None, config: TrainConfig, spec: JobSpec | None
) -> None:
    """Check a request against the run from whose checkpoint it starts."""
    changed = changes(vars(before), vars(config))
    if changed and not config.allow_config_change:
        raise RequestError(
            f"--init-from {config.init_from}: it was trained with another configuration: "
            f"{'; '.join(changed)}. Give the options as they were, or add "
            "--allow-config-change. [CD0703]"
        )
    if step is not None and not config.find_batch_size and is_finished(run, step, before, config):
        raise RequestError(
            f"--init-from {config.init_from}: {run.name} is done at step {step}: nothing is left "
            "to train. Give it more, such as --epochs N --allow-config-change, or name an earlier "
            "checkpoint of it. [CD0510]"
        )
    problem = uneven_batch(run, config, spec.world_size) if spec else ""
    if problem:
        raise RequestError(f"--init-from {config.init_from}: {problem} [CD0105]")


def uneven_batch(run: RunDir, config: TrainConfig, world_size: int, *, resumes: bool = True) -> str:
    """Explain why so many ranks cannot share the batch that a run's ranks agreed on; empty else.

    resumes: False where they begin at step 0.
    """
    agreed = files.read(Agreement, run.resolved) or Agreement()
    images, ranks = agreed.global_batch_size, agreed.reference_world_size
    if not 1 <= ranks <= images:
        return ""
    step_size = images // ranks
    reference = images // step_size
    if resumes:
        reference = config.reference_world_size(world_size, images, step_size)
    return config.uneven_batch(reference, world_size)


def is_finished(run: RunDir, step: int, before: TrainConfig, after: TrainConfig) -> bool:
    """Return whether a run has trained all of `after`, by the report that it wrote at `step`.

    before: what it was asked for. A run without a report has not come to its end.
    """
    report = files.read(Report, run.report) or Report()
    steps, epochs = report.steps, report.epochs
    if steps is None or epochs is None or step != steps:
        return False
    if after.max_steps and after.max_steps <= steps:
        return True
    # Ended by --max-steps, it may have been anywhere in its last epoch.
    return steps != before.max_steps and after.epochs <= epochs
