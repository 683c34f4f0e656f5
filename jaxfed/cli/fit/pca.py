"""`jaxfed fit` for the PCA family: one table of all exported algorithms."""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from cyclopts import Token
from jaxtyping import Array, Float, Key

from jaxfed import data, multi_start, pca, plot
from jaxfed._checks import is_whole
from jaxfed._numbers import precision_of
from jaxfed.cli import _evaluate
from jaxfed.cli._common import (
    BACKEND,
    IMPUTE,
    SAMPLES,
    TABLE,
    UNITS,
    files,
    held_out,
    read_samples,
    rounds,
    share_of,
    taken_out,
    whole_or_share,
)
from jaxfed.cli._options import (
    call,
    define,
    descriptions,
    first_line,
    flag_of,
    option,
    options_of,
)
from jaxfed.cli.fit import _confidence, _processes, _release, _run, _shares, _weights
from jaxfed.cli.fit._run import CHECKPOINTS, ONE_EXCHANGE, PARTICIPATION, ROBUST, RUN, TOL
from jaxfed.cli.fit._split import Split, moved
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import Names, replace_names
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution
from jaxfed.inference import Confidence
from jaxfed.pca.fitted import finite_clients, side_by_side
from jaxfed.preprocess import Impute, Standardize
from jaxfed.preprocess.impute import ROUNDS

PICTURES = ("components.png", "convergence.png")
WARM_STARTS = ("projector", "spectrum")
SEVERAL, STARTS = "several", 3
DRAWN = 4  # clients whose local components are drawn
MOST_OF_ALL = 0.9  # a feature's share of the energy that is worth a warning


class Entry(NamedTuple):
    """How to run an algorithm."""

    algorithm: Callable[..., Algorithm]  # its class, whose docstring describes the options
    has_rounds: bool = True  # whether it runs more than one exchange
    has_warm_start: bool = False  # whether it may start from the solution of `OneShot`
    has_bootstrap: bool = False  # whether few rounds from the solution fit a resample
    has_release: bool = False  # whether moments with negative eigenvalues suit it
    shares: _shares.Rule | None = None  # how shares of the variance determine its ranks


# By command word: the name of the class in lower case.
ALGORITHMS = {
    "perpca": Entry(
        pca.PerPCA,
        has_warm_start=True,
        has_bootstrap=True,
        has_release=True,
        shares=_shares.shared_and_local,
    ),
    "hmf": Entry(pca.HMF, has_warm_start=True),
    "tcmf": Entry(pca.TCMF, has_warm_start=True),
    "pertucker": Entry(pca.PerTucker),
    "local": Entry(pca.Local, has_rounds=False, shares=_shares.of_each),
    "pooled": Entry(pca.Pooled, has_rounds=False, has_release=True, shares=_shares.of_all),
    "oneshot": Entry(
        pca.OneShot, has_rounds=False, has_release=True, shares=_shares.shared_and_local
    ),
    "hierarchicalpca": Entry(pca.HierarchicalPCA, shares=_shares.under_a_prior),
    "empiricalbayespca": Entry(pca.EmpiricalBayesPCA, shares=_shares.under_a_prior),
    "blocklanczos": Entry(pca.BlockLanczos, shares=_shares.of_all),
    "subspaceiteration": Entry(pca.SubspaceIteration, shares=_shares.of_all),
    "localpower": Entry(pca.LocalPower, shares=_shares.of_all),
    "faps": Entry(pca.FAPS, shares=_shares.of_all),
}


# --- options -------------------------------------------------------------------------------------


def commands() -> dict[str, Callable[..., bool | None]]:
    """Describe the commands."""
    return {name: _command(name, entry) for name, entry in ALGORITHMS.items()}


def _command(name: str, entry: Entry) -> Callable[..., bool | None]:
    shape = "draw components as images of this many pixels, e.g. 28x28"
    options = {
        "": [
            *files(SAMPLES),
            *RUN,
            *TABLE,
            *([_weights.OPTION] if entry.shares else []),
            held_out("share of each client's samples to test on; 0 for none", 0.2),
            *UNITS,
            IMPUTE,
            option("--image-shape", str, shape, None, converter=_shape, metavar="HxW"),
            *BACKEND,
        ],
        "Algorithm": _options_of(entry),
    }
    if entry.has_rounds:
        options["Rounds"] = [rounds(200), TOL, PARTICIPATION, CHECKPOINTS]
    if entry.has_warm_start:
        start = inspect.signature(entry.algorithm).parameters["start"]
        choices = *get_args(start.annotation), SEVERAL
        about = (
            "first components: the algorithm's own choice, the solution of oneshot with method "
            f"projector or spectrum, or the best of {STARTS} starts after {multi_start.ROUNDS} "
            "rounds of each"
        )
        options["Rounds"].append(option("--start", (*choices, *WARM_STARTS), about, choices[0]))
    if entry.has_rounds:
        options["Faulty or malicious clients"] = ROBUST
    if entry.has_bootstrap:
        options["Confidence"] = _confidence.OPTIONS
    if entry.has_release:
        options["Privacy of persons"] = _release.OPTIONS
    options["Several processes, each with the files of its own clients"] = _processes.OPTIONS
    run = partial(_run.run, prepare=partial(prepare, entry=entry))
    # What algorithms without rounds have no options for.
    fixed = {"algorithm": name} | ({} if entry.has_rounds else ONE_EXCHANGE)
    return define(run, options, first_line(entry.algorithm), **fixed)


