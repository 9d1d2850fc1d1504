"""A run: its directory, its records, and its events from submission to result."""
