"""Plots of results, made with Matplotlib.

Each function returns a `Figure` to show in a notebook or save with `figure.savefig`. Nothing here
keeps state or needs a screen. With `figure`, a function draws into that figure or subfigure; with
`ax`, it draws into those axes and returns them:

    figure, (left, right) = plt.subplots(1, 2)
    jf.plot.convergence(solution.history, bits=True, ax=left).set_yscale("log")
    jf.plot.client_map(solution.result.local, temperatures, ax=right)
"""

from jaxfed import _names
from jaxfed.plot._agreement import agreement, confusion
from jaxfed.plot._clusters import client_map, clusters
from jaxfed.plot._curves import convergence
from jaxfed.plot._grid import grid
from jaxfed.plot._images import components, separation
from jaxfed.plot._samples import reconstructions, samples
from jaxfed.plot._variance import scree, variance_shares

__all__ = [
    "agreement",
    "client_map",
    "clusters",
    "components",
    "confusion",
    "convergence",
    "grid",
    "reconstructions",
    "samples",
    "scree",
    "separation",
    "variance_shares",
]

__dir__ = _names.public_names(__name__)
