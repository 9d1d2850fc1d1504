"""Datasets: MNIST, synthetic digits and a user's own, their files and their loading."""
