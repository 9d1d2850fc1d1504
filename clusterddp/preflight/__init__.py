"""Checks of a job's nodes before its tasks start."""
