"""`python -m clusterddp` and the `clusterddp` command."""

from clusterddp.cli.startup import main

if __name__ == "__main__":
    main()
