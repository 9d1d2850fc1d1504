"""A run: its directory, its records and its life from submission to verdict."""
