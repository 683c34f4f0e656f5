"""Draw malformed arguments, make the calls and classify the outcomes."""

import inspect
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_origin

import jax
import jaxtyping
import numpy as np
import scipy.sparse
from beartype.door import is_bearable
from beartype.roar import BeartypeCallHintForwardRefException

import jaxfed as jf
from bench import common

from .callables import Target, targets
from .files import written
from .kinds import Kind
from .values import DAMAGED, DAMAGED_ARRAYS, MALFORMED

SECONDS = 5.0  # of the processor, which other processes do not take from a call
CLOCK = 60.0  # seconds by the clock, after which a call hangs
DAMAGED_FILES = 0.1  # the share of cases
GOOD = ("refused", "taken")
# Whose refusals of types are part of their behaviour: what users meet first.
DOORS = ("Clients.", "fit", "rollout", "grid", "sweep", "tune", "personalize", "load")


@dataclass(frozen=True)
class Case:
    """One call with a parameter that is changed.

    Attributes:
        target: what is called.
        parameter: what is changed.
        label: how.
        value: to what.
        taken: whether it must be accepted; None if it may be.
    """

    target: Target
    parameter: str
    label: str
    value: Any
    taken: bool | None

    def __str__(self) -> str:
        return f"{self.target.name}({self.parameter}={self.label})"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: `kind` is one of `GOOD`, or a fault."""

    case: Case
    kind: str
    message: str = ""


@cache
def _targets() -> list[Target]:
    return targets()


def cases(number: int, seed: int) -> Iterator[Case]:
    """Draw cases at random."""
    rng = random.Random(seed)
    made = 0
    while made < number:
        if rng.random() < DAMAGED_FILES:
            made += 1
            yield _damaged(rng, made)
            continue
        target = rng.choice(_targets())
        parameter = rng.choice(sorted(target.kinds))
        label, value = _drawn(rng, target.right.get(parameter))
        taken = _fits(target.kinds[parameter], value)
        if taken and not target.cheap:
            continue
        if not taken and _of_another_type(target, parameter, value):
            continue
        made += 1
        yield Case(target, parameter, label, value, taken)


def _damaged(rng: random.Random, number: int) -> Case:
    """A call of a reader with a damaged file, which it may read nevertheless."""
    reader, how, place = written(rng, Path(f"damaged-{number}"))
    (target,) = (each for each in _targets() if each.name == f"data.{reader}")
    parameter = next(iter(target.right))
    return Case(target, parameter, f"({how})", place, None)


def _fits(kind: Kind, value: Any) -> bool:
    """Whether a value must be accepted; one that a predicate cannot even look at must not."""
    if isinstance(value, Iterator):  # looking would use it up
        return False
    try:
        return bool(kind(value))
    except (TypeError, ValueError, AttributeError, OverflowError):
        return False


def _of_another_type(target: Target, parameter: str, value: Any) -> bool:
    """Whether a type checker refuses the value, so that no check at run time has to.

    Arrays are called with where any array is taken: their shapes are checked at run time.
    """
    if target.name.startswith(DOORS) or target.call is not None:
        return False
    parameters = inspect.signature(attrgetter(target.name)(jf)).parameters
    if parameter not in parameters:  # an option that is passed on to a callable fuzzed itself
        return True
    annotation = parameters[parameter].annotation
    if annotation is inspect.Parameter.empty:
        return False
    if isinstance(value, np.ndarray | jax.Array) and _takes_arrays(annotation):
        return False
    try:
        # Several times, because beartype looks at one random member of a list.
        return not all(is_bearable(value, annotation) for _ in range(8))
    except BeartypeCallHintForwardRefException:  # a class of an optional package
        return False
    except TypeError:  # beartype asks an array without axes for its length
        return True


def _takes_arrays(annotation: Any) -> bool:
    """Whether an annotation, or a member of its union or sequence, is of arrays of numbers."""
    if isinstance(annotation, type):
        kinds = np.ndarray | jax.Array | jaxtyping.AbstractArray
        return issubclass(annotation, kinds) and "Key" not in annotation.__name__
    if get_origin(annotation) in (Callable, Mapping):
        return False
    return any(map(_takes_arrays, get_args(annotation)))


def _drawn(rng: random.Random, right: Any) -> tuple[str, Any]:
    """Draw a value; every third is made by damaging a valid one."""
    if right is not None and rng.random() < 0.35:
        if isinstance(right, np.ndarray) and rng.random() < 0.7:
            label = rng.choice(sorted(DAMAGED_ARRAYS))
            with np.errstate(all="ignore"):
                return f"right, {label}", DAMAGED_ARRAYS[label](right)
        label = rng.choice(sorted(DAMAGED))
        return f"right, {label}", DAMAGED[label](right)
    label = rng.choice(sorted(MALFORMED))
    return label, MALFORMED[label]()


def outcome(case: Case) -> Outcome:
    """Make the call; it must not write into the working directory."""
    before = _files()
    kind, message, slow = _timed(case)
    if slow:  # once may be compilation, of what other cases have done without
        kind = _timed(case)[2] or kind
    if _files() != before:
        kind = "wrote"
    if case.taken is None:
        shutil.rmtree(case.value.parts[0])
    return Outcome(case, kind, message)


def _timed(case: Case) -> tuple[str, str, str]:
    """The outcome of a call, its message, and whether it was slow or hung; else no text."""
    clock, processor = time.perf_counter(), time.process_time()
    kind, message = _called(case)
    slow = "slow" if time.process_time() - processor > SECONDS else ""
    return kind, message, "hanging" if time.perf_counter() - clock > CLOCK else slow


def _called(case: Case) -> tuple[str, str]:
    arguments = dict(case.target.right) | {case.parameter: case.value}
    try:
        result = jax.block_until_ready(case.target(**arguments))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if not isinstance(error, ValueError | FileNotFoundError):
            return "another exception", message
        if case.taken:
            return "refused though right", message
        return ("refused" if _named(case, str(error)) else "unnamed"), message
    if case.taken is None:
        return ("taken" if _sound(result) else "taken though wrong"), ""
    return ("taken", "") if case.taken else ("taken though wrong", "")


def _sound(result: Any) -> bool:
    """Whether what a reader gives has numbers, and all of them finite."""
    numbers = [
        leaf.data if scipy.sparse.issparse(leaf) else leaf
        for leaf in jax.tree.leaves(result)
        if not isinstance(leaf, str)
    ]
    return all(np.isfinite(each).all() for each in numbers)


def _named(case: Case, message: str) -> bool:
    names = (case.parameter, *case.target.says.get(case.parameter, ()))
    if isinstance(case.value, np.ndarray | jax.Array | list | tuple | range | dict):
        # It may be right in itself, and not fit the others.
        names = (*names, *case.target.kinds, *case.target.right)
    if case.taken is None:
        return case.value.parts[0] in message
    if isinstance(case.value, str | os.PathLike) and str(case.value):
        names = (*names, str(case.value))
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in names)


def _files() -> list[str]:
    return sorted(os.listdir())


def table(outcomes: list[Outcome]) -> str:
    """Count the outcomes of each callable."""
    kinds = sorted({each.kind for each in outcomes}, key=lambda kind: (kind not in GOOD, kind))
    counted = Counter((each.case.target.name, each.kind) for each in outcomes)
    counted.update(("all", each.kind) for each in outcomes)
    return common.table(
        [
            {"callable": name}
            | {kind: counted[name, kind] for kind in kinds}
            | {"all": sum(counted[name, kind] for kind in kinds)}
            for name in (*sorted({each.case.target.name for each in outcomes}), "all")
        ]
    )
