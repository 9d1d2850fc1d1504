"""`python -m tests.kept make`: keep what this version writes, once, for the release."""

import sys

from tests.kept.making import make

if sys.argv[1:] != ["make"]:
    sys.exit(f"usage: python -m tests.kept make, not {sys.argv[1:]}")
make()
