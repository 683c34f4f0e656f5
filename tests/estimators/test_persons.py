"""Estimators whose noise protects persons: what it covers, and what it does not."""

import functools

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