def _options_of(entry: Entry) -> list[inspect.Parameter]:
    """Describe the options of an algorithm, whose numbers of components may be shares."""
    about, found = descriptions(entry.algorithm), []
    for each in options_of(entry.algorithm, without={"start"} if entry.has_warm_start else ()):
        if each.name in _shares.ABOUT:
            words = f"{about[each.name]}, {_shares.ABOUT[each.name]}" if entry.shares else ""
            each = option(
                flag_of(each.name), float, words or about[each.name], converter=whole_or_share
            )
        found.append(each)
    return found


def _shape(_: Any, words: Sequence[Token]) -> tuple[int, int]:
    text = words[0].value
    match = re.fullmatch(r"([0-9]+)x([0-9]+)", text)
    if match is None:
        raise ValueError(f"wanted HEIGHTxWIDTH, e.g. 28x28, got {text!r}")
    return int(match[1]), int(match[2])


# --- the run -------------------------------------------------------------------------------------


def prepare(arguments: SimpleNamespace, precision: ExitStack, *, entry: Entry) -> _run.FitInputs:
    """Make the algorithm, and read the samples."""
    _release.check(arguments)
    _weights.check(arguments)
    given = _shares.given_in(arguments, entry.shares)
    # With shares, other options are checked before any file is read, the numbers afterwards.
    planned = _planned(arguments, entry, {x: 1 for x, n in given.items() if not is_whole(n)})
    split_key, key = jax.random.split(jax.random.key(arguments.seed))
    # Processes split different clients, each by its own key; the key of the run is common.
    if process := jax.process_index():
        split_key = jax.random.fold_in(split_key, process)
    split = read(arguments, split_key, precision)
    shape, features = arguments.image_shape, split.train[0].shape[1]
    if shape is not None and shape[0] * shape[1] != features:
        raise ValueError(
            f"--image-shape: {shape[0]}x{shape[1]} is {shape[0] * shape[1]} pixels, the data have "
            f"{features} features"
        )
    fitted = gaps = None
    if (components := arguments.impute) is not None:
        incomplete = split.clients(missing="mask")
        imputed = fit(
            _run.robust(arguments, Impute(*(() if components == "auto" else components))),
            incomplete,
            rounds=ROUNDS,
            key=jax.random.fold_in(split_key, 1),
        )
        # Not from imputed samples, which vary less than true ones.
        fitted = imputed.result.local.moments(incomplete)
        split, gaps = _completed(split, imputed), _confidence.Gaps(incomplete, imputed)
    clients = split.clients()
    if split.weighted is not None:
        fitted = split.weighted
    _confidence.check(arguments, clients)
    ranks = {}
    if entry.shares is not None and given:
        ranks = entry.shares(clients if fitted is None else fitted, given)
        planned = _planned(arguments, entry, ranks)
    finish = _run.unchanged
    if getattr(arguments, "epsilon", None) is not None:
        running = [x for x in (planned.start, planned.algorithm) if x is not None]
        sent = _release.released(arguments, split, [_run.robust(arguments, x) for x in running])
        fitted, split = sent.moments, sent.split
        clients = split.clients()
        finish = partial(_release.finished, sent=sent, clients=clients)
    confidence = partial(_confidence.computed, arguments, key=jax.random.fold_in(key, 1), gaps=gaps)
    chosen = _shares.in_words(ranks)
    listed = " and ".join(f"{number} {name}" for name, number in chosen.items())
    return _run.FitInputs(
        planned.algorithm,
        clients if fitted is None else fitted,
        split.names,
        f"{len(clients)} clients, {clients.features} features, {sum(map(len, split.train))} "
        f"samples to learn from and {sum(map(len, split.held_out))} held out."
        + f" The variance to explain takes {listed}."
        * bool(chosen),
        key,
        partial(
            _evaluated,
            clients=clients,
            split=split,
            shape=shape,
            confidence=confidence,
            chosen=chosen,
        ),
        planned.start,
        start_rounds=planned.start_rounds,
        page={
            "image_shape": shape,
            "feature_names": split.features,
            "clients": split.weighted or clients,
        },
        preprocessing=split.units,
        imputed=split.imputed,
        finish=finish,
    )


