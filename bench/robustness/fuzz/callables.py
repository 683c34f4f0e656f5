"""The public callables to fuzz: valid arguments, and the values that each parameter accepts.

Most of this is derived: callables from the public namespaces, kinds of values from annotations and
names (`derived.py`), required arguments from their names. `callables.toml` contains the rest.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import jaxfed as jf

from . import kinds, special
from .derived import TABLE, kind_of
from .given import given
from .kinds import Kind

ROOMS = [
    jf,
    jf.adjoint,
    jf.backend,
    jf.channel,
    jf.data,
    jf.deploy.flower,
    jf.estimators,
    jf.gcca,
    jf.generative,
    jf.inference,
    jf.linalg,
    jf.manifolds,
    jf.manifolds.grassmann,
    jf.manifolds.stiefel,
    jf.metrics,
    jf.models,
    jf.nmf,
    jf.nn,
    jf.participation,
    jf.pca,
    jf.plot,
    jf.privacy,
    jf.report,
    jf.testing,
]


@dataclass(frozen=True)
class Target:
    """One callable.

    Attributes:
        name: of the callable, within `jaxfed`.
        right: arguments that are right, by name.
        kinds: which values each parameter takes.
        cheap: whether a right call takes no time; else only wrong ones are made.
        call: how it is called, where that is not by its parameters' names.
        says: what else a message may call a parameter.
    """

    name: str
    right: Mapping[str, Any]
    kinds: Mapping[str, Kind]
    cheap: bool = False
    call: Callable[..., Any] | None = None
    says: Mapping[str, list[str]] = field(default_factory=dict)

    def __call__(self, /, **arguments: Any) -> Any:
        """Call it."""
        function = self.call or attrgetter(self.name)(jf)
        return function(**arguments)


def targets() -> list[Target]:
    """All of them; an entry `name, variant` of the table is another way to call the same."""
    entries = TABLE["callables"]
    names = dict.fromkeys([*entries, *public()])
    return [_target(name.partition(",")[0], entries.get(name, {})) for name in names]


def public() -> Iterator[str]:
    """The names of the public callables, but for those that take no argument of a user's."""
    for room in ROOMS:
        # The manifolds share functions of one module.
        home = room.__name__.removesuffix(".stiefel").removesuffix(".grassmann")
        home = "jaxfed.core" if room is jf else home
        for name in dir(room):  # those too that are imported when they are asked for
            found = getattr(room, name)
            own = callable(found) and getattr(found, "__module__", "").startswith(home)
            result = isinstance(found, type) and issubclass(found, tuple)
            if own and not result and not name.startswith("_") and name not in TABLE["inner"]:
                yield ".".join([*room.__name__.split(".")[1:], name]).removeprefix("core.")


def _target(name: str, entry: Mapping[str, Any]) -> Target:
    callable_, calls = attrgetter(name)(jf), _calls(name)
    parameters = {
        parameter: found
        for parameter, found in inspect.signature(callable_).parameters.items()
        if found.kind not in (found.VAR_KEYWORD, found.VAR_POSITIONAL)
    }
    right = {
        parameter: _argument(TABLE["right"][parameter])
        for parameter, found in parameters.items()
        if found.default is found.empty and parameter in TABLE["right"]
    }
    right |= {parameter: _argument(value) for parameter, value in entry.get("right", {}).items()}
    own = {parameter: _kind(value) for parameter, value in entry.get("kinds", {}).items()}
    derived = {
        parameter: kind_of(parameter, parameters, right)
        for parameter in parameters.keys() - own.keys() - {"self", *entry.get("open", [])}
    }
    algorithm = isinstance(callable_, type) and issubclass(callable_, jf.Algorithm)
    cheap = algorithm or name.startswith(tuple(TABLE["cheap"]))
    return Target(name, right, derived | own, cheap, calls, entry.get("says", {}))


def _argument(value: Any) -> Any:
    """A right argument: a value of `given.py` by its name, or what the table has."""
    if isinstance(value, dict):
        return given()[value["given"]]
    if isinstance(value, list) and not isinstance(value[0], str | list):
        return tuple(value)
    return value


def _kind(spec: str | list[Any]) -> Kind:
    """A kind by its name, or by what makes it and its arguments, which may be kinds themselves."""
    name, *arguments = [spec] if isinstance(spec, str) else spec
    found = getattr(kinds, name, None) or getattr(special, name)
    if isinstance(spec, str) and name not in kinds.MAKERS:
        return found
    options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    if name in ("array", "real"):
        lengths = {"*": None, "...": ...}
        return found(*(lengths.get(each, each) for each in arguments), **options)
    if name in kinds.OF_KINDS:
        arguments = [_kind(each) if isinstance(each, str | list) else each for each in arguments]
    return found(*arguments, **options)


def _calls(name: str) -> Callable[..., Any] | None:
    """How callables are called that are not called by the names of their parameters."""
    if name == "channel.chain":
        return lambda compressors: jf.channel.chain(
            *(compressors if isinstance(compressors, list | tuple) else [compressors])
        )
    if not name.startswith("estimators."):
        return None
    # As scikit-learn wants it, parameters are only looked at in `fit`.
    kind = {"GCCA": "tables", "AJIVE": "tables", "NMF": "twelve_counts"}
    own = (kind[end] for end in kind if name.endswith(end))
    tables = given()[next(own, "twelve")]
    return lambda **parameters: attrgetter(name)(jf)(**parameters).fit(tables).summary_
