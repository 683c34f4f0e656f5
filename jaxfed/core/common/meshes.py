"""Device meshes: whether JAX or its compiler places arrays."""

import jax
from jax.sharding import Mesh
from jaxtyping import Array


def automatic(mesh: Mesh) -> Mesh:
    """The same mesh, with the compiler placing arrays within a program."""
    return Mesh(mesh.devices, mesh.axis_names)  # whose axes are automatic by default


def is_explicit(array: Array) -> bool:
    """Whether JAX tracks a mesh axis of the array through every operation."""
    return any(axis is not None for axis in jax.typeof(array).sharding.spec)
