"""Static analysis of users' sbatch files and training scripts; nothing is run."""
