"""Making sure, before anything starts, of the files that a training will read."""

import dataclasses
from pathlib import Path

import click

from clusterddp.errors import CheckpointError, DataError, RequestError
from clusterddp.run_dir import RunDir
from clusterddp.train_config import TrainConfig, changes


def make_sure(config: TrainConfig, *, may_fetch: bool) -> None:
    """The dataset is there and whole (made or fetched where it can be), the checkpoint not torn.

    Says on stderr what it found. Raises RequestError: nothing has run yet that could have failed.
    """
    from clusterddp.training import checkpoint_file, data

    def say(line: str) -> None:
        click.echo(line, err=True)

    try:
        if config.resume:
            _check_configuration(checkpoint_file.find(config.resume, say), config)
        info = data.ensure(config.dataset, config.data_dir, progress=say, may_fetch=may_fetch)
    except (CheckpointError, DataError) as error:
        raise RequestError(str(error)) from None
    say(f"dataset: {info.describe()}")


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
