"""Scripts of one's own, read and never run: sbatch files, training scripts, and their mistakes."""
