"""Metrics of components, groupings and generated samples.

For components: what they reconstruct, how close they are to the truth, how similar clients are. For
generated samples: how far the law of their features is off, how noisy they are, and how evenly
clients are served. Functions take arrays and compute in their precision; columns of `local` that
are exactly zero, of clients with fewer components than others, do not count.
"""

from jaxfed import _names
from jaxfed.metrics.clustering import adjusted_rand_index, clustering_accuracy
from jaxfed.metrics.consensus import (
    floats_to_accuracy,
    relative_singular_value_error,
    rounds_to_accuracy,
    scaled_kkt_violation,
)
from jaxfed.metrics.expected import expected_reconstruction_error
from jaxfed.metrics.generation import (
    ClientDistribution,
    KernelDistance,
    client_distribution,
    frechet_distance,
    kernel_distance,
    kernel_distance_of_subsets,
    kernel_distance_with_error,
    noise_level,
)
from jaxfed.metrics.reconstruction import (
    EnergyShares,
    captured_energy,
    kkt_violation,
    reconstructed_energy,
    reconstruction_error,
    separation,
)
from jaxfed.metrics.representation import spectral_clustering_accuracy, svm_accuracy
from jaxfed.metrics.subspaces import (
    client_distances,
    misalignment,
    projector_distance,
    subspace_error,
)

__all__ = [
    "ClientDistribution",
    "EnergyShares",
    "KernelDistance",
    "adjusted_rand_index",
    "captured_energy",
    "client_distances",
    "client_distribution",
    "clustering_accuracy",
    "expected_reconstruction_error",
    "floats_to_accuracy",
    "frechet_distance",
    "kernel_distance",
    "kernel_distance_of_subsets",
    "kernel_distance_with_error",
    "kkt_violation",
    "misalignment",
    "noise_level",
    "projector_distance",
    "reconstructed_energy",
    "reconstruction_error",
    "relative_singular_value_error",
    "rounds_to_accuracy",
    "scaled_kkt_violation",
    "separation",
    "spectral_clustering_accuracy",
    "subspace_error",
    "svm_accuracy",
]

__dir__ = _names.public_names(__name__)
