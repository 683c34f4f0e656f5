"""Noise that clients share, in sums that masks hide: how large it is, and what is refused."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest

import jaxfed as jf
from jaxfed import privacy
from jaxfed.core.clients.guarantee import least_deviation, people_in, sensitivity
from jaxfed.privacy import _gaussian
from tests.helpers import gaussian_samples, planted_samples

KEY = jax.random.key(3)
release = functools.partial(privacy.release_moments, epsilon=1.0, delta=1e-5)


def masks(clients, bits=32, bound=500.0, inner=None):
    hidden = jf.channel.secure_sum(clients, bits=bits, bound=bound, inner=inner)
    return jf.Wire(hidden, jf.channel.lossless())


@pytest.mark.parametrize("rows", ["pairs", "directions", "clip"])
@pytest.mark.parametrize("sharers", [2, 3])
def test_a_sum_over_as_many_as_share_it_has_the_noise_of_one_release(rows, sharers):
    counts = (9, 20, 15)
    clients = jf.Clients.from_samples(gaussian_samples(counts))
    options = {"rows": rows} | ({"bound": 1.5} if rows == "clip" else {})

    def total(own, sharers):
        found = release(clients, key=own, sharers=sharers, **options)
        return jnp.einsum("m,mij->ij", found.data.count[:sharers], found.data.dense[:sharers])

    keys = jax.random.split(KEY, 3000)
    found = np.asarray(jax.jit(jax.vmap(lambda own: total(own, sharers)))(keys))
    size = 1.5**2 if rows == "clip" else 1.0
    # One person changes one row's term, or of a mean over pairs one of half as many.
    far = 2**0.5 * size * (2 if rows == "pairs" else 1)
    deviation = _gaussian.noise_of(1.0, 1e-5) * far
    spread = np.std(found, axis=0) / deviation
    np.testing.assert_allclose(spread, np.where(np.eye(6), 1, 2**-0.5), rtol=0.06)
    beside = (found[:, 0, 1] - found[:, 0, 1].mean()) / deviation * 2**0.5
    assert kstest(beside / np.std(beside), "norm").pvalue > 1e-3
    guarantee = release(clients, key=KEY, sharers=sharers, **options).guarantee
    assert guarantee.sharers == sharers and guarantee.epsilon == 1.0
    assert least_deviation(guarantee) == pytest.approx(deviation / (2 * sharers) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("people", [4, 5, 9, 100])
def test_every_person_moves_the_sum_by_as_much_however_many_a_client_has(people):
    for rows in ("pairs", "directions"):
        far = float(sensitivity(people, rows, 1.0, "replace"))
        number = float(people_in(jnp.asarray(float(people)), rows))
        assert number * far == pytest.approx(2**0.5 * (2 if rows == "pairs" else 1))


def test_components_of_the_masked_sum_have_the_error_of_one_place():
    clients = jf.Clients.from_samples(planted_samples((100,) * 10, 8, (4, 3), ()))
    options = {"epsilon": 3.0, "delta": 1e-5, "rows": "directions"}
    whole = jf.fit(jf.pca.Pooled(2), clients, rounds=1, key=KEY).result.shared

    def error(sharers, seed):
        key = jax.random.key(seed)
        found = privacy.release_moments(clients, sharers=sharers, key=key, **options)
        channel = masks(10) if sharers > 1 else jf.channel.lossless()
        basis = jf.fit(jf.pca.Pooled(2), found, rounds=1, channel=channel, key=KEY).result.shared
        return max(0.0, 2 - float(jnp.sum((basis.T @ whole) ** 2))) ** 0.5

    alone, shared = (np.mean([error(k, seed) for seed in range(6)]) for k in (1, 10))
    # The root of 10, but for the scatter of six draws.
    assert 2 < alone / shared < 5


def test_masks_leave_the_sum_of_the_noisy_moments_and_say_so(x64):
    clients = jf.Clients.from_samples(gaussian_samples((9, 20, 15)))
    found = release(clients, sharers=3, key=KEY)
    solution = jf.fit(jf.pca.Pooled(2), found, rounds=1, channel=masks(3), key=KEY)
    total = np.einsum("m,mij->ij", np.asarray(found.counts), np.asarray(found.data.dense))
    wanted = np.linalg.eigh(total)[1][:, -2:]
    basis = np.asarray(solution.result.shared)
    np.testing.assert_allclose(basis @ basis.T, wanted @ wanted.T, atol=1e-5)
    said = privacy.statement(solution)
    assert "at least 3 clients" in said and "masks hide what a single client sent" in said
    assert "the moment of a single client" in said
    assert "single client" not in privacy.statement(release(clients, key=KEY))
    again = jax.jit(
        lambda own: (
            jf.rollout(
                jf.pca.Pooled(2),
                release(clients, sharers=3, key=own),
                rounds=1,
                channel=masks(3),
                key=KEY,
            ).result.shared
        )
    )(KEY)
    np.testing.assert_allclose(again @ again.T, wanted @ wanted.T, atol=1e-5)
    at_home = jf.pca.fit_local(solution, clients, 1)
    assert at_home.local.shape == (3, 6, 1)


@pytest.mark.parametrize("bound", [200.0, 5000.0])
def test_a_run_says_that_masks_clip_shared_moments(bound, recwarn):
    """A client with more persons than the bound has larger entries."""
    clients = jf.Clients.from_samples(planted_samples((3000, 300, 300), 8, (4, 3), ()))
    found = release(clients, sharers=3, key=KEY, rows="directions")
    jf.fit(jf.pca.Pooled(2), found, rounds=1, channel=masks(3, bound=bound), key=KEY)
    said = [str(each.message) for each in recwarn if each.category is jf.UnitsWarning]
    assert len(said) == (bound < 1e3) and all("wanted a bound above" in each for each in said)


def test_what_shows_more_than_the_sum_is_refused():
    clients = jf.Clients.from_samples(gaussian_samples((9, 20, 15)))
    found = release(clients, sharers=3, key=KEY)
    fit = functools.partial(jf.fit, rounds=1, key=KEY)
    pooled, hidden, silent = jf.pca.Pooled(2), masks(3), jnp.array([0.5, 0.5, 0.0])
    noisy = masks(3, inner=jf.channel.gaussian(1.0, 1.0, clients=3))
    half_hidden = jf.Wire(hidden.up, hidden.down, first=jf.channel.lossless())
    for said, call in {
        r"^algorithm: wanted one that sends the sum .* 3 clients share, got PerPCA": (
            lambda: fit(jf.pca.PerPCA(1, 1), found, channel=hidden)
        ),
        r"^channel: wanted secure_sum, .*got lossless": lambda: fit(pooled, found),
        r"^channel: wanted secure_sum, around lossless, .*gaussian": (
            lambda: fit(pooled, found, channel=noisy)
        ),
        r"^channel: .*got lossless\(\)$": lambda: fit(pooled, found, channel=half_hidden),
        r"^channel: wanted numbers rounded to at most .*more bits": (
            lambda: fit(pooled, found, channel=masks(3, bits=8))
        ),
        r"^clients: wanted at least 3 of positive weight .*, got 2": (
            lambda: fit(pooled, found.take([0, 1]), channel=masks(2))
        ),
        r"^clients: wanted at least 3 of .* weight": (
            lambda: fit(pooled, eqx.tree_at(lambda x: x.weights, found, silent), channel=hidden)
        ),
        r"^clients: wanted moments with noise of their own": (
            lambda: jf.pca.suggest_ranks(found, key=KEY)
        ),
        r"^semidefinite: wanted False with sharers": (
            lambda: release(clients, sharers=3, semidefinite=True)
        ),
        r"^sharers: wanted a whole number of at least 1, got 0": (
            lambda: release(clients, sharers=0)
        ),
        r"^sharers: wanted": lambda: release(clients, sharers=2.5),
    }.items():
        with pytest.raises(ValueError, match=said):
            call()


def test_the_expected_error_is_that_of_shared_noise():
    variances = {"shared_variances": (4.0, 2.0), "noise_variance": 0.1}
    options = variances | {"epsilon": 1.0, "delta": 1e-5, "rows": "directions"}
    shared = privacy.expected_error(200, 10, 8, sharers=8, **options)
    rng = np.random.default_rng(0)
    deviations = np.sqrt([4.0, 2.0] + [0.1] * 8)
    clients = jf.Clients.from_samples(rng.normal(size=(8, 200, 10)) * deviations)
    truth = np.eye(10, 2)

    def measured(seed):
        found = privacy.release_moments(
            clients, sharers=8, key=jax.random.key(seed), epsilon=1.0, delta=1e-5, rows="directions"
        )
        basis = jf.fit(jf.pca.Pooled(2), found, rounds=1, channel=masks(8), key=KEY).result.shared
        return max(0.0, 2 - np.linalg.norm(truth.T @ np.asarray(basis)) ** 2)

    found = np.mean([measured(seed) for seed in range(10)]) ** 0.5
    assert 1 / 1.5 < found / shared < 1.5
    needed = privacy.persons_needed(shared, 10, 8, sharers=8, **options)
    assert needed == pytest.approx(200, abs=2)
    for wrong in (0, 9):
        with pytest.raises(ValueError, match=r"^sharers: wanted"):
            privacy.expected_error(200, 10, 8, sharers=wrong, **options)
    with pytest.raises(ValueError, match=r"^sharers: wanted 1 with local components"):
        privacy.expected_error(200, 10, 8, sharers=2, local_variances=(1.0,), **options)
