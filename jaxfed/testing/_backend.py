"""Check that a backend satisfies the contract of `jaxfed.backend.Backend`."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxfed import backend as backends
from jaxfed import reduction
from jaxfed._checks import check_factor, check_instance, check_whole
from jaxfed.core.backends.backend import Backend, collect
from jaxfed.core.common.buckets import Buckets
from jaxfed.core.contract.reduction import contributions, plain
from jaxfed.testing import _compare
from jaxfed.testing._case import combination
from jaxfed.testing._report import Report, chosen, reported

FEATURES = 3


@dataclass(frozen=True)
class _Case:
    backend: Backend
    clients: int
    rtol: float
    atol: float

    def same(self, given: PyTree, wanted: PyTree, sentence: str) -> None:
        _compare.same(given, wanted, sentence, self.rtol, self.atol)


def _work(shared, own):
    """A message with every kind of reduction, and what the client keeps."""
    values, weight, place = own
    vector = jnp.tanh(values.mean(0) * shared)
    message = {
        "mean": vector,
        "sum": reduction.Sum((vector[0], place)),
        "max": reduction.Max(vector),
        "gram": reduction.Gram(values.T),
        "gathered": reduction.Gather({"vector": vector, "place": place}),
    }
    kept = {"vector": 2 * vector, "place": place, "nothing": None}
    return contributions(message, weight), kept


@functools.partial(jax.jit, static_argnums=2)
def _mapped(shared, own, backend, which):
    total, kept = collect(backend, _work, shared, own, which)
    return plain(total), kept


def _draw(clients: int, rows: int, first: int = 0) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(first)
    values = jnp.asarray(rng.normal(size=(clients, rows, FEATURES)))
    return values, jnp.asarray(rng.uniform(0.5, 1.5, clients)), first + jnp.arange(clients)


_SHARED = np.array([0.5, -1.0, 2.0])


def _both(case: _Case, own: PyTree, backend: Backend | None = None) -> tuple[PyTree, PyTree]:
    count = jax.tree.leaves(own)[-1].shape[0]
    which = jnp.arange(count)
    given = _mapped(jnp.asarray(_SHARED), own, backend or case.backend, which)
    return given, _mapped(jnp.asarray(_SHARED), own, backends.vmap(), which)


def _check_vmap(case: _Case) -> None:
    sentence = "the backend gives what vmap gives"
    case.same(*_both(case, _draw(case.clients, 4)), sentence)


def _check_few(case: _Case) -> None:
    least = case.backend.multiple
    case.same(*_both(case, _draw(least, 4)), f"{least} of clients give what vmap gives")


def _check_absent(case: _Case) -> None:
    values, weights, places = _draw(case.clients, 4)
    absent = places % 3 == 0
    values = jnp.where(absent[:, None, None], jnp.nan, values)
    (given, _), (wanted, _) = _both(case, (values, jnp.where(absent, 0, weights), places))
    sentence = "what clients of weight 0 hold does not count"
    case.same(given, wanted, sentence)
    _compare.check_finite(given, sentence)


def _check_buckets(case: _Case) -> None:
    size = case.clients
    (long, *_), (short, *_) = _draw(size, 6), _draw(size, 2, first=size)
    places = tuple(np.random.default_rng(0).permutation(2 * size).reshape(2, size))
    values = Buckets((long, short), tuple(map(jnp.asarray, places)), (size, size))
    weights, numbers = jnp.linspace(0.5, 1.5, 2 * size), jnp.arange(2 * size)
    given, wanted = _both(case, (values, weights, numbers))
    case.same(given, wanted, "clients in buckets give what vmap gives")
    np.testing.assert_array_equal(given[1]["place"], numbers)


def _check_blocks(case: _Case) -> None:
    blocks = case.backend.in_blocks(2, ())
    check_instance("in_blocks", blocks, Backend, "a jaxfed.backend.Backend")
    case.same(*_both(case, _draw(case.clients, 4), blocks), "in_blocks gives what vmap gives")


def _check_derivatives(case: _Case) -> None:
    values, weights, places = _draw(case.clients, 4)

    def slopes(backend: Backend) -> PyTree:
        def value(shared, values, weights) -> Float[Array, ""]:
            return combination(_mapped(shared, (values, weights, places), backend, places))

        return jax.grad(value, (0, 1, 2))(jnp.asarray(_SHARED), values, weights)

    given, wanted = slopes(case.backend), slopes(backends.vmap())
    _compare.check_finite(given, "derivatives are finite")
    case.same(given, wanted, "derivatives are those of vmap")


def _check_vmap_over_runs(case: _Case) -> None:
    own, which = _draw(case.clients, 4), jnp.arange(case.clients)
    settings = jnp.asarray(_SHARED) * jnp.asarray([[1.0], [0.5]])
    given = jax.vmap(lambda shared: _mapped(shared, own, case.backend, which))(settings)
    each = [_mapped(shared, own, case.backend, which) for shared in settings]
    wanted = jax.tree.map(lambda *x: jnp.stack(x), *each)
    case.same(given, wanted, "runs mapped over settings give what a loop gives")


_CHECKS = {
    "vmap": _check_vmap,
    "few": _check_few,
    "absent": _check_absent,
    "buckets": _check_buckets,
    "blocks": _check_blocks,
    "derivatives": _check_derivatives,
    "runs": _check_vmap_over_runs,
}


def check_backend(
    backend: Backend,
    *,
    clients: int = 7,
    checks: Sequence[str] | None = None,
    progress: bool | None = None,
    rtol: float = 1e-9,
    atol: float = 1e-9,
) -> Report:
    """Check that a backend satisfies the contract of `jaxfed.backend.Backend`.

    Checks map work that sends every kind of reduction, in double precision, and compare with
    `jaxfed.backend.vmap`. In the order in which they run:

    * `"vmap"`: what the server receives and what clients keep;
    * `"few"`: as few clients as there can be;
    * `"absent"`: what clients of weight 0 hold, NaN included, does not count;
    * `"buckets"`: clients in two buckets of different shapes;
    * `"blocks"`: the backend that `in_blocks` returns;
    * `"derivatives"`: derivatives by what clients share, by their data and by their weights;
    * `"runs"`: `jax.vmap` over runs gives what a loop gives.

    `check_algorithm(..., backends={"mine": backend})` runs an algorithm on it.

    Args:
        backend: the backend to check.
        clients: number of clients, rounded up to what the backend takes.
        checks: names of the checks to run; all by default.
        progress: print each check's name and duration to standard error; by default if that is a
            terminal.
        rtol: relative tolerance of the comparisons.
        atol: absolute tolerance of the comparisons.

    Returns:
        The checks that passed, and reasons why others were skipped.

    Raises:
        AssertionError: names the violated property, with the values compared.
        ValueError: if an argument is invalid, or a method breaks its contract, which the message
            names.
    """
    check_instance("backend", backend, Backend, "a jaxfed.backend.Backend")
    check_whole("clients", clients, least=3)
    names, progress = chosen(checks, tuple(_CHECKS), progress)
    check_factor("rtol", rtol, single=True)
    check_factor("atol", atol, single=True)
    with jax.enable_x64(True):
        size = int(clients) + -int(clients) % backend.multiple
        case = _Case(backend, size, rtol, atol)
        return reported(
            "check_backend",
            {name: functools.partial(_CHECKS[name], case) for name in names},
            progress,
        )
