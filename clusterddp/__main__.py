"""`python -m clusterddp` and the `clusterddp` command."""

import gc
import os
import sys
from typing import NoReturn

from clusterddp.version import bundle_file


def main() -> NoReturn:
    """Run the command and exit with its code."""
    gc.disable()  # until `go_on`, and before anything else is imported
    try:
        _leave_the_runs_own()
        from clusterddp.cli.main import main as run

        run()
    except KeyboardInterrupt:  # outside of click: during the imports, or at the very end
        from clusterddp.errors import EXIT_INTERRUPTED

        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)


def _leave_the_runs_own() -> None:
    """Become the installed command, where a COMMAND's path has led to its run's own package.

    That is there for `clusterddp.loop`, and has neither click nor templates.
    """
    own = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 -- light
    if bundle_file() or not os.path.isfile(own):  # noqa: PTH113
        return
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in parts if p != own)}
    os.execve(sys.executable, [sys.executable, "-m", "clusterddp", *sys.argv[1:]], environ)


if __name__ == "__main__":
    main()
