"""Tests of what only a GPU can show: `python -m pytest -m gpu`."""
