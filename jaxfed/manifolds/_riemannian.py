"""Riemannian versions of Optax optimizers."""

from typing import Any

import jax
import optax
from jax.tree_util import GetAttrKey, KeyPath
from jaxtyping import Array, PyTree

from jaxfed._checks import check_flag, check_instance
from jaxfed.manifolds._space import (
    broadcast,
    check_manifold_names,
    check_points,
    over_points,
    project,
)
from jaxfed.manifolds.stiefel import retraction as retraction_named

# Optax's names for averages of gradients, which are tangent vectors and must be transported.
_TANGENT_STATE = frozenset({"mu", "trace", "ema"})


def riemannian(
    transformation: optax.GradientTransformation,
    *,
    manifold: PyTree[str] = "stiefel",
    retraction: str = "polar",
    mask: PyTree[bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Make an Optax optimizer keep some parameters on a manifold.

    At a point x with gradient g, with P_x the tangent projection and R_x the retraction::

        s = transformation(P_x g)           e.g. a step with momentum
        x_new = R_x(P_x s)                  the returned update is x_new - x
        m <- P_{x_new} m                    for every first moment m in the state

    so that ``optax.apply_updates(params, updates)`` is on the manifold up to rounding, whatever the
    transformation does. Parameters marked ``"euclidean"`` are optimized as usual, and depend on the
    others only if the transformation looks at all of them (as in a clipped global norm).

    First moments are arrays shaped like the parameters in a field named ``mu``, ``trace`` or
    ``ema`` anywhere in the state; that covers all of Optax's momenta, including Adam's first
    moment. The rest of the state stays as it is: second moments (``nu``) are averages of squared
    entries rather than tangent vectors. Do not use L-BFGS here: its curvature pairs would need more
    than a projection. Weight decay of a parameter with orthonormal columns is normal to the
    manifold and hence has no effect.

    The state is that of ``transformation``. Put this last in an `optax.chain`, since anything after
    it would leave the manifold.

    Example::

        optimizer = riemannian(
            optax.adam(1e-2), manifold={"basis": "stiefel", "bias": "euclidean"}
        )

    Args:
        transformation: Any Optax gradient transformation.
        manifold: ``"stiefel"``, ``"grassmann"`` or ``"euclidean"`` for all parameters, or a pytree
            of these names that is a prefix of the parameters. Parameters on a manifold have shape
            (..., d, r) with d >= r; each matrix of the leading axes is a point.
        retraction: ``"polar"``, ``"qr"`` or ``"cayley"``, as in
            `jaxfed.manifolds.stiefel.RETRACTIONS`.
        mask: Pytree of booleans that is a prefix of the parameters; where it is False, the
            parameter is Euclidean whatever ``manifold`` says.

    Returns:
        An Optax transformation whose ``update`` needs the parameters and passes further keyword
        arguments on.

    Raises:
        ValueError: If `transformation` is not an optimizer, a manifold or the retraction is unknown
            or the mask does not consist of booleans; from ``init`` and ``update``, if a parameter
            on a manifold is not of shape (..., d, r) with d >= r; from ``init``, if its columns are
            not orthonormal; from ``update``, if it gets no parameters.

    Source: Absil, Mahony & Sepulchre (2008), Optimization algorithms on matrix manifolds, Section
    4.2; Bécigneul & Ganea (2019), Riemannian adaptive optimization methods, for the transport of
    first moments.
    """
    optimizer = optax.GradientTransformation
    check_instance("transformation", transformation, optimizer, "an optax.GradientTransformation")
    check_manifold_names(manifold)
    for answer in jax.tree.leaves(mask):
        check_flag("mask", answer)
    retract = retraction_named(retraction)
    inner = optax.with_extra_args_support(transformation)

    def names_of(params: PyTree) -> PyTree[str]:
        """The manifold of every parameter, after checking its shape."""
        names = broadcast("manifold", manifold, params)
        if mask is not None:
            constrained = broadcast("mask", mask, params)
            names = jax.tree.map(lambda n, on: n if on else "euclidean", names, constrained)
        check_points("params", params, names, on=False)
        return names

    def init(params: PyTree) -> Any:
        # `optax.tree_map_params` asks for the state of a placeholder without leaves.
        if jax.tree.leaves(params):
            check_points("params", params, names_of(params))
        return inner.init(params)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError("params must be given to update: a retraction starts from them.")
        names = names_of(params)
        gradients = jax.tree.map(project, names, params, updates)
        steps, state = inner.update(gradients, state, params, **extra_args)
        # Scaling entry by entry, as Adam does, leads out of the tangent space.
        steps = jax.tree.map(project, names, params, steps)

        def moved(name, x, step):
            return step if name == "euclidean" else over_points(retract)(x, step) - x

        updates = jax.tree.map(moved, names, params, steps)
        new_params = optax.apply_updates(params, updates)
        # Moments are averages of tangent vectors at this point; the next gradient is one at the new
        # point.
        return updates, _transport(state, names, new_params)

    return optax.GradientTransformationExtraArgs(init, update)


def _transport(state: Any, names: PyTree[str], params: PyTree[Array]) -> Any:
    """Project the first moments in an optimizer state onto the tangent spaces at params.

    A leaf of the state belongs to the parameter with the longest path that ends the leaf's path. It
    is a first moment if the field before that has one of the names above.
    """
    points = {
        path: (name, x)
        for (path, x), name in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(names), strict=True
        )
    }

    def transport(path: KeyPath, value: Any) -> Any:
        for start in range(1, len(path) + 1):
            if path[start:] in points:
                field = path[start - 1]
                if isinstance(field, GetAttrKey) and field.name in _TANGENT_STATE:
                    name, x = points[path[start:]]
                    return project(name, x, value)
                return value
        return value

    return jax.tree_util.tree_map_with_path(transport, state)
