"""Checks of the nodes of a job, ahead of its tasks."""
