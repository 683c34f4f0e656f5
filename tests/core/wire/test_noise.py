"""Clipping, noise, and what they guarantee."""

import functools
import sys

import dp_accounting as dp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import jaxfed as jf
from jaxfed import privacy
from jaxfed.privacy import _losses
from tests.helpers import gaussian

FEATURES, CLIENTS = 6, 5
LOSSLESS = jf.channel.lossless()
sampled = functools.partial(gaussian, (20, 12, 15, 30, 9))


def test_messages_are_clipped_as_a_whole(key):
    message = {"a": jnp.full((3, 4), 2.0), "b": jnp.float32(-4)}  # of norm 8
    for clip, factor in ((2.0, 0.25), (100.0, 1.0)):
        channel = jf.channel.gaussian(clip, 1e-6)
        payload, _ = channel.encode(key, message, channel.memory(message))
        for part, given in zip(jax.tree.leaves(message), jax.tree.leaves(payload), strict=True):
            np.testing.assert_allclose(given, factor * part, atol=1e-3)
            assert given.dtype == part.dtype
    nothing, _ = jf.channel.gaussian(1.0, 1e-6).encode(key, {"a": jnp.zeros(3)}, ())
    np.testing.assert_allclose(nothing["a"], 0, atol=1e-5)


@pytest.mark.parametrize("clients", [1, 4])
def test_noise_has_the_stated_deviation(clients, key):
    channel = jf.channel.gaussian(0.5, 3.0, clients=clients)

    @jax.jit
    def total(key):
        keys = jax.random.split(key, clients)
        noisy = jax.vmap(lambda key: channel.encode(key, jnp.zeros(20_000), ())[0])(keys)
        return noisy.sum(0)

    first, second = total(key), total(jax.random.key(1))
    for noise in (first, second):
        # The standard deviation of so many draws is accurate to half a percent.
        np.testing.assert_allclose(noise.std(), 1.5, rtol=0.02)
        np.testing.assert_allclose(noise.mean(), 0, atol=0.05)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03


@pytest.mark.slow
def test_a_run_with_little_noise_is_close_to_one_without(key):
    algorithm, clients = jf.pca.PerPCA(2, 1, solver="gradient", step_size=0.05), sampled()
    start = jf.Personalized(jnp.eye(FEATURES, 2), None)
    run = functools.partial(
        jf.fit,
        algorithm,
        clients,
        rounds=20,
        key=key,
        warm_start=start,
        participation=jf.participation.uniform(3),
    )
    wanted = run().history["objective"]
    noisy = [
        run(channel=jf.Wire(jf.channel.gaussian(2.0, z, clients=3), LOSSLESS)).history["objective"]
        for z in (1e-4, 0.3)
    ]
    np.testing.assert_allclose(noisy[0], wanted, rtol=1e-3)
    assert np.abs(noisy[1] - wanted).max() > 10 * np.abs(noisy[0] - wanted).max()


@pytest.mark.slow
def test_the_start_has_noise_too(key):
    """Messages before the rounds are clipped and made noisy like all others."""
    algorithm, clients = jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.1), sampled()
    channels = (jf.channel.gaussian(1e3, 1e-9), jf.channel.gaussian(1e3, 1.0), LOSSLESS)
    wires = [jf.Wire(channel, LOSSLESS) for channel in channels]
    shared = [
        jf.fit(algorithm, clients, rounds=1, key=key, channel=wire).result.shared for wire in wires
    ]
    np.testing.assert_allclose(shared[0], shared[2], atol=1e-4)
    assert np.abs(shared[1] - shared[2]).max() > 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.float16)])
def test_noise_of_half_precision_has_as_many_values_as_the_type(dtype, key):
    """Noise drawn in half precision would end at three deviations, and reveal messages."""
    channel = jf.channel.gaussian(1.0, 1.0)
    sent = jax.jit(lambda key: channel.encode(key, jnp.zeros(200_000, dtype), None)[0])(key)
    assert sent.dtype == dtype
    values = np.asarray(sent, np.float64)
    assert np.abs(values).max() > 4
    assert len(np.unique(values)) > 1000


def test_shared_noise_in_a_traced_run_with_known_clients(key):
    clients = sampled()
    channel = jf.Wire(jf.channel.gaussian(1.0, 1.0, clients=CLIENTS), LOSSLESS)

    @jax.jit
    def run(key):
        power = jf.pca.SubspaceIteration(2)
        return jf.rollout(power, clients, rounds=2, key=key, channel=channel).result.shared

    assert jnp.isfinite(run(key)).all()


