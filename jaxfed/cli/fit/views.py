"""`jaxfed fit` for views of the same entities: find what they have in common."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from inspect import Parameter
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import scipy.sparse
from jaxtyping import Array, Float, PyTree

from jaxfed import gcca, models, plot
from jaxfed._numbers import precision_of
from jaxfed.cli._common import BACKEND, BITS, WRITTEN, channel_of, files, held_out, rounds
from jaxfed.cli._options import call, define, option, options_of
from jaxfed.cli.fit import _run
from jaxfed.cli.fit._run import CHECKPOINTS, ONE_EXCHANGE, ROBUST, RUN, TOL
from jaxfed.cli.fit._view_files import Split, read
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.run.solution import Solution

PICTURES = ("agreement.png", "convergence.png")
CAPTIONS = {PICTURES[0]: "How much of each component of the representation each view gives, 0 to 1"}
POOLED = 10**8  # largest number of entries for which the minimum cost is computed
HELD_OUT = "held-out entities whose nearest in another view is themselves (%)"
BATCH = 1000
SUMMARIES = {
    "maxvar": "generalized CCA of views of the same entities (Shrestha & Fu 2023)",
    "mvlsa": "generalized CCA in one round (Rastogi et al. 2015)",
    "deepmaxvar": "generalized CCA by a neural network for every view (Shrestha & Fu 2023)",
    "ajive": "joint and individual parts of views in one round (Feng et al. 2018)",
}


# --- options -------------------------------------------------------------------------------------


def _plain(sparse: str) -> list[Parameter]:
    """Describe options that all commands have; `sparse` names the files of sparse views."""
    data = (
        f"folder with one file for each view (.npy, .csv, .parquet, or .npz of one array{sparse}), "
        "or one .npz file with an array for each; the rows of all views are the same entities"
    )
    scale = (
        "subtract each feature's mean (center) and divide by its standard deviation (standardize)"
    )
    return [
        *files(data),
        *WRITTEN,
        *RUN,
        option("--views", list[str], "names of the views to use; default: all", None),
        option("--scale", ("none", "center", "standardize"), scale, "standardize"),
        held_out("share of the entities to look for in other views", 0.0),
        BITS,
        *BACKEND,
    ]


def commands() -> dict[str, Callable[..., bool | None]]:
    """Describe the commands."""
    start = (
        "first representation: that of mvlsa, or a random one; default: mvlsa, but random with "
        "--groups, since mvlsa trusts every client"
    )
    sparse, loop = _plain(" or of scipy.sparse.save_npz"), [TOL, CHECKPOINTS]
    linear = {
        "": sparse,
        "Rounds": [
            rounds(100),
            *loop,
            option("--start", ("mvlsa", "random"), start, None),
            *options_of(gcca.MVLSA, without={"rank"}),
        ],
        "Algorithm": options_of(gcca.MaxVar),
        "Faulty or malicious clients": ROBUST,
    }
    batch = f"entities in each step; default: {BATCH}, or all if they are fewer"
    hidden = "numbers of units of the hidden layers; none for linear maps"
    deep = {
        "": _plain(""),
        "Rounds": [rounds(50), *loop],
        "Networks": [
            option("--hidden", tuple[int, ...], hidden, (128, 64), consume_multiple=True),
            option("--batch-size", int, batch, None),
            option("--step-size", float, "step size of Adam", 1e-3),
        ],
        # Without parameters that are not numbers or have other defaults here.
        "Algorithm": options_of(
            gcca.DeepMaxVar, without={"network", "optimizer", "batch_size", "step_size"}
        ),
        "Faulty or malicious clients": ROBUST,
    }
    one_round = {"": sparse, "Algorithm": options_of(gcca.MVLSA)}
    return {
        "maxvar": _command("maxvar", linear, participation=None),
        "mvlsa": _command("mvlsa", one_round, ridge=0.0, **ONE_EXCHANGE),
        "deepmaxvar": _command("deepmaxvar", deep, participation=None),
        "ajive": _command(
            "ajive", {"": _plain(""), "Algorithm": options_of(gcca.AJIVE)}, **ONE_EXCHANGE
        ),
    }


def _command(name: str, options: dict[str, list[Parameter]], **fixed: Any) -> Callable[..., Any]:
    run = partial(_run.run, prepare=prepare)
    return define(run, options, SUMMARIES[name], algorithm=name, **fixed)


# --- the run -------------------------------------------------------------------------------------


class ViewMethod(NamedTuple):
    """How the views are mapped to the common representation."""

    algorithm: Algorithm
    # `outputs(result.local, views)` maps the views, `(views, entities, rank)`; each approximates
    # the representation times the square root of the number of entities.
    outputs: Callable[[PyTree, gcca.Views], Float[Array, "views entities rank"]]
    batches: str  # batches, in words, for the message before the run
    maps: str  # the map of a view, in words, printed after its number of features
    start: Algorithm | None = None  # an algorithm whose solution the run starts from


def prepare(arguments: SimpleNamespace, precision: ExitStack) -> _run.FitInputs:
    """Read the views, and make the algorithm."""
    channel = channel_of(arguments)
    is_deep, is_ajive = (arguments.algorithm == name for name in ("deepmaxvar", "ajive"))
    method = _ajive(arguments) if is_ajive else None if is_deep else _linear(arguments)
    split = read(arguments)
    if not is_deep:  # networks need no more than single precision
        precision.enter_context(precision_of(split.train[0].dtype))
    if not scipy.sparse.issparse(split.train[0]):
        views = gcca.Views.from_arrays(split.train, names=split.names)
    elif is_deep or is_ajive:
        raise ValueError(
            f"--data: fit {arguments.algorithm} needs dense views, got sparse ones; fit maxvar "
            "takes them"
        )
    else:
        centered = arguments.scale != "none"
        views = gcca.Views.from_sparse(split.train, names=split.names, center=centered)
    method = method or _deep(arguments, len(split.entities))
    evaluated = _parts if is_ajive else _evaluated
    maps = ", ".join(
        f"{name} {width}{method.maps}"
        for name, width in zip(split.names, split.widths, strict=True)
    )
    return _run.FitInputs(
        method.algorithm,
        views,
        split.names,
        f"{len(views)} views, {len(split.entities)} entities to learn from{method.batches} and "
        f"{len(split.held_out[0])} held out; {'networks of' if is_deep else 'features:'} {maps}.",
        jax.random.key(arguments.seed),
        partial(evaluated, arguments=arguments, method=method, views=views, split=split),
        method.start,
        options={"channel": channel},
    )


def _linear(arguments: SimpleNamespace) -> ViewMethod:
    algorithm, start = gcca.MVLSA, None
    if arguments.algorithm != "mvlsa":
        algorithm = gcca.MaxVar
        if arguments.groups is None and arguments.start != "random":
            start = call(arguments, gcca.MVLSA)
        elif arguments.start == "mvlsa":
            raise ValueError("--start: wanted random with --groups, since mvlsa has no robust form")

    def outputs(local: Array, views: gcca.Views) -> Array:
        return jax.vmap(lambda view, weights: view.mv(weights))(views.data, local)

    return ViewMethod(call(arguments, algorithm), outputs, "", "", start)


def _ajive(arguments: SimpleNamespace) -> ViewMethod:
    def outputs(local: gcca.ViewParts, views: gcca.Views) -> Array:
        found = jax.vmap(lambda own, view: own.transform(view.values))(local, views.data)
        return found.joint * local.individual_scores.shape[-2] ** 0.5

    return ViewMethod(call(arguments, gcca.AJIVE), outputs, "", "")


def _deep(arguments: SimpleNamespace, entities: int) -> ViewMethod:
    batch = min(BATCH, entities) if arguments.batch_size is None else arguments.batch_size
    hidden = tuple(arguments.hidden)
    algorithm = call(
        arguments,
        gcca.DeepMaxVar,
        network=partial(models.Perceptron, outputs=arguments.rank, hidden=hidden),
        optimizer=optax.adam(1.0),
        batch_size=batch,
    )
    sizes = "".join(f"-{units}" for units in (*hidden, arguments.rank))
    return ViewMethod(algorithm, algorithm.outputs, f", in batches of {batch},", sizes)


def _evaluated(
    solution: Solution,
    *,
    arguments: SimpleNamespace,
    method: ViewMethod,
    views: gcca.Views,
    split: Split,
) -> _run.Findings:
    shared, local = np.asarray(solution.result.shared), solution.result.local
    scores = np.asarray(method.outputs(local, views)) / len(split.entities) ** 0.5
    with np.errstate(over="ignore"):  # a robust run goes on without views that overflow
        finite = np.flatnonzero(np.isfinite(np.square(scores)).all(axis=(1, 2)))
    names = [split.names[i] for i in finite]
    shares = _shares(shared, scores[finite])
    quantities: dict[str, float | None] = {}
    arrays = _about(views, split)
    least = None
    if arguments.algorithm == "deepmaxvar":
        quantities["cost"] = float(np.square(scores - shared).sum() / 2)
        arrays["scores"] = scores
    else:
        quantities["cost"] = float(gcca.cost(views, *solution.result, ridge=arguments.ridge))
        # The minimum cost is computed from all views together, if they are dense and not too large.
        if isinstance(views.data, gcca.View) and views.data.values.size <= POOLED:
            least = float(gcca.optimum(views, arguments.rank, ridge=arguments.ridge).cost)
        quantities["least cost, of pooled views"] = least
    for name, share in zip(names, shares.mean(1), strict=True):
        quantities[f"representation that {name} gives (%)"] = 100 * float(share)
    quantities[HELD_OUT] = _accuracy(method, local, split)
    figures = {PICTURES[0]: plot.agreement(shares, names)}
    if solution.rounds > 1:
        levels = (
            None
            if least is None or not np.isfinite(least)
            else {"least cost / views": least / len(split.names)}
        )
        label = "cost / views"
        figures[PICTURES[1]] = plot.convergence(solution.history, levels=levels, label=label)
    return _run.Findings(quantities, figures, arrays, captions=CAPTIONS)


def _parts(
    solution: Solution,
    *,
    arguments: SimpleNamespace,
    method: ViewMethod,
    views: gcca.Views,
    split: Split,
) -> _run.Findings:
    shared, local = solution.result
    rule = gcca.joint_rank(views, arguments.signal_rank, key=jax.random.key(arguments.seed))
    kept = np.asarray(shared.singular_values) > 0
    quantities: dict[str, float | None] = {
        "joint directions": int(kept.sum()),
        "rank that the bounds suggest": rule.rank,
    }
    energy = np.square(views.data.values).sum(axis=(1, 2))
    for part in ("joint", "individual"):
        # Scores are orthonormal, so loadings have all the energy of a part.
        found = np.square(getattr(local, f"{part}_loadings")).sum(axis=(1, 2)) / energy
        for name, share in zip(split.names, found, strict=True):
            quantities[f"variation of {name} that is {part} (%)"] = 100 * float(share)
    quantities[HELD_OUT] = _accuracy(method, local, split)
    figures = {}
    if kept.any():
        scores = np.asarray(method.outputs(local, views)) / len(split.entities) ** 0.5
        shares = _shares(np.asarray(shared.scores)[:, kept], scores[..., kept])
        figures[PICTURES[0]] = plot.agreement(shares, split.names)
    return _run.Findings(quantities, figures, _about(views, split), captions=CAPTIONS)


def _accuracy(method: ViewMethod, local: PyTree, split: Split) -> float | None:
    """Return how often a held-out entity's nearest neighbour is itself, in percent."""
    if len(split.held_out[0]) < 2:
        return None
    others = method.outputs(local, gcca.Views.from_arrays(split.held_out))
    return 100 * float(gcca.alignment_accuracy(others))


def _about(views: gcca.Views, split: Split) -> dict[str, Any]:
    """Return arrays that describe the entities and features of the result."""
    arrays: dict[str, Any] = {"entities": split.entities, "features": split.widths}
    for name in ("mean", "scale"):
        arrays[name] = [np.pad(x, (0, views.features - len(x))) for x in getattr(split, name)]
    return arrays


def _shares(
    shared: Float[np.ndarray, "entities rank"], scores: Float[np.ndarray, "views entities rank"]
) -> Float[np.ndarray, "views rank"]:
    """Return the share of each component of the representation that each view's scores explain.

    The representation is rotated first, so that the views agree most on its first component.
    """
    agreement = shared.T @ scores.mean(0)
    axes = np.linalg.eigh(agreement + agreement.T)[1][:, ::-1]
    return 1 - np.square((scores - shared) @ axes).sum(axis=1)
