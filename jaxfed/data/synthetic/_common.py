"""Draws samples of shared and local components, for all synthetic clients."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxfed._checks import (
    check_factor,
    checked_key,
    counts_of,
    host_array,
    is_list,
    is_whole,
    refuse,
)


class Law(NamedTuple):
    """The components, standard deviations and noise that define the distribution of samples."""

    shared: Float[Array, "d r1"]
    local: Float[Array, "m d r2"]
    shared_scale: Float[Array, "..."]
    local_scale: Float[Array, "..."]
    noise_variance: Float[Array, ""]


def draw(self: Any, key: PRNGKeyArray, samples: int | Sequence[int]) -> Any:  # noqa: D417
    """Draw fresh samples of the same distribution, for example to test on.

    Args:
        key: random key.
        samples: samples per client, one number or one per client.

    Returns:
        One `(m, n, d)` array for one number, else a list of `(n_i, d)` arrays.

    Raises:
        ValueError: if `samples` is not positive or has the wrong length.
    """
    key = checked_key("key", key)
    law = self.law
    clients, _, _ = law.local.shape
    sizes = sizes_of(samples, clients)
    if isinstance(sizes, int):
        return _draw(key, np.arange(clients), *law, samples=sizes)
    # Compile once per power of two, not once per client, and cut off the surplus.
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
        # Draw scores and noise in one call: random numbers take most of the compile time.
        z = scale * jax.random.normal(jax.random.fold_in(key, i), (samples, r1 + r2 + d), dtype)
        phi, psi, noise = jnp.split(z, [r1, r1 + r2], axis=1)
        return phi @ shared.T + psi @ local[i].T + noise

    return jax.vmap(client)(ids)


def sizes_of(samples: int | Sequence[int], clients: int) -> int | tuple[int, ...]:
    """Samples per client: one number for all, or one for each."""
    sizes = counts_of("samples", samples, clients)
    return int(samples) if is_whole(samples) else sizes


def scale_of(name: str, value: Any, rank: int | None, dtype: Any) -> Float[Array, "..."]:
    """A standard deviation for all components or one for each; a single number if rank is None."""
    if rank is not None and is_list(value):
        value = host_array(name, value, "numbers")
    check_factor(name, value, single=rank is None)
    if np.shape(value) not in ((), (rank,)):
        raise refuse(name, f"one number or one per component ({rank})", value)
    return jnp.asarray(value, dtype)