def test_noise_under_masks(key):
    """The server sees neither a message nor, in the sum, less than all of the noise."""
    clients, power = sampled(), jf.pca.SubspaceIteration(2)
    noise = jf.channel.gaussian(5.0, 2.0, clients=CLIENTS)
    channel = jf.channel.secure_sum(CLIENTS, bits=32, bound=1000.0, inner=noise)
    heard = privacy.record(power, clients, rounds=40, key=key, channel=jf.Wire(channel, LOSSLESS))
    matrices = [privacy.client_matrix(clients, i) for i in range(CLIENTS)]
    clipped = 0
    for matrix in matrices:
        products = matrix @ heard.received
        lengths = np.linalg.norm(products, axis=(1, 2), keepdims=True)
        clipped = clipped + products * np.minimum(1, 5 / lengths)
    np.testing.assert_allclose((heard.total - clipped).std(), 5 * 2, rtol=0.15)
    with pytest.raises(ValueError, match=r"^channel: its noise is shared by 6 clients, and 5 take"):
        more = jf.channel.gaussian(5.0, 2.0, clients=6)
        channel = jf.channel.secure_sum(CLIENTS, bits=32, bound=9.0, inner=more)
        jf.fit(power, clients, rounds=1, key=key, channel=jf.Wire(channel, LOSSLESS))


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: jf.channel.gaussian(0, 1.0), "clip"),
        (lambda: jf.channel.gaussian(float("inf"), 1.0), "clip"),
        (lambda: jf.channel.gaussian(1.0, -1.0), "noise_multiplier"),
        (lambda: jf.channel.gaussian(1.0, float("nan")), "noise_multiplier"),
        (lambda: jf.channel.gaussian(1.0, 1.0, clients=0), "clients"),
        (lambda: jf.channel.gaussian(1.0, 1.0, clients=2.0), "clients"),
        (lambda: privacy.epsilon(0, 1, delta=1e-5), "noise_multiplier"),
        (lambda: privacy.epsilon(1.0, 0, delta=1e-5), "rounds"),
        (lambda: privacy.epsilon(1.0, 1, delta=0), "delta"),
        (lambda: privacy.epsilon(1.0, 1, delta=1), "delta"),
        (lambda: privacy.noise_multiplier(0, 1, delta=1e-5), "epsilon"),
        (lambda: privacy.noise_multiplier(float("inf"), 1, delta=1e-5), "epsilon"),
        (lambda: privacy.noise_multiplier(1.0, 1, delta=0.0), "delta"),
        (lambda: privacy.epsilon(1.0, 1, delta=0.1, participants=3), "participants, clients"),
        (
            lambda: privacy.epsilon(1.0, 1, delta=0.1, participants=3, clients=2),
            "participants, clients",
        ),
        (lambda: privacy.epsilon(1.0, 1, delta=0.1, adjacency="remove"), "adjacency"),
        (
            lambda: privacy.epsilon(
                1.0, 1, delta=0.1, participants=2, clients=3, adjacency="zero_out"
            ),
            "adjacency",
        ),
    ],
)
def test_bad_settings_are_refused(make, argument):
    with pytest.raises(ValueError, match=rf"^{argument}: wanted .*got"):
        make()


