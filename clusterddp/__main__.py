"""`python -m clusterddp` and the `clusterddp` command."""

from typing import NoReturn

from clusterddp.cli import short_lived


def main() -> NoReturn:
    """Run the command and exit with its code."""
    short_lived.begin()
    from clusterddp.cli.main import main as run

    try:
        run()
    except SystemExit as leaving:
        short_lived.end(leaving)


if __name__ == "__main__":
    main()
