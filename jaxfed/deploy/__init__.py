"""Out of one process: on separate machines (`flower`), in several JAX processes (`processes`)."""

from jaxfed.deploy import flower as flower
from jaxfed.deploy import processes as processes
