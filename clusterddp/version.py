"""Version of the package, and the file from which it runs."""

import os
import sys

__version__ = "0.2.0"


def bundle_file() -> str:
    """Return the bundle (see `submission.bundle`) this process runs from; empty if installed.

    Works in the process of `python FILE …` and in its forks.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if not main:
        return ""
    file = os.path.realpath(os.path.dirname(main))  # noqa: PTH120
    is_own = os.path.basename(file).startswith("clusterddp-")  # noqa: PTH119
    return file if is_own and os.path.isfile(file) else ""  # noqa: PTH113


def arming_folder() -> str:
    """Return the directory whose sitecustomize enables `processes.stacks` in a Python.

    In a bundle, it is among the sources, which every Python version can import.
    """
    package = f"{bundle_file()}/clusterddp" if bundle_file() else os.path.dirname(__file__)  # noqa: PTH120
    return f"{package}/processes/armed"


def armed_path(path: str) -> str:
    """Return a PYTHONPATH with `arming_folder` first, or `path` if that cannot be added."""
    folder = arming_folder()
    if ":" in folder:  # the separator of PYTHONPATH
        return path
    return f"{folder}:{path}" if path else folder


def described() -> str:
    """Identify this clusterddp: `0.2.0 (3f2a9c41d07b)` for a bundle, or `0.2.0 (installed)`."""
    digest = bundle_file().removesuffix(".pyz").rpartition("-")[2]
    return f"{__version__} ({digest or 'installed'})"


def command() -> list[str]:
    """Return the words that start this clusterddp, to be followed by a subcommand."""
    return [sys.executable, *([bundle_file()] if bundle_file() else ["-m", "clusterddp"])]


def of_script(script: str) -> str:
    """Return the version in a script's header; empty without one."""
    words = script.partition("rendered by clusterddp ")[2].split(maxsplit=1)
    return words[0].rstrip(".:") if words else ""
