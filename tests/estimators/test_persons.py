"""Estimators whose noise protects persons: what it covers, and what it does not."""

import functools
import pickle

import jax
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils import check_random_state

import jaxfed as jf
from jaxfed import estimators, privacy

SEED, COUNTS, FEATURES = 3, (60, 90, 40), 8
KEY = jax.random.key(check_random_state(SEED).randint(2**31 - 1))
NAMES = np.repeat(["a", "b", "c"], COUNTS)
PERSON = np.concatenate([[f"p{row // 2}" for row in range(n)] for n in COUNTS])
OPTIONS = {"epsilon": 5.0, "center": False, "random_state": SEED}


def sampled():
    """Clients' rows about their own means, in single precision."""
    rng = np.random.default_rng(0)
    scales = np.linspace(3, 0.5, FEATURES)
    tables = [rng.normal(size=(n, FEATURES)) * np.roll(scales, i) for i, n in enumerate(COUNTS)]
    return [np.float32(table - table.mean(axis=0)) for table in tables]


def span(components):
    return np.swapaxes(components, -1, -2) @ components


@pytest.mark.parametrize("person", [None, PERSON], ids=["rows", "persons"])
@pytest.mark.parametrize("rank", [0, 1])
def test_components_are_of_the_release_and_all_else_is_of_the_rows(rank, person):
    tables = sampled()
    if rank:
        model = estimators.PersonalizedPCA(2, rank, rounds=30, n_init=1, **OPTIONS)
        algorithm, rounds = jf.pca.PerPCA(2, rank), 30
    else:
        model, algorithm, rounds = estimators.FederatedPCA(2, **OPTIONS), jf.pca.Pooled(2), 1
    X = np.concatenate(tables)
    order = np.random.default_rng(1).permutation(len(X))
    labels = None if person is None else person[order]
    model = clone(model).fit(X[order], groups=NAMES[order], person=labels)

    tables = [X[order][NAMES[order] == name] for name in "abc"]
    owners = None if person is None else [labels[NAMES[order] == name] for name in "abc"]
    clients = jf.Clients.from_samples(tables)
    released = privacy.release_moments(clients, epsilon=5.0, delta=1e-5, person=owners, key=KEY)
    solution = jf.fit(algorithm, released, rounds=rounds, key=KEY)
    shared = np.asarray(solution.result.shared).T
    np.testing.assert_allclose(span(model.components_), span(shared), atol=1e-5)
    # In an order that is of the release as well.
    weights = released.counts / released.counts.sum()
    moment = model.components_ @ np.tensordot(weights, released.data.dense, 1) @ model.components_.T
    assert abs(moment[0, 1]) < 1e-5 * moment[0, 0] and moment[0, 0] > moment[1, 1]

    if rank:
        local = np.asarray(jf.pca.fit_local(solution, clients).local).swapaxes(1, 2)
        np.testing.assert_allclose(span(model.local_components_), span(local), atol=1e-4)
    scores = model.transform(X, groups=NAMES)
    shares = np.sum(scores**2, axis=0) / np.sum(X**2)
    np.testing.assert_allclose(model.explained_variance_ratio_, shares, rtol=1e-4)
    assert model.guarantee_ == released.guarantee
    unit = "person" if person is not None else "row"
    assert f"epsilon 5, delta 1e-05 per {unit}" in model.summary_
    assert privacy.statement(model) == privacy.statement(released)
    assert privacy.statement(model.saved_) == privacy.statement(released)


