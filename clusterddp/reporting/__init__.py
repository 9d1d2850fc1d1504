"""What a run achieved: its records gathered into one account, and the page that shows it."""
