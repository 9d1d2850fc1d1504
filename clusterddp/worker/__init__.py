"""Runs a task, under a small parent that records its end."""