@pytest.mark.slow
def test_unsupported_uses_of_shared_noise_are_refused(key):
    run = functools.partial(jf.fit, rounds=1, key=key)
    power, shared = jf.pca.SubspaceIteration(2), jf.channel.gaussian(1.0, 1.0, clients=CLIENTS)
    with pytest.raises(ValueError, match=r"^channel: .*shared by 5 clients, and 2 take part"):
        two = jf.participation.uniform(2)
        run(power, sampled(), channel=jf.Wire(shared, LOSSLESS), participation=two)
    varying = jf.participation.mask(np.eye(CLIENTS, dtype=bool))
    with pytest.raises(ValueError, match=r"^channel: .*a varying number take part"):
        run(power, sampled(), channel=jf.Wire(shared, LOSSLESS), participation=varying)
    for algorithm, clients in (
        (power, sampled(weights="samples")),
        (jf.pca.LocalPower(2, alignment="sign"), sampled()),
    ):
        with pytest.raises(ValueError, match=r"^channel: .*needs a sum, or a mean with equal w"):
            run(algorithm, clients, channel=jf.Wire(shared, LOSSLESS))
    alone = jf.channel.gaussian(1.0, 1.0)
    with pytest.raises(ValueError, match=r"^channel: .*Pooled sends 672 bits in the clear"):
        run(jf.pca.Pooled(2), sampled(), channel=jf.Wire(alone, LOSSLESS, LOSSLESS))
    with pytest.raises(ValueError, match=r"^channel: .*uplink alone"):
        run(power, sampled(), channel=alone)
    with pytest.raises(ValueError, match=r"^channel: .*single precision at least"):
        shared.check(sampled(), CLIENTS, {"x": jnp.zeros(3, jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"^channel: .*shared by 4 clients, and 3 take part"):
        four = jf.Wire(jf.channel.gaussian(1.0, 1.0, clients=4), LOSSLESS)
        some = jf.participation.uniform(3)
        run(jf.pca.PerPCA(1, 1, solver="gradient"), sampled(), channel=four, participation=some)
    # If each message has noise of its own, all of these are accepted.
    start = jf.Personalized(jnp.eye(FEATURES, 1), None)
    run(
        jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.1),
        sampled(weights="samples"),
        warm_start=start,
        channel=jf.Wire(alone, LOSSLESS),
        participation=varying,
    )


# --- the account ---------------------------------------------------------------------------------


def delta_of(epsilon, multiplier):
    """Balle & Wang (2018), Theorem 8, of sensitivity one."""
    half, ratio = 1 / (2 * multiplier), epsilon * multiplier
    return norm.cdf(half - ratio) - np.exp(epsilon) * norm.cdf(-half - ratio)


@pytest.mark.parametrize(("multiplier", "rounds"), [(1.3, 1), (4.0, 10), (60.0, 1000)])
def test_accounting_of_full_participation_is_exact(multiplier, rounds):
    for adjacency, distance in (("replace", 2), ("zero_out", 1)):
        epsilon = privacy.epsilon(multiplier, rounds, delta=1e-5, adjacency=adjacency)
        effective = multiplier / distance / rounds**0.5
        np.testing.assert_allclose(delta_of(epsilon, effective), 1e-5, rtol=1e-6)
        back = privacy.noise_multiplier(epsilon, rounds, delta=1e-5, adjacency=adjacency)
        np.testing.assert_allclose(back, multiplier, rtol=1e-6)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_accounting_of_drawn_participants_equals_dp_accounting():
    options = {"delta": 1e-5, "participants": 10, "clients": 100}
    epsilon = privacy.epsilon(4.0, 20, **options)
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(2.0))
    accountant.compose(event, 20)
    # Above what two data sets show that a client tells apart, and close to it; Renyi is not.
    pair = dp.pld.privacy_loss_distribution.from_gaussian_mechanism(
        4.0,
        sensitivity=2,
        sampling_prob=0.1,
        value_discretization_interval=1e-3,
        pessimistic_estimate=False,
        use_connect_dots=False,
    )
    below = pair.self_compose(20).get_epsilon_for_delta(1e-5)
    assert below < epsilon < 1.1 * below < 0.6 * accountant.get_epsilon(1e-5)
    # Of one message it is known: Balle, Barthe & Gaboardi (2018).
    one = privacy.epsilon(1.0, 1, **options)
    undrawn = np.log1p(np.expm1(one) / 0.1)
    np.testing.assert_allclose(0.1 * delta_of(undrawn, 0.5), 1e-5, rtol=1e-3)
    # With so much noise that rounding could matter, too, a draw never harms.
    assert privacy.epsilon(5e3, 1, **options) < privacy.epsilon(5e3, 1, delta=1e-5)
    needed = privacy.noise_multiplier(epsilon, 20, **options)
    assert 4.0 * (1 - 1e-6) <= needed <= 4.0 * 1.0011
    everybody = options | {"participants": 100}
    assert privacy.epsilon(4.0, 20, **everybody) == privacy.epsilon(4.0, 20, delta=1e-5)


