"""Masks that cancel exactly in the sum, and hide every single message."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed import privacy
from jaxfed.core.backends.backend import collect
from jaxfed.core.wire.masks import without_masks
from jaxfed.core.wire.packing import pack_wide, unpack_wide
from tests import helpers

FEATURES, CLIENTS, ROUNDS = 6, 5, 12
LOSSLESS = jf.channel.lossless()
sampled = functools.partial(helpers.gaussian, (20, 12, 15, 30, 9))
solve = functools.partial(helpers.solve, rounds=ROUNDS)


def masks(**options):
    return jf.channel.secure_sum(CLIENTS, **{"bits": 24, "bound": 600.0} | options)


def exchange(channel, messages, key, shares=None):
    """What the server decodes from each client's payload, and from their sum."""
    shares = jnp.ones(len(messages)) if shares is None else shares

    def one(place, share, message, key):
        context = jf.channel.Context(place, share, jax.random.key(7), jnp.int32(3))
        own, message = channel.bind(context), {"x": message}
        payload, memory = own.encode(key, message, own.memory(message))
        return own.differentiable(own.decode(payload), message, memory)

    keys = jax.random.split(key, len(messages))
    sent = jax.vmap(one)(jnp.arange(len(messages)), shares, messages, keys)
    told = channel.receive(jax.tree.map(lambda x: x.sum(0), sent), None)
    return sent["x"].value.values, told["x"].value


