"""Device meshes: whether JAX or its compiler places arrays."""

import jax
from jax.sharding import AxisType, Mesh
from jaxtyping import Array


def automatic(mesh: Mesh) -> Mesh:
    """The same mesh, with the compiler placing arrays within a program."""
    return Mesh(mesh.devices, mesh.axis_names)  # whose axes are automatic by default


def check_context() -> None:
    """Refuse a mesh with explicit axes in `jax.set_mesh`, under which most operations fail.

    Raises:
        ValueError: names the axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if names := [name for name, kind in types.items() if kind is AxisType.Explicit]:
        raise ValueError(
            f"mesh: wanted automatic axes in jax.set_mesh, got explicit ones ({', '.join(names)}); "
            "run without the context, in which clients may be on any mesh, or make the mesh with "
            "axis_types=(jax.sharding.AxisType.Auto, ...)"
        )


def is_explicit(array: Array) -> bool:
    """Whether JAX tracks a mesh axis of the array through every operation."""
    return any(axis is not None for axis in jax.typeof(array).sharding.spec)
