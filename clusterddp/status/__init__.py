"""What a login node asks of runs, and does with them."""
