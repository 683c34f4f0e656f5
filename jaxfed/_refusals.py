"""The error for a wrong argument, usable without JAX."""

import difflib
import reprlib
from collections.abc import Iterable


class _Brief(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() < 2_000:  # Python refuses to write integers of thousands of digits
            return super().repr_int(x, level)
        return f"{'-' * (x < 0)}2^{x.bit_length()}"


_BRIEF = _Brief()
_BRIEF.maxstring = _BRIEF.maxother = 200
_BRIEF.maxlong = 60


def shown(given: object) -> str:
    """Any value in one short line."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    shape, dtype = getattr(given, "shape", None), getattr(given, "dtype", None)
    if isinstance(shape, tuple) and shape:
        package = type(given).__module__.partition(".")[0]
        if package not in ("jax", "jaxlib", "numpy") and hasattr(given, "__array__"):
            # A data frame or a tensor, whose text would fill lines.
            kind = type(given).__name__
            return f"a {kind} of shape {tuple(shape)}; convert it with numpy.asarray"
        if dtype is not None:
            return f"an array of {dtype} of shape {shape}"
    return " ".join(_BRIEF.repr(given).split())


def closest(given: str, known: Iterable[str]) -> str:
    """A hint at the name that was meant, to append to an error; nothing if none is close."""
    close = difflib.get_close_matches(given, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def refuse(argument: str, wanted: str, given: object) -> ValueError:
    """The error for a wrong argument, for the caller to raise."""
    return ValueError(f"{argument}: wanted {wanted}, got {shown(given)}")
