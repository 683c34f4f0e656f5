"""What noise in gradients guarantees: single steps by brute force, their composition, words."""

import functools
import itertools
import math

import dp_accounting as dp
import jax
import numpy as np
import optax
import pytest
from scipy.stats import hypergeom, norm

import jaxfed as jf
from jaxfed import privacy
from jaxfed.core.clients.guarantee import checked_guarantee
from jaxfed.generative import AdaptiveTraining, FedAvg, GradientNoise
from jaxfed.models import reconstruction_loss
from jaxfed.privacy import _losses
from tests.generative.training import autoencoder

FEATURES = 5
ADAM = optax.adam(0.05)


def clients(*counts):
    return jf.Clients.from_samples([np.ones((n, FEATURES), np.float32) for n in counts])


def training(noise_multiplier=1.0, clip=0.5, make=FedAvg, batch_size=10, local_steps=20, **options):
    return make(
        autoencoder(),
        reconstruction_loss,
        batch_size=batch_size,
        local_steps=local_steps,
        gradient_noise=GradientNoise(clip, noise_multiplier),
        **options,
    )


guarantee = functools.partial(privacy.training_guarantee, rounds=5, delta=1e-5)


# --- one step ------------------------------------------------------------------------------------


def told_apart(first, second, draws, sigma, epsilons):
    """The δ of one step on two tables of single numbers, in both orders, by integration."""
    y = np.linspace(-10 * sigma - len(first), 10 * sigma + len(first), 3001)
    one, other = (
        norm.pdf(y[:, None], [rows[list(draw)].sum() for draw in draws], sigma).mean(axis=1)
        for rows in (first, second)
    )
    factors = np.exp(epsilons)[:, None]
    return [
        np.trapezoid(np.maximum(a - factors * b, 0), y, axis=1)
        for a, b in ((one, other), (other, one))
    ]


@pytest.mark.parametrize(("samples", "size", "rows"), [(6, 2, 1), (6, 2, 2), (6, 3, 3), (5, 4, 2)])
def test_no_two_tables_are_told_apart_better_than_the_bound(samples, size, rows):
    """Of clipped gradients of one number; the last two are drawn with a person in any case."""
    rng, sigma = np.random.default_rng(0), 1.3
    draws = list(itertools.combinations(range(samples), size))
    shares = hypergeom.pmf(np.arange(1, min(rows, size) + 1), samples, rows, size).tolist()
    epsilons = np.array([-1.5, -0.3, 0.0, 0.2, 0.7, 1.5])
    bound = _losses._profile(epsilons, 2 / sigma, shares)
    extreme = -np.ones(samples)
    found = []
    for table in [extreme, *rng.choice([-1, -0.4, 0, 1], (10, samples))]:
        other = table.copy()
        other[:rows] = 1.0 if table is extreme else rng.choice([-1, 0.3, 1], rows)
        found += told_apart(table, other, draws, sigma, epsilons)
    worst = np.max(found, axis=0)
    assert (worst <= bound + 1e-6).all()
    assert (worst >= 0.75 * bound).all()
    if rows == 1:  # it is exact
        np.testing.assert_allclose(worst, bound, rtol=1e-4)


# --- all steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "sigma"), [(1, 2.0), (4, 6.0)])
def test_composition_agrees_with_dp_accounting(rows, sigma):
    """Above what one pair of tables shows, whose losses dp-accounting composes, and close to it.

    Not equal, since the pair is in one order, and the bound holds for either order in every step.
    """
    shares = hypergeom.pmf(np.arange(rows + 1), 500, rows, 10)
    pair = dp.pld.privacy_loss_distribution.from_mixture_gaussian_mechanism(
        sigma, 2.0 * np.arange(rows + 1), shares, value_discretization_interval=1e-3
    )
    known = pair.self_compose(5 * 20).get_epsilon_for_delta(1e-5)
    found = guarantee(training(sigma), clients(500, 700), rows_per_person=rows)
    assert known < found.epsilon < 1.2 * known


