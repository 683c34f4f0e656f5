"""Small clients, models and compiled runs for the tests of algorithms that train models."""

import functools

import jax
import numpy as np

import jaxfed as jf
from jaxfed.models import Autoencoder
from tests import helpers

FEATURES, LATENT, COUNTS = 5, 2, (9, 6, 7, 8)
LOSSLESS, QUANTIZED = jf.channel.lossless(), jf.channel.quantize(4)


sampled = functools.partial(
    helpers.gaussian, COUNTS, (2, 1.5, 1, 0.5, 0.3), dtype=np.float64, weights="samples"
)
solve = functools.partial(helpers.solve, rounds=10)


def tables_of(clients):
    rows = clients.data.count.astype(int)
    return [np.asarray(x[:n]) for x, n in zip(clients.data.values, rows, strict=True)]


def autoencoder(seed=0):
    return Autoencoder(FEATURES, LATENT, key=jax.random.key(seed))
