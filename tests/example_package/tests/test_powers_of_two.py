"""A channel from outside: its bits, its error, its derivative, and whole runs through it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_kmeans import KMeans
from powers_of_two import PowersOfTwo

import jaxfed as jf
from jaxfed.testing import check_algorithm


def draw(clients=4, features=5):
    rng = np.random.default_rng(0)
    scales = np.linspace(3, 0.3, features)
    return jf.Clients.from_samples(
        [(rng.normal(size=(n, features)) * scales).astype("f4") for n in range(9, 9 + clients)]
    )


def fitted(channel, rounds=60, backend=None):
    return jf.fit(
        jf.pca.SubspaceIteration(2),
        draw(),
        rounds=rounds,
        key=jax.random.key(0),
        channel=channel,
        backend=backend or jf.backend.vmap(),
    )


def test_a_message_takes_four_bits_an_entry_and_is_off_by_at_most_41_per_cent():
    channel = PowersOfTwo()
    message = jax.random.normal(jax.random.key(0), (7, 3)).at[0, 0].set(0)
    payload, _ = channel.encode(jax.random.key(1), message, channel.memory(message))
    assert jf.channel.bits(payload) == 8 * 11 + 32 == 8 * len(jf.channel.to_bytes(payload))
    read = jf.channel.from_bytes(jf.channel.to_bytes(payload), payload)
    decoded = channel.decode(read)
    small = jnp.abs(message).max() / 2**6.5
    error = jnp.abs(decoded - message)
    assert (error <= jnp.where(jnp.abs(message) < small, small, 0.415 * jnp.abs(message))).all()
    assert (decoded == 0).sum() >= 1 and (decoded < 0).sum() > 3
    assert not channel.decode(channel.encode(jax.random.key(1), 0 * message, None)[0]).any()


def test_runs_count_its_bits():
    history = fitted(jf.Wire(PowersOfTwo(), jf.channel.lossless()), rounds=3).history
    np.testing.assert_array_equal(np.diff(history["bits_up"]), 8 * 5 + 32)


def test_differences_end_where_a_run_without_loss_does():
    exact = fitted(jf.channel.lossless()).history["objective"][-1]
    for channel in (
        jf.channel.difference(PowersOfTwo()),
        jf.channel.difference(jf.channel.chain(jf.channel.top_k(0.5), PowersOfTwo())),
    ):
        np.testing.assert_allclose(fitted(channel).history["objective"][-1], exact, rtol=1e-3)
    assert fitted(PowersOfTwo()).history["objective"][-1] > 1.01 * exact


@pytest.mark.parametrize(
    "backend",
    [
        jf.backend.chunked(2),
        jf.backend.separate(),
        jf.backend.shard(min(2, jax.local_device_count())),
        jf.backend.pmap(min(2, jax.local_device_count())),
    ],
    ids=["chunked", "separate", "shard", "pmap"],
)
def test_every_backend_gives_the_same(backend):
    channel = jf.channel.difference(PowersOfTwo())
    given, wanted = (fitted(channel, 5, each).history for each in (backend, jf.backend.vmap()))
    np.testing.assert_allclose(given["objective"], wanted["objective"], rtol=1e-4)
    np.testing.assert_array_equal(given["bits_up"], wanted["bits_up"])


def test_algorithms_pass_the_public_checks_through_it():
    channels = {
        "alone": PowersOfTwo(),
        "difference": jf.channel.difference(PowersOfTwo()),
        "chain": jf.channel.chain(jf.channel.top_k(0.5), PowersOfTwo()),
    }
    report = check_algorithm(KMeans(2), draw(), channels=channels, checks=["channels", "bits"])
    assert report.checked == ("channels", "bits") and not report.skipped


def test_derivatives_pass_straight_through():
    def last(step):
        algorithm = jf.pca.PerPCA(2, 1, solver="gradient", step_size=step)
        run = jf.rollout(algorithm, draw(), rounds=3, key=jax.random.key(0), channel=PowersOfTwo())
        return run.history["objective"][-1]

    slope = jax.jit(jax.grad(last))(0.05)
    assert jnp.isfinite(slope) and slope != 0
