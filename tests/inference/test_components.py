"""Confidence of the components of personalized PCA."""

import functools

import jax
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.inference import Confidence, Interval
from jaxfed.inference.components import _tail_index

KEY = jax.random.key(0)
OPTIONS = {"resamples": 100, "runs_at_once": 50}
FEW = {"resamples": 10, "runs_at_once": 5}  # where no width of an interval counts


def clients_of(scales, samples=200, clients=6, seed=0):
    """Clients with shared axes along the first features, and a local one each."""
    rng = np.random.default_rng(seed)
    features = len(scales) + clients + 2
    tables = 0.3 * rng.standard_normal((clients, samples, features))
    tables[:, :, : len(scales)] += rng.standard_normal((clients, samples, len(scales))) * scales
    for i in range(clients):
        tables[i, :, len(scales) + i] += rng.standard_normal(samples)
    return jf.Clients.from_samples(tables)


@functools.cache
def found(scales, **options):
    clients = clients_of(scales, **options)
    solution = jf.fit(jf.pca.PerPCA(len(scales), 1), clients, rounds=40, key=KEY)
    return solution, clients, jf.inference.confidence(solution, clients, key=KEY, **OPTIONS)


@pytest.mark.slow
def test_axes_with_other_variances_are_identified(x64):
    solution, _, sure = found((3.0, 2.0, 1.0))
    assert sure.groups == ((0,), (1,), (2,))
    np.testing.assert_allclose(sure.axes[:3], np.eye(3), atol=0.2)
    assert sure.group_angles.max() < 0.3 and sure.angle < 0.2
    # The truth, which here is known.
    shares = np.asarray([9, 4, 1]) + 0.3**2
    assert np.all((sure.variances.lower < shares) & (shares < sure.variances.upper))
    total = shares.sum() + 1 + 0.3**2 * 8
    assert sure.shared_energy.lower < shares.sum() / total < sure.shared_energy.upper
    assert solution.result.shared.shape == sure.axes.shape == sure.axes_std.shape
    assert sure.remarks == ()


@pytest.mark.slow
def test_axes_with_equal_variances_are_one_group(x64):
    _, _, sure = found((3.0, 1.5, 1.5))
    assert sure.groups == ((0,), (1, 2))
    # As a group they are as sure as others; alone they would be anywhere.
    assert sure.group_angles[1] < 0.3


