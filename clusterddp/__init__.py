"""PyTorch distributed training on Slurm clusters.

The names below are the Python API. Each is imported on first use, so that importing the package is
fast (PEP 562).
"""

import sys
from typing import TYPE_CHECKING

# A COMMAND's Python may be older than clusterddp's. Its script can catch the error (see `loop`).
if sys.version_info < (3, 10):  # noqa: UP036
    raise ImportError("clusterddp needs Python 3.10 or later, this is " + sys.version.split()[0])

from clusterddp.version import __version__

if TYPE_CHECKING:
    from clusterddp.api import Run, launch, render, runs, submit
    from clusterddp.errors import ClusterDDPError, RequestError, TrainingError
    from clusterddp.ranks.dist_env import DistEnv
    from clusterddp.request.resources import Resources
    from clusterddp.request.spec import JobSpec
    from clusterddp.request.train_config import TrainConfig
    from clusterddp.status.status import RunStatus

_archive = getattr(__spec__.loader, "archive", "")
if _archive:  # zipimport's loader, of a run's bundle
    from clusterddp.archive import serve

    serve(_archive)

__all__ = ["ClusterDDPError", "DistEnv", "JobSpec", "RequestError", "Resources", "Run", "RunStatus"]
__all__ += ["TrainConfig", "TrainingError", "__version__"]
__all__ += ["launch", "render", "runs", "submit"]

_NAMES = {
    "api": ("Run", "launch", "render", "runs", "submit"),
    "errors": ("ClusterDDPError", "RequestError", "TrainingError"),
    "ranks.dist_env": ("DistEnv",),
    "request.resources": ("Resources",),
    "request.spec": ("JobSpec",),
    "request.train_config": ("TrainConfig",),
    "status.status": ("RunStatus",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
