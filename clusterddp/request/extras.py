"""Packages that a training needs only with certain options: the extras of pyproject.toml."""

import importlib.util
import sys

from clusterddp.request.train_config import TrainConfig


def missing(config: TrainConfig) -> str:
    """What is not installed for this interpreter but asked for, and how to get it; or nothing.

    Nothing is imported for the answer.
    """
    for option, wanted, package in (
        ("--model keras-convnet", config.model == "keras-convnet", "keras"),
        ("--tensorboard", config.tensorboard, "tensorboard"),
    ):
        spec = importlib.util.find_spec(package) if wanted else None
        # A folder of that name, such as one of logs, is no package.
        if wanted and (spec is None or spec.origin is None):
            return (
                f"{option} needs the package {package}, which is not installed for "
                f"{sys.executable}. Install it there: pip install 'clusterddp[{package}]'."
            )
    return ""
