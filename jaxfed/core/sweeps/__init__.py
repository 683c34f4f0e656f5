"""Many runs as one program: sweeps, grids and tuning."""
