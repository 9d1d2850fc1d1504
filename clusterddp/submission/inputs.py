"""Checks of the files that a training reads, before anything is submitted or started."""

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


def check_inputs(
    config: TrainConfig,
    spec: JobSpec | None = None,
    *,
    code: Path | None = None,
    fetch: bool = True,
) -> None:
    """Check the dataset (generate or download it if needed), the checkpoint and user functions.

    spec: request of the job that trains. Its Python may have more packages than this one, and its
        ranks must be able to share the checkpoint's batch. None if ranks are started here; then
        nothing is downloaded.
    code: directory in which user functions are looked up, without running them; by default the
        current one.
    fetch: False to write nothing; the dataset's files are then not checked.

    Logs the files found. Raises RequestError.
    """
    from clusterddp.checkpoints import catalog
    from clusterddp.data import mnist
    from clusterddp.data.synthetic import generate

    absent = config.missing_package()
    if absent and not _in_another_python(spec):
        raise RequestError(absent, code="CD0803")
    find_user_functions(config, spec, code=code)
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
        if not fetch:
            return
        info = mnist.ensure(config.dataset, config.data_dir, sources)
    except (CheckpointError, DataError) as error:
        raise RequestError(str(error), code=error.code) from None
    log.info(f"dataset: {info.describe()}")


def _fetch(data_dir: str) -> None:
    from clusterddp.data.download import fetch  # imports tarfile, http.client …

    fetch(data_dir)


def check_folder(config: TrainConfig) -> None:
    """Raise RequestError if --data-dir does not exist: its name may be mistyped.

    The default directory is created if needed.
    """
    usual = Path(TrainConfig().data_dir).absolute()
    is_named = config.dataset == "mnist" and Path(config.data_dir).absolute() != usual
    if is_named and not Path(config.data_dir).expanduser().exists():
        place = shlex.quote(config.data_dir)
        raise RequestError(
            f"--data-dir: {place} does not exist. Name the directory that contains MNIST/raw, or "
            f"create it: clusterddp data fetch --data-dir {place}. --dataset synthetic needs no "
            "data. [CD0601]"
        )


def find_user_functions(
    config: TrainConfig, spec: JobSpec | None, *, code: Path | None = None
) -> None:
    """Look up the user's model and dataset functions without running them.

    Raises RequestError if one does not exist.
    """
    folder = code or Path.cwd()
    for option, reference in config.user_functions:
        if _in_another_python(spec) and user_functions.find(reference, folder) is None:
            log.warning(f"{option} {reference} is not in {folder}: the tasks need it. [CD0317]")
        else:
            file = user_functions.locate(option, reference, folder)
            log.info(f"{option.strip('-')}: {reference} of {file}")


def _in_another_python(spec: JobSpec | None) -> bool:
    """Return whether the tasks may have packages that are not installed here."""
    if spec is None:
        return False
    return spec.python != sys.executable or bool(spec.wrapper or spec.container_image)


def _check_awaited(run: RunDir, config: TrainConfig, spec: JobSpec) -> None:
    """Check a request that starts from the last checkpoint of a run that has not ended yet."""
    before = run.read_spec()
    for train in before.trainings if before else ():
        _check_run(run, train, None, config, spec)
    log.info(f"--init-from: starts from the newest checkpoint of {run.name} after that run ends")


def _check_checkpoint(checkpoint: Path, config: TrainConfig, spec: JobSpec | None) -> None:
    """Raise RequestError if ranks would refuse the checkpoint or nothing is left to train."""
    step = checkpoint_step(checkpoint)
    if step is not None and config.max_steps and config.max_steps <= step:
        raise RequestError(
            f"--init-from {config.init_from}: this checkpoint is at step {step}, so --max-steps "
            f"{config.max_steps} leaves nothing to train. Raise --max-steps. [CD0510]"
        )
    for folder in checkpoint.resolve().parents[1:4]:  # the run that wrote it, if any
        before = RunDir(folder).read_spec()
        if before:
            for train in before.trainings:
                _check_run(RunDir(folder), train, step, config, spec)
            return


def _check_run(
    run: RunDir, before: TrainConfig, step: int | None, config: TrainConfig, spec: JobSpec | None
) -> None:
    """Check a request against the run whose checkpoint it starts from."""
    changed = changes(vars(before), vars(config))
    if changed and not config.allow_config_change:
        raise RequestError(
            f"--init-from {config.init_from}: trained with another configuration: "
            f"{'; '.join(changed)}. Restore these options, or add --allow-config-change. [CD0703]"
        )
    if step is not None and not config.find_batch_size and is_finished(run, step, before, config):
        raise RequestError(
            f"--init-from {config.init_from}: {run.name} finished at step {step}, so nothing is "
            "left to train. Add --epochs N --allow-config-change with more epochs, or choose an "
            "earlier checkpoint. [CD0510]"
        )
    problem = uneven_batch(run, config, spec.world_size) if spec else ""
    if problem:
        raise RequestError(f"--init-from {config.init_from}: {problem} [CD0105]")


def uneven_batch(run: RunDir, config: TrainConfig, world_size: int, *, resumes: bool = True) -> str:
    """Return why `world_size` ranks cannot share the batch of a run; empty if they can.

    resumes: False if they start at step 0.
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
    """Return whether a run's report at `step` shows that it has trained all that `after` requests.

    before: configuration of the run. A run without a report has not finished.
    """
    report = files.read(Report, run.report) or Report()
    steps, epochs = report.steps, report.epochs
    if steps is None or epochs is None or step != steps:
        return False
    if after.max_steps and after.max_steps <= steps:
        return True
    # A run that --max-steps ended may have stopped anywhere in its last epoch.
    return steps != before.max_steps and after.epochs <= epochs
