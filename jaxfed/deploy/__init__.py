"""Out of one process: several JAX processes of a cluster, `jaxfed.deploy.processes`."""

from jaxfed.deploy import processes as processes
