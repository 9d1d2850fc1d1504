"""Questions and requests of a login node about runs: their state, stop, chain, stacks."""
