"""Gathers the records of a run into one account, and renders the page of it."""
