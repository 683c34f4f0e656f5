"""Other people's implementations, run for numbers that tests hold ours against."""
