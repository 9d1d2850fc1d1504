"""The training of one rank: the loop and what it calls."""
