"""Making sure, before anything starts, of the files that a training will read."""

import click

from clusterddp.errors import CheckpointError, DataError, RequestError
from clusterddp.train_config import TrainConfig


def make_sure(config: TrainConfig, *, may_fetch: bool) -> None:
    """The dataset is there and whole (made or fetched where it can be), the checkpoint not torn.

    Says on stderr what it found. Raises RequestError: nothing has run yet that could have failed.
    """
    from clusterddp.training import checkpoint_file, data

    def say(line: str) -> None:
        click.echo(line, err=True)

    try:
        if config.resume:
            checkpoint_file.find(config.resume, say)
        info = data.ensure(config.dataset, config.data_dir, progress=say, may_fetch=may_fetch)
    except (CheckpointError, DataError) as error:
        raise RequestError(str(error)) from None
    say(f"dataset: {info.describe()}")
