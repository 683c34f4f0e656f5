"""What tests of several packages share: where files lie, samples and clients, and runs."""

import functools
import re
from pathlib import Path

import jax
import numpy as np

import jaxfed as jf

ROOT = Path(__file__).parents[1]  # of the project
SCALES = (3, 2.5, 2, 1.5, 0.4, 0.3)


def blocks(page: Path, language: str = "python") -> list[str]:
    """The source of a page's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def gaussian_samples(counts, scales=SCALES, *, seed=0, dtype=np.float32):
    """Arrays with these numbers of Gaussian samples, whose features have these deviations."""
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, len(scales))) * scales).astype(dtype) for n in counts]


def gaussian(counts, scales=SCALES, *, seed=0, dtype=np.float32, **options):
    """Clients with such samples."""
    samples = gaussian_samples(counts, scales, seed=seed, dtype=dtype)
    return jf.Clients.from_samples(samples, **options)


def decaying_samples(counts, features, decay=1.1, *, seed=0):
    """Arrays of samples whose pooled singular values decay geometrically."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(n, features)))[0] for n in (sum(counts), features))
    return np.split(left * decay ** -np.arange(features) @ right, np.cumsum(counts)[:-1])


def planted_samples(counts, features, shared, local, *, noise=0.3, seed=0):
    """Arrays of samples along common and own directions with these deviations, and noise."""
    rng = np.random.default_rng(seed)
    common = np.linalg.qr(rng.normal(size=(features, len(shared))))[0] * shared
    arrays = []
    for n in counts:
        own = np.linalg.qr(rng.normal(size=(features, len(local))))[0] * local
        signal = rng.normal(size=(n, len(shared))) @ common.T
        signal += rng.normal(size=(n, len(local))) @ own.T
        arrays.append(signal + noise * rng.normal(size=(n, features)))
    return arrays


def _clients(data):
    return data if isinstance(data, jf.Clients) else jf.Clients.from_samples(data)


@functools.partial(jax.jit, static_argnames="rounds")
def _compiled(algorithm, clients, key, *, rounds, **options):
    key = jax.random.key(0) if key is None else key
    return jf.rollout(algorithm, clients, rounds=rounds, key=key, **options)


def solve(algorithm, data, key=None, *, rounds, **options):
    """A compiled `jf.rollout` on clients or samples; options that are None have their defaults."""
    options = {name: value for name, value in options.items() if value is not None}
    return _compiled(algorithm, _clients(data), key, rounds=rounds, **options)


def fit(algorithm, data, *, rounds, **options):
    """A `jf.fit` on clients or samples, with key 0 unless another is given."""
    options = {"key": jax.random.key(0)} | options
    return jf.fit(algorithm, _clients(data), rounds=rounds, **options)


def projector(frames):
    """The projections onto the spans of orthonormal columns."""
    frames = np.asarray(frames)
    return frames @ np.swapaxes(frames, -1, -2)


def gap(found, truth):
    """The largest entry in which such projections differ."""
    return np.max(np.abs(projector(found) - projector(truth)))