def of_own_rows(shared, table, prior):
    """The most likely components under the prior, by the formulas of the model."""
    rank, (rows, features) = len(shared), table.shape
    moment = table.T @ table / rows
    values = np.linalg.eigvalsh(moment)[::-1]
    noise = values[rank:].sum() * rows / ((rows - rank) * (features - rank))
    score = (values.sum() - features * noise) / rank
    joint = rows / (noise * (1 + noise / score)) * moment + shared.T @ shared / prior
    return np.linalg.eigh(joint)[1][:, ::-1][:, :rank].T


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_prior_is_of_the_release_and_components_under_it_are_of_the_rows(dtype):
    tables = [dtype(table) for table in sampled()]
    X = np.concatenate(tables)
    model = estimators.HierarchicalBayesPCA(2, **OPTIONS).fit(X, groups=NAMES)
    with jax.enable_x64(dtype is np.float64):
        clients = jf.Clients.from_samples(tables)
        options = {"epsilon": 5.0, "delta": 1e-5, "semidefinite": True, "key": KEY}
        released = privacy.release_moments(clients, **options)
        algorithm = jf.pca.HierarchicalPCA(2, solver="eigenvectors")
        solution = jf.fit(algorithm, released, rounds=30, key=KEY)
    shared = np.asarray(solution.result.shared).T
    np.testing.assert_allclose(span(model.components_), span(shared), atol=1e-5)
    prior = float(solution.history["prior_variance"][-1])
    assert model.prior_variance_ == pytest.approx(prior, rel=1e-4)
    local = [of_own_rows(model.components_, table.astype(float), prior) for table in tables]
    np.testing.assert_allclose(span(model.local_components_), span(np.stack(local)), atol=1e-4)
    assert model.guarantee_ == released.guarantee
    assert privacy.statement(model) == privacy.statement(released)
    # Directions of rows have no unit, and a given prior has none either.
    for unit in (1e-9, 1e9):
        other = clone(model).fit(X * dtype(unit), groups=NAMES)
        np.testing.assert_allclose(other.local_components_, model.local_components_, atol=1e-4)
    given = clone(model).set_params(prior_variance=0.02).fit(X, groups=NAMES)
    assert given.prior_variance_ == 0.02
    new = [tables[0][:9] for _ in range(2)]
    found = given.personalize(new[0], groups=["new"] * 9).local_components_[-1]
    wanted = of_own_rows(given.components_, new[0].astype(float), 0.02)
    np.testing.assert_allclose(span(found), span(wanted), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 3.0, 10.0])
def test_a_prior_of_a_release_supports_clients_as_one_without_noise(epsilon):
    """On data of the model: no worse than without noise but for the centre of the prior."""
    rng, options = np.random.default_rng(0), {"center": False, "random_state": 0}
    frame = np.linalg.qr(rng.normal(size=(15, 2)))[0]
    own = [np.linalg.qr(frame + 0.1 * rng.normal(size=(15, 2)))[0] for _ in range(12)]
    tables = [rng.normal(size=(1000, 2)) @ x.T for x in own]
    X = np.concatenate([x + 0.4 * rng.normal(size=x.shape) for x in tables])
    groups, exact = np.repeat(np.arange(12), 1000), np.concatenate(tables)
    errors = {}
    for name, given in (("noise", epsilon), ("none", None)):
        model = estimators.HierarchicalBayesPCA(2, epsilon=given, **options)
        model.fit(X, groups=groups)
        back = model.inverse_transform(model.transform(exact, groups), groups)
        errors[name] = np.sum((back - exact) ** 2)
    assert errors["noise"] < 1.1 * errors["none"]
    shared = model.set_params(epsilon=epsilon).fit(X, groups=groups).components_
    personalized = estimators.PersonalizedPCA(2, 1, n_init=1, epsilon=epsilon, **options)
    other = personalized.fit(X, groups=groups).components_
    distances = [2 - np.linalg.norm(frame.T @ x.T) ** 2 for x in (shared, other)]
    assert distances[0] < 1.1 * distances[1]


