"""Units, offsets, order and number of rows change nothing, for any public function of data."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxfed as jf
from bench.tables.units import ALGORITHMS
from tests.laws.table import KEY, LAWS, Law, clients_of, draw

MODULES = (
    "aggregation", "channel", "estimators", "gcca", "inference", "linalg", "manifolds", "metrics",
    "nmf", "pca", "preprocess", "privacy", "stream",
)  # fmt: skip
HELD = {name: law for name, law in LAWS.items() if isinstance(law, Law)}
SPREAD = 4.0
OFFSETS = (0.0, 1e2, 1e4, 1e6, 1e9)  # in spreads
# Copies of the rows, which are then a million.
COPIES = 2800


def public(module):
    """The functions, algorithms and estimators of a module; neither records nor what makes none."""
    found = getattr(jf, module)
    for name in found.__all__ if hasattr(found, "__all__") else dir(found):
        each = getattr(found, name)
        if name.startswith("_") or not callable(each):
            continue
        kinds = (jf.Algorithm, jf.stream.Forgetting)
        if not inspect.isclass(each) or hasattr(each, "fit") or issubclass(each, kinds):
            yield f"{module}.{name}"


def test_every_public_function_has_a_law_or_a_reason_why_not():
    wanted = {name for module in MODULES for name in public(module)}
    assert not wanted - LAWS.keys() and not HELD.keys() - wanted


def values(law, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = law.function(x)
    parts = found if isinstance(law.degree, tuple) else (found,)
    return [[np.asarray(leaf, float) for leaf in jax.tree.leaves(part)] for part in parts]


@functools.cache
def reference(name):
    return values(LAWS[name], draw().astype(np.float32))


def follows(name, x, scale=1.0):
    law = HELD[name]
    degrees = law.degree if isinstance(law.degree, tuple) else (law.degree,)
    for degree, *parts in zip(degrees, values(law, x), reference(name), strict=True):
        for found, wanted in zip(*parts, strict=True):
            size = np.max(np.abs(wanted), where=np.isfinite(wanted), initial=0)
            np.testing.assert_allclose(found / scale**degree, wanted, rtol=0, atol=law.tol * size)


def follows_or_refuses(name, x, scale=1.0):
    """Single precision holds no digits of features far from zero; they are refused by name."""
    try:
        follows(name, x, scale)
    except ValueError as error:
        assert "features that single precision holds" in str(error)


CHEAP = ("channel.", "linalg.", "metrics.", "manifolds.")
EACH = [
    pytest.param(name, marks=() if name.startswith(CHEAP) else pytest.mark.slow) for name in HELD
]


@pytest.mark.parametrize("exponent", [-40, 40])
@pytest.mark.parametrize("name", EACH)
def test_units(name, exponent):
    follows(name, draw().astype(np.float32) * np.float32(2.0**exponent), 2.0**exponent)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, law in HELD.items() if law.centred])
def test_offsets(name):
    follows_or_refuses(name, draw() + 1e6 * SPREAD)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, law in HELD.items() if not law.counted])
def test_a_million_rows(name):
    follows(name, np.repeat(draw().astype(np.float32), COPIES, axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "TCMF"])
def test_rounds_do_not_depend_on_units(name):
    """TCMF's threshold has a unit."""
    algorithm, x = ALGORITHMS[name][0], draw().astype(np.float32)
    runs = [
        jf.fit(algorithm, clients_of(x * np.float32(2.0**k)), rounds=60, tol=1e-3, key=KEY)
        for k in (0, -38, 38)
    ]
    assert len({(int(run.rounds), str(run.status)) for run in runs}) == 1


GRADIENT = "HierarchicalPCA by gradient steps"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in ALGORITHMS if name != "TCMF"), GRADIENT])
def test_derivatives_do_not_depend_on_units(name):
    algorithm = jf.pca.HierarchicalPCA(3) if name == GRADIENT else ALGORITHMS[name][0]
    rounds, x = min(3, ALGORITHMS.get(name, (None, 3))[1]), draw().astype(np.float32)

    @jax.jit
    @jax.grad
    def gradient(x):
        found = jf.rollout(algorithm, clients_of(x), rounds=rounds, key=KEY)
        frames = [part for part in found.result if part is not None]
        return sum(jnp.sum(jnp.sin(3 * frame @ frame.mT)) for frame in frames)

    wanted = gradient(x)
    for unit in (2.0**-40, 2.0**40):
        found = np.asarray(gradient(np.float32(unit) * x), float) * unit
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-2 * float(abs(wanted).max()))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(HELD)),
    exponent=st.integers(-50, 50),
    offset=st.sampled_from(OFFSETS),
    order=st.randoms(use_true_random=False),
    double=st.booleans(),
)
def test_a_walk(name, exponent, offset, order, double):
    law, x = HELD[name], draw()
    if not law.ordered:
        x = x[:, order.sample(range(len(x[0])), len(x[0]))]
    x = (x + SPREAD * offset * law.centred) * 2.0**exponent
    if not double and not (law.centred and offset):
        x = x.astype(np.float32)
    follows_or_refuses(name, x, 2.0**exponent)
