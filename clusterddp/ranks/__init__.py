"""Who a task is: its ranks and addresses, from torch's variables, a Slurm step or flags."""
