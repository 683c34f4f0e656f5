"""The product of the manifolds of a tree's arrays, and arithmetic on its vectors."""

from collections.abc import Callable
from types import ModuleType

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import KeyPath, keystr
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from jaxfed._checks import check_name
from jaxfed.linalg.basis import orthonormalize_once
from jaxfed.linalg.sums import unit_of
from jaxfed.manifolds import grassmann, stiefel

MANIFOLDS: dict[str, ModuleType] = {"stiefel": stiefel, "grassmann": grassmann}
CHOICES = sorted([*MANIFOLDS, "euclidean"])


class Space(eqx.Module):
    """A product of manifolds with the inner product of the embedding space.

    Attributes:
        names: the manifold of each leaf, a tree like the points.
        retraction: key of `jaxfed.manifolds.stiefel.RETRACTIONS`.
    """

    names: PyTree[str] = eqx.field(static=True)
    retraction: str = eqx.field(static=True)

    def project(self, x: PyTree, g: PyTree) -> PyTree:
        """The tangent vector nearest to ``g``."""
        return jax.tree.map(project, self.names, x, g)

    def retract(self, x: PyTree, v: PyTree) -> PyTree:
        """The point that a step leads to."""
        return self._moved(stiefel.RETRACTIONS[self.retraction], x, v)

    def retract_once(self, x: PyTree, v: PyTree) -> PyTree:
        """A point that a step leads to, whatever the retraction, by a shorter program."""
        return self._moved(lambda x, v: orthonormalize_once(x + v), x, v)

    def _moved(self, retract: Callable[[Array, Array], Array], x: PyTree, v: PyTree) -> PyTree:
        retract = over_points(retract)

        def leaf(name, x, v):
            return x + v if name == "euclidean" else retract(x, v)

        return jax.tree.map(leaf, self.names, x, v)

    def units(
        self, x: PyTree, least: PyTree[Float[Array, ""]] | None = None
    ) -> PyTree[Float[Array, ""]]:
        """A power of two near the largest entry of Euclidean arrays; 1 on manifolds.

        Args:
            x: the point.
            least: for each array, what counts as an entry too.
        """

        def unit(name, leaf, more):
            found = unit_of(leaf, more) if name == "euclidean" else jnp.ones(())
            return found.astype(leaf.dtype)

        least = jax.tree.map(jnp.zeros_like, x) if least is None else least
        return jax.tree.map(unit, self.names, x, least)

    def reach(self, x: PyTree) -> float:
        """A bound of distances, √r for each point of rank r; infinite for Euclidean arrays."""
        names, leaves = jax.tree.leaves(self.names), jax.tree.leaves(x)
        if "euclidean" in names:
            return float("inf")
        # The number of columns of all points together, the sum of their ranks.
        return sum(leaf.size / leaf.shape[-2] for leaf in leaves) ** 0.5


def broadcast(argument: str, prefix: PyTree, params: PyTree) -> PyTree:
    """Repeat a prefix of a tree to the whole tree; a `ValueError` if it is not a prefix."""
    try:
        return jax.tree.broadcast(prefix, params)
    except ValueError as error:
        raise ValueError(
            f"{argument} must be a prefix of the pytree of parameters: {error}"
        ) from None


def check_manifold_names(manifold: PyTree[str]) -> None:
    """Raise a `ValueError` for anything but a tree of manifold names."""
    for name in jax.tree.leaves(manifold, is_leaf=lambda node: node is None) or [manifold]:
        check_name("manifold", name, CHOICES)


def over_points(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Map a function of matrices over leading axes."""
    return jnp.vectorize(function, signature="(d,r),(d,r)->(d,r)")


def project(
    name: str, x: Float[Array, "*shape"], g: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The tangent vector nearest to ``g``."""
    if name == "euclidean":
        return g
    # Optimizers may store a momentum in a shorter type than the parameters.
    return over_points(MANIFOLDS[name].project)(x, g).astype(g.dtype)


def check_points(argument: str, params: PyTree, names: PyTree[str], *, on: bool = True) -> None:
    """Raise a `ValueError` for shapes that cannot be on their manifolds, or points off them.

    Traced points are not checked for being on the manifold, and with `on=False` none are.
    """

    def check(path: KeyPath, x: ArrayLike, name: str) -> None:
        if name == "euclidean":
            return
        shape, place = jnp.shape(x), f"{argument}{keystr(path)} is to be on the manifold {name!r}"
        if len(shape) < 2 or shape[-2] < shape[-1]:
            raise ValueError(
                f"{place} and must have shape (..., d, r) with d >= r, got {shape}; mark it "
                "'euclidean' or transpose it."
            )
        if not on or isinstance(x, Tracer):
            return
        # Evaluate now, even if the point is a constant of a function that is being traced.
        with jax.ensure_compile_time_eval():
            orthonormal = _all_on(x)
        if not orthonormal:
            raise ValueError(
                f"{place} but its columns are not orthonormal; start from "
                "jaxfed.manifolds.stiefel.random or jaxfed.linalg.orthonormalize."
            )

    jax.tree_util.tree_map_with_path(check, params, names)


@jax.jit
def _all_on(x: Float[Array, "*points d r"]) -> Bool[Array, ""]:
    return jnp.vectorize(stiefel.is_on, signature="(d,r)->()")(x).all()


# --- arithmetic of vectors -----------------------------------------------------------------------


def inner(u: PyTree, v: PyTree) -> Float[Array, ""]:
    """Inner product of two tangent vectors."""
    return jnp.asarray(sum(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), u, v))))


def norm(u: PyTree) -> Float[Array, ""]:
    """Length of a tangent vector."""
    return jnp.sqrt(inner(u, u))


def linear_combination(a: ArrayLike, u: PyTree, b: ArrayLike, v: PyTree) -> PyTree:
    """A u + b v, in the types of u."""
    return jax.tree.map(lambda x, y: (a * x + b * y).astype(x.dtype), u, v)


def scaled(a: ArrayLike, u: PyTree) -> PyTree:
    """A multiple of u, in its types."""
    return jax.tree.map(lambda x: (a * x).astype(x.dtype), u)


def times(u: PyTree, units: PyTree[Float[Array, ""]]) -> PyTree:
    """Each array times its unit."""
    return jax.tree.map(jnp.multiply, u, units)


def over(u: PyTree, units: PyTree[Float[Array, ""]]) -> PyTree:
    """Each array in its unit."""
    return jax.tree.map(jnp.divide, u, units)


def chosen(which: Bool[Array, ""], u: PyTree, v: PyTree) -> PyTree:
    """The first of two trees if `which`, else the second."""
    return jax.tree.map(lambda x, y: jnp.where(which, x, y), u, v)
