"""Check that algorithms, channels, backends and reductions of your own satisfy their contracts."""

import functools
from collections.abc import Callable, Mapping, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from jaxfed import _names
from jaxfed._checks import check_callable, check_factor, check_instance, check_whole
from jaxfed.core.backends.backend import Backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.wire import Wire
from jaxfed.testing import _case, _checks, _compare
from jaxfed.testing._backend import check_backend
from jaxfed.testing._channel import check_channel
from jaxfed.testing._reduction import check_reduction
from jaxfed.testing._report import Report, chosen, reported

__all__ = [
    "CHECKS",
    "Report",
    "check_algorithm",
    "check_backend",
    "check_channel",
    "check_reduction",
]

CHECKS = tuple(_checks.CHECKS)
"""Names of all checks, in the order in which they run."""


def check_algorithm(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int = 4,
    key: Key[Array, ""] | None = None,
    essence: _case.Essence | None = None,
    loss: Callable[[Personalized], Float[Array, ""]] | None = None,
    constraint: Callable[[Personalized], None] | None = None,
    others: Clients | None = None,
    wider: Algorithm | None = None,
    pad: Callable[[Clients], Clients] | None = None,
    deterministic: bool = False,
    channels: Mapping[str, Channel | Wire] | None = None,
    backends: Mapping[str, Backend] | None = None,
    checks: Sequence[str] | None = None,
    progress: bool | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-6,
) -> Report:
    """Check that an algorithm satisfies the contract of `jaxfed.Algorithm`.

    Most checks compare two runs that must agree. They compute in double precision, regardless of
    the caller's settings. In the order in which they run:

    * `"refusals"`: data of an unknown kind are refused with a `ValueError` about `clients`;
    * `"structure"`: states keep their shapes and types, no array is empty, clients' states have a
      leading axis of clients, all numbers are finite, and constraints hold;
    * `"types"`: results have the data's precision, single or double, and satisfy constraints in it;
    * `"compilation"`: a second call with other numbers compiles nothing, in `rollout` and `fit`;
    * `"host"`: `fit` in chunks of rounds returns the results of `rollout`;
    * `"participation"`: absent clients keep their states exactly, or the algorithm refuses;
    * `"bits"`: the bits in the history are the lengths of the payloads;
    * `"newcomers"`: `jaxfed.personalize` returns finite models of the same shapes for new clients,
      and a warm start matches its clients by id;
    * `"checkpoint"`: a run that was interrupted and resumed equals an uninterrupted run bit for
      bit;
    * `"order"`: permuting clients permutes their results and changes nothing else;
    * `"padding"`: padding and one more client of weight 0 change nothing;
    * `"samples"`: if `quadratic_in_samples` is True, two equal samples count as much as the same
      two times the roots of weights with mean 1;
    * `"vmap"`: runs mapped over algorithms, clients and keys return the results of a loop;
    * `"gradients"`: derivatives of at most five rounds by hyperparameters and data are finite and
      not all zero; for deterministic algorithms they equal finite differences;
    * `"backends"`: every backend returns the results of `vmap`;
    * `"buckets"`: samples in buckets with separate padding return the same results;
    * `"source"`: samples read block by block return the same results;
    * `"channels"`: at most five rounds through a channel return finite numbers and satisfy
      constraints, or are refused with a `ValueError` about that argument; a lossless channel
      changes nothing.

    Args:
        algorithm: the algorithm to check.
        clients: at least three clients to run it on.
        rounds: number of rounds of the runs, at least two.
        key: random key.
        essence: `f(result) -> (shared, local)`, the part of the result to compare, without
            arbitrary choices such as the basis of a subspace; `local` has a leading axis of
            clients, or is None. By default the result itself.
        loss: `f(result) -> number`, the function to differentiate; by default a fixed
            combination of all numbers of the essence.
        constraint: `f(result)`, raises an AssertionError for an invalid result, such as components
            that are not orthonormal; called in both precisions.
        others: other clients of the same shapes; by default the same ones with permuted data.
        wider: the algorithm for one more client, if it depends on their number.
        pad: returns the clients with more padding. By default it adds zero rows to
            `jaxfed.Samples`; for other data, that part is skipped.
        deterministic: whether the result depends smoothly on data and hyperparameters, so that
            derivatives must equal finite differences.
        channels: channels to run through, under any names; by default one of each kind.
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
        ValueError: if a check is unknown, there are too few clients or rounds, or a function that
            was given returns something else.
    """
    check_instance("algorithm", algorithm, Algorithm, "a jaxfed algorithm")
    check_instance("clients", clients, Clients, "jaxfed.Clients")
    names, progress = chosen(checks, CHECKS, progress)
    functions = {"essence": essence, "loss": loss, "constraint": constraint, "pad": pad}
    for name, function in functions.items():
        if function is not None:
            check_callable(name, function, "a function or None")
    if len(clients) < 3:
        raise ValueError(f"clients: wanted at least 3, got {len(clients)}")
    check_whole("rounds", rounds, least=2)
    check_factor("rtol", rtol, single=True)
    check_factor("atol", atol, single=True)
    with jax.enable_x64(True):
        if others is None:
            data = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), clients.data)
            others = eqx.tree_at(lambda c: c.data, clients, data)
        case = _case.Case(
            algorithm=_compare.floats_as(algorithm, np.float64),
            clients=_compare.floats_as(clients, np.float64),
            others=_compare.floats_as(others, np.float64),
            wider=_compare.floats_as(algorithm if wider is None else wider, np.float64),
            key=jax.random.key(0) if key is None else key,
            rounds=rounds,
            essence=_case.checked_essence(essence),
            loss=None if loss is None else _case.checked_loss(loss),
            constraint=None if constraint is None else _case.checked_constraint(constraint),
            pad=pad,
            deterministic=deterministic,
            channels=channels,
            backends=backends,
            rtol=rtol,
            atol=atol,
        )
        checks_of = {name: functools.partial(_checks.CHECKS[name], case) for name in names}
        return reported("check_algorithm", checks_of, progress, case.skipped)


__dir__ = _names.public_names(__name__)
