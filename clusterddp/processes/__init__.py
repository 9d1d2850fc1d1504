"""Groups of processes on one machine: how they start, get signals and end."""

START_METHODS = ("exec", "fork", "spawn", "forkserver")
"""Ways in which a process can begin (`start_methods`)."""
