"""Version of the package, and the file from which it runs."""

import sys

__version__ = "0.1.1"


def bundle_file() -> str:
    """Return the bundle that this process was started from; empty where it is an installed one.

    `submission.bundle` makes it. For the process of `python FILE …` and for those that it forks.
    """
    import os.path

    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if not main:
        return ""
    file = os.path.realpath(os.path.dirname(main))  # noqa: PTH120
    is_own = os.path.basename(file).startswith("clusterddp-")  # noqa: PTH119
    return file if is_own and os.path.isfile(file) else ""  # noqa: PTH113


def arming_folder() -> str:
    """Return the folder whose sitecustomize arms a Python for `processes.stacks`.

    In a bundle it is one of the sources, which any Python reads.
    """
    import os.path

    package = f"{bundle_file()}/clusterddp" if bundle_file() else os.path.dirname(__file__)  # noqa: PTH120
    return f"{package}/processes/armed"


def armed_path(path: str) -> str:
    """Return a PYTHONPATH with the arming folder first; as it is where it cannot have that."""
    folder = arming_folder()
    if ":" in folder:  # which parts its entries
        return path
    return f"{folder}:{path}" if path else folder


def described() -> str:
    """Say which clusterddp this is: `0.1.1 (3f2a9c41d07b)` of a bundle, or `0.1.1 (installed)`."""
    digest = bundle_file().removesuffix(".pyz").rpartition("-")[2]
    return f"{__version__} ({digest or 'installed'})"


def command() -> list[str]:
    """Give the words that start this clusterddp once more, before those of a subcommand."""
    return [sys.executable, *([bundle_file()] if bundle_file() else ["-m", "clusterddp"])]


def of_script(script: str) -> str:
    """Return the version that rendered a script, as its header says; empty without one."""
    words = script.partition("rendered by clusterddp ")[2].split(maxsplit=1)
    return words[0].rstrip(".:") if words else ""
