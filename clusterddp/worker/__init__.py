"""Execution of a task under a small parent process that records its end."""
