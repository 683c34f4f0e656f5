"""What runs send until they reach a goal, as the papers count it."""

import numpy as np
from jaxtyping import Float, Int

WORD = 32  # bits of an entry in full precision


def rounds_to(curve: Float[np.ndarray, "*batch rounds"], goal: float) -> Int[np.ndarray, "*batch"]:
    """The number of rounds, from 1, until a metric is first at most the goal; -1 if it never is.

    NaN marks rounds in which the metric was not computed.
    """
    reached = np.asarray(curve) <= goal
    return np.where(reached.any(axis=-1), reached.argmax(axis=-1) + 1, -1)


def compression_ratio(position: float, full_position: float, bits: float) -> float:
    """The share of bits saved on the way to a goal: Shrestha & Fu (2023), Section V-A3.

    Args:
        position: at which the compressed run reaches the goal, counted from 1 for the start, whose
            messages have as many bits as those of a round.
        full_position: the same of the run in full precision.
        bits: of an entry of a message.
    """
    return 1 - position * bits / (WORD * full_position)


def bits_per_variable(rounds: int, bits: float) -> float:
    """The bits of an entry in one direction, without scales: Shrestha & Fu (2023), Section V-A3.

    Messages before the rounds have 8 bits with compressors, as jaxfed sends them.
    """
    return (8 if bits < WORD else WORD) + rounds * bits
