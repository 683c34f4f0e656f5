"""Reductions over clients: NumPy's numbers on every backend, monoid laws, derivatives, traffic."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxfed as jf
from jaxfed.core.backends.backend import collect
from jaxfed.core.contract.groups import Groups
from jaxfed.core.contract.reduction import (
    Gather,
    Gram,
    Max,
    Mean,
    Sum,
    contributions,
    is_linear,
    is_summed,
    joined,
    plain,
    separated,
    wrapped,
)
from jaxfed.pca.components import moment_received

CLIENTS = 8  # a multiple of all numbers of devices below; three does not divide it

pytestmark = pytest.mark.usefixtures("x64")

BACKENDS = {
    "vmap": jf.backend.vmap,
    "chunks of 3": lambda: jf.backend.chunked(3),
    "shard 4": lambda: jf.backend.shard(4),
    "pmap 2": lambda: jf.backend.pmap(2),
    "chunks on devices": lambda: jf.backend.shard(2, inner=jf.backend.chunked(3)),
}
on_every_backend = pytest.mark.parametrize("name", BACKENDS)


class Pair(NamedTuple):
    """A wrapped part with a structure of its own."""

    vector: jax.Array
    scalar: jax.Array
    nothing: None = None


def draw_messages(seed=0, clients=CLIENTS):
    rng = np.random.default_rng(seed)
    return {
        "vector": jnp.asarray(rng.normal(size=(clients, 3))),
        "scalar": jnp.asarray(rng.normal(size=clients)),
        "factor": jnp.asarray(rng.normal(size=(clients, 4, 2))),
        "whole": jnp.asarray(rng.integers(-5, 6, size=(clients, 2)), jnp.int32),
    }


WEIGHTS = np.array([0.2, 0.0, 0.1, 0.3, 0.0, 0.15, 0.2, 0.05])


def message(own):
    """One of each, some with a structure inside."""
    pair = Pair(own["vector"], own["scalar"])
    return {
        "bare": own["vector"],
        "mean": Mean(pair),
        "sum": Sum(pair),
        "count": Sum(own["whole"]),
        "max": Max(pair),
        "gram": Gram(own["factor"]),
        "total gram": Gram(own["factor"], weighted=False),
        "gather": Gather(Pair(own["vector"], own["whole"])),
        "nothing": None,
    }


def by_numpy(own, weights):
    own, there = jax.tree.map(np.asarray, own), weights > 0
    shares = weights[there]
    vectors, scalars, factors = (own[k][there] for k in ("vector", "scalar", "factor"))
    mean = np.einsum("m,md->d", shares, vectors)
    present = np.where(there[:, None], own["vector"], 0)
    return {
        "bare": mean,
        "mean": Pair(mean, shares @ scalars),
        "sum": Pair(vectors.sum(0), scalars.sum()),
        "count": own["whole"][there].sum(0),
        "max": Pair(vectors.max(0), scalars.max()),
        "gram": np.einsum("m,mik,mjk->ij", shares, factors, factors),
        "total gram": np.einsum("mik,mjk->ij", factors, factors),
        "gather": Pair(present, np.where(there[:, None], own["whole"], 0)),
        "nothing": None,
    }


@functools.partial(jax.jit, static_argnames="backend")
def reduce(backend, own, weights):
    def work(_, own):
        own, weight, place = own
        return contributions(message(own), weight), {"place": place, "double": 2 * own["scalar"]}

    given = own, weights, jnp.arange(len(weights))
    total, kept = collect(backend, work, None, given, len(weights))
    return plain(total), kept


@on_every_backend
def test_every_reduction_equals_numpys(name):
    own = draw_messages()
    total, kept = reduce(BACKENDS[name](), own, jnp.asarray(WEIGHTS))
    wanted = by_numpy(own, WEIGHTS)
    chex.assert_trees_all_close(total, wanted, rtol=1e-12, atol=1e-12)
    assert jax.tree.structure(total) == jax.tree.structure(wanted)
    assert total["count"].dtype == jnp.int32
    np.testing.assert_array_equal(kept["place"], np.arange(CLIENTS))
    np.testing.assert_array_equal(kept["double"], 2 * own["scalar"])


@on_every_backend
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_messages_of_absent_clients_do_not_count(name, bad):
    absent = WEIGHTS == 0
    own = draw_messages()
    spoiled = {
        k: v if k == "whole" else jnp.where(absent.reshape(-1, *[1] * (v.ndim - 1)), bad, v)
        for k, v in own.items()
    }
    wanted, _ = reduce(BACKENDS[name](), own, jnp.asarray(WEIGHTS))
    given, _ = reduce(BACKENDS[name](), spoiled, jnp.asarray(WEIGHTS))
    chex.assert_trees_all_equal(given, wanted)


@on_every_backend
def test_no_client_takes_part(name):
    total, _ = reduce(BACKENDS[name](), draw_messages(), jnp.zeros(CLIENTS))
    largest = total.pop("max")
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(total))
    assert all((np.asarray(x) == -np.inf).all() for x in jax.tree.leaves(largest))


@pytest.mark.parametrize("name", ["vmap", "chunks of 3"])
@pytest.mark.parametrize("clients", [1, 2, 7])
def test_any_number_of_clients_on_one_device(name, clients):
    own, weights = draw_messages(1, clients), np.linspace(1, 2, clients)
    total, _ = reduce(BACKENDS[name](), own, jnp.asarray(weights))
    chex.assert_trees_all_close(total, by_numpy(own, weights), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@on_every_backend
def test_integers_have_a_mean_and_a_maximum(name):
    numbers = jnp.asarray([3, -7, 2, 9, -1, 9, 1, 4], jnp.int32)

    def work(_, own):
        return contributions((own[0], Max(own[0])), own[1]), None

    weights = jnp.asarray([1, 1, 1, 0, 1, 0, 1, 1.0])
    total, _ = collect(BACKENDS[name](), work, None, (numbers, weights), CLIENTS)
    mean, largest = plain(total)
    assert (mean, largest) == (2, 4)
    assert largest.dtype == jnp.int32
    half, _ = collect(BACKENDS[name](), work, None, (numbers, weights / 2), CLIENTS)
    assert plain(half)[0] == 1


@on_every_backend
def test_thin_factors_of_one_batch_are_not_multiplied_out(name):
    factors = jnp.asarray(np.random.default_rng(0).normal(size=(CLIENTS, 20, 1)))

    def work(_, own):
        return contributions(Gram(own[0], thin=True), own[1]), None

    total, _ = collect(BACKENDS[name](), work, None, (factors, jnp.asarray(WEIGHTS)), CLIENTS)
    found = plain(total)
    assert found.shape == ((20, CLIENTS) if name == "vmap" else (20, 20))
    product = moment_received(found).matrix()
    wanted = np.einsum("m,mik,mjk->ij", WEIGHTS, factors, factors)
    np.testing.assert_allclose(product, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        jf.pca.Pooled(2),
        jf.pca.OneShot(2, 1, method="projector"),
        jf.pca.OneShot(2, 1, method="spectrum"),
        jf.pca.OneShot(2, 1, method="local_first"),
    ],
    ids=["Pooled", "projector", "spectrum", "local first"],
)
def test_factors_and_products_give_the_same_components_and_derivatives(algorithm):
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(4, 5, 60)) * 0.8 ** np.arange(60)
    cost = jnp.asarray(rng.normal(size=(60, 60)))

    def value(samples, backend):
        clients = jf.Clients.from_samples(samples)
        shared = jf.rollout(
            algorithm, clients, rounds=1, key=jax.random.key(0), backend=backend
        ).result
        shared = shared if isinstance(shared, jax.Array) else shared.shared
        return jnp.sum(cost * (shared @ shared.T))

    function = jax.jit(jax.value_and_grad(value), static_argnums=1)
    both = (function(samples, mapped) for mapped in (jf.backend.vmap(), jf.backend.chunked(2)))
    for one, other in zip(*both, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10)


@on_every_backend
def test_gathered_from_the_first_clients_only(name):
    def work(_, own):
        return contributions(Gather(own), jnp.ones(())), None

    total, _ = collect(BACKENDS[name](), work, None, jnp.arange(8.0), 6)
    np.testing.assert_array_equal(plain(total), np.arange(6.0))


@on_every_backend
@pytest.mark.parametrize("weighted", [True, False])
def test_groups_are_sums_of_their_clients(name, weighted):
    rng = np.random.default_rng(0)
    own, ids = jnp.asarray(rng.normal(size=(CLIENTS, 3))), jnp.asarray([5, 0, 1, 7, 2, 9, 4, 3])

    def work(_, given):
        own, weight, client_id = given
        return contributions(Groups(Pair(own, own[0]), 3, weighted), weight, client_id), None

    given = own, jnp.asarray(WEIGHTS), ids
    total = plain(collect(BACKENDS[name](), work, None, given, CLIENTS)[0])
    shares = WEIGHTS if weighted else np.where(WEIGHTS > 0, 1.0, 0.0)
    of = np.asarray(ids) % 3
    wanted = np.stack([shares[of == g] @ np.asarray(own)[of == g] for g in range(3)])
    chex.assert_trees_all_close(total, Pair(wanted, wanted[:, 0]), rtol=1e-12, atol=1e-12)
    assert is_linear(Groups(own, 3)) and not is_summed((own, Groups(own, 3)))


def test_what_one_client_sends_stays_in_its_group():
    own = jnp.asarray([1.0, jnp.nan, jnp.inf, 1e6, -1e6, 1.0])
    ids, one = jnp.arange(6), jnp.ones(())

    def total(limit):
        def work(_, given):
            own, client_id = given
            return contributions(Groups(own, 6, False, limit), one, client_id), None

        return plain(collect(jf.backend.vmap(), work, None, (own, ids), 6)[0])

    np.testing.assert_array_equal(total(None), [1, 0, 0, 1e6, -1e6, 1])
    np.testing.assert_array_equal(total(1.0), [1, 0, 0, 1, -1, 1])


# --- derivatives -----------------------------------------------------------------------------


@pytest.mark.slow
@on_every_backend
def test_derivatives_are_finite_differences(name):
    own = {k: v for k, v in draw_messages(2).items() if k != "whole"}
    cost = {
        k: np.random.default_rng(3).normal(size=np.shape(v))
        for k, v in enumerate(jax.tree.leaves(by_numpy(draw_messages(2), WEIGHTS)))
    }

    def value(own, weights):
        total, _ = reduce(BACKENDS[name](), own | {"whole": draw_messages(2)["whole"]}, weights)
        return sum(jnp.vdot(cost[k], x**2) for k, x in enumerate(jax.tree.leaves(total)))

    rng = np.random.default_rng(4)
    at = own, jnp.asarray(WEIGHTS)
    # Absent clients stay absent.
    along = (
        jax.tree.map(lambda x: rng.normal(size=x.shape), own),
        rng.normal(size=CLIENTS) * (WEIGHTS > 0),
    )
    step = 1e-6
    ahead, behind = (
        value(*jax.tree.map(lambda x, d, s=sign: x + s * step * d, at, along)) for sign in (1, -1)
    )
    slopes = jax.grad(value, (0, 1))(*at)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))
    found = sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (slopes, along)), strict=True))
    np.testing.assert_allclose(found, (ahead - behind) / (2 * step), rtol=1e-6)
    # Nothing of absent clients passes through.
    for slope in jax.tree.leaves(slopes[0]):
        assert not np.asarray(slope)[WEIGHTS == 0].any()


# --- reductions from outside -----------------------------------------------------------------


class Largest(jf.reduction.Reduction):
    """The largest entries, broken in one function."""

    value: jax.Array
    function: str = eqx.field(static=True)
    returned: Callable = eqx.field(static=True)

    def given(self, function, value):
        return self.returned(value) if self.function == function else value

    def with_value(self, value):
        return Largest(value, self.function, self.returned)

    def contribution(self, weight):
        return self.given("contribution", self)

    def over_clients(self):
        if self.function == "kept apart":
            return self
        return self.given("over_clients", self.with_value(self.value.max(0)))

    def neutral(self):
        return self.given("neutral", self.with_value(jnp.full(self.value.shape, -jnp.inf)))

    def combined(self, other):
        return self.given("combined", self.with_value(jnp.maximum(self.value, other.value)))

    @staticmethod
    def over_devices(parts, axis):
        return parts[0].given("over_devices", jax.lax.pmax(parts, axis))


@pytest.mark.parametrize(
    ("function", "returned", "said"),
    [
        ("contribution", lambda x: x.value, r"contribution: wanted a Largest, got f64\[3\]"),
        ("contribution", lambda x: x.with_value("text"), "contribution: wanted arrays, got 'text'"),
        ("over_clients", lambda x: x.value, r"over_clients: wanted a Reduction, got f64\[3\]"),
        (
            "kept apart",
            None,
            r"over_clients: wanted .*f64\[1,3\].* from any number of clients, got .*f64\[2,3\]",
        ),
        (
            "neutral",
            lambda x: x.with_value(x.value.astype("float32")),
            r"neutral: wanted .*f64\[3\].* got .*f32\[3\]",
        ),
        (
            "combined",
            lambda x: x.with_value(x.value[:1]),
            r"combined: wanted .*f64\[3\].* got .*f64\[1\]",
        ),
        ("over_devices", lambda x: x[0], "over_devices: wanted a list of 1, got Largest"),
        (
            "over_devices",
            lambda x: [part.with_value(part.value[None]) for part in x],
            r"over_devices: wanted .*f64\[3\].* got .*f64\[1,3\]",
        ),
    ],
)
def test_a_reduction_that_breaks_the_contract_is_named(function, returned, said):
    def run(own):
        def work(_, own):
            part = Largest(own, function, returned)
            return contributions(part, jnp.ones(())), None

        backend = jf.backend.shard(2, inner=jf.backend.chunked(2))
        return collect(backend, work, None, own, CLIENTS)[0]

    with pytest.raises(ValueError, match=rf"^Largest\.{said}"):
        jax.eval_shape(run, jnp.ones((CLIENTS, 3)))


# --- traffic ---------------------------------------------------------------------------------


def collectives(program):
    return re.findall(r" (all-reduce|all-gather|all-to-all|[a-z-]+-permute)(?:-start)?\(", program)


def test_one_all_reduce_for_all_sums():
    def added(own):
        pair = Pair(own["vector"], own["scalar"])
        return {
            "bare": own["vector"],
            "mean": Mean(pair),
            "sum": Sum(pair),
            "g": Gram(own["factor"]),
        }

    def total(own, weights):
        def work(_, own):
            return contributions(added(own[0]), own[1]), None

        return collect(jf.backend.shard(4), work, None, (own, weights), CLIENTS)[0]

    program = jax.jit(total).lower(draw_messages(), jnp.asarray(WEIGHTS)).compile().as_text()
    assert collectives(program) == ["all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        jf.pca.SubspaceIteration(2),
        jf.pca.PerPCA(1, 1, solver="gradient", start="random", step_size=0.1),
    ],
    ids=["SubspaceIteration", "PerPCA"],
)
def test_one_all_reduce_per_round(algorithm):
    rng = np.random.default_rng(0)
    clients = jf.Clients.from_samples(rng.normal(size=(CLIENTS, 6, 5)))
    run = functools.partial(
        jf.rollout, algorithm, rounds=5, key=jax.random.key(0), backend=jf.backend.shard(4)
    )
    program = jax.jit(lambda clients: run(clients).result.shared).lower(clients)
    # The loop's body is there once, however many rounds there are, and nothing is sent before it.
    assert collectives(program.compile().as_text()) == ["all-reduce"]


# --- the laws --------------------------------------------------------------------------------


PARTS = {
    "Mean": Mean,
    "Sum": Sum,
    "Max": Max,
    "Gram": Gram,
    "Gram, not weighted": lambda value: Gram(value, weighted=False),
}
numbers = st.integers(-8, 8).map(float)


@pytest.mark.parametrize("kind", PARTS)
@given(
    values=st.lists(st.lists(numbers, min_size=6, max_size=6), min_size=3, max_size=4),
    weights=st.lists(st.sampled_from([0.0, 0.25, 1.0, 4.0]), min_size=4, max_size=4),
    cuts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_reductions_are_monoids(kind, values, weights, cuts):
    # With these numbers all sums and roots are exact.
    values, weights = np.array(values).reshape(-1, 3, 2), np.array(weights[: len(values)])

    def partial(chosen):
        made = jax.vmap(lambda x, w: PARTS[kind](x).contribution(w))(
            jnp.asarray(values[chosen]), jnp.asarray(weights[chosen])
        )
        return made.over_clients()

    first, last = sorted(min(cut, len(values) - 1) for cut in cuts)
    order = np.arange(len(values))
    whole = partial(order)
    if 0 < first < last < len(values):
        a, b, c = (partial(part) for part in np.split(order, [first, last]))
        chex.assert_trees_all_equal(a.combined(b).combined(c), whole)
        chex.assert_trees_all_equal(a.combined(b.combined(c)), whole)
    else:
        a, b = (partial(part) for part in np.split(order, [last]))
        chex.assert_trees_all_equal(a.combined(b), whole)
    chex.assert_trees_all_equal(a.combined(b), b.combined(a))
    chex.assert_trees_all_equal(whole.combined(whole.neutral()), whole)
    chex.assert_trees_all_equal(whole.neutral().combined(whole), whole)
    chex.assert_trees_all_equal(partial(order[::-1]), whole)


# --- messages --------------------------------------------------------------------------------


def test_wrapping_is_undone():
    sent = message(jax.tree.map(lambda x: x[0], draw_messages()))
    parts = wrapped(sent)
    assert isinstance(parts["bare"], Mean) and isinstance(parts["mean"], Mean)
    chex.assert_trees_all_equal(plain(parts), plain(sent))
    chex.assert_trees_all_equal(wrapped(parts), parts)
    reduced, gathered = separated(parts)
    assert gathered["mean"] is None and reduced["gather"] is None
    chex.assert_trees_all_equal(joined(reduced, gathered), parts)


def test_linear_messages_are_recognized():
    x = jnp.ones((2, 1))
    assert is_linear({"a": x, "b": Sum({"c": x}), "d": Mean(x), "e": None})
    for part in (Max(x), Gram(x), Gather(x)):
        assert not is_linear({"a": x, "b": part})
