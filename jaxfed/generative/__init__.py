"""Federated training of any Equinox model by any loss."""

from jaxfed.generative.fedavg import FedAvg as FedAvg
