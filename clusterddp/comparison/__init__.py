"""Compares the same training on one device and on several: rows, runs, results and table."""
