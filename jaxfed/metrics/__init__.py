"""How good components are: what they reconstruct, how near the truth, how alike clients are.

Every function takes arrays, works in their precision, and leaves columns of `local` that are
exactly zero (clients with fewer components than the others) out of account.
"""

from jaxfed.metrics.clustering import adjusted_rand_index, clustering_accuracy
from jaxfed.metrics.consensus import (
    floats_to_accuracy,
    relative_singular_value_error,
    rounds_to_accuracy,
    scaled_kkt_violation,
)
from jaxfed.metrics.expected import expected_reconstruction_error
from jaxfed.metrics.reconstruction import (
    EnergyShares,
    captured_energy,
    kkt_violation,
    reconstructed_energy,
    reconstruction_error,
    separation,
)
from jaxfed.metrics.subspaces import (
    client_distances,
    misalignment,
    projector_distance,
    subspace_error,
)

__all__ = [
    "EnergyShares",
    "adjusted_rand_index",
    "captured_energy",
    "client_distances",
    "clustering_accuracy",
    "expected_reconstruction_error",
    "floats_to_accuracy",
    "kkt_violation",
    "misalignment",
    "projector_distance",
    "reconstructed_energy",
    "reconstruction_error",
    "relative_singular_value_error",
    "rounds_to_accuracy",
    "scaled_kkt_violation",
    "separation",
    "subspace_error",
]
