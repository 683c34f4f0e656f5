"""Eigenvalues for choosing ranks: of the mean second moment, and of each client's own."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

SHOWN = 20  # largest number of eigenvalues
WIDEST = 1000  # largest smaller side of a table that is decomposed
EACH = 100  # largest number of clients whose spectra are computed


class Spectra(NamedTuple):
    """The arguments of a scree plot, and its caption."""

    variances: dict[str, Float[np.ndarray, "*clients r"]]
    total: float
    chosen: dict[str, int]
    caption: str


def spectra(
    samples: Sequence[Float[np.ndarray, "n_i d"]],
    shared: Float[np.ndarray, "d r1"] | None,
    local: Float[np.ndarray, "m d r2"] | None,
) -> Spectra | None:
    """Spectra of the mean second moment, and of each client's without the shared components.

    Args:
        samples: every client's samples.
        shared: shared components, if there are any.
        local: local components, if there are any.

    Returns:
        The eigenvalues and the chosen ranks; None if tables are too large.
    """
    features, clients = samples[0].shape[1], len(samples)
    total = float(np.mean([np.sum(table.astype(float) ** 2) / len(table) for table in samples]))
    rows = sum(map(len, samples))
    if total == 0 or not np.isfinite(total) or min(features, rows) > WIDEST:
        return None
    found, chosen = {}, {}
    if shared is not None:
        # Scale rows, so that the Gram matrix of all together is the mean second moment.
        scaled = [table / np.sqrt(len(table) * clients) for table in samples]
        found["mean of all clients"] = _squares(np.concatenate(scaled))
        chosen["shared rank"] = shared.shape[1]
    if local is not None:
        some = np.unique(np.linspace(0, clients - 1, min(EACH, clients)).astype(int))
        rest = [samples[i] / np.sqrt(len(samples[i])) for i in some]
        if shared is not None:
            rest = [table - (table @ shared) @ shared.T for table in rest]
        name = "each client" if shared is None else "each client without the shared components"
        each = [_squares(table) for table in rest]
        width = max(map(len, each))
        found[name] = np.stack([np.pad(x, (0, width - len(x))) for x in each])
        chosen["local rank"] = local.shape[2]
    if len(chosen) > len(set(chosen.values())):  # two lines at one place look like one
        chosen = {" and ".join(chosen): chosen["shared rank"]}
    caption = "Variance along principal components, relative to the mean over clients"
    if local is not None:
        caption += "; the band spans the smallest to the largest value of any client"
    return Spectra(found, total, chosen, caption)


def _squares(table: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " r"]:
    """The largest squared singular values of a table."""
    rows, columns = table.shape
    # Use the smaller of the two Gram matrices, which have the same eigenvalues.
    square = table.T @ table if columns <= rows else table @ table.T
    return np.maximum(np.linalg.eigvalsh(square.astype(float))[::-1][:SHOWN], 0)
