"""An attacker proves what broken mechanisms lose, and no more than a correct one claims."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed import privacy
from jaxfed.privacy import _gaussian

DELTA, EPSILON = 1e-5, 1.0
RUNS = 400_000
SIGMA = _gaussian.noise_of(EPSILON, DELTA)


def neighbours(length=9.0):
    """Six persons, of whom the first is as far as can be from the first of the other data."""
    rows = np.random.default_rng(0).normal(size=(6, 3))
    found = []
    for axis in (0, 1):
        rows[0] = length * np.eye(3)[axis]
        found.append(jf.Clients.from_samples([rows.astype(np.float32)]))
    return found


def release(clients, key, *, epsilon=EPSILON, **options):
    return privacy.release_moments(clients, epsilon=epsilon, delta=DELTA, key=key, **options)


bound = functools.partial(privacy.audit, delta=DELTA, runs=RUNS, key=jax.random.key(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"rows": "directions"}, {"rows": "clip", "bound": 2.0}, {"semidefinite": True}]
)
def test_a_correct_mechanism_passes(options):
    one, other = neighbours()
    found = bound(functools.partial(release, **options), one, other)
    assert 0.2 * EPSILON < found < EPSILON


def unclipped(clients, key):
    x, n = clients.data.values[0], 6
    noise = jax.random.normal(key, (3, 3))
    return x.T @ x / n + SIGMA * 2**0.5 / n * (noise + noise.T) / 2


def half_noise(clients, key):
    return release(clients, key, rows="directions", epsilon=_gaussian.epsilon_of(SIGMA / 2, DELTA))


def one_noise_for_two(clients, key):
    noise = SIGMA * 2**0.5 / 6 * jax.random.normal(key, (3, 3))
    x = clients.data.values[0]
    units = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    # The moments of all rows, and of all but the last, for which nobody drew noise again.
    return [own.T @ own / 6 + (noise + noise.T) / 2 for own in (units, units[1:])]


def second_row_uncounted(clients, key):
    """The first person's rows are taken for those of three persons."""
    x = clients.data.values[0]
    rows = jnp.concatenate([x, x[:1], x[:1]])
    return release(jf.Clients.from_samples(rows[None]), key, rows="directions")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mechanism", [unclipped, half_noise, one_noise_for_two, second_row_uncounted]
)
def test_broken_mechanisms_are_caught(mechanism):
    one, other = neighbours()
    assert bound(mechanism, one, other) > EPSILON


@pytest.mark.slow
def test_rows_of_a_person_that_are_counted_pass():
    x = [np.asarray(clients.data.values[0]) for clients in neighbours()]
    one, other = (jf.Clients.from_samples([np.concatenate([own, own[:1], own[:1]])]) for own in x)
    mechanism = functools.partial(release, rows="directions", person=[[*range(6), 0, 0]])
    assert 0.2 * EPSILON < bound(mechanism, one, other) < EPSILON


def test_what_does_not_depend_on_the_data_reveals_nothing(key):
    one, other = neighbours()
    noise = functools.partial(privacy.audit, delta=DELTA, runs=4000, key=key)
    assert noise(lambda clients, key: jax.random.normal(key, (3,)), one, other) < 0.1
    assert noise(lambda clients, key: jnp.zeros(2), one, other) == 0
    # All runs tell; this many prove about this much.
    assert 5 < noise(lambda clients, key: clients.data.values[0, 0], one, other) < 7


@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_what_tells_may_be_small_beside_other_outputs(size, key):
    one, other = neighbours()

    def mechanism(clients, key):
        return jnp.stack([size * jax.random.normal(key), clients.data.values[0, 0, 0]])

    assert privacy.audit(mechanism, one, other, delta=DELTA, runs=4000, key=key) > 5


def test_bad_arguments_are_refused(key):
    one, other = neighbours()
    good = {"mechanism": release, "clients": one, "neighbour": other, "delta": DELTA, "key": key}
    for name, wrong in (
        ("mechanism", 3),
        ("clients", None),
        ("neighbour", 3),
        ("delta", 0.0),
        ("runs", 10),
        ("confidence", 1.0),
        ("key", 3),
    ):
        with pytest.raises(ValueError, match=f"^{name}: wanted"):
            privacy.audit(**(good | {name: wrong}))
    with pytest.raises(ValueError, match=r"^mechanism: wanted finite outputs"):
        privacy.audit(**good | {"mechanism": lambda clients, key: jnp.nan, "runs": 1000})
    with pytest.raises(ValueError, match=r"^neighbour: wanted clients for which"):
        privacy.audit(
            **good
            | {
                "mechanism": lambda clients, key: jax.random.normal(key, clients.data.count.shape),
                "neighbour": jf.Clients.from_samples(np.ones((2, 6, 3), np.float32)),
                "runs": 1000,
            }
        )
