"""Staging: the environment of the tasks, packed once and unpacked on each node's own disk."""
