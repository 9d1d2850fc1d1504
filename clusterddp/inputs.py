"""Making sure, before anything starts, of the files that a training will read."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from clusterddp import extras, references
from clusterddp.errors import CheckpointError, DataError, RequestError
from clusterddp.run_dir import RunDir
from clusterddp.spec import JobSpec
from clusterddp.train_config import TrainConfig, changes


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201 -- what is asked for may go to stdout


def make_sure(
    config: TrainConfig,
    *,
    may_fetch: bool,
    code: Path | None = None,
    elsewhere: bool = False,
    say: Callable[[str], None] = _to_stderr,
) -> None:
    """The dataset is there and whole (made or fetched where it can be), the checkpoint not torn.

    A person's own functions are found, without running them, from the folder `code`, which is the
    current one by default. elsewhere: the tasks use another Python, which can have more installed.

    Says what it found. Raises RequestError: nothing has run yet that could have failed.
    """
    from clusterddp.training import data, run_checkpoints

    absent = extras.missing(config)
    if absent and not elsewhere:
        raise RequestError(absent)
    for option, reference in config.own_functions:
        folder = code or Path.cwd()
        if elsewhere and references.find(reference, folder) is None:
            say(f"clusterddp: warning: {option} {reference} is not in {folder}: the tasks need it")
        else:
            found = references.locate(option, reference, folder)
            say(f"{option.strip('-')}: {reference} of {found}")
    try:
        if config.resume:
            _check_configuration(run_checkpoints.find(config.resume, say), config)
        if references.is_reference(config.dataset):
            return
        info = data.ensure(config.dataset, config.data_dir, progress=say, may_fetch=may_fetch)
    except (CheckpointError, DataError) as error:
        raise RequestError(str(error)) from None
    say(f"dataset: {info.describe()}")


def in_another_python(spec: JobSpec) -> bool:
    """Whether the tasks can have modules installed that are not installed here."""
    return spec.python != sys.executable or bool(spec.launch_prefix)


def _check_configuration(checkpoint: Path, config: TrainConfig) -> None:
    """Refuse what its ranks would refuse later, where the checkpoint lies in a run with records."""
    if config.allow_changed:
        return
    for folder in checkpoint.resolve().parents[1:4]:
        try:
            before = RunDir(folder).load_spec().train
        except RequestError:
            continue
        changed = changes(dataclasses.asdict(before), config) if before else []
        if changed:
            raise RequestError(
                f"--resume {config.resume}: it was trained with another configuration: "
                f"{'; '.join(changed)}. Give the options as they were, or add --allow-changed."
            )
        return
