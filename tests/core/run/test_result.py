"""What one function takes as a fitted model, all take; what needs a run says so."""

import importlib
import inspect
import pkgutil

import chex
import jax
import numpy as np
import pytest

import jaxfed as jf
from jaxfed import estimators

M, N, D = 4, 12, 5
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
SAMPLES = RNG.normal(size=(M, N, D)).astype(np.float32) * np.float32([3, 2.5, 2, 1, 0.5])
CLIENTS = jf.Clients.from_samples(SAMPLES)
VIEWS = jf.gcca.Views.from_arrays([RNG.normal(size=(9, 3)).astype(np.float32) for _ in range(M)])
PUBLIC = [
    (f"{module.name}.{name}", function)
    for module in pkgutil.iter_modules(jf.__path__)
    if not module.name.startswith("_") and module.name not in ("cli", "core", "deploy", "kernels")
    for home in [importlib.import_module(f"jaxfed.{module.name}")]
    for name in dir(home)
    for function in [getattr(home, name)]
    if inspect.isfunction(function) and function.__module__.startswith("jaxfed")
] + [("personalize", jf.personalize)]


def learned(kind, tmp_path):
    """A solution of this family, its result and what is loaded from its file, and an estimator."""
    key = {"key": KEY, "rounds": 2}
    estimator = None
    if kind == "pca":
        solution = jf.fit(jf.pca.PerPCA(1, 1), CLIENTS, **key)
        estimator = estimators.PersonalizedPCA(1, 1, rounds=2, n_init=1, center=False)
        estimator.fit(np.concatenate(SAMPLES), groups=np.repeat(np.arange(M), N))
    elif kind == "gcca":
        solution = jf.fit(jf.gcca.MaxVar(2), VIEWS, **key)
        estimator = estimators.FederatedGCCA(2, rounds=2).fit(list(np.asarray(VIEWS.data.values)))
    else:
        solution = jf.fit(jf.nmf.INMF(2), jf.Clients.from_samples(np.abs(SAMPLES)), **key)
    solution.save(tmp_path / "result.npz")
    forms = [solution, solution.result, jf.load(tmp_path / "result.npz")]
    return forms if estimator is None else [*forms, estimator, estimator.saved_]


# How to call the functions that take a fitted model, by name of their module.
SCORES = np.ones((M, N, 2), np.float32)
TAKE = {
    "pca.transform": ("pca", lambda f, x: f(x, SAMPLES)),
    "pca.inverse_transform": ("pca", lambda f, x: f(x, SCORES)),
    "pca.anomaly_score": ("pca", lambda f, x: f(x, SAMPLES)),
    "pca.complete": ("pca", lambda f, x: f(x, SAMPLES)),
    "pca.explained_variance": ("pca", lambda f, x: f(x, SAMPLES)),
    "pca.fit_local": ("pca", lambda f, x: f(x, SAMPLES, 1)),
    "inference.membership": ("pca", lambda f, x: f(x, CLIENTS)),
    "metrics.reconstruction_error": ("pca", lambda f, x: f(x, SAMPLES)),
    "metrics.captured_energy": ("pca", lambda f, x: f(x, SAMPLES)),
    "metrics.separation": ("pca", lambda f, x: f(x, SAMPLES)),
    "metrics.kkt_violation": ("pca", lambda f, x: f(x, SAMPLES)),
    "metrics.scaled_kkt_violation": ("pca", lambda f, x: f(x, SAMPLES)),
    "metrics.relative_singular_value_error": ("pca", lambda f, x: f(x, SAMPLES, np.ones(1))),
    "report.html": ("pca", lambda f, x: f(x, CLIENTS)),
    "report.write": ("pca", lambda f, x: f("report.html", x, CLIENTS)),
    "plot.components": ("pca", lambda f, x: f(x)),
    "plot.scores": ("pca", lambda f, x: f(x, CLIENTS)),
    "plot.biplot": ("pca", lambda f, x: f(x, CLIENTS)),
    "gcca.transform": ("gcca", lambda f, x: f(x, VIEWS)),
    "nmf.transform": ("nmf", lambda f, x: f(x, np.abs(SAMPLES), penalty=1.0)),
    "nmf.complete": ("nmf", lambda f, x: f(x, np.abs(SAMPLES), penalty=1.0)),
    "nmf.annotate": ("nmf", lambda f, x: f(x, None, "batch")),
}
# And those that need a run.
RUN = {
    "inference.bootstrap": lambda f, x: f(x, CLIENTS, lambda result, clients: 0, key=KEY),
    "inference.confidence": lambda f, x: f(x, CLIENTS, key=KEY),
    "aggregation.client_influence": lambda f, x: f(x, CLIENTS, key=KEY),
    "aggregation.far_clients": lambda f, x: f(x, CLIENTS.ids),
    "privacy.spent": lambda f, x: f(x, delta=1e-5),
    "personalize": lambda f, x: f(jf.pca.PerPCA(1, 1), x, CLIENTS),
}


def test_every_function_of_a_fitted_model_is_listed():
    takes = {name for name, f in PUBLIC if "fitted" in inspect.signature(f).parameters}
    runs = {
        name
        for name, f in PUBLIC
        if {"solution", "solutions"} & inspect.signature(f).parameters.keys()
    }
    assert takes | {"plot.components"} == TAKE.keys()
    assert runs == RUN.keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["pca", "gcca", "nmf"])
def test_what_one_takes_all_take(family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forms = learned(family, tmp_path)
    functions = dict(PUBLIC)
    for name, (kind, call) in TAKE.items():
        if kind != family or name == "nmf.annotate":  # which calls `transform`
            continue
        solution, result, loaded, *estimator = (call(functions[name], form) for form in forms)
        assert {type(found) for found in (result, loaded, *estimator)} == {type(solution)}, name
        if name.startswith(family):  # what is computed from the models alone is the same
            chex.assert_trees_all_equal(solution, result, loaded)
            if estimator:
                chex.assert_trees_all_equal(*estimator)


@pytest.mark.parametrize("name", [*TAKE, *RUN])
def test_anything_else_is_refused_by_the_arguments_name(name):
    function = dict(PUBLIC)[name]
    call = TAKE[name][1] if name in TAKE else RUN[name]
    argument = {"plot.components": "groups", "privacy.spent": "solutions"}.get(
        name, "fitted" if name in TAKE else "solution"
    )
    for wrong in (None, "result.npz", SAMPLES, estimators.PersonalizedPCA()):
        with pytest.raises(ValueError, match=rf"^{argument}: wanted "):
            call(function, wrong)
    if name in RUN:
        result = jf.Personalized(np.eye(D)[:, :1], np.ones((M, D, 1)))
        with pytest.raises(ValueError, match=rf"^{argument}: wanted "):
            call(function, result)
