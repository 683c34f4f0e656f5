"""Synthetic data whose truth is known: shared and local components, image sequences, topics.

The model of personalized PCA (Shi & Kontar, 2024, equation 1) is, for a sample of client i,

    y = U diag(s_g) phi + V_i diag(s_i) psi + epsilon,     U'U = I, V_i'V_i = I, U'V_i = 0,

with standard normal scores phi, psi and noise of variance sigma^2 in every feature.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxfed.linalg import orthonormalize, polar


class PerPCAData(NamedTuple):
    """Samples of clients that share some principal components, and the truth behind them.

    A named tuple, so it is a pytree, and `data._replace(shared_scale=...).draw(key, n)` draws
    from a changed law with the same components.

    Attributes:
        samples: one `(m, n, d)` array, or a list of `(n_i, d)` arrays where sizes were given
            per client.
        shared: the shared components U, orthonormal.
        local: the local components V_i, orthonormal and orthogonal to `shared`.
        labels: the client's group; clients of one group have the same local components.
        shared_scale: standard deviation of the shared scores, one or one per component.
        local_scale: standard deviation of the local scores, one or one per component.
        noise_variance: variance of the noise in each feature.
    """

    samples: Any
    shared: Float[Array, "d r1"]
    local: Float[Array, "m d r2"]
    labels: Int[Array, " m"]
    shared_scale: Float[Array, "..."]
    local_scale: Float[Array, "..."]
    noise_variance: Float[Array, ""]

    def draw(self, key: PRNGKeyArray, samples: int | Sequence[int]) -> Any:
        """Draw fresh samples of the same law, e.g. to test on.

        Args:
            key: random key.
            samples: samples per client, one number or one per client.

        Returns:
            One `(m, n, d)` array for one number, else a list of `(n_i, d)` arrays.

        Raises:
            ValueError: if `samples` is not positive or has the wrong length.
        """
        clients, _, _ = self.local.shape
        sizes = _sizes(samples, clients)
        law = (
            self.shared,
            self.local,
            self.shared_scale,
            self.local_scale,
            self.noise_variance,
        )
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


@partial(jax.jit, static_argnames=("groups", "free", "rank", "dtype"))
def _random_subspaces(key, *, groups, free, rank, dtype):
    return jax.vmap(orthonormalize)(jax.random.normal(key, (groups, free, rank), dtype))


@jax.jit
def _rotate(key, u, v):
    d = u.shape[0]
    q = orthonormalize(jax.random.normal(key, (d, d), u.dtype))
    return q @ u, q @ v


def perpca_synthetic(
    key: PRNGKeyArray,
    *,
    clients: int,
    features: int,
    shared_rank: int,
    local_rank: int,
    samples: int | Sequence[int],
    shared_scale: float | Sequence[float] | Float[Array, "..."] = 1.0,
    local_scale: float | Sequence[float] | Float[Array, "..."] = 1.0,
    noise_variance: float | Float[Array, ""] = 0.0,
    local: Literal["window", "random"] = "window",
    window: int | None = None,
    groups: int | None = None,
    rotate: bool = False,
    dtype: Any = jnp.float32,
) -> PerPCAData:
    """Draw clients with shared and local principal components.

    The shared components are the first `shared_rank` coordinate axes. The local components lie
    in the other coordinates: `"window"` gives client i the axes i, i + 1, ... modulo `window`, so
    that client i and client i + window agree, and the mean of their projections has largest
    eigenvalue local_rank / window where `window` divides `clients`; `"random"` gives each group
    of clients its own random subspace.

    Scales may be arrays under a transformation, so a `vmap` over them (or over `key`) is a sweep.

    Args:
        key: random key.
        clients: number of clients m.
        features: number of features d.
        shared_rank: number of shared components r1.
        local_rank: number of local components r2 of each client.
        samples: samples per client, one number or one per client.
        shared_scale: standard deviation of the shared scores, one or one per component.
        local_scale: standard deviation of the local scores, one or one per component.
        noise_variance: variance of the noise in each feature.
        local: how the local components differ between clients.
        window: with `"window"`, the number of coordinates the local axes cycle through, from
            `local_rank` to `features - shared_rank` (the default).
        groups: with `"random"`, the number of distinct local subspaces; client i belongs to group
            i modulo `groups`. Default: one per client.
        rotate: rotate everything by one random rotation, so that no axis is special.
        dtype: type of the samples; `float64` needs double precision to be enabled.

    Returns:
        The samples with the truth behind them.

    Raises:
        ValueError: if a size, rank or scale is impossible.

    Source:
        Shi & Kontar (2024), equation 1 and section 7.1.
    """
    for name, value in (
        ("clients", clients),
        ("features", features),
        ("shared_rank", shared_rank),
        ("local_rank", local_rank),
    ):
        _check_positive(name, value)
    free = features - shared_rank
    if local_rank > free:
        raise ValueError(
            f"shared_rank + local_rank must be at most features = {features}, "
            f"got {shared_rank} + {local_rank}"
        )
    if local not in ("window", "random"):
        raise ValueError(f'local must be "window" or "random", got {local!r}')
    if window is not None and local != "window":
        raise ValueError(f'window is for local="window", got window={window} with local={local!r}')
    if groups is not None and local != "random":
        raise ValueError(f'groups is for local="random", got groups={groups} with local={local!r}')
    sizes = _sizes(samples, clients)

    key_local, key_rotation, key_samples = jax.random.split(key, 3)
    if local == "window":
        window = free if window is None else window
        if not local_rank <= window <= free:
            raise ValueError(
                f"window must be from local_rank = {local_rank} to features - shared_rank = "
                f"{free}, got {window}"
            )
        # With window == local_rank every shift spans the same subspace: one group.
        labels = np.arange(clients) % (window if window > local_rank else 1)
        axes = (np.arange(clients)[:, None] + np.arange(local_rank)) % window
        basis = jnp.asarray(np.eye(free)[axes].transpose(0, 2, 1), dtype)
    else:
        groups = clients if groups is None else groups
        _check_positive("groups", groups)
        if groups > clients:
            raise ValueError(f"groups must be at most clients = {clients}, got {groups}")
        labels = np.arange(clients) % groups
        basis = _random_subspaces(
            key_local, groups=groups, free=free, rank=local_rank, dtype=jnp.dtype(dtype)
        )[labels]

    # Zeros in the shared coordinates: orthogonal to the shared components to the last bit.
    v = jnp.concatenate([jnp.zeros((clients, shared_rank, local_rank), dtype), basis], axis=1)
    u = jnp.asarray(np.eye(features, shared_rank), dtype)
    if rotate:
        u, v = _rotate(key_rotation, u, v)
    data = PerPCAData(
        samples=[],
        shared=u,
        local=v,
        labels=jnp.asarray(labels),
        shared_scale=_scale("shared_scale", shared_scale, shared_rank, dtype),
        local_scale=_scale("local_scale", local_scale, local_rank, dtype),
        noise_variance=_scale("noise_variance", noise_variance, None, dtype),
    )
    return data._replace(samples=data.draw(key_samples, sizes))


def misalignment_pair(
    key: PRNGKeyArray,
    theta: float | Float[Array, ""],
    *,
    samples: int | Sequence[int] = 1000,
    shared_scale: float | Float[Array, ""] = 1.0,
    local_scale: float | Float[Array, ""] = 2.0,
    noise_variance: float | Float[Array, ""] = 0.0,
    dtype: Any = jnp.float32,
) -> PerPCAData:
    """Draw two clients in three dimensions whose local components differ by a given amount.

    theta = sin^2(arccos(v_1'v_2) / 2) is the misalignment 1 - lambda_max((P_1 + P_2) / 2): the
    local components are (cos, +-sin, 0) of half the angle between them, the shared one is the
    third axis. `theta` may be traced: a `vmap` over it is a sweep over heterogeneity.

    Args:
        key: random key.
        theta: misalignment, from 0 (the same component) to 1/2 (orthogonal ones).
        samples: samples per client, one number or one per client.
        shared_scale: standard deviation of the shared score.
        local_scale: standard deviation of the local score.
        noise_variance: variance of the noise in each feature.
        dtype: type of the samples.

    Returns:
        The samples with the truth behind them; each client is its own group.

    Raises:
        ValueError: if `theta` is not in [0, 1/2], or a size or scale is impossible.

    Source:
        Shi & Kontar (2024), section 7.1.1, figures 1 and 3.
    """
    if _is_concrete(theta) and not 0 <= float(theta) <= 0.5:
        raise ValueError(f"theta must be from 0 to 1/2, got {theta}")
    sizes = _sizes(samples, 2)
    theta = jnp.asarray(theta, dtype)
    cos, sin = jnp.sqrt(1 - theta), jnp.sqrt(theta)
    v = jnp.stack([jnp.stack([cos, sin, 0 * sin]), jnp.stack([cos, -sin, 0 * sin])])
    data = PerPCAData(
        samples=[],
        shared=jnp.eye(3, dtype=dtype)[:, 2:],
        local=v[..., None],
        labels=jnp.arange(2),
        shared_scale=_scale("shared_scale", shared_scale, 1, dtype),
        local_scale=_scale("local_scale", local_scale, 1, dtype),
        noise_variance=_scale("noise_variance", noise_variance, None, dtype),
    )
    return data._replace(samples=data.draw(key, sizes))


_TABLE_2 = {"clients": 100, "features": 15, "shared_rank": 2, "noise_variance": 0.5}

#: Arguments of `perpca_synthetic` for the experiments of Shi & Kontar (2024), section 7.1:
#: `perpca_synthetic(key, **PERPCA_SETTINGS["figure9"])`. In `"table2"` and `"figure4"` the model
#: can be identified from the samples: the first half of the clients has a tenth of the samples.
#: `"table2_published"` holds the parameters of the published experiment; its test samples have
#: another law, `data._replace(shared_scale=0.5, local_scale=0.5).draw(key, 100)`.
PERPCA_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "table2": _TABLE_2
        | {
            "local_rank": 3,
            "samples": (10,) * 50 + (100,) * 50,
            "shared_scale": 2.0,
            "local_scale": 3.0,
            "window": 6,
        },
        "table2_published": _TABLE_2
        | {
            "local_rank": 10,
            "samples": (100,) * 50 + (1000,) * 50,
            "shared_scale": 0.01,
            "local_scale": 0.99,
        },
        "figure4": _TABLE_2
        | {
            "local_rank": 4,
            "samples": (100,) * 50 + (1000,) * 50,
            "shared_scale": 1.0,
            "local_scale": 2.0,
        },
        "figure7": {
            "clients": 20,
            "features": 30,
            "shared_rank": 1,
            "local_rank": 1,
            "samples": 1000,
            "window": 10,
        },
        "figure9": _TABLE_2
        | {
            "local_rank": 3,
            "samples": 1000,
            "shared_scale": 0.5,
            "local_scale": 0.5,
            "window": 10,
        },
    }
)


class SpectrumData(NamedTuple):
    """Samples whose pooled matrix has a given spectrum, dealt out to clients.

    Attributes:
        samples: one `(m, n, d)` array, or a list of `(n_i, d)` arrays where sizes were given
            per client.
        basis: left singular vectors of the pooled matrix, samples as columns; the first r are
            the exact r components of all samples together.
        singular_values: its singular values, in descending order, the first of them one.
    """

    samples: Any
    basis: Float[Array, "d d"]
    singular_values: Float[Array, " d"]


def spectrum_synthetic(
    key: PRNGKeyArray,
    *,
    clients: int,
    features: int,
    samples: int | Sequence[int],
    spectrum: Literal["geometric", "arithmetic"] = "geometric",
    decay: float | Float[Array, ""] = 1.01,
    condition: float | Float[Array, ""] = 100.0,
    rotate: bool = True,
    dtype: Any = jnp.float32,
) -> SpectrumData:
    """Draw clients whose samples together have a known singular value decomposition.

    All samples as columns form U diag(s) V' with random orthonormal U and V (of uniform entries
    that are orthonormalized), and each client is given some of the columns. The singular values
    are `s_j = decay^(1 - j)`, or `s_j = 1 - (j - 1) / (d - 1) (1 - 1 / condition)`.

    `decay` and `condition` may be arrays under a transformation: a `vmap` over them is a sweep.

    Args:
        key: random key.
        clients: number of clients m.
        features: number of features d.
        samples: samples per client, one number or one per client; together at least `features`.
        spectrum: how the singular values fall, `"geometric"` or `"arithmetic"`.
        decay: ratio of one singular value to the next of the geometric spectrum, at least 1.
        condition: ratio of the first singular value to the last of the arithmetic spectrum, at
            least 1.
        rotate: draw U; otherwise it is the identity, an equivalent problem for every method that
            does not look at single features.
        dtype: type of the samples; `float64` needs double precision to be enabled.

    Returns:
        The samples and the exact components.

    Raises:
        ValueError: if a size is impossible, there are fewer samples than features, or a ratio is
            less than 1.

    Source:
        Wang, Liu & Zhang (2022), (23), (24) and section 5.6.
    """
    _check_positive("clients", clients)
    _check_positive("features", features)
    if spectrum not in ("geometric", "arithmetic"):
        raise ValueError(f'spectrum must be "geometric" or "arithmetic", got {spectrum!r}')
    sizes = _sizes(samples, clients)
    each = (sizes,) * clients if isinstance(sizes, int) else sizes
    if sum(each) < features:
        raise ValueError(f"samples must be at least features = {features} in all, got {sum(each)}")
    for name, ratio in (("decay", decay), ("condition", condition)):
        if np.shape(ratio) != ():
            raise ValueError(f"{name} must be one number, got shape {np.shape(ratio)}")
        if _is_concrete(ratio) and not 1 <= float(ratio) < np.inf:
            raise ValueError(f"{name} must be at least 1 and finite, got {ratio}")
    place = jnp.arange(features, dtype=dtype)
    if spectrum == "geometric":
        values = jnp.asarray(decay, dtype) ** -place
    else:
        values = 1 - place / max(features - 1, 1) * (1 - 1 / jnp.asarray(condition, dtype))
    rows, basis = _spectrum(key, values, samples=sum(each), rotate=rotate)
    if isinstance(sizes, int):
        dealt: Any = rows.reshape(clients, sizes, features)
    else:
        dealt = jnp.split(rows, np.cumsum(each)[:-1])
    return SpectrumData(dealt, basis, values)


@partial(jax.jit, static_argnames=("samples", "rotate"))
def _spectrum(key, values, *, samples, rotate):
    key_basis, key_rows = jax.random.split(key)
    d, dtype = len(values), values.dtype
    right = orthonormalize(jax.random.uniform(key_rows, (samples, d), dtype, -1, 1))
    basis = jnp.eye(d, dtype=dtype)
    if rotate:
        basis = orthonormalize(jax.random.uniform(key_basis, (d, d), dtype, -1, 1))
        return (right * values) @ basis.T, basis
    return right * values, basis


class HierarchicalData(NamedTuple):
    """Samples of clients whose principal components scatter around common ones, and the truth.

    A named tuple, so it is a pytree.

    Attributes:
        samples: one `(m, n, d)` array, or a list of `(n_i, d)` arrays where sizes were given
            per client.
        shared: the common components V, orthonormal.
        local: the clients' components U_i, orthonormal.
        noise_variance: variance of the noise in each feature; that of the scores is one.
    """

    samples: Any
    shared: Float[Array, "d r"]
    local: Float[Array, "m d r"]
    noise_variance: Float[Array, ""]

    def draw(self, key: PRNGKeyArray, samples: int | Sequence[int]) -> Any:
        """Draw fresh samples of the same law, e.g. to test on.

        Args:
            key: random key.
            samples: samples per client, one number or one per client.

        Returns:
            One `(m, n, d)` array for one number, else a list of `(n_i, d)` arrays.

        Raises:
            ValueError: if `samples` is not positive or has the wrong length.
        """
        one = jnp.ones((), self.local.dtype)
        law = PerPCAData(
            (), self.shared[:, :0], self.local, jnp.arange(len(self.local)), one, one,
            self.noise_variance,
        )  # fmt: skip
        return law.draw(key, samples)


def hierarchical_synthetic(
    key: PRNGKeyArray,
    *,
    clients: int,
    features: int,
    rank: int,
    samples: int | Sequence[int],
    prior_variance: float | Float[Array, ""],
    noise_variance: float | Float[Array, ""] = 0.5,
    dtype: Any = jnp.float32,
) -> HierarchicalData:
    r"""Draw clients whose components scatter around common ones.

    Client i draws U~ with entries normal around those of a random V, of variance \(\sigma^2\);
    its components are the retraction of what lies in the tangent space at V,
    \(U_i = \mathrm{polar}(V + P_V(\tilde U - V))\), and its samples are \(y = U_i x + e\) with
    standard normal x. Large variances saturate: frames far from V are nearly uniform.

    `prior_variance` and `noise_variance` may be arrays under a transformation: a `vmap` over them
    is a sweep, and with the same key the clients differ in nothing else.

    Args:
        key: random key.
        clients: number of clients m.
        features: number of features d.
        rank: number of components r.
        samples: samples per client, one number or one per client.
        prior_variance: variance of the entries of U~.
        noise_variance: variance of the noise in each feature.
        dtype: type of the samples; `float64` needs double precision to be enabled.

    Returns:
        The samples and the truth behind them.

    Raises:
        ValueError: if a size is impossible or a variance is negative or not finite.

    Source:
        Ozkara, Huang & Diggavi (2023), Section V.
    """
    for name, value in (("clients", clients), ("features", features), ("rank", rank)):
        _check_positive(name, value)
    if rank >= features:
        raise ValueError(f"rank must be less than features = {features}, got {rank}")
    _sizes(samples, clients)
    spread = jnp.sqrt(_scale("prior_variance", prior_variance, None, dtype))
    noise = _scale("noise_variance", noise_variance, None, dtype)
    key_frames, key_samples = jax.random.split(key)
    shape = (clients, features, rank)
    shared, local = _scattered_frames(key_frames, spread, shape=shape)
    data = HierarchicalData((), shared, local, noise)
    return data._replace(samples=data.draw(key_samples, samples))


@partial(jax.jit, static_argnames="shape")
def _scattered_frames(key, spread, *, shape):
    key_shared, key_local = jax.random.split(key)
    clients, features, rank = shape
    shared = orthonormalize(jax.random.normal(key_shared, (features, rank), spread.dtype))

    def one(client):
        normal = jax.random.normal(
            jax.random.fold_in(key_local, client), (features, rank), spread.dtype
        )
        overlap = shared.T @ normal
        return polar(shared + spread * (normal - shared @ (overlap + overlap.T) / 2))

    return shared, jax.vmap(one)(jnp.arange(clients))


class ImageSequence(NamedTuple):
    """A sequence of grayscale images with the two parts it is the sum of.

    Attributes:
        frames: background + foreground (+ noise).
        background: the part every frame shares, a matrix of low rank.
        foreground: the moving blobs, exactly zero elsewhere.
    """

    frames: Float[Array, "m h w"]
    background: Float[Array, "h w"]
    foreground: Float[Array, "m h w"]


def image_sequence_synthetic(
    key: PRNGKeyArray,
    *,
    frames: int = 20,
    height: int = 32,
    width: int = 48,
    blobs: int = 2,
    radius: float = 4.0,
    brightness: float = 0.5,
    background_rank: int = 3,
    noise_variance: float = 0.0,
    dtype: Any = jnp.float32,
) -> ImageSequence:
    """Draw a short video: a smooth still background and bright blobs that move over it.

    The background is a constant plus `background_rank - 1` products of a wave in each direction,
    in [0, 1 - brightness]; a blob is `brightness * max(0, 1 - distance^2 / radius^2)`, moves on a
    straight line and is reflected at the border; where blobs overlap the brighter one is seen.
    Without noise frames are in [0, 1].

    Args:
        key: random key.
        frames: number of frames m.
        height: rows h of a frame.
        width: columns w of a frame.
        blobs: number of blobs.
        radius: radius of a blob in pixels.
        brightness: peak of a blob above the background, in (0, 1).
        background_rank: bound on the rank of the background, at least 2.
        noise_variance: variance of the noise in each pixel.
        dtype: type of the images.

    Returns:
        The frames and their parts. With rows as samples, each frame is one client.

    Raises:
        ValueError: if a size is impossible or a blob does not fit into a frame.
    """
    for name, value in (
        ("frames", frames),
        ("height", height),
        ("width", width),
        ("blobs", blobs),
    ):
        _check_positive(name, value)
    if background_rank < 2:
        raise ValueError(f"background_rank must be at least 2, got {background_rank}")
    if not 0 < brightness < 1:
        raise ValueError(f"brightness must be between 0 and 1, got {brightness}")
    if not 0 < 2 * radius < min(height, width) - 1:
        raise ValueError(
            f"radius must be positive and 2 * radius less than height - 1 and width - 1, "
            f"got radius={radius} in frames of {height} x {width}"
        )
    variance = _scale("noise_variance", noise_variance, None, dtype)
    return _image_sequence(
        key,
        radius,
        brightness,
        variance,
        shape=(frames, height, width),
        blobs=blobs,
        waves=background_rank - 1,
        dtype=jnp.dtype(dtype),
    )


@partial(jax.jit, static_argnames=("shape", "blobs", "waves", "dtype"))
def _image_sequence(key, radius, brightness, variance, *, shape, blobs, waves, dtype):
    frames, height, width = shape
    key_wave, key_phase, key_start, key_angle, key_speed, key_noise = jax.random.split(key, 6)

    frequency = jax.random.uniform(key_wave, (2, waves, 1), dtype, 0.5, 2.0)
    phase = jax.random.uniform(key_phase, (2, waves, 1), dtype, 0.0, 2 * jnp.pi)
    rows, columns = jnp.arange(height, dtype=dtype), jnp.arange(width, dtype=dtype)
    vertical = jnp.cos(jnp.pi * frequency[0] * rows / height + phase[0])
    horizontal = jnp.cos(jnp.pi * frequency[1] * columns / width + phase[1])
    background = vertical.T @ horizontal
    low, high = background.min(), background.max()
    background = (1 - brightness) * (background - low) / (high - low)

    # A triangle wave of the free path is a straight line reflected at both ends.
    path = jnp.asarray([height, width], dtype) - 1 - 2 * radius
    start = jax.random.uniform(key_start, (blobs, 2), dtype) * path
    angle = jax.random.uniform(key_angle, (blobs,), dtype, 0.0, 2 * jnp.pi)
    speed = radius * jax.random.uniform(key_speed, (blobs, 1), dtype, 0.5, 1.0)
    velocity = speed * jnp.stack([jnp.sin(angle), jnp.cos(angle)], -1)
    time = jnp.arange(frames, dtype=dtype)[:, None, None]
    folded = jnp.mod(start + time * velocity, 2 * path)
    centre = radius + jnp.where(folded > path, 2 * path - folded, folded)
    squared = (rows[:, None] - centre[..., 0, None, None]) ** 2 + (
        columns - centre[..., 1, None, None]
    ) ** 2
    foreground = brightness * jnp.maximum(0, 1 - squared / radius**2).max(axis=1)

    noise = jnp.sqrt(variance) * jax.random.normal(key_noise, foreground.shape, dtype)
    return ImageSequence(background + foreground + noise, background, foreground)


class TopicData(NamedTuple):
    """Word counts of groups of documents, with the topics they were drawn from.

    Attributes:
        counts: how often each word occurs in each document.
        shared: word probabilities of the topic common to all groups.
        local: word probabilities of each group's own topic.
    """

    counts: Float[Array, "m n words"]
    shared: Float[Array, " words"]
    local: Float[Array, "m words"]


def topics_synthetic(
    key: PRNGKeyArray,
    *,
    groups: int = 5,
    documents: int = 100,
    words_per_topic: int = 20,
    words_per_document: float = 50.0,
    dtype: Any = jnp.float32,
) -> TopicData:
    """Draw bags of words that mix one common topic with the topic of the document's group.

    Each topic has its own words (first the common topic's, then group by group). A document has a
    share of the common topic that is uniform in [0, 1] and independent Poisson counts.

    Args:
        key: random key.
        groups: number of groups m, the clients.
        documents: documents n in each group.
        words_per_topic: words that belong to each topic.
        words_per_document: mean number of words of a document.
        dtype: type of the counts.

    Returns:
        Counts over `words_per_topic * (groups + 1)` words, and the topics.

    Raises:
        ValueError: if a number is not positive.
    """
    for name, value in (
        ("groups", groups),
        ("documents", documents),
        ("words_per_topic", words_per_topic),
        ("words_per_document", words_per_document),
    ):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    return _topics(
        key,
        words_per_document,
        groups=groups,
        documents=documents,
        words_per_topic=words_per_topic,
        dtype=jnp.dtype(dtype),
    )


@partial(jax.jit, static_argnames=("groups", "documents", "words_per_topic", "dtype"))
def _topics(key, words_per_document, *, groups, documents, words_per_topic, dtype):
    key_topic, key_share, key_count = jax.random.split(key, 3)
    weights = jax.random.normal(key_topic, (groups + 1, words_per_topic), dtype)
    topics = (
        jnp.eye(groups + 1, dtype=dtype)[:, :, None] * jax.nn.softmax(weights)[:, None, :]
    ).reshape(groups + 1, -1)
    shared, local = topics[0], topics[1:]
    share = jax.random.uniform(key_share, (groups, documents, 1), dtype)
    mean = words_per_document * (share * shared + (1 - share) * local[:, None])
    return TopicData(jax.random.poisson(key_count, mean).astype(dtype), shared, local)


class GCCAData(NamedTuple):
    """Views of the same entities, and what they have in common.

    Attributes:
        views: one `(entities, features)` array per view.
        latent: the common scores `Z`.
        mixing: each view's mixing matrix `A_j`.
    """

    views: list[Float[Array, "entities features"]]
    latent: Float[Array, "entities latent"]
    mixing: list[Float[Array, "latent features"]]


def gcca_synthetic(
    key: PRNGKeyArray,
    *,
    views: int = 3,
    entities: int = 500,
    features: int | Sequence[int] = 25,
    latent: int = 20,
    noise: float = 0.1,
    densities: tuple[float, float, float] = (1.0, 1.0, 1.0),
    dtype: Any = None,
) -> GCCAData:
    r"""Views with a common latent factor, \(X_j = Z A_j + \sigma E_j\).

    All of `Z`, `A_j` and `E_j` are Gaussian, or sparse with Gaussian entries. The defaults are the
    small setting of the paper.

    Args:
        key: random key.
        views: number of views.
        entities: number of entities.
        features: number of features, one for all or one per view.
        latent: number of latent dimensions.
        noise: standard deviation of the noise (the paper's programs take the 0.1 that it calls
            a variance as one).
        densities: shares of the entries of `Z`, `A_j` and `E_j` that are not zero. The paper's
            large setting has 0.01, 0.0005 and 0.001.
        dtype: floating-point type; JAX's default if None.

    Returns:
        The views, and the truth.

    Raises:
        ValueError: for counts that are not positive, a negative noise, densities outside (0, 1].

    Source: Shrestha & Fu (2023), Section V-A1; Fu, Huang, Hong, Sidiropoulos & So (2017).
    """
    for name, value in (("views", views), ("entities", entities), ("latent", latent)):
        _check_positive(name, value)
    widths = (features,) * views if isinstance(features, int) else tuple(features)
    if len(widths) != views:
        raise ValueError(f"features must be one number or {views}, got {len(widths)}")
    for width in widths:
        _check_positive("features", width)
    if _is_concrete(noise) and not 0 <= noise < np.inf:
        raise ValueError(f"noise must be non-negative and finite, got {noise}")
    if len(densities) != 3 or not all(0 < density <= 1 for density in densities):
        raise ValueError(f"densities must be three numbers in (0, 1], got {densities}")
    kind = jnp.dtype(jax.dtypes.canonicalize_dtype(float) if dtype is None else dtype)
    of_latent, of_mixing, of_noise = (float(density) for density in densities)

    def gaussian(key, density, *shape):
        if density == 1:
            return jax.random.normal(key, shape, kind)
        present, value = jax.random.split(key)
        kept = jax.random.bernoulli(present, density, shape)
        return kept * jax.random.normal(value, shape, kind)

    latent_key, *keys = jax.random.split(key, views + 1)
    scores = gaussian(latent_key, of_latent, entities, latent)
    arrays, mixing = [], []
    for width, view_key in zip(widths, keys, strict=True):
        mixing_key, noise_key = jax.random.split(view_key)
        matrix = gaussian(mixing_key, of_mixing, latent, width)
        arrays.append(scores @ matrix + noise * gaussian(noise_key, of_noise, entities, width))
        mixing.append(matrix)
    return GCCAData(arrays, scores, mixing)


def _is_concrete(value) -> bool:
    return not isinstance(value, Tracer)


def _check_positive(name: str, value) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _sizes(samples, clients: int) -> int | tuple[int, ...]:
    if isinstance(samples, int | np.integer):
        _check_positive("samples", samples)
        return int(samples)
    sizes = tuple(samples)
    if len(sizes) != clients:
        raise ValueError(
            f"samples must be one number or one per client, got {len(sizes)} for {clients} clients"
        )
    for size in sizes:
        _check_positive("samples of every client", size)
    return tuple(int(size) for size in sizes)


def _scale(name: str, value, rank: int | None, dtype) -> Float[Array, "..."]:
    shapes = ((),) if rank is None else ((), (rank,))
    if np.shape(value) not in shapes:
        wanted = "one number" if rank is None else f"one number or one per component ({rank})"
        raise ValueError(f"{name} must be {wanted}, got shape {np.shape(value)}")
    # NumPy, because inside a compiled function even the test of a constant would be traced.
    if _is_concrete(value) and not np.all((np.asarray(value) >= 0) & np.isfinite(value)):
        raise ValueError(f"{name} must be non-negative and finite, got {value}")
    return jnp.asarray(value, dtype)
