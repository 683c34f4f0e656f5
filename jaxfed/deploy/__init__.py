"""Out of one process: several JAX processes of a cluster (`jaxfed.deploy.processes`)."""
