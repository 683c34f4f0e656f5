"""Means and deviations: against NumPy's of the pooled rows, through channels, layouts and files."""

import functools

import chex
import jax
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.preprocess import Standardization, Standardize
from tests import helpers

FEATURES = 4
# Deviations; the means are a thousand times as large.
SPREAD = np.array([0.3, 1.0, 2.0, 5.0])
fit = functools.partial(helpers.fit, rounds=1)


def tables(counts=(20, 35, 8), seed=0):
    rng = np.random.default_rng(seed)
    draws = [rng.normal(size=(n, FEATURES)) + rng.normal(size=FEATURES) for n in counts]
    return [((1000 + y) * SPREAD).astype(np.float32) for y in draws]


def expected(arrays, center, scale):
    """By NumPy in double precision: each client's mean and scale."""
    arrays = [np.asarray(y, float) for y in arrays]
    pooled = np.concatenate(arrays)
    zero = np.zeros(FEATURES)
    means = {"shared": pooled.mean(0), "none": zero}
    means = [y.mean(0) if center == "local" else means[center] for y in arrays]
    left = np.concatenate([y - mean for y, mean in zip(arrays, means, strict=True)])
    scales = {
        "shared": [left.std(0)] * len(arrays),
        "local": [y.std(0) for y in arrays],
        "energy": [
            np.full(FEATURES, np.sqrt(np.mean((y - mean) ** 2)))
            for y, mean in zip(arrays, means, strict=True)
        ],
        "none": [zero + 1] * len(arrays),
    }
    return np.stack(means), np.stack(scales[scale])


@pytest.mark.parametrize("scale", ["shared", "local", "energy", "none"])
@pytest.mark.parametrize("center", ["shared", "local", "none"])
def test_means_and_deviations_equal_those_of_the_pooled_rows(center, scale):
    arrays = tables()
    found = fit(Standardize(center, scale), arrays).result
    mean, deviation = expected(arrays, center, scale)
    np.testing.assert_allclose(found.local.mean, mean, rtol=1e-6)
    # About a mean that is not the client's own, the rounding of that mean counts; in the scales of
    # single clients, that of squares, whose order of addition JAX versions choose (5e-6 by 0.12).
    rtol = 1e-5 if (center, scale) == ("shared", "energy") or scale == "local" else 1e-6
    np.testing.assert_allclose(found.local.scale, deviation, rtol=rtol)
    if found.shared is not None:
        wanted = mean[0], deviation[0]
        chex.assert_trees_all_close((found.shared.mean, found.shared.scale), wanted, rtol=1e-6)


def test_many_samples_cost_no_precision():
    (table,) = tables(counts=(300_001,))
    found = fit(Standardize(), [table]).result.shared
    pooled = table.astype(float)
    wanted = pooled.mean(0), pooled.std(0)
    chex.assert_trees_all_close((found.mean, found.scale), wanted, rtol=1e-6)


def test_only_zero_weights_matter():
    arrays = tables()
    whole = fit(Standardize(), jf.Clients.from_samples(arrays, weights=[0.1, 0.7, 0.0]))
    part = fit(Standardize(), arrays[:2])
    chex.assert_trees_all_close(whole.result.shared, part.result.shared, rtol=1e-6)


MASKS = jf.channel.secure_sum(3, bits=32, bound=4e5)


def check_pooled(found, arrays):
    mean, deviation = expected(arrays, "shared", "shared")
    chex.assert_trees_all_close(found, (mean[0], deviation[0]), rtol=1e-6)


@pytest.mark.slow
def test_sums_can_be_masked():
    arrays = tables()
    # The sums before the round are of the size of the data, those of the round are of differences.
    wire = jf.Wire(jf.channel.secure_sum(3, bits=32, bound=2e3), jf.channel.lossless(), MASKS)
    found = fit(Standardize(), arrays, channel=wire).result.shared
    check_pooled((found.mean, found.scale), arrays)


