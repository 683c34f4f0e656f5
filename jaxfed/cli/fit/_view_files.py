"""Read views of the same entities from files, scale them, and hold some entities out."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from jaxtyping import Float, Int

from jaxfed import data
from jaxfed.cli._common import how_written, share_of

MATCHED = 1000  # largest number of held-out entities to match with other views


class Split(NamedTuple):
    """The views, scaled."""

    names: list[str]  # of the views
    entities: Int[np.ndarray, " entities"]  # indices of the entities to learn from
    train: list[Any]  # the views of these entities, dense or sparse; sparse ones are not centered
    held_out: list[Float[np.ndarray, "k d_j"]]  # the views of other entities
    # What was subtracted; for sparse views, what still has to be subtracted.
    mean: list[Float[np.ndarray, " d_j"]]
    scale: list[Float[np.ndarray, " d_j"]]  # what they were divided by

    @property
    def widths(self) -> list[int]:
        """Numbers of features."""
        return [len(mean) for mean in self.mean]


def read(arguments: SimpleNamespace) -> Split:
    """Read, split and scale the views in `--data`."""
    views, names = data.read_views(
        arguments.data,
        names=arguments.views,
        max_bytes=arguments.max_bytes,
        **how_written(arguments),
    )
    share = share_of(arguments)
    entities = views[0].shape[0]
    order = np.random.default_rng(arguments.seed).permutation(entities)
    out, kept = np.split(order, [round(share * entities)])
    split = Split(names, np.sort(kept), [], [], [], [])
    for view in views:
        train, held_out = view[split.entities], view[out[:MATCHED]]
        is_sparse = scipy.sparse.issparse(view)
        # Moments of training entities only, so that held-out ones have no influence.
        mean = np.asarray(train.mean(axis=0)).ravel()
        scale = np.ones_like(mean)
        if arguments.scale == "standardize":
            squares = train.power(2) if is_sparse else (train - mean) ** 2
            variance = np.asarray(squares.mean(axis=0)).ravel()
            if is_sparse:
                variance = np.maximum(variance - mean**2, 0)
            # Do not divide constant features.
            scale = np.where(variance > 0, np.sqrt(variance), scale)
        elif arguments.scale == "none":
            mean = np.zeros_like(mean)
        if is_sparse:
            held_out = held_out.toarray()
            split.train.append(train @ scipy.sparse.diags_array(1 / scale))
        else:
            split.train.append((train - mean) / scale)
        split.held_out.append((held_out - mean) / scale)
        split.mean.append(mean)
        split.scale.append(scale)
    return split