class _Planned(NamedTuple):
    """What runs, and what it starts from."""

    algorithm: Algorithm
    start: Algorithm | None
    start_rounds: int


def _planned(arguments: SimpleNamespace, entry: Entry, ranks: _shares.Ranks) -> _Planned:
    """Make the algorithms, some of whose numbers of components come from the data."""
    settings, start, start_rounds = SimpleNamespace(**vars(arguments) | dict(ranks)), None, 1
    if entry.has_warm_start and arguments.start in (*WARM_STARTS, SEVERAL):
        delattr(settings, "start")  # the algorithm's own default, which the warm start replaces
    algorithm = call(settings, entry.algorithm)
    if entry.has_warm_start and arguments.start == SEVERAL:
        start = multi_start.MultiStart(algorithm, STARTS)
        start_rounds = multi_start.ROUNDS
    elif entry.has_warm_start and arguments.start in WARM_STARTS:
        start = pca.OneShot(settings.shared_rank, settings.local_rank, method=arguments.start)
    return _Planned(algorithm, start, start_rounds)


def read(arguments: SimpleNamespace, key: Key[Array, ""], precision: ExitStack) -> Split:
    """Read, split and standardize the samples in `--data`."""
    # Not all commands that read samples have this option.
    incomplete = getattr(arguments, "impute", None) is not None
    arrays, names, features = read_samples(arguments, precision, incomplete=incomplete)
    column = getattr(arguments, "weight_column", None)
    if column is not None:
        precision.enter_context(precision_of(np.dtype(float)))
        arrays = _weights.counted(column, arrays, names, features)
    share = share_of(arguments)
    train, held_out = arrays, []
    if share > 0:
        train, held_out = data.train_test_split(arrays, share, key=key)
    if column is not None:
        return _weighted(arguments, names, train, held_out, features)
    persons = None
    if getattr(arguments, "person", None) is not None:
        _, held_out, _ = _release.persons_of(arguments, held_out, features)
        persons, train, features = _release.persons_of(arguments, train, features)
    # Released units come later, from samples as they are.
    later = getattr(arguments, "ranges", None) is not None
    choices = ("none", "none") if later else (arguments.center, arguments.scale)
    # Of training samples only, so that held-out samples have no influence.
    algorithm = Standardize(*choices)
    exchanged = "shared" in choices
    if exchanged:
        algorithm = _run.robust(arguments, algorithm)
    missing = "mask" if incomplete else "refuse"
    clients = Clients.from_samples(train, names=names, features=features, missing=missing)
    # Without an exchange, the round changes nothing; if its objective overflows, the fit says so.
    units = fit(algorithm, clients, rounds=1, key=key, throw=exchanged).result.local

    train, held_out = moved(train, units), moved(held_out, units)
    if persons is None and getattr(arguments, "epsilon", None) is None:
        _warn_of_one_direction(train, features, *choices)
    return Split(names, train, held_out, units, choices, features, persons)


def _warn_of_one_direction(
    train: list[np.ndarray], features: list[str] | None, center: str, scale: str
) -> None:
    """Warn if the means, or one feature, have most of the energy: the first component is theirs."""
    squares = np.sum([np.nansum(np.square(x, dtype=float), axis=0) for x in train], axis=0)
    sums = np.sum([np.nansum(x, axis=0, dtype=float) for x in train], axis=0)
    counts = np.sum([np.isfinite(x).sum(axis=0) for x in train], axis=0)
    total, place = squares.sum() or 1, int(np.argmax(squares))
    of_means, of_one = (sums**2 / np.maximum(counts, 1)).sum() / total, squares[place] / total
    # Of two features, one often has most.
    if len(squares) > 2 and of_one > MOST_OF_ALL and scale == "none":
        what = f"feature {place} (from 0) has" if features is None else f"{features[place]} has"
        share, todo = of_one, "--scale shared counts all features alike"
        if center == "none":
            todo = f"--center shared or local removes means, and {todo}"
    elif of_means > MOST_OF_ALL and center == "none":
        what, share = "the features' means have", of_means
        todo = "--center shared or local removes them"
    else:
        return
    warnings.warn(
        f"--data: {what} {100 * share:.3g} % of the energy of the samples, and the first "
        f"component will be little else; {todo}",
        stacklevel=2,
    )


