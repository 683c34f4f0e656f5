"""Times of rounds, solves and first calls, as ratios to rivals within one run."""
