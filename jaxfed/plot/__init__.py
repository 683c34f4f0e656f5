"""Plots of results, made with Matplotlib.

Each function returns a `Figure` to show in a notebook or save with `figure.savefig`. Nothing here
keeps state or needs a screen. With `figure`, a function draws into that figure or subfigure; with
`ax`, it draws into those axes and returns them:

    figure, (left, right) = plt.subplots(1, 2)
    jf.plot.convergence(solution.history, bits=True, ax=left).set_yscale("log")
    jf.plot.client_map(solution.result.local, temperatures, ax=right)
"""

from jaxfed import _names
from jaxfed.plot._agreement import agreement as agreement
from jaxfed.plot._agreement import confusion as confusion
from jaxfed.plot._clusters import client_map as client_map
from jaxfed.plot._clusters import clusters as clusters
from jaxfed.plot._confidence import angles as angles
from jaxfed.plot._confidence import bands as bands
from jaxfed.plot._confidence import distances as distances
from jaxfed.plot._curves import convergence as convergence
from jaxfed.plot._grid import grid as grid
from jaxfed.plot._images import components as components
from jaxfed.plot._images import separation as separation
from jaxfed.plot._loadings import loadings as loadings
from jaxfed.plot._ranks import ranks as ranks
from jaxfed.plot._samples import reconstructions as reconstructions
from jaxfed.plot._samples import samples as samples
from jaxfed.plot._scores import biplot as biplot
from jaxfed.plot._scores import scores as scores
from jaxfed.plot._variance import scree as scree
from jaxfed.plot._variance import variance_shares as variance_shares

__dir__ = _names.public_names(__name__)
