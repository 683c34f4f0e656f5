"""Small clients, models and compiled runs for the tests of algorithms that train models."""

import functools

import jax
import numpy as np

import jaxfed as jf
from jaxfed.models import Autoencoder

FEATURES, LATENT, COUNTS = 5, 2, (9, 6, 7, 8)
LOSSLESS, QUANTIZED = jf.channel.lossless(), jf.channel.quantize(4)
VMAP = jf.backend.vmap()


def draw(seed=0, dtype=np.float64, weights="samples"):
    rng = np.random.default_rng(seed)
    tables = [(rng.normal(size=(n, FEATURES)) @ np.diag([2, 1.5, 1, 0.5, 0.3])) for n in COUNTS]
    return jf.Clients.from_samples([x.astype(dtype) for x in tables], weights=weights)


def tables_of(clients):
    rows = clients.data.count.astype(int)
    return [np.asarray(x[:n]) for x, n in zip(clients.data.values, rows, strict=True)]


def autoencoder(seed=0):
    return Autoencoder(FEATURES, LATENT, key=jax.random.key(seed))


@functools.partial(jax.jit, static_argnames="rounds")
def solve(algorithm, clients, key, rounds=10, start=None, **options):
    given = {"channel": LOSSLESS, "participation": None, "backend": VMAP} | options
    return jf.rollout(algorithm, clients, rounds=rounds, key=key, warm_start=start, **given)
