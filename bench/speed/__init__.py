"""Times, as ratios within one run: rounds, solves and first calls beside their rivals."""
