"""Resumable training in frameworks with a training loop of their own."""
