"""Check that a reduction satisfies the contract of `jaxfed.reduction.Reduction`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxfed import backend
from jaxfed._checks import check_callable, check_factor, check_positive, checked_array
from jaxfed.core.backends.backend import Backend, collect
from jaxfed.core.contract.reduction import (
    Part,
    Reduction,
    combined,
    contributions,
    each,
    is_linear,
    is_part,
    neutral,
    over_clients,
    plain,
    to_combine,
    wrapped,
)
from jaxfed.testing import _compare
from jaxfed.testing._case import combination, every_backend
from jaxfed.testing._report import Report, Skipped, chosen, reported

Make = Callable[[PyTree], Part]


class _Members(NamedTuple):
    """What clients send, their weights and their ids, leading axis = clients."""

    values: PyTree
    weights: Float[Array, " clients"]
    ids: Int[Array, " clients"]


@dataclass(frozen=True)
class _Case:
    make: Make
    members: _Members
    backends: Mapping[str, Backend]
    rtol: float
    atol: float

    @property
    def is_combined(self) -> bool:
        """Whether the server receives one result, not each client's part."""
        one = wrapped(jax.eval_shape(self.make, jax.tree.map(lambda x: x[0], self.members.values)))
        return all(isinstance(x, Reduction) for x in jax.tree.leaves(one, is_leaf=is_part))

    def total(self, members: _Members, mapped: Backend | None = None) -> PyTree:
        """What the server receives."""
        return _total(members, self.make, backend.vmap() if mapped is None else mapped)

    def same(self, given: PyTree, wanted: PyTree, sentence: str) -> None:
        _compare.same(given, wanted, sentence, self.rtol, self.atol)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _total(members, make, mapped):
    def work(_, own):
        return _contribution(make, own), None

    return plain(collect(mapped, work, None, members, len(members.weights))[0])


def _contribution(make: Make, own: _Members) -> PyTree[Part]:
    return contributions(make(own.values), own.weights, own.ids)


def _check_monoid(case: _Case) -> None:
    if not case.is_combined:
        raise Skipped("gathered parts are not combined")

    def total(parts: PyTree[Reduction]) -> PyTree[Reduction]:
        return to_combine(over_clients(parts))

    @jax.jit
    def partial_results(members: _Members) -> tuple[PyTree, ...]:
        parts = jax.vmap(functools.partial(_contribution, case.make))(members)
        middle, count = 1 + len(members.weights) // 2, len(members.weights)
        one, two, three = (
            total(jax.tree.map(lambda x, a=a, b=b: x[a:b], parts))
            for a, b in ((0, 1), (1, middle), (middle, count))
        )
        left, right = combined(combined(one, two), three), combined(one, combined(two, three))
        both = combined(one, two), combined(two, one)
        return total(parts), left, right, *both, one, combined(neutral(one), one)

    whole, left, right, forth, back, one, unchanged = partial_results(case.members)
    case.same(left, whole, "partial results combine to that of all clients")
    case.same(right, left, "combined is associative")
    case.same(back, forth, "combined is commutative")
    case.same(unchanged, one, "neutral changes nothing that it is combined with")


def _check_order(case: _Case) -> None:
    if not case.is_combined:
        raise Skipped("gathered parts come in the order of clients")
    order = np.random.default_rng(0).permutation(len(case.members.weights))
    given = case.total(jax.tree.map(lambda x: x[order], case.members))
    case.same(given, case.total(case.members), "the order of clients does not matter")


def _check_absent(case: _Case) -> None:
    values, weights, ids = case.members
    absent = np.arange(len(ids)) % 3 == 0
    weights = jnp.where(absent, 0, weights)

    def spoiled(x: Array) -> Array:
        if not eqx.is_inexact_array(x):
            return x
        return jnp.where(absent.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)

    given = case.total(_Members(jax.tree.map(spoiled, values), weights, ids))
    wanted = case.total(_Members(values, weights, ids))
    case.same(given, wanted, "absent clients' parts do not count")
    if case.is_combined:
        there = jax.tree.map(lambda x: x[~absent], _Members(values, weights, ids))
        case.same(given, case.total(there), "absent clients count as if they did not exist")


def _check_linear(case: _Case) -> None:
    values, *rest = case.members
    if not is_linear(case.make(jax.tree.map(lambda x: x[0], values))):
        raise Skipped("the reduction does not declare linear")
    other = jax.tree.map(lambda x: jnp.roll(x, 1, 0), values)

    def both(one: PyTree, two: PyTree) -> PyTree:
        return jax.tree.map(lambda x, y: 2 * x - 3 * y, one, two)

    given = case.total(_Members(both(values, other), *rest))
    wanted = both(case.total(case.members), case.total(_Members(other, *rest)))
    case.same(given, wanted, "the result is linear in what clients send")


def _check_sum(case: _Case) -> None:
    def make(value: PyTree) -> PyTree[Part]:
        return each(lambda part: part.as_sum(), wrapped(case.make(value)))

    one = jax.tree.map(lambda x: x[0], case.members.values)
    if jax.tree.structure(make(one)) == jax.tree.structure(wrapped(case.make(one))):
        raise Skipped("as_sum returns the part itself")
    given = _total(case.members, make, backend.vmap())
    sentence = "the part that as_sum returns has the same result"
    case.same(given, case.total(case.members), sentence)