@pytest.mark.parametrize(
    "model",
    [
        estimators.FederatedPCA,
        pytest.param(estimators.PersonalizedPCA, marks=pytest.mark.slow),
        pytest.param(estimators.HierarchicalBayesPCA, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_exact_noise_is_of_the_system_whatever_the_seed(model):
    pytest.importorskip("opendp")
    X = np.concatenate(sampled())
    exact = model(2, noise="opendp", rounds=5, **OPTIONS)
    assert clone(exact).get_params()["noise"] == "opendp"
    one, other = (clone(exact).fit(X, groups=NAMES) for _ in range(2))
    assert one.guarantee_.mechanism == "discrete Gaussian"
    assert "generator for simulations" not in privacy.statement(one)
    assert not np.allclose(span(one.components_), span(other.components_))
    again = pickle.loads(pickle.dumps(one))
    np.testing.assert_array_equal(again.transform(X, NAMES), one.transform(X, NAMES))


def test_noise_is_new_without_a_seed():
    X = np.concatenate(sampled())
    model = estimators.FederatedPCA(2, **OPTIONS).set_params(random_state=None)
    one, other = (clone(model).fit(X, groups=NAMES).components_ for _ in range(2))
    assert not np.allclose(one, other)
    plain = model.set_params(epsilon=None).fit(X, groups=NAMES)
    assert plain.guarantee_ is None
    with pytest.raises(ValueError, match=r"^released: wanted .*with epsilon, got FederatedPCA"):
        privacy.statement(plain)


Personalized = functools.partial(estimators.PersonalizedPCA, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0}, "epsilon: wanted a positive finite number, got 0"),
        ({"epsilon": "1"}, "epsilon: wanted a positive finite number, got '1'"),
        ({"delta": 1.0}, "delta: wanted a number between 0 and 1, got 1.0"),
        ({"noise": "numpy"}, "noise: wanted one of jax, opendp, got 'numpy'"),
        ({"noise": True}, "noise: wanted .*, got True"),
        ({"noise": "opendp", "epsilon": None}, "noise: wanted 'jax', .* without epsilon, got 'op"),
        ({"center": True}, "center: wanted False with epsilon, .* each client's own mean .*True"),
        ({"shrinkage": True}, "shrinkage: wanted False with epsilon, .*, got True"),
        ({"robust": True}, "robust: wanted False with epsilon, .*, got True"),
        ({"forgetting": 0.5}, "forgetting: wanted None with epsilon, .*, got 0.5"),
        ({"impute": (1, 1)}, r"impute: wanted None with epsilon, .*, got \(1, 1\)"),
        ({"bootstrap": 50}, "bootstrap: wanted 0 with epsilon, .*, got 50"),
        ({"person": PERSON[:-1]}, "Found input variables with inconsistent numbers of samples"),
        ({"person": PERSON[:, None]}, "person: wanted one label for each row"),
        ({"person": [None, *PERSON[1:]]}, "person: wanted labels .*got NoneType"),
        ({"person": ["", *PERSON[1:]]}, r"person\[0\]: wanted whose row .* got a gap at row 0"),
        ({"person": NAMES}, "clients: wanted at least 4 persons each, got 1"),
        ({"person": PERSON, "epsilon": None}, "person: wanted None without epsilon"),
        ({"groups": np.arange(len(NAMES)) // 3}, "clients: wanted at least 4 persons each, got 3"),
    ],
)
def test_what_is_not_covered_is_refused_before_anything_is_released(options, message, monkeypatch):
    spent = []
    monkeypatch.setattr("jaxfed.privacy.moments.released", lambda *_: spent.append(1))
    told = {"groups": NAMES}
    told |= {name: x for name, x in options.items() if name in ("groups", "person")}
    model = Personalized(**{name: x for name, x in options.items() if name not in told})
    with pytest.raises(ValueError, match=f"^{message}"):
        model.fit(np.concatenate(sampled()), **told)
    assert not spent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_variance": 0.1}, "noise_variance: wanted None with epsilon, .* no unit, got 0.1"),
        ({"noise_variance": np.ones(2)}, "noise_variance: wanted None with epsilon, .* no unit"),
        ({"center": True}, "center: wanted False with epsilon"),
        ({"robust": True}, "robust: wanted False with epsilon"),
        ({"epsilon": -1.0}, "epsilon: wanted a positive finite number, got -1.0"),
        ({"prior_variance": -1.0}, "prior_variance: wanted a positive"),
        ({"n_components": 8}, "X has 8 feature|.*minimum of 9"),
    ],
)
def test_a_prior_of_a_release_refuses_what_is_not_covered(options, message, monkeypatch):
    spent = []
    monkeypatch.setattr("jaxfed.privacy.moments.released", lambda *_: spent.append(1))
    model = estimators.HierarchicalBayesPCA(**(OPTIONS | options))
    with pytest.raises(ValueError, match=f"^({message})"):
        model.fit(np.concatenate(sampled()), groups=NAMES)
    assert not spent


def test_a_ledger_counts_releases_and_refuses_those_beyond_its_budget(tmp_path):
    ledger = privacy.Ledger(tmp_path / "ledger", epsilon=7.5, delta=1e-5)
    model = estimators.FederatedPCA(2, ledger=ledger, **OPTIONS)
    X = np.concatenate(sampled())
    for fitted in (model, clone(model)):
        if fitted is model:
            fitted.fit(X, groups=NAMES)
            assert ledger.spent() == pytest.approx(5.0)
            continue
        with pytest.raises(ValueError, match=r"^epsilon: wanted at most 7\.5 for all releases"):
            fitted.fit(X, groups=NAMES)
    assert ledger.spent() == pytest.approx(5.0)
    with pytest.raises(ValueError, match=r"^ledger: wanted None without epsilon"):
        model.set_params(epsilon=None).fit(X, groups=NAMES)
    with pytest.raises(ValueError, match=r"^ledger: wanted a jaxfed\.privacy\.Ledger or None"):
        model.set_params(epsilon=5.0, ledger="file").fit(X, groups=NAMES)


def test_moments_without_noise_are_not_kept():
    with pytest.raises(ValueError, match=r"^epsilon: wanted None in partial_fit, .* got 5.0"):
        Personalized().partial_fit(np.concatenate(sampled()), groups=NAMES)