def _weighted(
    arguments: SimpleNamespace,
    names: list[str],
    train: list[np.ndarray],
    held_out: list[np.ndarray],
    features: list[str] | None,
) -> Split:
    """Standardize samples whose weights are in a column."""
    column = arguments.weight_column
    weights, train, own = taken_out("weight-column", column, train, features)
    units = _weights.standardization(train, weights, arguments.center, arguments.scale)
    units = replace_names(units, Names(tuple(names), tuple(own)))

    train = moved(train, units)
    rows = _weights.scaled(train, weights)
    _warn_of_one_direction(rows, own, arguments.center, arguments.scale)
    if held_out:
        unseen, held_out, _ = taken_out("weight-column", column, held_out, features)
        held_out = _weights.scaled(moved(held_out, units), unseen)
    return Split(
        names,
        rows,
        held_out,
        units,
        (arguments.center, arguments.scale),
        own,
        weighted=_weights.moments(train, weights, names, own),
    )


def _completed(split: Split, imputed: Solution) -> Split:
    """Impute missing entries of all samples."""

    def complete(tables: list[Float[np.ndarray, "n_i d"]]) -> list[Float[np.ndarray, "n_i d"]]:
        if not tables:
            return []
        clients = Clients.from_samples(tables, missing="mask")
        values = np.asarray(imputed.result.local.transform(clients).data.values)
        # A robust run goes on without the clients whose entries overflow.
        values = np.where(np.isfinite(values), values, np.asarray(imputed.result.shared.mean))
        return [rows[: len(table)] for rows, table in zip(values, tables, strict=True)]

    return split._replace(
        train=complete(split.train),
        held_out=complete(split.held_out),
        imputed=imputed,
        missing=float(np.mean(np.isnan(np.concatenate(split.train)))),
    )


def _evaluated(
    solution: Solution,
    *,
    clients: Clients,
    split: Split,
    shape: tuple[int, int] | None,
    confidence: Callable[[Solution, Clients], Confidence | None],
    chosen: Mapping[str, int],
) -> _run.Findings:
    result = Personalized(*side_by_side(solution))
    kept = finite_clients(result.local, split.train)
    lost = len(split.train) - len(kept)
    if lost:  # only a robust run goes on without them
        clients, split = clients.take(kept), split.only(kept)
        if result.local is not None:
            result = result._replace(local=result.local[kept])
    train = _evaluate.shares(result, clients.data)
    unseen = None
    if split.held_out:
        others = Clients.from_samples(split.held_out)
        unseen = 100 * float(_evaluate.shares(result, others.data).residual)
    objective = _evaluate.objective(result, clients.data)
    quantities = {
        **chosen,
        "objective (mean squared error of a training sample)": objective,
        "error on training samples (% of their energy)": 100 * float(train.residual),
        "error on held-out samples (% of their energy)": unseen,
        "in shared components (% of the training energy)": 100 * float(train.shared),
        "in local components (% of the training energy)": 100 * float(train.local),
        "misalignment of the local components": _evaluate.theta(result),
    }
    if split.imputed is not None:
        quantities["missing entries, completed (% of training samples)"] = 100 * split.missing
    if lost:
        quantities["clients left out of these measures, not finite"] = lost
    samples = dict(zip(split.names, map(len, split.train), strict=True))
    figures = _figures(result, split, shape)
    if solution.rounds > 1:
        figures[PICTURES[1]] = plot.convergence(solution.history)
    arrays, summary = {"units": split.choices, "features": split.features}, {"samples": samples}
    found = confidence(solution, clients)
    if found is not None:
        figures |= _confidence.figures(found, split.names, shape, split.features)
        arrays |= {"confidence.axes": found.axes, "confidence.axes_std": found.axes_std}
        summary["confidence"] = _confidence.json_entry(found, split.names)
    return _run.Findings(quantities, figures, arrays, summary, confidence=found)


def _figures(result: Personalized, split: Split, shape: tuple[int, int] | None) -> dict[str, Any]:
    """Draw the components, by file name."""
    shared, local = result
    groups = {}
    if shared is not None:
        groups["shared components"] = pca.principal_axes(shared, split.train)
    if local is not None:
        for name, basis, samples in list(zip(split.names, local, split.train, strict=True))[:DRAWN]:
            groups[f"local components of {name}"] = pca.principal_axes(basis, [samples])
    return {PICTURES[0]: plot.components(groups, shape, feature_names=split.features)}
