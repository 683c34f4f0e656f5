"""Out of one process: on separate machines (`flower`), and in a cluster (`processes`)."""

from jaxfed.deploy import flower as flower
from jaxfed.deploy import processes as processes
