"""Malformed values by label, and ways to damage a valid value."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NOT_FINITE = float("nan"), float("inf"), float("-inf"), np.float64("nan")
WHOLE = -1, 0, 2**31, 2**63, -(2**63) - 1, 10**400, np.int64(-1), np.int64(2)
REAL = -0.0, 0.5, 1.5, 3.0, 1e300, 1e-300, 1j, Fraction(1, 2)
TEXTS = "", "auto", "3", b"3", "no such file.npz", Path("no such folder"), "a\0b"
OTHERS = None, True, False, np.datetime64("2024-01-01"), int, ..., range(1, 4)
TUPLES = (), (1,), (1, 2), (-1, 2), (2**63, 1), (0.5, float("nan"))

# Made anew each time: a generator can be used up, and an array written to.
MALFORMED: dict[str, Callable[[], Any]] = {
    f"{type(value).__name__} {value!r:.20}": lambda value=value: value
    for value in (*NOT_FINITE, *WHOLE, *REAL, *TEXTS, *OTHERS, *TUPLES)
} | {
    "10 ** 5000": lambda: 10**5000,  # has too many digits to be printed
    "module": lambda: np,
    "object": lambda: object(),
    "function": lambda: lambda *a, **k: None,
    "slice": lambda: slice(2),
    "[]": lambda: [],
    "{}": lambda: {},
    "set": lambda: {1, 2},
    "dict": lambda: {"a": 1},
    "dict of arrays": lambda: {"a": np.ones((3, 2), np.float32)},
    "generator": lambda: (i for i in range(3)),
    "ragged": lambda: [[1.0, 2.0], [3.0]],
    "mixed": lambda: [1, "a", None],
    "list of None": lambda: [None, None],
    "['a', 'b']": lambda: ["a", "b"],
    "empty array": lambda: np.zeros((0, 3), np.float32),
    "no axis": lambda: np.float32(1.0),
    "array without an axis": lambda: np.asarray(1.5),
    "vector": lambda: np.arange(3, dtype=np.float32),
    "matrix": lambda: np.ones((3, 2), np.float32),
    "five axes": lambda: np.ones((2, 1, 1, 1, 2), np.float32),
    "object array": lambda: np.asarray([1, "a", None], object),
    "object matrix": lambda: np.asarray([[1, 2.0], [None, "a"]], object),
    "complex array": lambda: np.ones((3, 2), np.complex64),
    "text array": lambda: np.asarray(["a", "b"]),
    "date array": lambda: np.asarray(["2024-01-01"], "datetime64[D]"),
    "bool array": lambda: np.ones(3, bool),
    "whole array": lambda: np.ones((3, 2), np.int64),
    "huge array": lambda: np.full((3, 2), 2**63, np.uint64),
    "half array": lambda: np.ones((3, 2), np.float16),
    "NaN array": lambda: np.full((3, 2), np.nan, np.float32),
    "infinite array": lambda: np.full((2, 3, 2), np.inf, np.float32),
    "records": lambda: np.zeros(2, [("a", "f4"), ("b", "i4")]),
    "masked array": lambda: np.ma.masked_array(np.ones((3, 2)), mask=True),
    "jax array": lambda: jnp.ones((3, 2)),
    "jax number": lambda: jnp.asarray(1),
    "key": lambda: jax.random.key(0),
    "several keys": lambda: jax.random.split(jax.random.key(0), 3),
    "old key": lambda: np.zeros(2, np.uint32),
    "shape": lambda: jax.ShapeDtypeStruct((3, 2), np.float32),
}


def _put(value: np.ndarray, number: float) -> np.ndarray:
    changed = value.copy()
    changed.reshape(-1)[-1] = number
    return changed


# What else can be wrong with a value that would be right.
DAMAGED: dict[str, Callable[[Any], Any]] = {
    "in a list": lambda value: [value],
    "twice": lambda value: (value, value),
    "in a dict": lambda value: {"a": value},
    "in a set of names": lambda value: {str(type(value))},
    "from a generator": lambda value: (each for each in [value]),
    "as text": lambda value: str(type(value)),
    "its class": type,
    "as a function": lambda value: lambda: value,
}

DAMAGED_ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "complex": lambda value: value.astype(np.complex64),
    "objects": lambda value: value.astype(object),
    "texts": lambda value: value.astype(str),
    "half": lambda value: value.astype(np.float16),
    "bool": lambda value: value.astype(bool),
    "whole": lambda value: value.astype(np.int32),
    "NaN": lambda value: _put(value.astype(np.float32), np.nan),
    "infinite": lambda value: _put(value.astype(np.float32), np.inf),
    "negative": lambda value: -1 - abs(value),
    "an axis more": lambda value: value[None],
    "flat": lambda value: value.reshape(-1),
    "one column less": lambda value: value[..., :-1],
    "one row less": lambda value: value[:-1],
    "one row only": lambda value: value[:1],
    "no row": lambda value: value[:0],
    "no column": lambda value: value[..., :0],
    "turned": lambda value: value.T,
    "its shape": lambda value: value.shape,
}
