"""`python -m clusterddp` and the `clusterddp` command."""

import gc
from typing import NoReturn


def main() -> NoReturn:
    """Run the command and exit with its code."""
    gc.disable()  # until `go_on`, and before anything else is imported
    from clusterddp.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
