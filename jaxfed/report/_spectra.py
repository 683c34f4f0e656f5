"""Eigenvalues by which ranks are judged: of all clients together, and of each beside the rest."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

SHOWN = 20  # eigenvalues at most
WIDEST = 1000  # of the smaller side of a table that is decomposed
EACH = 100  # clients at most whose own spectra are computed


class Spectra(NamedTuple):
    """What a scree plot takes, and what it shows."""

    variances: dict[str, Float[np.ndarray, "*clients r"]]
    total: float
    chosen: dict[str, int]
    caption: str


def spectra(
    samples: Sequence[Float[np.ndarray, "n_i d"]],
    shared: Float[np.ndarray, "d r1"] | None,
    local: Float[np.ndarray, "m d r2"] | None,
) -> Spectra | None:
    """Spectra of the clients' mean second moment, and of what shared components leave of each.

    Args:
        samples: of every client.
        shared: components, if there are any.
        local: components beside them, if there are any.

    Returns:
        The eigenvalues and the ranks that were chosen; None where tables are too large.
    """
    features, clients = samples[0].shape[1], len(samples)
    total = float(np.mean([np.sum(table.astype(float) ** 2) / len(table) for table in samples]))
    rows = sum(map(len, samples))
    if total == 0 or not np.isfinite(total) or min(features, rows) > WIDEST:
        return None
    found, chosen = {}, {}
    if shared is not None:
        scaled = [table / np.sqrt(len(table) * clients) for table in samples]
        found["mean of all clients"] = _squares(np.concatenate(scaled))
        chosen["shared rank"] = shared.shape[1]
    if local is not None:
        some = np.unique(np.linspace(0, clients - 1, min(EACH, clients)).astype(int))
        rest = [samples[i] / np.sqrt(len(samples[i])) for i in some]
        if shared is not None:
            rest = [table - (table @ shared) @ shared.T for table in rest]
        name = "each client" if shared is None else "each client beside the shared components"
        own = [_squares(table) for table in rest]
        width = max(map(len, own))
        found[name] = np.stack([np.pad(x, (0, width - len(x))) for x in own])
        chosen["local rank"] = local.shape[2]
    if len(chosen) > len(set(chosen.values())):  # one line is not seen on another
        chosen = {" and ".join(chosen): chosen["shared rank"]}
    caption = "Variance along principal components, in shares of the mean over clients"
    if local is not None:
        caption += "; the band reaches from the smallest to the largest of any client"
    return Spectra(found, total, chosen, caption)


def _squares(table: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " r"]:
    """The largest eigenvalues of a second moment, from a table with it as its square."""
    rows, columns = table.shape
    square = table.T @ table if columns <= rows else table @ table.T
    return np.maximum(np.linalg.eigvalsh(square.astype(float))[::-1][:SHOWN], 0)
