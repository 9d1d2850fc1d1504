"""Version of the package, and the file that it is run from, apart from the names that it offers."""

import sys

__version__ = "0.1.1"


def own_file() -> str:
    """Return the bundle, a run's own file, that this process was started from; empty without one.

    `submission.bundle` makes it. For the process of `python FILE …` and for those that it forks.
    """
    import os.path

    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    file = os.path.realpath(os.path.dirname(main))  # noqa: PTH120
    is_own = os.path.basename(file).startswith("clusterddp-")  # noqa: PTH119
    return file if is_own and os.path.isfile(file) else ""  # noqa: PTH113


def described() -> str:
    """Say which clusterddp this is: `0.1.1, clusterddp-0.1.1-3f2a9c41d07b.pyz`, or installed."""
    return f"{__version__}, {own_file().rpartition('/')[2] or 'installed'}"


def command() -> list[str]:
    """Give the words that start this clusterddp once more, before those of a subcommand."""
    return [sys.executable, *([own_file()] if own_file() else ["-m", "clusterddp"])]
