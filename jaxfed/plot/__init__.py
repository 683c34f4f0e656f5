"""Pictures of what was learned.

Each function returns a Matplotlib `Figure`, to be shown by a notebook or saved with
`figure.savefig`. Nothing here keeps state or needs a screen. Given `figure`, a function draws into
that figure or subfigure instead, so that pictures can be put together.
"""

from jaxfed.plot._agreement import agreement
from jaxfed.plot._clusters import clusters
from jaxfed.plot._curves import convergence
from jaxfed.plot._grid import grid
from jaxfed.plot._images import components, separation
from jaxfed.plot._samples import reconstructions, samples

__all__ = [
    "agreement",
    "clusters",
    "components",
    "convergence",
    "grid",
    "reconstructions",
    "samples",
    "separation",
]
