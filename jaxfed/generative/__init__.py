"""Federated training of any Equinox model by any loss."""

from jaxfed import _names
from jaxfed.generative.adaptive import AdaptiveTraining as AdaptiveTraining
from jaxfed.generative.diffusion import sample as sample
from jaxfed.generative.fedavg import FedAvg as FedAvg
from jaxfed.generative.gradient_noise import GradientNoise as GradientNoise

__dir__ = _names.public_names(__name__)
