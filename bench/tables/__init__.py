"""Scripts that make the tables of the documentation and of `bench/RESULTS.md`, except times."""
