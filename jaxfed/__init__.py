"""jaxfed: federated, personalized, unsupervised learning in JAX."""

from typing import TYPE_CHECKING

from jaxfed import _deprecated
from jaxfed import data as data
from jaxfed import gcca as gcca
from jaxfed import generative as generative
from jaxfed import linalg as linalg
from jaxfed import manifolds as manifolds
from jaxfed import metrics as metrics
from jaxfed import models as models
from jaxfed import pca as pca
from jaxfed import plot as plot
from jaxfed import privacy as privacy
from jaxfed.core import backend as backend
from jaxfed.core import channel as channel
from jaxfed.core import participation as participation
from jaxfed.core import reduction as reduction
from jaxfed.core.algorithm import Algorithm as Algorithm
from jaxfed.core.algorithm import Personalized as Personalized
from jaxfed.core.callbacks import Callback as Callback
from jaxfed.core.callbacks import EarlyStopping as EarlyStopping
from jaxfed.core.checkpoint import Checkpoint as Checkpoint
from jaxfed.core.clients import Clients as Clients
from jaxfed.core.clients import Samples as Samples
from jaxfed.core.grid import grid as grid
from jaxfed.core.grid import stack as stack
from jaxfed.core.grid import sweep as sweep
from jaxfed.core.run import fit as fit
from jaxfed.core.run import rollout as rollout
from jaxfed.core.solution import DivergenceError as DivergenceError
from jaxfed.core.solution import Solution as Solution
from jaxfed.core.solution import Status as Status

__version__ = "0.1.0"


def _masked(clients, *, size=None, samples=None):
    return clients.restrict(clients=size, samples=samples)


if not TYPE_CHECKING:
    __getattr__ = _deprecated.old_names(
        __name__,
        {
            "Diverged": "jaxfed.DivergenceError",
            "masked": ("jaxfed.Clients.restrict(clients=, samples=)", _masked),
        },
    )
