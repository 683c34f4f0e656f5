"""jaxfed: federated, personalized, unsupervised learning in JAX.

Names are imported on first use, so that `import jaxfed` and a command's `--help` do not wait for
JAX.
"""

from typing import TYPE_CHECKING

from jaxfed import _names

if TYPE_CHECKING:
    from jaxfed import adjoint as adjoint
    from jaxfed import aggregation as aggregation
    from jaxfed import backend as backend
    from jaxfed import channel as channel
    from jaxfed import contract as contract
    from jaxfed import data as data
    from jaxfed import deploy as deploy
    from jaxfed import estimators as estimators
    from jaxfed import gcca as gcca
    from jaxfed import generative as generative
    from jaxfed import inference as inference
    from jaxfed import linalg as linalg
    from jaxfed import manifolds as manifolds
    from jaxfed import metrics as metrics
    from jaxfed import models as models
    from jaxfed import nmf as nmf
    from jaxfed import nn as nn
    from jaxfed import participation as participation
    from jaxfed import pca as pca
    from jaxfed import plot as plot
    from jaxfed import preprocess as preprocess
    from jaxfed import privacy as privacy
    from jaxfed import reduction as reduction
    from jaxfed import report as report
    from jaxfed import stream as stream
    from jaxfed import testing as testing
    from jaxfed.core.clients.clients import Clients as Clients
    from jaxfed.core.clients.energies import EnergyWarning as EnergyWarning
    from jaxfed.core.clients.samples import IncompleteSamples as IncompleteSamples
    from jaxfed.core.clients.samples import Samples as Samples
    from jaxfed.core.clients.units import UnitsWarning as UnitsWarning
    from jaxfed.core.common.processes import ProcessError as ProcessError
    from jaxfed.core.contract.algorithm import Algorithm as Algorithm
    from jaxfed.core.contract.algorithm import Personalized as Personalized
    from jaxfed.core.contract.algorithm import hyperparameter as hyperparameter
    from jaxfed.core.run.callbacks import Callback as Callback
    from jaxfed.core.run.callbacks import EarlyStopping as EarlyStopping
    from jaxfed.core.run.compiling import enable_compilation_cache as enable_compilation_cache
    from jaxfed.core.run.fit import fit as fit
    from jaxfed.core.run.labelled import to_xarray as to_xarray
    from jaxfed.core.run.personalize import personalize as personalize
    from jaxfed.core.run.rollout import rollout as rollout
    from jaxfed.core.run.solution import DivergenceError as DivergenceError
    from jaxfed.core.run.solution import Solution as Solution
    from jaxfed.core.run.status import Status as Status
    from jaxfed.core.run.update import update as update
    from jaxfed.core.store.checkpoint import Checkpoint as Checkpoint
    from jaxfed.core.store.saved import Saved as Saved
    from jaxfed.core.store.saved import load as load
    from jaxfed.core.sweeps.grid import grid as grid
    from jaxfed.core.sweeps.sweep import stack as stack
    from jaxfed.core.sweeps.sweep import sweep as sweep
    from jaxfed.core.sweeps.tune import Tuned as Tuned
    from jaxfed.core.sweeps.tune import tune as tune
    from jaxfed.core.wire.wire import Wire as Wire
    from jaxfed.multi_start import MultiStart as MultiStart
    from jaxfed.planning.plan import Plan as Plan
    from jaxfed.planning.plan import plan as plan
    from jaxfed.planning.plan import shapes_of as shapes_of

__version__: str

# Where each public name is defined, as above.
_PLACES = {
    "data": "jaxfed.data",
    "deploy": "jaxfed.deploy",
    "estimators": "jaxfed.estimators",
    "gcca": "jaxfed.gcca",
    "generative": "jaxfed.generative",
    "inference": "jaxfed.inference",
    "linalg": "jaxfed.linalg",
    "manifolds": "jaxfed.manifolds",
    "metrics": "jaxfed.metrics",
    "models": "jaxfed.models",
    "nmf": "jaxfed.nmf",
    "nn": "jaxfed.nn",
    "pca": "jaxfed.pca",
    "plot": "jaxfed.plot",
    "preprocess": "jaxfed.preprocess",
    "privacy": "jaxfed.privacy",
    "report": "jaxfed.report",
    "stream": "jaxfed.stream",
    "testing": "jaxfed.testing",
    "adjoint": "jaxfed.adjoint",
    "aggregation": "jaxfed.aggregation",
    "backend": "jaxfed.backend",
    "channel": "jaxfed.channel",
    "contract": "jaxfed.contract",
    "participation": "jaxfed.participation",
    "reduction": "jaxfed.reduction",
    "Algorithm": "jaxfed.core.contract.algorithm:Algorithm",
    "Personalized": "jaxfed.core.contract.algorithm:Personalized",
    "hyperparameter": "jaxfed.core.contract.algorithm:hyperparameter",
    "Callback": "jaxfed.core.run.callbacks:Callback",
    "EarlyStopping": "jaxfed.core.run.callbacks:EarlyStopping",
    "Checkpoint": "jaxfed.core.store.checkpoint:Checkpoint",
    "Clients": "jaxfed.core.clients.clients:Clients",
    "IncompleteSamples": "jaxfed.core.clients.samples:IncompleteSamples",
    "Samples": "jaxfed.core.clients.samples:Samples",
    "EnergyWarning": "jaxfed.core.clients.energies:EnergyWarning",
    "UnitsWarning": "jaxfed.core.clients.units:UnitsWarning",
    "enable_compilation_cache": "jaxfed.core.run.compiling:enable_compilation_cache",
    "grid": "jaxfed.core.sweeps.grid:grid",
    "stack": "jaxfed.core.sweeps.sweep:stack",
    "sweep": "jaxfed.core.sweeps.sweep:sweep",
    "personalize": "jaxfed.core.run.personalize:personalize",
    "MultiStart": "jaxfed.multi_start:MultiStart",
    "ProcessError": "jaxfed.core.common.processes:ProcessError",
    "Plan": "jaxfed.planning.plan:Plan",
    "plan": "jaxfed.planning.plan:plan",
    "shapes_of": "jaxfed.planning.plan:shapes_of",
    "fit": "jaxfed.core.run.fit:fit",
    "to_xarray": "jaxfed.core.run.labelled:to_xarray",
    "rollout": "jaxfed.core.run.rollout:rollout",
    "Saved": "jaxfed.core.store.saved:Saved",
    "load": "jaxfed.core.store.saved:load",
    "DivergenceError": "jaxfed.core.run.solution:DivergenceError",
    "Solution": "jaxfed.core.run.solution:Solution",
    "Status": "jaxfed.core.run.status:Status",
    "Tuned": "jaxfed.core.sweeps.tune:Tuned",
    "tune": "jaxfed.core.sweeps.tune:tune",
    "update": "jaxfed.core.run.update:update",
    "Wire": "jaxfed.core.wire.wire:Wire",
}


if not TYPE_CHECKING:
    __getattr__ = _names.lazy_names(__name__, _PLACES | {"__version__": "jaxfed._versions:VERSION"})


def __dir__() -> list[str]:
    return sorted([*_PLACES, "__version__"])
