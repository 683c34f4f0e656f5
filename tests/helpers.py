"""What tests of several packages share: where files lie, clients, compiled runs."""

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


def gaussian(counts, scales=SCALES, *, seed=0, dtype=np.float32, **options):
    """Clients with these numbers of Gaussian samples, whose features have these deviations."""
    rng = np.random.default_rng(seed)
    arrays = [(rng.normal(size=(n, len(scales))) * scales).astype(dtype) for n in counts]
    return jf.Clients.from_samples(arrays, **options)


@functools.partial(jax.jit, static_argnames="rounds")
def solve(algorithm, clients, key=None, *, rounds, **options):
    """A compiled run with options of `jf.rollout`; those that are None have their defaults."""
    options = {name: value for name, value in options.items() if value is not None}
    key = jax.random.key(0) if key is None else key
    return jf.rollout(algorithm, clients, rounds=rounds, key=key, **options)
