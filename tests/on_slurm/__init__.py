"""Tests against a real Slurm, booted on this machine by `tests.on_slurm.cluster`."""
