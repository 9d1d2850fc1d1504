"""A run's checkpoints: their files, what they hold, which are kept."""
