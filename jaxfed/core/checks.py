"""What arguments must be, said alike everywhere: name, what was wanted and what was given.

Numbers that are traced are not known, and taken as they are.
"""

import numpy as np
import optax
from jax.core import Tracer


def check_name(argument: str, given: object, known: tuple[str, ...]) -> None:
    """Refuse a name that is not among the known ones.

    Raises:
        ValueError: as said above.
    """
    if given not in known:
        raise ValueError(f"{argument}: wanted one of {', '.join(known)}, got {given!r}")


def check_count(argument: str, given: object, *, least: int = 1) -> None:
    """Refuse what is not a whole number of at least so many.

    Raises:
        ValueError: as said above.
    """
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise ValueError(f"{argument}: wanted a whole number of at least {least}, got {given!r}")


def check_factor(argument: str, given) -> None:
    """Refuse numbers that are negative or not finite.

    Raises:
        ValueError: as said above.
    """
    if not isinstance(given, Tracer) and not _not_negative(given):
        raise ValueError(f"{argument}: wanted a finite number of at least 0, got {given!r}")


def check_positive(argument: str, given, *, optional: bool = False) -> None:
    """Refuse numbers that are not positive or not finite, and None unless it is `optional`.

    Raises:
        ValueError: as said above.
    """
    if isinstance(given, Tracer) or (optional and given is None):
        return
    if not _not_negative(given) or not (np.asarray(given) > 0).all():
        raise ValueError(f"{argument}: wanted a positive finite number, got {given!r}")


def check_optimizer(argument: str, given: object) -> None:
    """Refuse what is no Optax optimizer.

    Raises:
        ValueError: as said above.
    """
    if not isinstance(given, optax.GradientTransformation):
        raise ValueError(f"{argument}: wanted an optax.GradientTransformation, got {given!r}")


def _not_negative(given) -> bool:
    """Whether numbers are finite and not negative."""
    values = np.asarray(given)
    real = values.dtype.kind in "fiu"
    return real and bool(np.isfinite(values).all() and (values >= 0).all())
