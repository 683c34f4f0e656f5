"""What all synthetic clients share: samples of shared and local components, checks of sizes."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PRNGKeyArray


class Law(NamedTuple):
    """What samples are drawn from."""

    shared: Float[Array, "d r1"]
    local: Float[Array, "m d r2"]
    shared_scale: Float[Array, "..."]
    local_scale: Float[Array, "..."]
    noise_variance: Float[Array, ""]


class HasLaw(Protocol):
    """Data that know what they were drawn from."""

    @property
    def law(self) -> Law:
        """What samples are drawn from."""
        ...


def draw(self: HasLaw, key: PRNGKeyArray, samples: int | Sequence[int]) -> Any:  # noqa: D417
    """Draw fresh samples of the same law, e.g. to test on.

    Args:
        key: random key.
        samples: samples per client, one number or one per client.

    Returns:
        One `(m, n, d)` array for one number, else a list of `(n_i, d)` arrays.

    Raises:
        ValueError: if `samples` is not positive or has the wrong length.
    """
    law = self.law
    clients, _, _ = law.local.shape
    sizes = sizes_of(samples, clients)
    if isinstance(sizes, int):
        return _draw(key, np.arange(clients), *law, samples=sizes)
    # Compiled once per power of two, not once per client: the surplus is cut off.
    ceilings = np.asarray([1 << (size - 1).bit_length() for size in sizes])
    drawn: list[Any] = [None] * clients
    for ceiling in sorted(set(ceilings.tolist())):
        ids = np.flatnonzero(ceilings == ceiling)
        block = _draw(key, ids, *law, samples=ceiling)
        for k, i in enumerate(ids):
            drawn[i] = block[k, : sizes[i]]
    return drawn


@partial(jax.jit, static_argnames="samples")
def _draw(key, ids, shared, local, shared_scale, local_scale, noise_variance, *, samples):
    (d, r1), r2, dtype = shared.shape, local.shape[-1], shared.dtype
    deviations = [(shared_scale, r1), (local_scale, r2), (jnp.sqrt(noise_variance), d)]
    scale = jnp.concatenate([jnp.broadcast_to(jnp.asarray(s), n) for s, n in deviations]).astype(
        dtype
    )

    def client(i):
        # All scores and noise in one call: random numbers are most of the time to compile.
        z = scale * jax.random.normal(jax.random.fold_in(key, i), (samples, r1 + r2 + d), dtype)
        phi, psi, noise = jnp.split(z, [r1, r1 + r2], axis=1)
        return phi @ shared.T + psi @ local[i].T + noise

    return jax.vmap(client)(ids)


def is_concrete(value) -> bool:
    return not isinstance(value, Tracer)


def check_positive(name: str, value) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def sizes_of(samples, clients: int) -> int | tuple[int, ...]:
    if isinstance(samples, int | np.integer):
        check_positive("samples", samples)
        return int(samples)
    sizes = tuple(samples)
    if len(sizes) != clients:
        raise ValueError(
            f"samples must be one number or one per client, got {len(sizes)} for {clients} clients"
        )
    for size in sizes:
        check_positive("samples of every client", size)
    return tuple(int(size) for size in sizes)


def scale_of(name: str, value, rank: int | None, dtype) -> Float[Array, "..."]:
    shapes = ((),) if rank is None else ((), (rank,))
    if np.shape(value) not in shapes:
        wanted = "one number" if rank is None else f"one number or one per component ({rank})"
        raise ValueError(f"{name} must be {wanted}, got shape {np.shape(value)}")
    # NumPy, because inside a compiled function even the test of a constant would be traced.
    if is_concrete(value) and not np.all((np.asarray(value) >= 0) & np.isfinite(value)):
        raise ValueError(f"{name} must be non-negative and finite, got {value}")
    return jnp.asarray(value, dtype)
