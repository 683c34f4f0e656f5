"""Releases that protect persons: how far one moves them, their noise, and what it costs."""

import functools
from dataclasses import fields, replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import kstest

import jaxfed as jf
from jaxfed import privacy
from jaxfed.core.clients.guarantee import sensitivity
from jaxfed.privacy import _contributions, _gaussian
from tests.helpers import gaussian, gaussian_samples, planted_samples

FEATURES = 6
COUNTS = (20, 12, 15)
BOUND = 1.5
sampled = functools.partial(gaussian, COUNTS)
release = functools.partial(privacy.release_moments, epsilon=1.0, delta=1e-5)


# --- noise ------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 1.0, 10.0, 100.0])
def test_noise_is_calibrated_as_another_library_does(epsilon):
    import dp_accounting

    before = 0.0
    for delta in 10.0 ** -np.arange(3, 16):
        found = _gaussian.noise_of(epsilon, delta)
        np.testing.assert_allclose(
            found, dp_accounting.get_sigma_gaussian(epsilon, delta), rtol=1e-5
        )
        np.testing.assert_allclose(_gaussian.epsilon_of(found, delta), epsilon, rtol=1e-6)
        np.testing.assert_allclose(_gaussian.delta_of(epsilon, found), delta, rtol=1e-6)
        assert found > before
        before = found


def test_noise_is_of_equal_weight_in_all_directions(key):
    zero = jnp.zeros((3, 3))
    draws = jax.vmap(lambda own: _contributions.noise(own, zero))(jax.random.split(key, 100_000))
    draws = np.asarray(draws)
    for i, j in ((0, 0), (2, 2), (0, 1), (1, 2)):
        deviation = 1.0 if i == j else 2**-0.5
        assert kstest(draws[:, i, j] / deviation, "norm").pvalue > 1e-3
    across = np.stack([draws[:, 0, 0], draws[:, 0, 1], draws[:, 1, 2], draws[:, 2, 2]])
    np.testing.assert_allclose(np.corrcoef(across), np.eye(4), atol=0.02)


@pytest.mark.parametrize("rows", ["pairs", "directions", "clip"])
@pytest.mark.parametrize("neighbours", ["replace", "add_remove"])
def test_a_release_has_the_noise_that_its_guarantee_says(rows, neighbours, key):
    (samples,) = gaussian_samples((9,))
    clients = jf.Clients.from_samples([samples])
    options = {"rows": rows, "neighbours": neighbours}
    options |= {"bound": BOUND} if rows == "clip" else {}

    def noise(own):
        again = release(clients, key=own, **options), release(clients, key=own, **options)
        return again[0].data.dense[0], again[1].data.dense[0]

    keys = jax.random.split(key, 4000)
    found, again = jax.jit(jax.vmap(noise))(keys)
    np.testing.assert_array_equal(found, again)  # pure functions of the key
    np.testing.assert_array_equal(found, found.mT)
    size = BOUND**2 if rows == "clip" else 1
    far = size * (2**0.5 if neighbours == "replace" else 1) / (4 if rows == "pairs" else 9)
    deviation = _gaussian.noise_of(1.0, 1e-5) * far
    # Pairings differ between keys, but move a moment little in comparison with this noise.
    spread = np.std(np.asarray(found), axis=0) / deviation
    expected = np.where(np.eye(FEATURES), 1, 2**-0.5)
    np.testing.assert_allclose(spread, expected, rtol=0.06)


# --- sensitivity ------------------------------------------------------------------------------


def moment(rows, values, codes, people, key):
    return _contributions.moment_of(rows, BOUND, values, codes, jnp.asarray(float(people)), key)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rows", ["pairs", "directions", "clip"])
