"""The pickled batches of CIFAR-10, parsed and never unpickled.

A pickle is a program, and what runs one can be made to do nearly anything by it. So this knows the
instructions that the published files consist of, those of protocol 2 as Python 2 wrote it, and of
functions only the two calls that stand for an array of bytes; nothing is called, imported or set.
"""

import math
import pickletools
from typing import Any

import numpy as np

_MAKE_ARRAY, _ARRAY = "numpy.core.multiarray _reconstruct", "numpy ndarray"
_MAKE_TYPE, _BYTE = "numpy dtype", object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


class _Array:
    """An array before and after its elements are known."""

    elements: np.ndarray | None = None


def read_batch(pickled: bytes) -> dict[str, Any]:
    """The entries of a batch: arrays of bytes, bytes, whole numbers, lists of them.

    Raises:
        ValueError: for whatever is not in the published files.
    """
    machine = _Machine()
    try:
        for instruction, argument, _ in pickletools.genops(pickled):
            if instruction.name != "STOP":
                machine.step(instruction.name, argument)
        (batch,) = machine.stack
        return {key.decode("latin-1"): _finished(value) for key, value in batch.items()}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its parts do not fit together: {error}") from error


class _Machine:
    """What instructions work on: a stack, those outside of the last marks, and a memory."""

    def __init__(self):
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memory: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Do what one instruction says; names of functions are texts, texts are bytes."""
        match name:
            case "PROTO" if argument == 2:
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                self.stack.append(_CONSTANTS[name])
            case "BININT" | "BININT1" | "BININT2":
                self.stack.append(argument)
            case "BINSTRING" | "SHORT_BINSTRING":
                self.stack.append(argument.encode("latin-1"))
            case "MARK":
                self.outer.append(self.stack)
                self.stack = []
            case "EMPTY_LIST":
                self.stack.append([])
            case "APPENDS":
                added = self._since_mark()
                self._last(list).extend(added)
            case "EMPTY_DICT":
                self.stack.append({})
            case "SETITEMS":
                added = self._since_mark()
                self._last(dict).update(zip(added[::2], added[1::2], strict=True))
            case "TUPLE":
                added = self._since_mark()
                self.stack.append(tuple(added))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                parts = [self.stack.pop() for _ in range(int(name[-1]))]
                self.stack.append(tuple(reversed(parts)))
            case "BINPUT" | "LONG_BINPUT":
                self.memory[argument] = self.stack[-1]
            case "BINGET" | "LONG_BINGET":
                self.stack.append(self.memory[argument])
            case "GLOBAL" if argument in (_MAKE_ARRAY, _ARRAY, _MAKE_TYPE):
                self.stack.append(argument)
            case "REDUCE":
                given, function = self.stack.pop(), self.stack.pop()
                self.stack.append(_made(function, given))
            case "BUILD":
                state = self.stack.pop()
                _fill(self.stack[-1], state)
            case _:
                told = name if argument is None else f"{name} {argument!s:.80}"
                raise ValueError(f"{told} is in none of the published files")

    def _since_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.outer.pop()
        return found

    def _last(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError(f"wanted a {kind.__name__}, got a {type(self.stack[-1]).__name__}")
        return self.stack[-1]


def _made(function: Any, given: Any) -> Any:
    """What stands for the result of a call."""
    if function == _MAKE_ARRAY and given == (_ARRAY, (0,), b"b"):
        return _Array()
    if function == _MAKE_TYPE and given == (b"u1", 0, 1):
        return _BYTE
    raise ValueError("it holds something else than arrays of bytes")


def _fill(empty: Any, state: Any) -> None:
    """Give an array its elements; an element type has its state already."""
    if empty is _BYTE and state == (3, b"|", None, None, None, -1, -1, 0):
        return
    if not isinstance(empty, _Array):
        raise TypeError("a state that fits nothing")
    version, shape, kind, by_columns, elements = state
    if version != 1 or kind is not _BYTE or not isinstance(elements, bytes):
        raise TypeError("an array of something else than bytes")
    if not all(isinstance(n, int) and n >= 0 for n in shape) or math.prod(shape) != len(elements):
        raise ValueError(f"an array of shape {shape} has {len(elements)} elements")
    order = "F" if by_columns else "C"
    empty.elements = np.frombuffer(elements, np.uint8).reshape(shape, order=order)


def _finished(value: Any) -> Any:
    if isinstance(value, _Array):
        if value.elements is None:
            raise ValueError("an array without elements")
        return value.elements
    return value