def test_steps_of_all_samples_have_the_exact_guarantee_of_normal_noise():
    for rows in (1, 3):
        found = guarantee(training(30.0), clients(10), rows_per_person=rows)
        wanted = dp.get_epsilon_gaussian(30.0 / (2 * rows) / 100**0.5, 1e-5)
        np.testing.assert_allclose(found.epsilon, wanted, rtol=1e-9)


def test_many_steps_of_little_privacy_loss_are_not_rounded_up():
    """Their losses are far smaller than a thousandth."""
    found = guarantee(training(5.0), clients(10_000), rounds=500).epsilon
    # The central limit theorem of Dong, Roth & Su (2022), Theorem 10.
    mu = 1e-3 * (1e4 * math.expm1((2 / 5) ** 2)) ** 0.5
    assert 1 < found / dp.get_epsilon_gaussian(1 / mu, 1e-5) < 1.2


def test_it_is_the_worst_clients_and_grows_with_all_that_reveals_more():
    def epsilon(counts=(300, 400), rounds=5, rows=1, **options):
        own = training(**({"noise_multiplier": 3.0} | options))
        return guarantee(own, clients(*counts), rounds=rounds, rows_per_person=rows).epsilon

    first = epsilon()
    assert epsilon((300,)) == first == epsilon((900, 300, 301))
    assert epsilon((299, 400)) > first > epsilon((301, 400))
    assert epsilon(rounds=6) > first and epsilon(batch_size=11) > first and epsilon(rows=2) > first
    assert epsilon(noise_multiplier=3.1) < first and epsilon(clip=7.0) == first
    assert epsilon(rounds=10, local_steps=10) == first
    adaptive = epsilon(make=AdaptiveTraining)
    assert adaptive == first


@pytest.mark.parametrize(
    ("epsilon", "rows"), [(1.0, 1), pytest.param(8.0, 3, marks=pytest.mark.slow)]
)
def test_the_noise_for_an_epsilon_is_just_enough(epsilon, rows):
    known, numbers = clients(400, 500), {"rounds": 5, "delta": 1e-5, "rows_per_person": rows}
    z = privacy.training_noise(epsilon, known, local_steps=20, batch_size=10, **numbers)
    found = privacy.training_guarantee(training(z), known, **numbers).epsilon
    less = privacy.training_guarantee(training(0.998 * z), known, **numbers).epsilon
    assert found <= epsilon * (1 + 1e-6) < less
    whole = privacy.training_noise(epsilon, clients(10), local_steps=20, batch_size=10, **numbers)
    np.testing.assert_allclose(whole, 2 * rows * 10 * dp.get_sigma_gaussian(epsilon, 1e-5))


@pytest.mark.slow
def test_a_network_learns_in_spite_of_the_noise(key):
    """Of clients with many samples, nearly as well as without it."""
    truth = jf.data.perpca_synthetic(
        key=key, clients=6, features=12, shared_rank=2, local_rank=1, samples=500
    )
    known = jf.Clients.from_samples(truth.samples)
    z = privacy.training_noise(3.0, known, rounds=60, local_steps=1, batch_size=100, delta=1e-5)

    def error(multiplier):
        algorithm = FedAvg(
            jf.models.Autoencoder(12, 2, key=key),
            reconstruction_loss,
            optax.sgd(1.0),
            local_steps=1,
            batch_size=100,
            server_optimizer=ADAM,
            gradient_noise=GradientNoise(1.0, multiplier),
        )
        model = jf.fit(algorithm, known, rounds=60, key=jax.random.key(1)).result.shared
        restored = jax.vmap(jax.vmap(model))(truth.samples)
        return float(((restored - truth.samples) ** 2).sum(axis=-1).mean())

    without, nothing = error(0.0), float((truth.samples**2).sum(axis=-1).mean())
    assert without < 0.8 * nothing
    assert error(z) - without < 0.1 * (nothing - without)


# --- words ---------------------------------------------------------------------------------------