@pytest.mark.parametrize(
    ("multiplier", "rounds", "drawn"), [(10, 100, 10), (2, 50, 3), (20, 999, 50)]
)
def test_accounting_of_small_deltas(multiplier, rounds, drawn):
    """Where rounding errors of a plain convolution would decide: it falls as tails do."""
    options = {"participants": drawn, "clients": 1000}
    deltas = 10.0 ** -np.arange(3, 16)
    found = [privacy.epsilon(multiplier, rounds, delta=delta, **options) for delta in deltas]
    steps = np.diff(found)
    assert (steps > 0).all() and (found[-1] < found[5] * 5)
    # Epsilons of ever rarer failures grow smoothly.
    assert (np.abs(np.diff(steps))[4:] < 0.2 * steps[5:]).all()
    # dp-accounting's own composition, where it is accurate.
    ratio, share = 2 / multiplier, drawn / 1000
    for delta, wanted in zip(deltas[:4], found[:4], strict=True):
        undrawn = dp.get_epsilon_gaussian((rounds * ratio**2) ** -0.5, delta)
        step = min(1e-3, undrawn / 1e3, _losses.step_of(ratio, [share], rounds, delta))
        one = _losses.losses_of(ratio, [share], rounds, step, delta)
        law = dict(
            zip(
                np.arange(len(one.places)) - len(one.places) // 2,
                np.exp(one.logarithms),
                strict=True,
            )
        )
        plain = dp.pld.privacy_loss_distribution.PrivacyLossDistribution(
            dp.pld.pld_pmf.DensePLDPmf(
                step, min(law), np.fromiter(law.values(), float), one.beyond, True
            )
        )
        other = plain.self_compose(rounds).get_epsilon_for_delta(delta)
        np.testing.assert_allclose(wanted, other, rtol=1e-5)


def spent(*solutions, **options):
    return privacy.spent(*solutions, delta=1e-5, **options)


@pytest.mark.slow
def test_budgets_spent_by_runs(key):
    """Their solutions know what was sent; several runs add up, and so does a warm start."""
    clients, power = sampled(), jf.pca.SubspaceIteration(2)
    noise = jf.channel.gaussian(5.0, 2.0, clients=CLIENTS)
    run = functools.partial(jf.fit, key=key, channel=jf.Wire(noise, LOSSLESS))
    once = run(power, clients, rounds=3)
    assert spent(once) == pytest.approx(privacy.epsilon(2.0, 3, delta=1e-5))
    masks = jf.channel.secure_sum(CLIENTS, bits=32, bound=1e3, inner=noise)
    hidden = jf.rollout(power, clients, rounds=3, key=key, channel=jf.Wire(masks, LOSSLESS))
    assert spent(hidden, adjacency="zero_out") == pytest.approx(
        privacy.epsilon(2.0, 3, delta=1e-5, adjacency="zero_out")
    )
    twice = privacy.epsilon(2.0, 6, delta=1e-5)
    assert spent(once, hidden) == pytest.approx(twice)
    again = run(power, clients, rounds=3, warm_start=once)
    assert spent(again) == pytest.approx(twice)
    # One message in the first exchange, and none in the round that only reports.
    each = jf.Wire(jf.channel.gaussian(5.0, 2.0), LOSSLESS)
    shot = run(jf.pca.OneShot(1, 1, method="spectrum"), clients, rounds=1, channel=each)
    assert spent(shot) == pytest.approx(privacy.epsilon(2.0, 1, delta=1e-5))
    # All rounds count, also those after the best one.
    best = run(power, clients, rounds=3, best="objective", rounds_per_chunk=1)
    assert spent(best) == pytest.approx(spent(once))


@pytest.mark.slow
def test_rounds_that_solutions_share_are_counted_once(key):
    """Those of a chain of warm starts know of each other; runs that are only alike do not."""
    noise = jf.channel.gaussian(5.0, 2.0, clients=CLIENTS)
    keys = jax.random.split(key, 4)
    power, channel = jf.pca.SubspaceIteration(2), jf.Wire(noise, LOSSLESS)
    run = functools.partial(jf.fit, power, sampled(), rounds=2, channel=channel)
    first = run(key=keys[0])
    second = run(key=keys[1], warm_start=first)
    third, beside = run(key=keys[2], warm_start=second), run(key=keys[3], warm_start=first)
    runs = {count: pytest.approx(privacy.epsilon(2.0, 2 * count, delta=1e-5)) for count in (2, 3)}
    assert spent(first, second) == spent(second, first) == spent(second) == runs[2]
    assert spent(first, second, third) == spent(third) == runs[3]
    assert spent(second, beside) == runs[3]
    assert spent(first, run(key=keys[0])) == runs[2]


