"""What every task runs, and the small parent that records its end."""
