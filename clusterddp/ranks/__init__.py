"""Ranks and addresses of tasks, from torch's variables, a Slurm step or flags."""