@pytest.mark.slow
def test_participation_is_accounted_for(key):
    clients, alone = sampled(), jf.Wire(jf.channel.gaussian(1.0, 2.0), LOSSLESS)
    run = functools.partial(jf.rollout, key=key, channel=alone, rounds=4)
    power, start = jf.pca.SubspaceIteration(2), jf.Personalized(jnp.eye(FEATURES, 1), None)
    # Over four rounds, the first client is there twice and no other more often.
    given = jf.participation.mask(np.eye(3, CLIENTS, dtype=bool))
    some = run(power, clients, participation=given)
    assert spent(some) == pytest.approx(privacy.epsilon(2.0, 2, delta=1e-5))
    uniform = jf.participation.uniform(2)
    drawn = run(power, clients, participation=uniform)
    assert spent(drawn) == pytest.approx(privacy.epsilon(2.0, 4, delta=1e-5))
    chance = privacy.epsilon(2.0, 4, delta=1e-5, participants=2, clients=CLIENTS)
    assert chance < 0.9 * spent(drawn) and spent(drawn, drawn=True) == pytest.approx(chance)
    state = run(
        jf.pca.PerPCA(1, 1, solver="gradient"), clients, participation=uniform, warm_start=start
    )
    with pytest.raises(
        ValueError, match=r"^drawn: wanted an algorithm whose clients keep no state"
    ):
        spent(state, drawn=True)
    unequal = run(power, sampled(weights="samples"), participation=uniform)
    with pytest.raises(ValueError, match=r"^drawn: wanted clients of equal weights"):
        spent(unequal, drawn=True)
    with pytest.raises(ValueError, match=r"^adjacency: wanted replace"):
        spent(drawn, drawn=True, adjacency="zero_out")


@pytest.mark.slow
def test_runs_that_cannot_be_accounted_for_are_refused(key):
    clients, power = sampled(), jf.pca.SubspaceIteration(2)
    run = functools.partial(jf.fit, power, clients, rounds=2, key=key)
    noise = jf.Wire(jf.channel.gaussian(5.0, 2.0, clients=CLIENTS), LOSSLESS)
    with pytest.raises(ValueError, match=r"^solutions: wanted messages with noise, got 384 bits"):
        spent(run())
    with pytest.raises(ValueError, match=r"^solutions: .*ended by numbers without noise"):
        spent(run(channel=noise, callbacks=[lambda _: True], rounds_per_chunk=1))
    with pytest.raises(ValueError, match=r"^solutions: wanted at least one"):
        spent()
    private = run(channel=noise)
    with pytest.raises(ValueError, match=r"^solutions: .*of one run"):
        spent(jf.stack([private, private]))
    few = jf.fit(
        power,
        clients.take([0, 1]),
        rounds=2,
        key=key,
        channel=jf.Wire(jf.channel.gaussian(5.0, 2.0), LOSSLESS),
    )
    with pytest.raises(ValueError, match=r"^solutions: .*the same clients, got \[2, 5\]"):
        spent(private, few)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"dp_accounting is needed.*'jaxfed\[privacy\]'"):
        privacy.epsilon(1.0, 1, delta=1e-5)


def test_a_noisy_first_message_counts_as_one_more():
    with_it = privacy.epsilon(2.0, 4, delta=1e-5, first_message=True)
    assert with_it == pytest.approx(privacy.epsilon(2.0, 5, delta=1e-5))
    z = privacy.noise_multiplier(1.5, 4, delta=1e-5, first_message=True)
    assert z == pytest.approx(privacy.noise_multiplier(1.5, 5, delta=1e-5))
    assert privacy.epsilon(z, 4, delta=1e-5, first_message=True) == pytest.approx(1.5)
    # All clients take part before the rounds, which costs more than another round among few.
    few = {"delta": 1e-5, "participants": 10, "clients": 1000}
    without, more = privacy.epsilon(2.0, 40, **few), privacy.epsilon(2.0, 41, **few)
    assert without < more < privacy.epsilon(2.0, 40, **few, first_message=True)
    alone = privacy.epsilon(2.0, 1, delta=1e-5)
    assert privacy.epsilon(2.0, 40, **few, first_message=True) > alone


@pytest.mark.slow
def test_the_first_message_has_the_noise_that_is_accounted_for(key):
    """The message that is accounted for is the one that is sent."""
    algorithm, clients = jf.pca.PerPCA(2, 1, solver="gradient", step_size=0.05), sampled()
    heard = [
        privacy.record(algorithm, clients, rounds=1, key=key, channel=channel).first
        for channel in (LOSSLESS, jf.Wire(jf.channel.gaussian(2.0, 1.0), LOSSLESS))
    ]
    exact, noisy = (np.concatenate([x.ravel() for x in jax.tree.leaves(m)]) for m in heard)
    noise = noisy - exact * min(1, 2 / np.linalg.norm(exact))
    np.testing.assert_allclose(noise.std(), 2.0, rtol=0.5)
