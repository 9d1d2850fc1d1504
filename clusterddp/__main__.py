"""`python -m clusterddp` and the `clusterddp` command."""

from typing import NoReturn

from clusterddp.cli import startup


def main() -> NoReturn:
    """Run the command and exit with its code."""
    startup.begin()
    from clusterddp.cli.main import main as run  # click, and all else, below `begin`

    try:
        run()
    except SystemExit as leaving:
        startup.end(leaving)


if __name__ == "__main__":
    main()