def _check_backends(case: _Case) -> None:
    for name, mapped in case.backends.items():
        missing = -len(case.members.ids) % mapped.multiple  # clients of weight 0 fill it up

        def padded(x: Array, missing: int = missing) -> Array:
            return jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)])

        members = jax.tree.map(padded, case.members)
        sentence = f"the backend {name} gives what vmap gives"
        case.same(case.total(members, mapped), case.total(members), sentence)


def _check_derivatives(case: _Case) -> None:
    values, weights, ids = case.members
    floats, rest = eqx.partition(values, eqx.is_inexact_array)
    weights = weights.at[0].set(0)

    @jax.jit
    def value(floats: PyTree) -> Float[Array, ""]:
        return combination(case.total(_Members(eqx.combine(floats, rest), weights, ids)))

    slopes = jax.jit(jax.grad(value))(floats)
    _compare.check_finite(slopes, "derivatives are finite")
    if any(np.asarray(x[0]).any() for x in jax.tree.leaves(slopes)):
        raise AssertionError("the result does not depend on what absent clients hold")
    if not any(np.asarray(x).any() for x in jax.tree.leaves(slopes)):
        raise AssertionError("the result depends on what clients send: all derivatives are zero")
    rng = np.random.default_rng(0)
    along = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), floats)
    step = 1e-6
    ahead, behind = (
        value(jax.tree.map(lambda x, d, s=sign: x + s * step * d, floats, along))
        for sign in (1, -1)
    )
    found = sum(jnp.vdot(x, d) for x, d in zip(*map(jax.tree.leaves, (slopes, along)), strict=True))
    wanted = (ahead - behind) / (2 * step)
    _compare.same(found, wanted, "derivatives equal finite differences", 1e-4, 1e-4)


_CHECKS = {
    "monoid": _check_monoid,
    "order": _check_order,
    "absent": _check_absent,
    "linear": _check_linear,
    "sum": _check_sum,
    "backends": _check_backends,
    "derivatives": _check_derivatives,
}


def check_reduction(
    part: Make,
    values: PyTree,
    *,
    weights: Float[Array, " clients"] | None = None,
    backends: Mapping[str, Backend] | None = None,
    checks: Sequence[str] | None = None,
    progress: bool | None = None,
    rtol: float = 1e-9,
    atol: float = 1e-9,
) -> Report:
    """Check that a reduction satisfies the contract of `jaxfed.reduction.Part`.

    Checks compute in double precision. In the order in which they run:

    * `"monoid"`: partial results combine to the result of all clients, in any order and grouping,
      and `neutral` changes nothing;
    * `"order"`: permuting clients changes nothing;
    * `"absent"`: what clients of weight 0 hold, NaN included, does not count;
    * `"linear"`: if it declares `linear`, the result is linear in what clients send;
    * `"sum"`: if `as_sum` returns another part, that has the same result;
    * `"backends"`: every backend returns the result of `vmap`;
    * `"derivatives"`: derivatives are finite, equal finite differences, and are zero for absent
      clients.

    Args:
        part: `part(value)` returns ONE client's part of a message, such as `jaxfed.reduction.Sum`.
        values: arrays with a leading axis of at least three clients.
        weights: the clients' weights, positive; by default equal ones that add up to one.
        backends: backends, under any names; by default all that the devices allow.
        checks: names of the checks to run; all by default.
        progress: print each check's name and duration to standard error; by default if that is a
            terminal.
        rtol: relative tolerance of the comparisons.
        atol: absolute tolerance of the comparisons.

    Returns:
        The checks that passed, and reasons why others were skipped.

    Raises:
        AssertionError: names the violated property, with the values compared.
        ValueError: if a check is unknown, values have other axes, or a function of the reduction
            breaks its contract, which the message names.
    """
    check_callable("part", part, "a function or class that makes a part of a message")
    names, progress = chosen(checks, tuple(_CHECKS), progress)
    check_factor("rtol", rtol, single=True)
    check_factor("atol", atol, single=True)
    with jax.enable_x64(True):
        values = _compare.arrays("values", values)
        clients = {x.shape[0] if x.ndim else 0 for x in jax.tree.leaves(values)}
        if len(clients) != 1 or (count := clients.pop()) < 3:
            shapes = [x.shape for x in jax.tree.leaves(values)]
            raise ValueError(
                f"values: wanted arrays with one leading axis of at least 3 clients, got {shapes}"
            )
        if weights is None:
            weights = jnp.full(count, 1 / count)
        weights = checked_array("weights", weights, str(count), finite=True).astype(float)
        check_positive("weights", weights)
        known = every_backend() if backends is None else backends
        members = _Members(values, weights, jnp.arange(count))
        case = _Case(part, members, known, rtol, atol)
        return reported(
            "check_reduction",
            {name: functools.partial(_CHECKS[name], case) for name in names},
            progress,
        )
