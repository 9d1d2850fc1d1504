"""`python -m clusterddp` and the `clusterddp` command."""

import gc
import os
import sys
from typing import NoReturn

from clusterddp.version import bundle_file


def main() -> NoReturn:
    """Run the command and exit with its code."""
    gc.disable()  # before the other imports; `enable_gc` enables it again
    try:
        _use_installed_package()
        from clusterddp.cli.main import main as run

        run()
    except KeyboardInterrupt:  # outside of click: during imports or at exit
        from clusterddp.errors import EXIT_INTERRUPTED

        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)


def _use_installed_package() -> None:
    """Re-execute as the installed command if PYTHONPATH led a COMMAND to its run's bundle.

    The bundle is for `clusterddp.loop` and has neither click nor templates.
    """
    own = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 -- light
    if bundle_file() or not os.path.isfile(own):  # noqa: PTH113
        return
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in parts if p != own)}
    os.execve(sys.executable, [sys.executable, "-m", "clusterddp", *sys.argv[1:]], environ)


if __name__ == "__main__":
    main()
