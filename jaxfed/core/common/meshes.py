"""Meshes of devices: whether JAX or its compiler decides what lies where."""

import jax
from jax.sharding import Mesh
from jaxtyping import Array


def automatic(mesh: Mesh) -> Mesh:
    """The same mesh, with the compiler to say what lies where within a program."""
    return Mesh(mesh.devices, mesh.axis_names)  # whose axes are automatic by default


def is_explicit(array: Array) -> bool:
    """Whether JAX follows an axis of a mesh through every operation on the array."""
    return any(axis is not None for axis in jax.typeof(array).sharding.spec)
