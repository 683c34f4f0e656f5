"""Remove noise from second moments, so that few samples do not mislead the shared components.

With few noisy samples, the optimum of the personalized objective can lie far from the true shared
components: each client's local components pick the directions in which its noise happens to be
large, and the shared ones follow. So eigenvalues that noise alone explains are set to zero, and the
others are corrected for the noise they contain.

Each client is corrected from its own samples. In d features, n samples show a component only if its
variance exceeds √(d/n) times that of the noise. A weaker component is lost, even if the mean over
many clients would show it.

Source: edge and eigenvalue correction of the spiked covariance model, Donoho, Gavish & Johnstone
(2018), Optimal shrinkage of eigenvalues in the spiked covariance model, equations 1.3 and 1.10.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxfed._checks import check_instance
from jaxfed.linalg import Moment
from jaxfed.linalg.division import ratio
from jaxfed.pca.components import change_within


def shrink(moment: Moment, rank: int) -> Moment:
    """Remove the noise from one client's second moment: keep at most `rank` corrected eigenpairs.

    With noise variance v and aspect ratio g = features / samples, an eigenvalue x·v is kept if it
    exceeds (1 + √g)²·v, the edge of what noise alone explains. It becomes (l - 1)·v, where
    x = l (1 + g / (l - 1)). The multiple of the identity that noise adds is left out, because it is
    the same for all orthonormal bases.

    Args:
        moment: a client's second moment, with its number of samples.
        rank: maximum number of components that are signal; `shared_rank + local_rank` for `PerPCA`.

    Returns:
        The shrunk moment, as a factor of `rank` rows.

    Raises:
        ValueError: if `moment` is not a `Moment`, or `rank` is not from 1 to the number of
        features.
    """
    check_instance("moment", moment, Moment, "a jaxfed.linalg.Moment")
    return _shrunk(moment, rank)


@partial(jax.jit, static_argnames="rank")
def _shrunk(moment: Moment, rank: int) -> Moment:
    # Scaled to size one, because squares of tiny moments would underflow.
    energy = jax.lax.stop_gradient(moment.trace)
    size = jnp.where(energy > jnp.finfo(energy.dtype).tiny, jnp.sqrt(energy), 1)
    dense, samples = moment.dense, moment.samples
    moment = Moment(
        None if dense is None else dense / size / size,
        None if samples is None else samples / size,
        moment.count,
        moment.trace / size / size,
    )
    values, vectors = moment.top(rank)
    count = jnp.maximum(moment.count, 1)
    aspect = moment.dim / count
    edge = (1 + jnp.sqrt(aspect)) ** 2
    # Keeps ratios finite if the data have no noise.
    least = jnp.finfo(values.dtype).eps * moment.trace + jnp.finfo(values.dtype).tiny

    def estimate(noise, _):
        # The mean of the other eigenvalues, corrected for the noise within the signal.
        signal = values > edge * noise
        kept = signal.sum()
        left = moment.trace - jnp.sum(jnp.where(signal, values, 0))
        share = jnp.where(count > kept + 1, 1 - kept / count, 1)
        return jnp.maximum(left / (jnp.maximum(moment.dim - kept, 1) * share), least), None

    # Starts from "all is noise": otherwise clients with fewer samples than `rank` would count
    # everything as signal. Each step adds at least one component, or the iteration has ended.
    noise, _ = jax.lax.scan(estimate, moment.trace / moment.dim + least, length=rank + 1)
    x = ratio(values, noise)
    inside = jnp.maximum((x + 1 - aspect) ** 2 - 4 * x, 0)
    # At the edge, where the eigenvalue is dropped anyway, the root's derivative is infinite.
    root = jnp.sqrt(jnp.where(x > edge, inside, 1))
    spike = noise * jnp.where(x > edge, (x + 1 - aspect + root) / 2 - 1, 0)
    scale = jnp.where(spike > 0, jnp.sqrt(jnp.where(spike > 0, spike, 1)), 0)
    # The derivative of `Moment.top` leaves out rotations among the eigenvectors. They matter here,
    # where factors differ: V D Vᵀ changes by divided differences of the spikes (by their slope if
    # eigenvalues coincide), and its root by these over the sums of the scales.
    slope = jnp.where(x > edge, (1 + (x + 1 - aspect) / root) / 2, 0)
    gaps = values[:, None] - values
    clear = jnp.abs(gaps) > jnp.finfo(values.dtype).eps * moment.dim * values[0]
    turned = jnp.where(clear, ratio(spike[:, None] - spike, jnp.where(clear, gaps, 0)), slope)
    sums = scale[:, None] + scale
    turned = jnp.where(jnp.eye(rank, dtype=bool), 0, turned)
    change = turned * ratio(change_within(moment, vectors), sums)
    factor = size * (jnp.diag(scale) + change) @ vectors.T
    return Moment.from_samples(factor, jnp.ones_like(moment.count))
