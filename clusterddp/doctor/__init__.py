"""What `clusterddp doctor` checks on a login node, and what it finds."""
