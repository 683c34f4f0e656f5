"""jaxfed: federated, personalized, unsupervised learning in JAX.

What is asked for is imported when it is, so that `import jaxfed` and a command's `--help` do not
wait for JAX.
"""

from typing import TYPE_CHECKING

from jaxfed import _names

if TYPE_CHECKING:
    from jaxfed import data as data
    from jaxfed import deploy as deploy
    from jaxfed import estimators as estimators
    from jaxfed import gcca as gcca
    from jaxfed import generative as generative
    from jaxfed import linalg as linalg
    from jaxfed import manifolds as manifolds
    from jaxfed import metrics as metrics
    from jaxfed import models as models
    from jaxfed import nn as nn
    from jaxfed import pca as pca
    from jaxfed import plot as plot
    from jaxfed import privacy as privacy
    from jaxfed import report as report
    from jaxfed import testing as testing
    from jaxfed.core import adjoint as adjoint
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
    from jaxfed.core.compiling import enable_compilation_cache as enable_compilation_cache
    from jaxfed.core.energies import EnergyWarning as EnergyWarning
    from jaxfed.core.grid import grid as grid
    from jaxfed.core.grid import stack as stack
    from jaxfed.core.grid import sweep as sweep
    from jaxfed.core.personalize import personalize as personalize
    from jaxfed.core.plan import Plan as Plan
    from jaxfed.core.plan import plan as plan
    from jaxfed.core.plan import shapes_of as shapes_of
    from jaxfed.core.processes import ProcessError as ProcessError
    from jaxfed.core.remarks import HasRemarks as HasRemarks
    from jaxfed.core.run import fit as fit
    from jaxfed.core.run import rollout as rollout
    from jaxfed.core.samples import Samples as Samples
    from jaxfed.core.saved import Saved as Saved
    from jaxfed.core.saved import load as load
    from jaxfed.core.solution import DivergenceError as DivergenceError
    from jaxfed.core.solution import Solution as Solution
    from jaxfed.core.solution import Status as Status
    from jaxfed.core.tune import Tuned as Tuned
    from jaxfed.core.tune import tune as tune

__version__: str

# Where each public name lives, as above.
_PLACES = {
    "data": "jaxfed.data",
    "deploy": "jaxfed.deploy",
    "estimators": "jaxfed.estimators",
    "gcca": "jaxfed.gcca",
    "generative": "jaxfed.generative",
    "linalg": "jaxfed.linalg",
    "manifolds": "jaxfed.manifolds",
    "metrics": "jaxfed.metrics",
    "models": "jaxfed.models",
    "nn": "jaxfed.nn",
    "pca": "jaxfed.pca",
    "plot": "jaxfed.plot",
    "privacy": "jaxfed.privacy",
    "report": "jaxfed.report",
    "testing": "jaxfed.testing",
    "adjoint": "jaxfed.core.adjoint",
    "backend": "jaxfed.core.backend",
    "channel": "jaxfed.core.channel",
    "participation": "jaxfed.core.participation",
    "reduction": "jaxfed.core.reduction",
    "Algorithm": "jaxfed.core.algorithm:Algorithm",
    "Personalized": "jaxfed.core.algorithm:Personalized",
    "Callback": "jaxfed.core.callbacks:Callback",
    "EarlyStopping": "jaxfed.core.callbacks:EarlyStopping",
    "Checkpoint": "jaxfed.core.checkpoint:Checkpoint",
    "Clients": "jaxfed.core.clients:Clients",
    "Samples": "jaxfed.core.samples:Samples",
    "EnergyWarning": "jaxfed.core.energies:EnergyWarning",
    "enable_compilation_cache": "jaxfed.core.compiling:enable_compilation_cache",
    "grid": "jaxfed.core.grid:grid",
    "stack": "jaxfed.core.grid:stack",
    "sweep": "jaxfed.core.grid:sweep",
    "personalize": "jaxfed.core.personalize:personalize",
    "ProcessError": "jaxfed.core.processes:ProcessError",
    "Plan": "jaxfed.core.plan:Plan",
    "plan": "jaxfed.core.plan:plan",
    "shapes_of": "jaxfed.core.plan:shapes_of",
    "HasRemarks": "jaxfed.core.remarks:HasRemarks",
    "fit": "jaxfed.core.run:fit",
    "rollout": "jaxfed.core.run:rollout",
    "Saved": "jaxfed.core.saved:Saved",
    "load": "jaxfed.core.saved:load",
    "DivergenceError": "jaxfed.core.solution:DivergenceError",
    "Solution": "jaxfed.core.solution:Solution",
    "Status": "jaxfed.core.solution:Status",
    "Tuned": "jaxfed.core.tune:Tuned",
    "tune": "jaxfed.core.tune:tune",
}


if not TYPE_CHECKING:
    __getattr__ = _names.lazy_names(__name__, _PLACES | {"__version__": "jaxfed._versions:VERSION"})


def __dir__() -> list[str]:
    return sorted([*_PLACES, "__version__"])
