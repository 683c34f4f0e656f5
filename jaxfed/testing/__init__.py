"""What every algorithm must keep, as one check for algorithms of one's own: `check_algorithm`."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from jaxfed import _names
from jaxfed.core.backends.backend import Backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.checks import (
    check_callable,
    check_factor,
    check_flag,
    check_instance,
    check_texts,
    check_whole,
    checked_key,
    refuse,
)
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.wire import Wire
from jaxfed.testing import _case, _checks, _compare

CHECKS = tuple(_checks.CHECKS)


class Report(NamedTuple):
    """What was checked.

    Attributes:
        checked: names of the checks that ran and passed.
        skipped: why others, or parts of them, did not run, by name.
    """

    checked: tuple[str, ...]
    skipped: dict[str, str]


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
    rtol: float = 1e-6,
    atol: float = 1e-6,
) -> Report:
    """Check that an algorithm keeps the contract of `jaxfed.Algorithm`.

    Most checks compare two runs that must agree, in double precision, whatever the settings of the
    caller. They are:

    * `"structure"`: states keep shapes and types, no array is without elements, the clients'
      states have a leading axis of clients, all numbers are finite, and constraints are met;
    * `"types"`: results have the data's precision, single or double, and meet constraints there;
    * `"compilation"`: a second call with other numbers compiles nothing, by `rollout` and `fit`;
    * `"host"`: `fit`, in chunks of rounds, gives what `rollout` gives;
    * `"vmap"`: runs at once over algorithms, clients and keys are those of a loop;
    * `"gradients"`: derivatives by hyperparameters and data, of at most five rounds, are finite and
      not all zero; of a deterministic algorithm, equal to finite differences;
    * `"order"`: permuting clients permutes their results and changes nothing else;
    * `"padding"`: a further client of weight 0 and padding change nothing;
    * `"backends"`: every backend gives what `vmap` gives;
    * `"buckets"`: samples in buckets, each padded by itself, give what they give in one array;
    * `"source"`: so do samples that are read block by block;
    * `"participation"`: absent clients keep their states exactly, or the algorithm refuses;
    * `"channels"`: at most five rounds through a channel give finite numbers and meet constraints,
      or are refused by a `ValueError` about that argument; a channel that loses nothing changes
      nothing;
    * `"bits"`: what the history counts is the length of the payloads in bytes;
    * `"newcomers"`: `jaxfed.personalize` gives clients that took no part finite models of the same
      shapes, and a warm start finds its clients by their ids;
    * `"checkpoint"`: an interrupted run ends bit for bit like one that was not;
    * `"refusals"`: data of an unknown kind are refused by a `ValueError` about `clients`.

    Args:
        algorithm: what to check.
        clients: whom to run it on; at least three.
        rounds: how many rounds the runs have, at least two.
        key: random key.
        essence: `f(result) -> (shared, local)`, what the result says: what is compared, free of
            arbitrary choices such as bases of a subspace. The result itself by default.
        loss: `f(result) -> number`, what is differentiated; by default a fixed combination of all
            numbers of the essence.
        constraint: `f(result)`, raises an AssertionError for a result that should not be, such as
            components that are not orthonormal; called in both precisions.
        others: other clients of the same shapes; by default these with their data exchanged.
        wider: the algorithm for one client more, where it depends on their number.
        pad: gives the clients with more padding; by default rows of zeros where the data are
            `jaxfed.Samples`, else that part is skipped.
        deterministic: whether the result depends smoothly on data and hyperparameters, so that
            derivatives must equal finite differences.
        channels: channels to run through, by any names; by default one of each kind.
        backends: backends, by any names; by default all that the devices allow.
        checks: names of the checks to run; all of them by default.
        rtol: relative tolerance of the comparisons.
        atol: absolute tolerance.

    Returns:
        What was checked, and what was skipped and why.

    Raises:
        AssertionError: naming the property that does not hold, with what was compared.
        ValueError: for an unknown check, too few clients or too few rounds.
    """
    names = CHECKS if checks is None else checks
    check_texts("checks", names)
    if unknown := set(names) - set(CHECKS):
        raise ValueError(
            f"checks: wanted some of {', '.join(_checks.CHECKS)}, got {sorted(unknown)}"
        )
    for name, given, kind in (
        ("algorithm", algorithm, Algorithm),
        ("wider", algorithm if wider is None else wider, Algorithm),
        ("clients", clients, Clients),
        ("others", clients if others is None else others, Clients),
    ):
        check_instance(name, given, kind, f"a jaxfed.{kind.__name__}")
    if len(clients) < 3:
        raise ValueError(f"clients: wanted at least 3, got {len(clients)}")
    check_whole("rounds", rounds, least=2)
    check_flag("deterministic", deterministic)
    for name, given in (
        ("essence", essence),
        ("loss", loss),
        ("constraint", constraint),
        ("pad", pad),
    ):
        if given is not None:
            check_callable(name, given)
    for name, given in (("channels", channels), ("backends", backends)):
        if given is not None and not isinstance(given, Mapping):
            raise refuse(name, "a dictionary by any names", given)
    check_factor("rtol", rtol, single=True)
    check_factor("atol", atol, single=True)
    with jax.enable_x64(True):
        key = jax.random.key(0) if key is None else checked_key("key", key)
        if others is None:
            data = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), clients.data)
            others = eqx.tree_at(lambda c: c.data, clients, data)
        case = _case.Case(
            algorithm=_compare.cast(algorithm, np.float64),
            clients=_compare.cast(clients, np.float64),
            others=_compare.cast(others, np.float64),
            wider=_compare.cast(algorithm if wider is None else wider, np.float64),
            key=key,
            rounds=rounds,
            essence=essence or (lambda result: result),
            loss=loss,
            constraint=constraint,
            pad=pad,
            deterministic=deterministic,
            channels=channels,
            backends=backends,
            rtol=rtol,
            atol=atol,
            skipped={},
        )
        checked = []
        for name in names:
            try:
                _checks.CHECKS[name](case)
                checked.append(name)
            except _case.Skipped as reason:
                case.skipped[name] = str(reason)
    return Report(tuple(checked), case.skipped)


__dir__ = _names.public_names(__name__)