@pytest.mark.parametrize(("degrees", "samples"), [(3, 600), (3, 20_000), (20, 600), (20, 20_000)])
def test_the_tail_index_tells_heavy_tails(degrees, samples):
    """A t distribution has as many finite moments as degrees of freedom."""
    rng = np.random.default_rng(0)
    x = rng.standard_t(degrees, size=(4, samples, 3)) * [[[1e-6]], [[1]], [[2]], [[1e6]]]
    clients = jf.Clients.from_samples([x[0, : samples // 2], *x[1:]])
    index = _tail_index(clients, np.eye(3)[:, :2])
    assert (index < 4) == (degrees == 3)
    if samples > 1000 and degrees == 3:
        assert index == pytest.approx(3, rel=0.1)


@pytest.mark.slow
def test_heavy_tails_are_said(x64):
    x = np.random.default_rng(0).standard_t(2.5, size=(6, 200, 6)) * [3, 2, 1, 1, 1, 1]
    clients = jf.Clients.from_samples(x)
    solution = jf.fit(jf.pca.PerPCA(1, 1), clients, rounds=40, key=KEY)
    heavy = jf.inference.confidence(solution, clients, key=KEY, **FEW)
    assert any("scores have a tail index of" in remark for remark in heavy.remarks)


def test_a_tail_that_is_not_known_is_none():
    for rows in (np.zeros((8, 3)), np.ones((400, 3)), np.eye(3)):
        index = _tail_index(jf.Clients.from_samples([rows, rows]), np.eye(3)[:, :1])
        assert index == np.inf


def test_scores_vary_with_the_axes(x64):
    _, _, sure = found((3.0, 2.0, 1.0))
    samples = np.random.default_rng(1).standard_normal((4, len(sure.axes)))
    scores = sure.scores(samples)
    np.testing.assert_allclose(scores.estimate, samples @ sure.axes)
    reach = 1.959964 * np.std(samples @ sure.replicates, axis=0, ddof=1)
    np.testing.assert_allclose(scores.upper - scores.estimate, reach, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^samples: wanted"):
        sure.scores(samples[:, :-1])


@pytest.mark.slow
def test_what_to_know_is_said(x64):
    _, _, few = found((3.0,), samples=6)
    assert any("fewer than 20 samples" in remark for remark in few.remarks)
    clients = jf.Clients.from_samples(np.random.default_rng(0).standard_normal((6, 6, 9)))
    solution = jf.fit(jf.pca.PerPCA(1, 1), clients, rounds=40, key=KEY)
    nothing = jf.inference.confidence(solution, clients, key=KEY, **OPTIONS)
    assert any("do not determine" in remark for remark in nothing.remarks)
    assert "do not determine" in str(nothing)


@pytest.mark.slow
def test_buckets_are_the_same_clients(x64):
    counts = (20, 60, 30, 60, 25, 40)
    tables = [x[:n] for x, n in zip(clients_of((2.0,)).data.values, counts, strict=True)]
    both = []
    for bucket in (None, 1.2):
        clients = jf.Clients.from_samples(tables, bucket=bucket)
        solution = jf.fit(jf.pca.PerPCA(1, 1), clients, rounds=40, key=KEY)
        both.append(jf.inference.confidence(solution, clients, key=KEY, **FEW))
    np.testing.assert_allclose(both[0].angle, both[1].angle, rtol=1e-6)
    np.testing.assert_allclose(both[0].distance.lower, both[1].distance.lower, rtol=1e-6)


@pytest.mark.slow
def test_other_solutions_are_refused():
    clients = clients_of((2.0,))
    pooled = jf.fit(jf.pca.SubspaceIteration(1), clients, rounds=5, key=KEY)
    with pytest.raises(ValueError, match=r"^solution: wanted shared components with local ones"):
        jf.inference.confidence(pooled, clients, key=KEY)
    solution = jf.fit(jf.pca.PerPCA(1, 1), clients, rounds=2, key=KEY)
    with pytest.raises(ValueError, match=r"^level: wanted"):
        jf.inference.confidence(solution, clients, key=KEY, level=95)
    with pytest.raises(ValueError, match=r"wanted samples"):
        moments = jf.Clients.from_moments(np.stack([np.eye(9)] * 6))
        jf.inference.confidence(solution, moments, key=KEY)


@pytest.mark.slow
def test_the_farthest_clients_are_printed():
    shares = np.linspace(0.1, 0.2, 12)
    interval = Interval(np.asarray(0.5), np.asarray(0.4), np.asarray(0.6))
    found = Confidence(
        0.95,
        "samples",
        0.1,
        ((0,),),
        np.asarray([0.1]),
        np.eye(3)[:, :1],
        np.zeros((3, 1)),
        interval,
        interval,
        interval,
        Interval(shares, shares, shares),
        np.zeros((2, 3, 1)),
        (),
    )
    lines = [line for line in str(found).splitlines() if "outside shared" in line]
    assert [int(line.split()[3]) for line in lines] == list(range(11, 1, -1))
    assert str(found).splitlines()[-1] == "and 2 more, closer to the shared subspace"


@pytest.mark.slow
def test_half_precision_is_computed_in_single():
    half = clients_of((2.0,)).data.values.astype(jax.numpy.bfloat16)
    both = []
    for values in (half, half.astype(np.float32)):
        clients = jf.Clients.from_samples(values)
        model = jf.pca.PerPCA(1, 1, start="common")
        solution = jf.fit(model, clients, rounds=40, key=KEY)
        both.append(jf.inference.confidence(solution, clients, key=KEY, **FEW))
    np.testing.assert_allclose(both[0].shared_energy, both[1].shared_energy, rtol=1e-3)
    np.testing.assert_allclose(both[0].angle, both[1].angle, rtol=0.02)


@pytest.mark.slow
def test_clients_without_energy_and_noise_have_intervals(x64):
    values = np.array(clients_of((2.0,)).data.values)
    values[:, :, 2:] = 0
    values[0] = 0
    clients = jf.Clients.from_samples(values)
    solution = jf.fit(jf.pca.PerPCA(1, 1, start="common"), clients, rounds=40, key=KEY)
    sure = jf.inference.confidence(solution, clients, key=KEY, **FEW)
    assert all(np.isfinite(np.asarray(each)).all() for each in jax.tree.leaves(sure.distance))
    with pytest.raises(ValueError, match=r"^clients: wanted complete samples.*Impute"):
        gaps = jf.Clients.from_samples(np.where(values > 3, np.nan, values), missing="mask")
        jf.inference.confidence(solution, gaps, key=KEY)