compiled = jax.jit(exchange)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 7, 8, 13, 24, 32])
def test_packing_of_wide_numbers(width):
    numbers = np.random.default_rng(0).integers(0, 2**width, 21).astype(np.uint32)
    packed = pack_wide(jnp.asarray(numbers), width)
    pieces = [min(8, width - low) for low in range(0, width, 8)]
    assert packed.nbytes == sum(-(-21 * piece // 8) for piece in pieces)
    np.testing.assert_array_equal(unpack_wide(packed, 21, width), numbers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clients", "bits", "neighbours"),
    [(2, 3, None), (6, 13, 2), (7, 32, 4)],
)
def test_masks_cancel_to_the_bit(clients, bits, neighbours, key):
    # A unit of one, so that compilers have no products to round differently.
    bound = float((2 ** (bits - 1) - 1) // clients)
    channel = jf.channel.secure_sum(clients, bits=bits, bound=bound, neighbours=neighbours)
    messages = bound / 2 * jax.random.normal(key, (clients, 50))
    masked, told = map(np.asarray, compiled(channel, messages, key))
    bare, _ = map(np.asarray, compiled(without_masks(channel), messages, key))
    assert masked.dtype == bare.dtype == jnp.uint32
    assert (masked != bare).mean() >= 1 - 2.0 ** (2 - bits)
    np.testing.assert_array_equal(masked.sum(0) % 2**bits, bare.sum(0) % 2**bits)  # of 64 bits
    wanted = np.asarray(messages, np.float64).clip(-bound, bound).sum(0)
    np.testing.assert_allclose(told, wanted, rtol=1e-6, atol=clients + 1e-6 * bound)


@pytest.mark.slow
def test_masks_cancel_on_every_backend(key):
    """With five clients on four devices, some places are only padding."""
    channel, messages = masks(bound=3.0), jax.random.normal(key, (CLIENTS, 40))

    def work(_, own):
        place, message, key = own
        context = jf.channel.Context(place, jnp.float32(1), jax.random.key(7), jnp.int32(3))
        payload, _ = channel.bind(context).encode(key, {"x": message}, None)
        return channel.decode(payload), None

    keys = jax.random.split(key, CLIENTS)
    _, wanted = compiled(channel, messages, key)
    unit = 3.0 / channel.levels  # by which programs may round a message differently
    for backend in (jf.backend.chunked(2), jf.backend.pmap(4), jf.backend.shard(4)):
        filled = jnp.arange(CLIENTS + -CLIENTS % backend.multiple)
        own = (filled, messages[filled % CLIENTS], keys[filled % CLIENTS])
        added, _ = jax.jit(lambda own, b=backend: collect(b, work, (), own, CLIENTS))(own)
        told = channel.receive(added, None)
        np.testing.assert_allclose(told["x"].value, wanted, rtol=0, atol=1.1 * CLIENTS * unit)


@pytest.mark.parametrize(("clients", "bits"), [(3, 3), (100, 32), (100, 9)])
def test_no_sum_overflows(clients, bits, key):
    """Not even if all clients send the largest value, or more."""
    channel = jf.channel.secure_sum(clients, bits=bits, bound=0.7, neighbours=2)
    ends = jnp.tile(jnp.asarray([0.7, -0.7, 1e9, -jnp.inf]), (clients, 1))
    _, told = compiled(channel, ends, key)
    np.testing.assert_allclose(told, 0.7 * clients * np.array([1, -1, 1, -1]), rtol=1e-5)
    assert channel.levels * clients < 2 ** (bits - 1)


def test_the_sum_is_unbiased(key):
    channel = jf.channel.secure_sum(3, bits=5, bound=1.0)
    messages = jnp.asarray([[0.31, -0.9], [0.01, 0.5], [0.77, -0.2]])
    shares = jnp.asarray([0.5, 0.3, 0.2])
    run = jax.jit(jax.vmap(lambda key: exchange(channel, messages, key, shares)[1]))
    told = np.asarray(run(jax.random.split(key, 20_000)), np.float64)
    error = told.std(axis=0) / np.sqrt(len(told))
    assert (np.abs(told.mean(axis=0) - shares @ messages) < 4 * error + 1e-6).all()


@pytest.mark.float16
def test_sums_of_half_precision(key):
    """They have fewer numbers than there are levels."""
    channel = jf.channel.secure_sum(3, bits=24, bound=1.0)
    messages = jnp.asarray([[0.31, -0.9], [0.01, 0.5], [0.77, -0.2]], jnp.float16)
    _, told = compiled(channel, messages, key)
    assert told.dtype == jnp.float16
    np.testing.assert_allclose(told, [1.09, -0.6], atol=2e-3)


class Report(jf.Algorithm):
    """Sends means and a sum of what one client has broken, at the start or in round 2."""

    broken: float
    at_start: bool = eqx.field(static=True)

    def first_message(self, key, data, warm_start):
        return self._sent(data, self.at_start)

    def server_init(self, key, first, like, warm_start):
        return first, jnp.int32(0)

    def downlink(self, server):
        return server

    def client_init(self, key, downlink, data, warm_start):
        return None

    def client_step(self, key, downlink, local, data):
        return self._sent(data, downlink[1] == 1), local, {"objective": jnp.ones(())}

    def server_step(self, key, server, uplink):
        told = jax.tree.map(lambda new, old: new + 0 * old, uplink, server[0])
        return (told, server[1] + 1), {}

    def _sent(self, data, now):
        bad = (data.count == 12) & now  # the second client
        number = jnp.where(bad, self.broken, data.count / 100)
        return jnp.stack([number, 1.0]), jf.reduction.Sum(jnp.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize("at_start", [True, False])
def test_masks_do_not_hide_numbers_that_are_not_finite(at_start, key):
    """NaN used to become zero, and infinity the bound."""
    channel = jf.Wire(masks(bound=2.0, neighbours=2), LOSSLESS)
    for broken in (np.nan, np.inf):
        algorithm, when = Report(broken, at_start), 1 if at_start else 2
        solution = solve(algorithm, sampled(), channel=channel, rounds=3)
        assert solution.status == jf.Status.diverged
        assert np.isnan(solution.server[0][0]).any()
        np.testing.assert_array_equal(solution.failure.clients, np.arange(CLIENTS) == 1)
    with pytest.raises(jf.DivergenceError, match=rf"not finite in round {when}, at client 1;"):
        jf.fit(algorithm, sampled(), rounds=3, key=key, channel=channel)
    # A client without weight breaks nothing and adds nothing.
    weightless = sampled(weights=[1, 0, 1, 1, 1])
    solution = solve(algorithm, weightless, channel=channel, rounds=3)
    assert solution.status == jf.Status.round_limit
    (mean, total), _ = solution.server
    np.testing.assert_allclose(mean, [0.185, 1.0], atol=1e-4)
    np.testing.assert_allclose(total, 4, atol=1e-4)


def test_cost_of_masks(key):
    channel = jf.channel.secure_sum(8, bits=20, bound=1.0)
    message = {"frame": jnp.ones((50, 4)), "one": jnp.float32(2)}
    place = jf.channel.Context(jnp.int32(0), jnp.float32(1), key, jnp.int32(0))
    payload, _ = jax.jit(lambda *sent: channel.bind(place).encode(*sent, None))(key, message)
    assert jf.channel.bits(payload) == 8 * len(jf.channel.to_bytes(payload)) == 20 * 200 + 24


def test_a_masked_run_equals_an_open_one(x64):
    """With weighted means and several arrays; masks differ from round to round."""
    clients = sampled(dtype=np.float64, weights=[1, 2, 0, 3, 4])
    start = jf.Personalized(jnp.eye(FEATURES, 2), None)
    algorithm = jf.pca.PerPCA(2, 1, solver="gradient", step_size=0.05)
    wanted = solve(algorithm, clients, channel=LOSSLESS, warm_start=start)
    channel = jf.Wire(masks(bits=32, bound=1.0), LOSSLESS)
    given = solve(algorithm, clients, channel=channel, warm_start=start)
    np.testing.assert_allclose(given.result.shared, wanted.result.shared, atol=1e-7)
    np.testing.assert_allclose(given.history["objective"], wanted.history["objective"], rtol=1e-7)
    wanted = 32 * 12 * np.arange(1, ROUNDS + 1)
    np.testing.assert_allclose(given.history["bits_up"], wanted, rtol=1e-15)


@pytest.mark.slow
def test_few_bits_are_enough_for_a_sum():
    algorithm, clients = jf.pca.SubspaceIteration(2), sampled()
    wanted = solve(algorithm, clients, channel=LOSSLESS)
    channel = jf.Wire(masks(bits=18, neighbours=2), LOSSLESS)
    given = solve(algorithm, clients, channel=channel, backend=jf.backend.shard(4))
    np.testing.assert_allclose(
        given.history["objective"][-1], wanted.history["objective"][-1], rtol=1e-3
    )


def test_attacks_see_uniform_numbers(key, x64):
    scales = 1.1 ** -np.arange(24)
    clients = helpers.gaussian((40,) * CLIENTS, scales, seed=1, dtype=float)
    algorithm, rounds = jf.pca.SubspaceIteration(4), 12
    record = functools.partial(privacy.record, algorithm, clients, rounds=rounds, key=key, client=1)
    secret, bits, bound = privacy.client_matrix(clients, 1), 32, 200.0
    open_, hidden = record(), record(channel=jf.Wire(masks(bits=bits, bound=bound), LOSSLESS))
    assert privacy.linear_attack(open_, secret).min() < 1e-6
    assert privacy.linear_attack(hidden, secret, calibrated=True).min() > 0.8
    # The sum is what it was, and the same guess can be made from it.
    np.testing.assert_allclose(hidden.total[0], open_.total[0], atol=1e-5)
    guess = privacy.public_guess(clients, 1)
    assert privacy.linear_attack(hidden, secret, summed=True, calibrated=True).min() > 0.9 * guess

    scaled = hidden.sent.ravel() / (bound / ((2 ** (bits - 1) - 1) // CLIENTS) * 2**bits) + 0.5
    counts, _ = np.histogram(scaled, bins=16, range=(0, 1))
    assert counts.sum() == scaled.size == rounds * 24 * 4
    assert ((counts - scaled.size / 16) ** 2 / (scaled.size / 16)).sum() < 37.7  # 0.1 % of chance
    assert len(np.unique(scaled)) == scaled.size  # no mask twice


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"clients": 1}, "clients"),
        ({"clients": 2.0}, "clients"),
        ({"bits": 1}, "bits"),
        ({"bits": 33}, "bits"),
        ({"clients": 4, "bits": 3}, "bits: a sum over 4 clients may overflow"),
        ({"clients": 128, "bits": 8}, "bits: a sum over 128 clients may overflow"),
        ({"bound": 0}, "bound"),
        ({"bound": float("inf")}, "bound"),
        ({"neighbours": 3}, "neighbours"),
        ({"neighbours": 6}, "neighbours"),
        ({"neighbours": 0}, "neighbours"),
        ({"inner": jf.channel.difference(jf.channel.quantize(3))}, "inner"),
        ({"inner": "noise"}, "inner"),
    ],
)
def test_bad_settings_are_refused(options, argument):
    options = {"clients": 6, "bits": 8, "bound": 1.0} | options
    with pytest.raises(ValueError, match=rf"^{argument}.*(got|wanted)"):
        jf.channel.secure_sum(options.pop("clients"), **options)
    assert jf.channel.secure_sum(127, bits=8, bound=1.0).levels == 1


def test_unsupported_uses_of_masks_are_refused(key):
    run = functools.partial(jf.fit, clients=sampled(), rounds=1, key=key)
    power, up = jf.pca.SubspaceIteration(2), jf.Wire(masks(), LOSSLESS)
    with pytest.raises(ValueError, match=r"^channel: its masks are for 6 clients, there are 5"):
        other = jf.channel.secure_sum(6, bits=20, bound=1.0)
        run(power, channel=jf.Wire(other, LOSSLESS))
    some = np.array([True, True, True, False, True])
    for participation in (jf.participation.uniform(3), jf.participation.mask(some)):
        with pytest.raises(ValueError, match=r"^participation: masks only cancel if every client"):
            run(power, channel=up, participation=participation)
    with pytest.raises(ValueError, match=r"^channel: masked messages can be added up"):
        run(jf.pca.LocalPower(2, alignment="sign"), channel=up)
    with pytest.raises(ValueError, match=r"^channel: .*uplink alone"):
        run(power, channel=masks())
    # PerPCA sends a moment for its start and the largest eigenvalue, which is a maximum.
    start = jf.Personalized(jnp.eye(FEATURES, 1), None)
    for options in ({}, {"warm_start": start}):
        with pytest.raises(ValueError, match=r"^channel: masked messages can be added up"):
            run(jf.pca.PerPCA(1, 1, solver="gradient"), channel=up, **options)
        with pytest.raises(ValueError, match=r"^channel: .*PerPCA sends \d+ bits in the clear"):
            run(
                jf.pca.PerPCA(1, 1, solver="gradient"),
                channel=jf.Wire(up.up, up.down, LOSSLESS),
                **options,
            )
    with pytest.raises(ValueError, match=r"^channel: .*floating-point numbers only.*int32"):
        masks().encode(key, {"x": jnp.arange(3)}, None)


@pytest.mark.slow
def test_first_messages_are_masked_too(x64):
    """Its sums are exact up to rounding, and its masks are not those of a round."""
    clients, algorithm = (
        sampled(dtype=np.float64),
        jf.pca.PerPCA(2, 1, solver="gradient", step_size=0.05),
    )
    wanted = solve(algorithm, clients, channel=LOSSLESS)
    given = solve(algorithm, clients, channel=jf.Wire(masks(bits=32, bound=20.0), LOSSLESS))
    np.testing.assert_allclose(given.history["objective"], wanted.history["objective"], rtol=1e-5)


def test_mean_products_of_factors_are_summed_as_matrices(x64):
    """Factors do not add up, so behind masks clients send the upper triangle of the product."""
    clients, algorithm = sampled(dtype=np.float64), jf.pca.OneShot(2, 1)
    wanted = solve(algorithm, clients, rounds=1)
    channel = jf.Wire(masks(bits=32, bound=1.0), LOSSLESS)
    given = solve(algorithm, clients, rounds=1, channel=channel)
    assert jf.manifolds.grassmann.distance(given.result.shared, wanted.result.shared) < 1e-7
    bits = [x.history["bits_up"][0] for x in (wanted, given)]
    assert bits == [64 * FEATURES * 3, 32 * FEATURES * (FEATURES + 1) / 2]


@pytest.mark.slow
def test_the_derivative_is_that_of_the_sum(x64):
    """It silently had the wrong sign once."""
    clients = sampled(dtype=np.float64)
    start = jf.Personalized(jnp.eye(FEATURES, 2), None)

    @jax.jit
    def slope(channel, step):
        def last(step):
            algorithm = jf.pca.PerPCA(2, 1, solver="gradient", step_size=step)
            run = solve(algorithm, clients, channel=channel, warm_start=start)
            return run.history["objective"][-1]

        return jax.grad(last)(step), jax.jvp(last, (step,), (1.0,))[1]

    wanted = slope(LOSSLESS, 0.05)
    given = slope(jf.Wire(masks(bits=32, bound=1.0), LOSSLESS), 0.05)
    np.testing.assert_allclose(given, wanted, rtol=1e-5)
    # What is clipped is not what was sent, and its derivative is gone.
    channel = masks(bound=1.0)
    change = jax.grad(lambda x: exchange(channel, x, jax.random.key(0))[1].sum())
    np.testing.assert_array_equal(change(jnp.asarray([[0.5, 2.0]] * CLIENTS)), [[1, 0]] * CLIENTS)