def test_the_statement_says_what_is_protected_and_what_is_not():
    one = guarantee(training(4.0), clients(500))
    assert one[:2] == ("row", "replace") and one[4:] == (
        4.0,
        "gradients",
        0.5,
        "sampled Gaussian",
        1,
    )
    text = jf.privacy.statement(one)
    for wanted in (
        f"{one.epsilon:.4g} for epsilon and 1e-05 for delta in all steps together",
        "shortened to length 0.5",
        "4 times this length",
        "losses in the history",
        "a callback or a choice of the best round",
        "fine-tune at home",
        "a first model from these data",
        "whoever knows the random key",
    ):
        assert wanted in text
    assert "fit_local" not in text and "opendp" not in text
    person = guarantee(training(40.0), clients(500), rows_per_person=3)
    assert person.unit == "person" and "all rows that the person has" in jf.privacy.statement(
        person
    )
    assert checked_guarantee(**person._asdict()) == person
    with pytest.raises(ValueError, match=r"bound: wanted a positive"):
        checked_guarantee(**person._replace(bound=None)._asdict())


def test_epsilons_of_trainings_and_releases_add_up():
    first, second = (guarantee(training(z), clients(500)) for z in (4.0, 5.0))
    samples = jf.Clients.from_samples(np.random.default_rng(0).normal(size=(2, 50, FEATURES)))
    released = privacy.release_moments(samples, epsilon=0.5, delta=1e-6, key=jax.random.key(0))
    text = privacy.statement(first, second, released)
    total = first.epsilon + second.epsilon + 0.5
    assert f"Together: epsilon {total:.4g} at delta 2.1e-05" in text
    assert "fit_local" in text and "losses in the history" in text
    # A test is bounded by these two numbers alone.
    one = guarantee(training(40.0), clients(500))
    assert one.epsilon < 0.2
    found = 100 * (math.exp(one.epsilon) * 0.05 + 1e-5)
    assert f"finds at most {found:.0f} % of the cases" in privacy.statement(one)


# --- what is refused -----------------------------------------------------------------------------


def test_a_ledger_refuses_a_training(tmp_path):
    ledger = privacy.Ledger(tmp_path / "persons", epsilon=100.0, delta=1e-5)
    with pytest.raises(ValueError, match=r"guarantee: wanted that of a release"):
        ledger.spend(guarantee(training(4.0), clients(500)), clients(500))
    assert ledger.spent() == 0


@pytest.mark.slow
def test_accounts_of_messages_name_the_function(key):
    solution = jf.fit(training(local_steps=1), clients(20, 20), rounds=1, key=key)
    for account in (functools.partial(privacy.spent, delta=1e-5), privacy.statement):
        with pytest.raises(ValueError, match=r"training_guarantee computes how the noise"):
            account(solution)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "FedAvg"}, r"algorithm: wanted FedAvg or AdaptiveTraining"),
        (
            {"algorithm": FedAvg(autoencoder(), reconstruction_loss, batch_size=3)},
            r"algorithm: wanted .* with gradient_noise",
        ),
        ({"algorithm": training(np.array([1.0, 2.0]))}, r"algorithm: wanted known numbers"),
        ({"algorithm": training(0.0)}, r"noise_multiplier: wanted a positive"),
        ({"clients": clients(9, 40)}, r"batch_size: wanted at most .* 9 samples, got 10"),
        ({"clients": [1]}, r"clients: wanted jaxfed.Clients"),
        ({"rounds": 0}, r"rounds: wanted a whole number"),
        ({"delta": 1.0}, r"delta: wanted a number between 0 and 1"),
        ({"rows_per_person": 1.5}, r"rows_per_person: wanted a whole number"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    given = {"algorithm": training(), "clients": clients(40, 50), "rounds": 5, "delta": 1e-5}
    with pytest.raises(ValueError, match=message):
        privacy.training_guarantee(**given | change)


def test_bad_arguments_of_the_noise_are_refused():
    given = {"rounds": 5, "delta": 1e-5, "local_steps": 2, "batch_size": 3}
    for change, message in (
        ({"epsilon": 0.0}, r"epsilon: wanted a positive"),
        ({"local_steps": 0}, r"local_steps: wanted a whole"),
        ({"batch_size": 2.5}, r"batch_size: wanted a whole"),
        ({"batch_size": 60}, r"batch_size: wanted at most"),
    ):
        with pytest.raises(ValueError, match=message):
            privacy.training_noise(**{"epsilon": 1.0, "clients": clients(50)} | given | change)
