"""Federated training of any Equinox model by any loss."""

from jaxfed import _names
from jaxfed.generative.adaptive import AdaptiveTraining as AdaptiveTraining
from jaxfed.generative.diffusion import sample as sample
from jaxfed.generative.fedavg import FedAvg as FedAvg

__dir__ = _names.public_names(__name__)