@pytest.mark.slow
def test_sums_can_be_masked_on_flower(tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    from jaxfed.deploy import exchange
    from tests.deploy.federation import Federation

    monkeypatch.setattr(exchange, "PAUSE", 0.0)
    arrays = tables()
    wire = jf.Wire(jf.channel.secure_sum(3, bits=32, bound=2e3), jf.channel.lossless(), MASKS)
    clients = jf.Clients.from_samples(arrays)
    federation = Federation(tmp_path, Standardize(), clients, channel=wire)
    shared = federation.run(1).result.shared
    check_pooled((shared["shared.mean"], shared["shared.scale"]), arrays)


def test_nothing_is_sent_if_nothing_is_shared():
    history = fit(Standardize("local", "energy"), tables()).history
    assert history["bits_up"][-1] == 0


def test_a_minority_of_clients_may_send_arbitrary_values():
    arrays = tables(counts=(30,) * 7)
    wrong = [*arrays[:4], *(1e6 * y for y in arrays[4:])]
    clients = jf.Clients.from_samples(wrong, weights=[1, 1, 1, 1, 1, 1, 0])
    found = fit(Standardize(robust=True), clients).result.shared
    means = np.stack([y.astype(float).mean(0) for y in wrong[:6]])
    mean = np.median(means, 0)
    squares = [np.mean((y - mean) ** 2, 0) for y in wrong[:6]]
    wanted = mean, np.sqrt(np.median(squares, 0))
    np.testing.assert_allclose(found.mean, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(found.scale, wanted[1], rtol=1e-4)
    hidden = jf.Wire(MASKS, jf.channel.lossless())
    with pytest.raises(ValueError, match=r"^channel: masked messages can be added up"):
        fit(Standardize(robust=True), tables(), channel=hidden)


def layouts(arrays, folder):
    """The same clients, however their samples are stored."""
    for i, table in enumerate(arrays):
        np.save(folder / f"{i}.npy", table)
    maps = [np.load(folder / f"{i}.npy", mmap_mode="r") for i in range(len(arrays))]
    return {
        "padded": jf.Clients.from_samples(arrays),
        "buckets": jf.Clients.from_samples(arrays, bucket=1.1),
        "source": jf.Clients.from_source(maps, block_bytes=600),
        "chosen": jf.Clients.from_source(maps, bucket=None).take(np.arange(3)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded", "buckets", "source", "chosen"])
def test_clients_are_transformed_in_any_layout(name, tmp_path):
    arrays = tables()
    clients = layouts(arrays, tmp_path)[name]
    for algorithm in (Standardize("local", "shared"), Standardize()):
        result = fit(algorithm, clients).result
        units = result.local if result.shared is None else result.shared
        after = units.transform(clients)
        mean, deviation = expected(arrays, algorithm.center, algorithm.scale)
        for i, table in enumerate(arrays):
            wanted = (table - mean[i]) / deviation[i]
            if name in ("source", "chosen"):
                own = after.data.reader.source[i]
            else:
                own = after.take([i]).data.values[0, : len(table)]
            np.testing.assert_allclose(own, wanted, atol=2e-3)  # the data's own rounding
            rows = units.transform(table, client=i)
            np.testing.assert_allclose(rows, wanted, atol=2e-3)
            back = units.inverse_transform(rows, client=i)
            np.testing.assert_allclose(back, table, rtol=1e-6)
        again = fit(Standardize(algorithm.center, "shared"), after).result.local
        np.testing.assert_allclose(again.scale, np.ones((3, FEATURES)), rtol=1e-4)
        if clients.layout.in_memory:
            before = units.inverse_transform(after)
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), before.data, clients.data
            )


@pytest.mark.slow
def test_a_source_in_other_units_has_another_identity(tmp_path):
    clients = layouts(tables(), tmp_path)["source"]
    found = [
        fit(Standardize("local", scale), clients).result.local.transform(clients)
        for scale in ("local", "energy")
    ]
    marks = [each.identity().data for each in (clients, *found, found[0].take(np.arange(3)))]
    assert len({tuple(mark) for mark in marks[:3]}) == 3
    np.testing.assert_array_equal(marks[3], marks[1])


def test_constant_features_are_divided_by_their_magnitude_and_zeros_by_one():
    arrays = tables()
    for y in arrays:
        y[:, 1] = 0.1
        y[:, 2] = 0
    for algorithm in (Standardize(), Standardize("local"), Standardize("local", "local")):
        units = fit(algorithm, arrays).result.local
        np.testing.assert_allclose(units.scale[:, 1], 0.1)
        np.testing.assert_array_equal(units.scale[:, 2], 1)
        np.testing.assert_allclose(units.transform(arrays[0], client=0)[:, 1:3], 0, atol=1e-7)
    flat = jf.Clients.from_samples([np.full((4, 2), 0.1, np.float32)])
    units = fit(Standardize("local", "energy"), flat).result.local
    np.testing.assert_allclose(units.scale, 0.1)


def test_new_clients_get_their_own():
    arrays = tables()
    algorithm = Standardize("shared", "energy")
    solution = fit(algorithm, arrays)
    new = jf.Clients.from_samples(tables(counts=(11,), seed=1))
    found = jf.personalize(algorithm, solution, new, rounds=0).local
    np.testing.assert_array_equal(found.mean[0], solution.result.local.mean[0])
    rows = found.transform(new).data.values
    np.testing.assert_allclose(np.mean(np.square(rows)), 1, rtol=1e-5)


@pytest.mark.slow
def test_a_client_of_another_scale_leaves_the_shared_subspace_unchanged():
    key = jax.random.key(0)
    data = jf.data.perpca_synthetic(
        key=key,
        clients=30,
        features=12,
        shared_rank=2,
        local_rank=2,
        samples=60,
        noise_variance=0.09,
    )
    arrays = [np.asarray(y) for y in data.samples]

    def error(arrays):
        clients = jf.Clients.from_samples(arrays)
        units = fit(Standardize("local", "energy"), clients).result.local
        found = jf.fit(jf.pca.PerPCA(2, 2), units.transform(clients), rounds=60, key=key)
        return float(jf.metrics.projector_distance(found.result.shared, data.shared))

    alike, one_of_another_size = error(arrays), error([1000 * arrays[0], *arrays[1:]])
    assert abs(one_of_another_size / alike - 1) < 0.1


def test_a_solution_is_saved_with_them(tmp_path):
    clients = jf.Clients.from_samples(tables())
    units = fit(Standardize(), clients).result.local
    solution = fit(jf.pca.OneShot(1, 1), units.transform(clients))
    solution.save(tmp_path / "result.npz", preprocessing=units)
    found = jf.load(tmp_path / "result.npz").preprocessing
    chex.assert_trees_all_equal(found, units)
    solution.save(tmp_path / "result.npz")
    assert jf.load(tmp_path / "result.npz").preprocessing is None
    with pytest.raises(ValueError, match=r"^preprocessing: wanted a jaxfed\.preprocess"):
        solution.save(tmp_path / "result.npz", preprocessing=units.mean)


def test_bad_input_is_refused():
    clients = jf.Clients.from_samples(tables())
    units = Standardization(np.zeros((3, FEATURES)), np.ones((3, FEATURES)))
    rows = np.ones((2, FEATURES))
    views = jf.gcca.Views.from_arrays(tables(counts=(8, 8)))
    moments = jf.Clients.from_moments(np.eye(FEATURES)[None])
    for call, message in [
        (lambda: Standardization(np.zeros(2), np.zeros(2)), "^scale: wanted a positive"),
        (lambda: Standardization(np.zeros(2), np.ones(3)), "^scale: wanted as many"),
        (lambda: Standardization(np.full(2, np.nan), np.ones(2)), "^mean: wanted finite"),
        (lambda: Standardization(np.zeros((1, 1, 2)), np.ones((1, 1, 2))), "^mean: wanted"),
        (lambda: units.transform(rows), "^client: wanted whose rows .* 0 to 2, got None"),
        (lambda: units.transform(rows, client=3), "^client: .* got 3"),
        (lambda: units.transform(rows[:, :2], client=0), "^samples: wanted an array"),
        (lambda: units.transform(clients.take([0])), "^samples: wanted clients and features"),
        (lambda: units.transform(moments), "^clients: wanted samples, .* of type Moment"),
        (lambda: fit(Standardize(), views), "^clients: wanted samples, .* of type View"),
        (lambda: jf.Clients.from_samples([]), "^arrays: at least one client is needed"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
