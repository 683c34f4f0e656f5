"""Scripts that make tables of the documentation and of `bench/RESULTS.md`, other than times."""
