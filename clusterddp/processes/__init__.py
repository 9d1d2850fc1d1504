"""Groups of processes on one machine: how they start, get signals and end."""
