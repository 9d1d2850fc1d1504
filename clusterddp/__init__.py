"""Takes a PyTorch distributed training run onto a Slurm cluster."""

__version__ = "0.1.0"
