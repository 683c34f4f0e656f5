"""A client's components, from whatever form of a result a caller has."""

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxfed.core.run.result import Fitted, not_learned, result_of

# The largest overlap at which shared and local components still count as orthogonal.
OVERLAP = 0.01


def side_by_side(
    fitted: Fitted, argument: str = "fitted"
) -> tuple[Float[Array, "d r1"] | None, Float[Array, "m d r2"] | None]:
    """Return a client's components: shared and local ones, or only local ones if the two overlap.

    Raises:
        ValueError: if `fitted` is not a result of PCA.
    """
    result = result_of(fitted, "PCA", argument)
    parts = [(result.shared, 2), (result.local, 3)]
    if not any(part is not None for part, _ in parts) or not all(
        part is None or getattr(part, "ndim", None) == axes for part, axes in parts
    ):
        raise not_learned(fitted, "PCA", argument)
    shared, local = (None if part is None else jnp.asarray(part) for part, _ in parts)
    if shared is None or local is None:
        return shared, local
    if len(shared) != local.shape[1]:
        raise not_learned(fitted, "PCA", argument)
    # A traced overlap is unknown: count them as orthogonal.
    overlap = _overlap(shared, local)
    if not isinstance(overlap, Tracer) and float(overlap) > OVERLAP:
        return None, local
    return shared, local


@jax.jit
def _overlap(shared: Float[Array, "d r1"], local: Float[Array, "m d r2"]) -> Float[Array, ""]:
    # Of a client that failed in a robust run, components are NaN.
    return jnp.nanmax(jnp.abs(shared.T @ local))
