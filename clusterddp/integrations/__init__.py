"""Resumable training in frameworks that have their own training loop."""
