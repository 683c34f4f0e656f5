"""Statements of the papers that are functions here: against NumPy, quadrature and differential
equations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, optimize

import jaxfed as jf
from bench.formulas import adept as theory
from bench.formulas import cutemaxvar as compressor
from jaxfed.pca import bingham

# --- Shrestha & Fu (2023), Facts 1 and 2 ---------------------------------------------------------


def missed(message, levels, contraction):
    """The exact mean of the squared error, entry by entry from its two levels."""
    distance, total = np.max(np.abs(message)) / levels, 0.0
    for value in message:
        lower = np.floor(abs(value) / distance)
        up = abs(value) / distance - lower
        for level, probability in ((lower, 1 - up), (lower + 1, up)):
            total += probability * (level * distance / contraction - abs(value)) ** 2
    return total / np.sum(message**2)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 5])
def test_fact_1_holds_for_any_message(bits, x64):
    levels, rng = 2 ** (bits - 1) - 1, np.random.default_rng(0)
    messages = [rng.normal(size=n) for n in (1, 3, 40, 2500)]
    messages += [np.eye(30)[0], np.ones(30), np.where(np.arange(400) == 0, 1.0, 0.5 / levels)]
    for message in messages:
        tau = compressor.safe_contraction(len(message), levels)
        error = compressor.expected_error(message, levels, tau)
        np.testing.assert_allclose(error, missed(message, levels, tau), rtol=1e-10, atol=1e-14)
        assert error <= 1 - 1 / tau + 1e-12


@pytest.mark.parametrize("bits", [2, 3, 5])
def test_fact_2_bounds_what_is_missed(bits, x64):
    levels, rng = 2 ** (bits - 1) - 1, np.random.default_rng(1)
    for message in (rng.normal(size=40), rng.normal(size=2500), rng.uniform(-1, 1, size=100)):
        error = compressor.expected_error(message, levels)
        np.testing.assert_allclose(error, missed(message, levels, 1.0), rtol=1e-10)
        bound = compressor.error_bound(message, levels)
        wanted = len(message) * np.abs(message).max() ** 2 / (4 * levels**2 * np.sum(message**2))
        np.testing.assert_allclose(bound, wanted, rtol=1e-12)
        assert error <= bound
    # Met with equality where every entry but the largest lies in the middle of two levels.
    half = np.where(np.arange(50) == 0, 1.0, 0.5 / levels)
    exact, bound = compressor.expected_error(half, levels), compressor.error_bound(half, levels)
    np.testing.assert_allclose(exact, bound * 49 / 50, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "contraction"), [(2, 2.0), (3, 1.0)])
def test_what_is_missed_is_what_the_channel_misses(key, bits, contraction):
    channel = jf.channel.quantize(bits, contraction=contraction)
    message = jax.random.normal(key, (40,))

    @jax.jit
    @jax.vmap
    def error(key):
        found = channel.decode(channel.encode(key, message, ())[0])
        return jnp.sum((found - message) ** 2) / jnp.sum(message**2)

    errors = np.asarray(error(jax.random.split(key, 4000)))
    wanted = compressor.expected_error(message, 2 ** (bits - 1) - 1, contraction)
    assert abs(errors.mean() - wanted) <= 5 * errors.std() / 4000**0.5


def test_why_two_bits_fail_and_three_do_not(x64):
    """The relative errors of Gaussian messages as long as those of Table I."""
    rng = np.random.default_rng(2)
    messages = rng.normal(size=(50, 2500))
    errors = {
        levels: np.mean([compressor.expected_error(m, levels) for m in messages])
        for levels in (1, 3, 7)
    }
    np.testing.assert_allclose([errors[1], errors[3], errors[7]], [1.94, 0.25, 0.046], rtol=0.05)


# --- ADEPT, Lemma 4.2 and the evidence bound -----------------------------------------------------


@pytest.mark.parametrize(("variance", "horizon"), [(0.5, 3.0), (2.0, 0.7)])
def test_lemma_4_2_is_where_the_reversed_process_ends(variance, horizon, x64):
    mean, target = np.asarray([1.5, -0.4]), np.asarray([1.0, 0.3])

    def backwards(passed, state):
        """Mean and variance of dx = (theta - x) / (s² + t) dt + dw, t running back from T."""
        now = variance + horizon - passed
        return [*((mean - state[:2]) / now), -2 * state[2] / now + 1]

    start = [0.0, 0.0, variance + horizon]
    path = integrate.solve_ivp(backwards, (0, horizon), start, rtol=1e-10, atol=1e-12)
    *found, spread = path.y[:, -1]
    np.testing.assert_allclose(spread, variance, rtol=1e-8)
    np.testing.assert_allclose(theory.generated_mean(mean, variance, horizon), found, rtol=1e-8)
    wanted = np.sum((target - found) ** 2) / (2 * variance)
    found = theory.generation_divergence(mean, target, variance, horizon)
    np.testing.assert_allclose(found, wanted, rtol=1e-8)


@pytest.mark.parametrize(("variance", "horizon"), [(0.5, 3.0), (2.0, 0.7)])
def test_the_bound_weighs_a_wrong_mean_as_the_integrated_score(variance, horizon, x64):
    # Scores of two Gaussians of variance s² + t differ by the means' difference over it.
    weight, _ = integrate.quad(lambda t: (variance + t) ** -2, 0, horizon)
    np.testing.assert_allclose(theory.denoising_weight(variance, horizon), weight, rtol=1e-10)
    np.testing.assert_allclose(theory.denoising_weight(variance, 1e9), 1 / variance, rtol=1e-8)


# --- the marginal likelihood of EmpiricalBayesPCA at a size where it can be integrated -----------


def on_the_sphere(nodes=60):
    """Directions in three dimensions and their weights, exact for smooth functions."""
    z, weights = np.polynomial.legendre.leggauss(nodes)
    angle = 2 * np.pi * (np.arange(2 * nodes) + 0.5) / (2 * nodes)
    ring = np.sqrt(1 - z**2)[:, None]
    points = np.stack(
        [
            ring * np.cos(angle),
            ring * np.sin(angle),
            np.broadcast_to(z[:, None], (nodes, 2 * nodes)),
        ]
    )
    return points.reshape(3, -1), np.repeat(weights / 2 / (2 * nodes), 2 * nodes)


def concentrations(variance, clients=100, samples=20, noise=0.5):
    """The concentration of largest likelihood, integrated and as it is approximated."""
    rng = np.random.default_rng(0)
    own = np.eye(3)[0] + variance**0.5 * rng.normal(size=(clients, 3)) * [0, 1, 1]
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    scores = rng.normal(size=(clients, samples, 1))
    data = scores * own[:, None] + noise**0.5 * rng.normal(size=(clients, samples, 3))
    precise = samples / (noise * (1 + noise)) * np.einsum("mni,mnj->mij", data, data) / samples
    shared, (points, weights) = np.diag([1.0, 0.0, 0.0]), on_the_sphere()

    def integrated(concentration):
        def log_mean(matrix):
            exponent = np.einsum("ip,...ij,jp->...p", points, matrix, points) / 2
            largest = exponent.max(-1, keepdims=True)
            return largest[..., 0] + np.log(np.exp(exponent - largest) @ weights)

        joint = log_mean(precise + concentration * shared)
        return np.mean(log_mean(concentration * shared) - joint)

    @jax.jit
    def approximate(concentration):
        values = jnp.linalg.eigvalsh(precise + concentration * shared)[:, ::-1]
        gaps = values[:, :1] - values[:, 1:]
        joint = bingham.log_normalizer(gaps, 3, 1).mean(1) + values[:, 0] / 2
        prior = bingham.log_normalizer(concentration, 3, 1) + concentration / 2
        return jnp.mean(prior - joint)

    return [
        np.exp(
            optimize.minimize_scalar(
                lambda x, f=f: float(f(np.exp(x))), bounds=(-2, 6), method="bounded"
            ).x
        )
        for f in (integrated, approximate)
    ]


@pytest.mark.slow
def test_how_far_the_approximate_likelihood_is_off(x64):
    """In three dimensions, where it is least good, as the class says."""
    pairs = np.asarray([concentrations(variance) for variance in (0.03, 0.1, 0.3)])
    np.testing.assert_allclose(pairs[:, 1] / pairs[:, 0] - 1, [-0.03, -0.11, -0.15], atol=0.01)
