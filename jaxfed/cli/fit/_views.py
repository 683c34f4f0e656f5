"""Views of the same entities: read from files, scaled, some entities held out."""

import argparse
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from jaxtyping import Float, Int

from jaxfed import data
from jaxfed.cli.fit import _common

MATCHED = 1000  # held-out entities at most that are looked for in other views


class Split(NamedTuple):
    """The views, scaled as asked for."""

    names: list[str]
    entities: Int[np.ndarray, " entities"]  # which are learned from
    train: list[Any]  # dense or sparse, not centred if sparse
    held_out: list[Float[np.ndarray, "k d_j"]]
    mean: list[Float[np.ndarray, " d_j"]]
    scale: list[Float[np.ndarray, " d_j"]]


def add_views(parser: argparse.ArgumentParser) -> None:
    """Add the options of which views, how scaled, how many entities held out and how many bits."""
    parser.add_argument("--views", nargs="+", metavar="NAME", help="which; default: all")
    parser.add_argument(
        "--scale",
        choices=("none", "center", "standardize"),
        default="standardize",
        help="subtract each feature's mean; and divide by its standard deviation; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the entities, to look for in other views; default: %(default)s",
    )
    parser.add_argument(
        "--bits",
        type=int,
        metavar="B",
        help="of each number of a message, 2 to 8, sent as quantized differences; default: all",
    )


def read(arguments: argparse.Namespace) -> Split:
    """Read what `--data` names.

    Raises:
        ValueError: for arguments or files that do not fit.
        FileNotFoundError: if there are no files.
    """
    views, names = data.read_views(
        arguments.data, names=arguments.views, max_bytes=arguments.max_bytes
    )
    share = _common.held_out_share(arguments)
    entities = views[0].shape[0]
    order = np.random.default_rng(arguments.seed).permutation(entities)
    out, kept = np.split(order, [round(share * entities)])
    kept, matched = np.sort(kept), out[:MATCHED]
    train, held_out, means, scales = [], [], [], []
    for view in views:
        own, others = view[kept], view[matched]
        if scipy.sparse.issparse(view):
            others = others.toarray()
        # Of the entities that are learned from, so that nothing is known of the others.
        mean = np.asarray(own.mean(axis=0)).ravel()
        squares = own.power(2) if scipy.sparse.issparse(own) else (own - mean) ** 2
        variance = np.asarray(squares.mean(axis=0)).ravel()
        if scipy.sparse.issparse(own):
            variance = np.maximum(variance - mean**2, 0)
        scale = np.ones_like(mean)
        if arguments.scale == "standardize":
            # A constant feature has nothing to divide.
            scale = np.where(variance > 0, np.sqrt(variance), scale)
        elif arguments.scale == "none":
            mean = np.zeros_like(mean)
        if scipy.sparse.issparse(own):
            train.append(own @ scipy.sparse.diags_array(1 / scale))
        else:
            train.append((own - mean) / scale)
        held_out.append((others - mean) / scale)
        means.append(mean)
        scales.append(scale)
    return Split(names, kept, train, held_out, means, scales)


def shares(
    shared: Float[np.ndarray, "entities rank"], scores: Float[np.ndarray, "views entities rank"]
) -> Float[np.ndarray, "views rank"]:
    """Share of each component of the representation that each view's scores give.

    The representation is turned first so that the views agree most about its first component.
    """
    agreement = shared.T @ scores.mean(0)
    axes = np.linalg.eigh(agreement + agreement.T)[1][:, ::-1]
    return 1 - np.square((scores - shared) @ axes).sum(axis=1)
