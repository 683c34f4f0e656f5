"""A reduction from outside: NumPy's numbers on every backend, and the public checks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from log_sum_exp import LogSumExp

import jaxfed as jf
from jaxfed.testing import check_algorithm

DEVICES = min(2, jax.local_device_count())
BACKENDS = {
    "vmap": jf.backend.vmap(),
    "chunked": jf.backend.chunked(3),
    "separate": jf.backend.separate(),
    "pmap": jf.backend.pmap(DEVICES),
    "shard": jf.backend.shard(DEVICES, inner=jf.backend.chunked(1)),
}
CANDIDATES = np.linspace(-2, 2, 9)


class Mixture(jf.Algorithm):
    """Which of some candidate means the samples of a client drawn at random have.

    The likelihood of a client's samples is far below the smallest positive number.
    """

    deviation: jax.Array = eqx.field(converter=jnp.asarray)

    def check(self, clients, warm_start):
        """Refuse data that are not samples."""
        if not isinstance(clients.parts[0], jf.Samples):
            raise ValueError(f"clients: wanted samples, got {type(clients.data).__name__}")

    def server_init(self, key, first, like, warm_start):
        return jnp.zeros(len(CANDIDATES), like.values.dtype)

    def downlink(self, server):
        return server

    def client_init(self, key, downlink, data, warm_start):
        return None

    def client_step(self, key, downlink, local, data):
        away = (data.values.mean(1)[:, None] - CANDIDATES.astype(data.values.dtype)) ** 2
        likelihood = -(away * data.mask[:, None]).sum(0) / (2 * self.deviation**2)
        return LogSumExp(likelihood), local, {"objective": -likelihood.max()}

    def server_step(self, key, server, uplink):
        return uplink, {}


def draw():
    rng = np.random.default_rng(0)
    return jf.Clients.from_samples(
        [rng.normal(1, 1, (n, 3)).astype("f4") for n in (40, 30, 60, 25)]
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_gives_numpys_number(name):
    clients = draw()
    found = jf.fit(
        Mixture(0.15), clients, rounds=2, key=jax.random.key(0), backend=BACKENDS[name]
    ).result.shared
    values = np.asarray(clients.data.values, float).mean(-1)
    away = (values[..., None] - CANDIDATES) ** 2 * np.asarray(clients.data.mask)[..., None]
    likelihoods = -away.sum(1) / (2 * 0.15**2)
    assert likelihoods.max() < -100  # whose exponential is zero in single precision
    wanted = np.logaddexp.reduce(likelihoods + np.log(clients.weights)[:, None], axis=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_an_algorithm_that_uses_it_keeps_the_contract():
    report = check_algorithm(
        Mixture(0.15),
        draw(),
        backends=BACKENDS,
        deterministic=True,
        rounds=2,
        checks=[
            "structure",
            "types",
            "host",
            "vmap",
            "gradients",
            "order",
            "padding",
            "backends",
            "buckets",
            "source",
            "participation",
            "channels",
            "bits",
        ],
    )
    assert {"backends", "gradients", "channels"} <= set(report.checked)
    # What needs sums is refused.
    assert "channel secure_sum" in report.skipped


def test_what_needs_sums_is_refused():
    for channel in (
        jf.channel.difference(jf.channel.sign()),
        jf.Wire(jf.channel.secure_sum(4, bits=20, bound=1.0), jf.channel.lossless()),
    ):
        with pytest.raises(ValueError, match=r"^channel: "):
            jf.fit(Mixture(0.15), draw(), rounds=1, key=jax.random.key(0), channel=channel)
