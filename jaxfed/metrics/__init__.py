"""Metrics of components, groupings and generated samples.

Metrics of components measure what they reconstruct, how close they are to the truth, and how
similar clients are. Metrics of generated samples measure how far the distribution of their features
is off, how noisy they are, and how evenly clients are served. Functions take arrays and compute in
their precision. Columns of `local` that are exactly zero, from clients with fewer components, do
not count.
"""

from jaxfed import _names
from jaxfed.metrics.clustering import clustering_accuracy as clustering_accuracy
from jaxfed.metrics.consensus import relative_singular_value_error as relative_singular_value_error
from jaxfed.metrics.consensus import scaled_kkt_violation as scaled_kkt_violation
from jaxfed.metrics.expected import expected_reconstruction_error as expected_reconstruction_error
from jaxfed.metrics.generation import ClientDistribution as ClientDistribution
from jaxfed.metrics.generation import KernelDistance as KernelDistance
from jaxfed.metrics.generation import client_distribution as client_distribution
from jaxfed.metrics.generation import frechet_distance as frechet_distance
from jaxfed.metrics.generation import kernel_distance as kernel_distance
from jaxfed.metrics.generation import kernel_distance_of_subsets as kernel_distance_of_subsets
from jaxfed.metrics.generation import kernel_distance_with_error as kernel_distance_with_error
from jaxfed.metrics.generation import noise_level as noise_level
from jaxfed.metrics.reconstruction import EnergyShares as EnergyShares
from jaxfed.metrics.reconstruction import captured_energy as captured_energy
from jaxfed.metrics.reconstruction import kkt_violation as kkt_violation
from jaxfed.metrics.reconstruction import reconstructed_energy as reconstructed_energy
from jaxfed.metrics.reconstruction import reconstruction_error as reconstruction_error
from jaxfed.metrics.reconstruction import separation as separation
from jaxfed.metrics.representation import (
    spectral_clustering_accuracy as spectral_clustering_accuracy,
)
from jaxfed.metrics.representation import svm_accuracy as svm_accuracy
from jaxfed.metrics.subspaces import client_distances as client_distances
from jaxfed.metrics.subspaces import misalignment as misalignment
from jaxfed.metrics.subspaces import projector_distance as projector_distance
from jaxfed.metrics.subspaces import subspace_error as subspace_error

__dir__ = _names.public_names(__name__)
