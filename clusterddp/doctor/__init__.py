"""Checks of a login node by `clusterddp doctor`, and their findings."""