@pytest.mark.parametrize("neighbours", ["replace", "add_remove"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("people", [4, 5])
def test_no_person_moves_a_moment_further_than_the_sensitivity(rows, neighbours, several, people):
    """An adversary chooses all rows, and those of one person twice; it nearly reaches the bound."""
    counts = np.full(people, 1)
    if several:
        counts = 1 + np.arange(people) % 3
    codes = jnp.asarray(np.repeat(np.arange(people), counts))
    others = 2 * int(counts.max())  # rows of the person in the other data set: another number
    features, n = 3, len(codes)
    rest = jnp.where(codes == 0, n + others, codes)  # without person 0
    many = jnp.zeros(others, codes.dtype)
    padded = jnp.full(others, n + others)

    @jax.jit
    def distance(x, key):
        x = x.reshape(n + others, features)
        one = moment(rows, x, jnp.concatenate([codes, padded]), people, key)
        owner = (
            padded
            if neighbours == "add_remove"
            else many
            if several
            else many.at[1:].set(n + others)
        )
        other = moment(rows, x, jnp.concatenate([rest, owner]), people, key)
        return jnp.linalg.norm(one - other)

    size = 1.0 if rows != "clip" else BOUND
    bound = float(sensitivity(float(people), rows, size, neighbours))
    ascent = jax.jit(jax.value_and_grad(lambda x, key: -distance(x, key)))
    best, rng = 0.0, np.random.default_rng(0)
    for key in jax.random.split(jax.random.key(0), 8):
        start = 3 * rng.normal(size=(n + others) * features)
        found = minimize(
            lambda x, key=key: [np.asarray(y, float) for y in ascent(x, key)], start, jac=True
        )
        best = max(best, -found.fun)
        assert best <= bound * (1 + 1e-9)
    assert best >= 0.95 * bound


def test_every_person_is_paired_once_whatever_the_number_of_rows():
    for people, seed in ((4, 0), (5, 1), (8, 2), (9, 3)):
        rng = np.random.default_rng(seed)
        codes = np.sort(np.concatenate([np.arange(people), rng.integers(0, people, 7)]))
        padded = np.concatenate([codes, np.full(3, len(codes) + 3)])
        sizes = np.bincount(codes, minlength=len(padded))
        others, paired = _contributions._partners(
            jnp.asarray(padded),
            jnp.asarray(sizes),
            jnp.asarray(float(people)),
            jax.random.key(seed),
        )
        others, paired = np.asarray(others), np.asarray(paired)
        partners = {}
        for row in np.flatnonzero(paired):
            partners.setdefault(codes[row], set()).add(codes[others[row]])
        assert len(partners) == people - people % 2
        for one, (other,) in ((k, tuple(v)) for k, v in partners.items()):
            assert one != other and partners[other] == {one}


def test_pairs_differ_between_keys_and_are_uniform():
    codes, sizes = jnp.arange(4), jnp.ones(4, int)
    keys = jax.random.split(jax.random.key(0), 6000)
    partner = jax.vmap(lambda k: _contributions._partners(codes, sizes, jnp.asarray(4.0), k)[0][0])
    np.testing.assert_allclose(np.bincount(partner(keys), minlength=4)[1:] / 6000, 1 / 3, atol=0.03)


# --- what a release is ------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["pairs", "directions", "clip"])
def test_with_little_noise_it_is_the_moment_of_what_rows_become(rows, key):
    (x,) = gaussian_samples((20_000,))
    options = {"rows": rows} | ({"bound": BOUND} if rows == "clip" else {})
    found = privacy.release_moments(
        jf.Clients.from_samples([x]), epsilon=1e4, delta=1e-5, key=key, **options
    )
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    x = x * np.minimum(1, BOUND / norm) if rows == "clip" else x / norm
    # Of normal samples, pairs have the law of directions, here of half as many rows.
    tolerance = 0.02 if rows == "pairs" else 2e-4
    np.testing.assert_allclose(found.data.dense[0], x.T @ x / len(x), atol=tolerance)
    np.testing.assert_array_equal(found.counts, [20_000])


def test_units_and_centres_of_pairs_do_not_matter(key):
    arrays = gaussian_samples(COUNTS)
    plain = release(jf.Clients.from_samples(arrays), key=key)
    for scale in (2.0**-60, 2.0**40):
        other = release(jf.Clients.from_samples([x * np.float32(scale) for x in arrays]), key=key)
        np.testing.assert_array_equal(plain.data.dense, other.data.dense)
    moved = release(jf.Clients.from_samples([x + 5 for x in arrays]), key=key)
    np.testing.assert_allclose(plain.data.dense, moved.data.dense, atol=1e-5)
    huge = release(jf.Clients.from_samples([x * np.float32(1e37) for x in arrays]), key=key)
    assert np.isfinite(huge.data.dense).all()


def test_padding_buckets_and_order_do_not_matter(key):
    arrays = gaussian_samples((40, 5, 12))
    whole = release(jf.Clients.from_samples(arrays), key=key)
    bucketed = release(jf.Clients.from_samples(arrays, bucket=1.1), key=key)
    np.testing.assert_allclose(whole.data.dense, bucketed.data.dense, atol=1e-6)
    alone = release(jf.Clients.from_samples(arrays).take([1]), key=key)
    np.testing.assert_allclose(whole.data.dense[1], alone.data.dense[0], atol=1e-6)
    traced = jax.jit(lambda c: release(c, key=key))(jf.Clients.from_samples(arrays))
    np.testing.assert_allclose(whole.data.dense, traced.data.dense, atol=1e-5)
    assert traced.guarantee == whole.guarantee
    several = jax.vmap(lambda k: release(jf.Clients.from_samples(arrays), key=k).data.dense)(
        jnp.stack([key, jax.random.key(1)])
    )
    np.testing.assert_allclose(whole.data.dense, several[0], atol=1e-5)


def test_persons_of_one_row_are_rows(key):
    arrays = gaussian_samples(COUNTS)
    clients = jf.Clients.from_samples(arrays)
    names = [[f"p{i}" for i in range(len(x))] for x in arrays]
    one, other = release(clients, key=key), release(clients, person=names, key=key)
    assert (one.guarantee.unit, other.guarantee.unit) == ("row", "person")
    np.testing.assert_array_equal(one.counts, other.counts)


def test_rows_of_a_person_count_once(key):
    (x,) = gaussian_samples((12,))
    twice, ids = np.concatenate([x, x, x[:3]]), [*range(12), *range(12), *range(3)]
    for rows in ("pairs", "directions"):
        one, other = (
            _contributions.moment_of(
                rows, 1.0, jnp.asarray(values), jnp.asarray(codes), jnp.asarray(12.0), key
            )
            for values, codes in (
                (np.concatenate([x, 0 * twice[12:]]), [*range(12), *[27] * 15]),
                (twice, ids),
            )
        )
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_releases_of_one_key_have_other_noise(key):
    clients = sampled()
    found = [
        release(clients, key=key, **options).data.dense
        for options in ({}, {"neighbours": "add_remove"}, {"rows": "directions"})
    ]
    found.append(privacy.release_moments(clients, epsilon=2.0, delta=1e-5, key=key).data.dense)
    noise = [np.asarray(x)[:, *np.triu_indices(FEATURES)].ravel() for x in found]
    noise = [x - x.mean() for x in noise]
    assert np.abs(np.corrcoef(noise) - np.eye(4)).max() < 0.5


def test_projection_makes_moments_semidefinite(key):
    plain, projected = (release(sampled(), semidefinite=x, key=key) for x in (False, True))
    values, vectors = np.linalg.eigh(plain.data.dense)
    assert values.min() < 0
    positive = vectors * np.maximum(values, 0)[:, None] @ vectors.swapaxes(1, 2)
    np.testing.assert_allclose(projected.data.dense, positive, atol=1e-5)


@pytest.mark.parametrize("x64", [False, True])
def test_precision_is_that_of_the_samples(x64, key):
    with jax.enable_x64(x64):
        arrays = gaussian_samples(COUNTS, dtype=np.float64 if x64 else np.float32)
        found = release(jf.Clients.from_samples(arrays), key=key).data
        assert {x.dtype for x in jax.tree.leaves(found)} == {arrays[0].dtype}
    half = [jnp.asarray(x, jnp.bfloat16) for x in gaussian_samples(COUNTS)]
    assert release(jf.Clients.from_samples(half), key=key).data.dense.dtype == jnp.float32


# --- the record -------------------------------------------------------------------------------


def test_the_guarantee_travels_to_the_solution(key, tmp_path):
    released = release(sampled(), key=key)
    assert released.guarantee == privacy.Guarantee(
        "row", "replace", 1.0, 1e-5, _gaussian.noise_of(1.0, 1e-5), "pairs"
    )
    assert "released with epsilon 1, delta 1e-05 per row" in repr(released)
    assert released.take([0, 2]).guarantee is released.guarantee
    assert released.restrict(clients=2).guarantee is released.guarantee
    solution = jf.fit(jf.pca.PerPCA(2, 1), released, rounds=5, key=key)
    assert [each.guarantee for each in solution.releases] == [released.guarantee] * 2
    assert "privacy    epsilon 1, delta 1e-05 per row" in solution.summary()
    solution.save(tmp_path / "result.npz")
    saved = jf.load(tmp_path / "result.npz")
    assert saved.guarantees == (released.guarantee,) and saved.summary() == solution.summary()
    with pytest.raises(ValueError, match="statement says how the noise in the data"):
        privacy.spent(solution, delta=1e-5)  # which is of whole clients
    raw = jf.fit(jf.pca.PerPCA(2, 1), sampled(), rounds=5, key=key)
    assert "privacy" not in raw.summary()
    with pytest.raises(ValueError, match="got messages that were computed from only other data"):
        privacy.statement(raw)
    later = jf.fit(jf.pca.PerPCA(2, 1), released, rounds=5, key=key, warm_start=raw)
    with pytest.raises(ValueError, match="got messages that were computed from also other data"):
        privacy.statement(later)
    again = jf.fit(jf.pca.PerPCA(2, 1), released, rounds=5, key=key, warm_start=solution)
    for each in (again, solution, saved):
        assert privacy.statement(each) == privacy.statement(released)
    raw.save(tmp_path / "raw.npz")
    with pytest.raises(ValueError, match=r"^released: wanted .* got Saved"):
        privacy.statement(jf.load(tmp_path / "raw.npz"))


@pytest.mark.parametrize("change", [{"epsilon": -1.0}, {"unit": "us"}, {"delta": float("nan")}])
def test_files_with_an_impossible_guarantee_are_refused(change, key, tmp_path):
    solution = jf.fit(jf.pca.Pooled(2), release(sampled(), key=key), rounds=1, key=key)
    (release_,) = {each.guarantee for each in solution.releases}
    broken = [replace(each, guarantee=release_._replace(**change)) for each in solution.releases]
    replace(solution, releases=tuple(broken)).save(tmp_path / "result.npz")
    (name,) = change
    with pytest.raises(ValueError, match=rf"^path: wanted a file .*\({name}: wanted"):
        jf.load(tmp_path / "result.npz")


def test_runs_on_releases_share_one_program(key):
    first, *others = (
        privacy.release_moments(sampled(), epsilon=e, delta=1e-5, key=key) for e in (1.0, 2.0, 3.0)
    )
    fit = functools.partial(jf.fit, jf.pca.Pooled(2), rounds=1, key=key)
    fit(first)
    with jax.no_tracing():  # or an error
        shared = [fit(other).result.shared for other in others]
    assert not np.array_equal(*shared)


def test_components_at_home_are_the_best_beside_the_shared_ones(key):
    arrays = planted_samples((300,) * 6, 8, (3, 3), (2,))
    clients = jf.Clients.from_samples([x.astype(np.float32) for x in arrays])
    released = privacy.release_moments(clients, epsilon=5.0, delta=1e-5, key=key)
    solution = jf.fit(jf.pca.PerPCA(2, 1), released, rounds=50, key=key)
    at_home = jf.pca.fit_local(solution, clients)
    assert at_home.local.shape == (6, 8, 1)
    np.testing.assert_array_equal(at_home.shared, solution.result.shared)
    by_hand = jf.pca.fit_local(solution, [x.astype(np.float32) for x in arrays], 1)
    np.testing.assert_allclose(at_home.local, by_hand.local, atol=1e-5)
    error = [jf.metrics.reconstruction_error(x, np.float32(arrays)) for x in (solution, at_home)]
    assert error[1] < error[0]
    scores = jf.pca.transform(at_home, arrays[1].astype(np.float32), client=1)
    back = jf.pca.inverse_transform(at_home, scores, client=1)
    assert np.mean((back - arrays[1]) ** 2) < 0.4**2


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "epsilon: wanted a positive finite number"),
        ({"epsilon": -1.0}, "epsilon: wanted a positive finite number"),
        ({"delta": 0.0}, "delta: wanted a number between 0 and 1"),
        ({"delta": 1.0}, "delta: wanted a number between 0 and 1"),
        ({"rows": "all"}, "rows: wanted one of pairs, directions, clip"),
        ({"rows": "clip"}, "bound: wanted a positive finite number"),
        ({"bound": 2.0}, "bound: wanted None with rows='pairs'"),
        ({"neighbours": "both"}, "neighbours: wanted one of replace, add_remove"),
        ({"person": [[1] * 20]}, "person: wanted 3 arrays of labels"),
        ({"person": [[1] * 20, [1] * 12, [1] * 14]}, r"person\[2\]: wanted 15 labels"),
        ({"person": [[*range(19), None], [1] * 12, [1] * 15]}, r"person\[0\]: .* a gap at row 19"),
        ({"person": [[1] * 20, ["a", "", *"b" * 10], [1] * 15]}, r"person\[1\]: .* a gap at row 1"),
        ({"person": [np.r_[np.nan, :19], [1] * 12, [1] * 15]}, r"person\[0\]: .* a gap at row 0"),
        ({"person": [[1] * 20, [1] * 12, [1] * 15]}, "clients: wanted at least 4 persons"),
        ({"ledger": "a.json"}, "ledger: wanted a jaxfed.privacy.Ledger"),
        ({"key": 3}, "key: wanted one random key"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, message, key):
    with pytest.raises(ValueError, match=f"^{message}"):
        privacy.release_moments(
            sampled(), **({"epsilon": 1.0, "delta": 1e-5, "key": key} | options)
        )


def test_bad_data_are_refused_before_anything_is_spent(key, tmp_path):
    ledger = privacy.Ledger(tmp_path / "ledger", epsilon=3.0, delta=1e-5)
    equal = np.tile(gaussian_samples((1,))[0], (5, 1))
    cases = [
        (gaussian_samples((9, 3)), {}, "clients: wanted at least 4 persons each, got 3 at .* 1"),
        ([*gaussian_samples((9,)), equal], {}, "clients: wanted rows that differ, got 5 equal"),
        ([0 * equal], {"rows": "directions"}, "clients: wanted rows that are not all zero"),
    ]
    for arrays, options, message in cases:
        with pytest.raises(ValueError, match=message):
            release(jf.Clients.from_samples(arrays), key=key, ledger=ledger, **options)
    released = release(sampled(), key=key)
    with pytest.raises(ValueError, match="clients: wanted samples"):
        release(released, key=key, ledger=ledger)
    weighted = jf.Clients.from_samples(gaussian_samples(COUNTS), weights="samples")
    with pytest.raises(ValueError, match="clients: wanted weights that do not tell"):
        release(weighted, person=[np.arange(n) // 2 for n in COUNTS], key=key, ledger=ledger)
    assert ledger.spent() == 0
    with pytest.warns(UserWarning, match="delta: 0.1 is above one over the 20 persons"):
        privacy.release_moments(sampled(), epsilon=1.0, delta=0.1, key=key)


@pytest.mark.parametrize("bound", [3e-18, 1e20])
@pytest.mark.parametrize("noise", ["jax", "opendp"])
def test_a_bound_whose_square_is_lost_is_refused_before_anything_is_spent(tmp_path, bound, noise):
    ledger = privacy.Ledger(tmp_path / "ledger", epsilon=1.0, delta=1e-6)
    clients = jf.Clients.from_samples(np.full((1, 50, 3), bound, np.float32))
    options = {"epsilon": 1.0, "delta": 1e-6, "rows": "clip", "bound": bound, "noise": noise}
    with pytest.raises(ValueError, match="bound: wanted a number from 1e-13 to 2e\\+13 in float32"):
        privacy.release_moments(clients, ledger=ledger, **options)
    assert ledger.spent() == 0


# --- what leaves ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["pairs", "directions", "clip"])
@pytest.mark.parametrize("more", [{}, {"semidefinite": True}, {"sharers": 2}])
@pytest.mark.parametrize("several", [False, True])
def test_rows_reach_nothing_but_the_noisy_moments(rows, more, several, key):
    """The list of all that released clients hold, and of what depends on the rows."""
    samples = np.stack(gaussian_samples((8, 8)))
    options = {"rows": rows, "key": key, **more} | ({"bound": BOUND} if rows == "clip" else {})
    options |= {"person": [np.arange(8) // 2] * 2} if several else {}

    def of(values):
        clients = jf.Clients.from_samples(samples, names=["a", "b"], features=list("uvwxyz"))
        return release(eqx.tree_at(lambda x: x.data.values, clients, values), **options)

    values = jnp.asarray(samples, jnp.float32)
    found, moved = jax.jvp(of, (values,), (jnp.ones_like(values),))
    held = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(found)}
    assert set(held) == {".data.dense", ".data.count", ".data.trace", ".ids", ".weights"}
    for path, x in jax.tree.leaves_with_path(moved):
        noisy = jax.tree_util.keystr(path) in (".data.dense", ".data.trace")
        assert x.dtype == jax.dtypes.float0 or bool(jnp.any(x != 0)) <= noisy
    # The trace is that of the moment with its noise, and the counts are public.
    np.testing.assert_allclose(found.data.trace, jnp.trace(found.data.dense, 0, 1, 2), rtol=1e-5)
    np.testing.assert_array_equal(found.data.count, 4 if several else 8)
    fixed = {x.name for x in fields(found) if x.metadata.get("static")}
    assert fixed == {"blocks", "guarantee", "imputed", "names"}
    assert found.blocks is None and not found.imputed
    assert (
        found.names
        == jf.Clients.from_samples(samples, names=["a", "b"], features=list("uvwxyz")).names
    )
