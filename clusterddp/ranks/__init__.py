"""Places of tasks: ranks and addresses, from torch's variables, a Slurm step or flags."""
