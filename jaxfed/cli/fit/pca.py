"""`jaxfed fit` for the PCA family: one table of all exported algorithms."""

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Self, get_args

import jax
import numpy as np
from cyclopts import Token
from jaxtyping import Array, Float, Int, Key

from jaxfed import data, multi_start, pca, plot, privacy
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
)
from jaxfed.cli._options import call, define, first_line, option, options_of
from jaxfed.cli.fit import _confidence, _processes, _release, _run
from jaxfed.cli.fit._run import CHECKPOINTS, ONE_EXCHANGE, PARTICIPATION, ROBUST, RUN, TOL
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution
from jaxfed.inference import Confidence
from jaxfed.pca.fitted import finite_clients, side_by_side
from jaxfed.preprocess import Impute, Standardization, Standardize
from jaxfed.preprocess.impute import ROUNDS

PICTURES = ("components.png", "convergence.png")
WARM_STARTS = ("projector", "spectrum")
SEVERAL, STARTS = "several", 3
DRAWN = 4  # clients whose local components are drawn


class Entry(NamedTuple):
    """How to run an algorithm."""

    algorithm: Callable[..., Algorithm]  # its class, whose docstring describes the options
    has_rounds: bool = True  # whether it runs more than one exchange
    has_warm_start: bool = False  # whether it may start from the solution of `OneShot`
    has_bootstrap: bool = False  # whether few rounds from the solution fit a resample
    has_release: bool = False  # whether moments with negative eigenvalues suit it


# By command word: the name of the class in lower case.
ALGORITHMS = {
    "perpca": Entry(pca.PerPCA, has_warm_start=True, has_bootstrap=True, has_release=True),
    "hmf": Entry(pca.HMF, has_warm_start=True),
    "tcmf": Entry(pca.TCMF, has_warm_start=True),
    "pertucker": Entry(pca.PerTucker),
    "local": Entry(pca.Local, has_rounds=False),
    "pooled": Entry(pca.Pooled, has_rounds=False, has_release=True),
    "oneshot": Entry(pca.OneShot, has_rounds=False, has_release=True),
    "hierarchicalpca": Entry(pca.HierarchicalPCA),
    "empiricalbayespca": Entry(pca.EmpiricalBayesPCA),
    "blocklanczos": Entry(pca.BlockLanczos),
    "subspaceiteration": Entry(pca.SubspaceIteration),
    "localpower": Entry(pca.LocalPower),
    "faps": Entry(pca.FAPS),
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
            held_out("share of each client's samples to test on; 0 for none", 0.2),
            *UNITS,
            IMPUTE,
            option("--image-shape", str, shape, None, converter=_shape, metavar="HxW"),
            *BACKEND,
        ],
        "Algorithm": options_of(entry.algorithm, without={"start"} if entry.has_warm_start else ()),
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


def _shape(_: Any, words: Sequence[Token]) -> tuple[int, int]:
    text = words[0].value
    match = re.fullmatch(r"([0-9]+)x([0-9]+)", text)
    if match is None:
        raise ValueError(f"wanted HEIGHTxWIDTH, e.g. 28x28, got {text!r}")
    return int(match[1]), int(match[2])


# --- the run -------------------------------------------------------------------------------------


class Split(NamedTuple):
    """The clients' samples, standardized as requested; NaN for missing entries."""

    names: list[str]  # of the clients
    train: list[Float[np.ndarray, "n_i d"]]  # to learn from
    # To test on; an empty list if none are held out.
    held_out: list[Float[np.ndarray, "k_i d"]]
    units: Standardization  # what was subtracted and divided by
    choices: tuple[str, str]  # `--center` and `--scale`
    features: list[str] | None = None  # names of the features
    persons: list[np.ndarray] | None = None  # whose training samples these are
    imputed: Solution | None = None  # the run that imputed missing entries
    missing: float = 0.0  # share of the entries of training samples that were missing

    def clients(self, missing: Literal["refuse", "mask"] = "refuse") -> Clients:
        """Return the clients with their names, to learn from."""
        return Clients.from_samples(
            self.train, names=self.names, features=self.features, missing=missing
        )

    def only(self, kept: Int[np.ndarray, " kept"]) -> Self:
        """Return the clients at these positions; preprocessing remains that of all."""
        parts = {"names": self.names, "train": self.train, "held_out": self.held_out}
        return self._replace(**{k: [x[i] for i in kept] if x else x for k, x in parts.items()})


def prepare(arguments: SimpleNamespace, precision: ExitStack, *, entry: Entry) -> _run.FitInputs:
    """Make the algorithm, and read the samples."""
    _release.check(arguments)
    settings, start, start_rounds = SimpleNamespace(**vars(arguments)), None, 1
    if entry.has_warm_start and arguments.start in (*WARM_STARTS, SEVERAL):
        delattr(settings, "start")  # the algorithm's own default, which the warm start replaces
    algorithm = call(settings, entry.algorithm)
    if entry.has_warm_start and arguments.start == SEVERAL:
        start = multi_start.MultiStart(algorithm, STARTS)
        start_rounds = multi_start.ROUNDS
    elif entry.has_warm_start and arguments.start in WARM_STARTS:
        start = pca.OneShot(arguments.shared_rank, arguments.local_rank, method=arguments.start)
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
    if arguments.impute is not None:
        incomplete = split.clients(missing="mask")
        imputed = fit(
            _run.robust(arguments, Impute(*arguments.impute)),
            incomplete,
            rounds=ROUNDS,
            key=jax.random.fold_in(split_key, 1),
        )
        # Not from imputed samples, which vary less than true ones.
        fitted = imputed.result.local.moments(incomplete)
        split, gaps = _completed(split, imputed), _confidence.Gaps(incomplete, imputed)
    clients = split.clients()
    _confidence.check(arguments, clients)
    protected = getattr(arguments, "epsilon", None) is not None
    if protected:
        # With noise that nobody can draw again, whatever the seed.
        fitted = privacy.release_moments(
            clients,
            epsilon=arguments.epsilon,
            delta=arguments.delta,
            person=split.persons,
            noise=arguments.noise or "jax",
            ledger=_release.ledger_of(arguments),
        )
    confidence = partial(_confidence.computed, arguments, key=jax.random.fold_in(key, 1), gaps=gaps)
    return _run.FitInputs(
        algorithm,
        clients if fitted is None else fitted,
        split.names,
        f"{len(clients)} clients, {clients.features} features, {sum(map(len, split.train))} "
        f"samples to learn from and {sum(map(len, split.held_out))} held out.",
        key,
        partial(_evaluated, clients=clients, split=split, shape=shape, confidence=confidence),
        start,
        start_rounds=start_rounds,
        page={"image_shape": shape, "feature_names": split.features, "clients": clients},
        preprocessing=split.units,
        imputed=split.imputed,
        finish=partial(_release.at_home, clients=clients) if protected else lambda found: found,
    )


def read(arguments: SimpleNamespace, key: Key[Array, ""], precision: ExitStack) -> Split:
    """Read, split and standardize the samples in `--data`."""
    # Not all commands that read samples have this option.
    incomplete = getattr(arguments, "impute", None) is not None
    arrays, names, features = read_samples(arguments, precision, incomplete=incomplete)
    share = share_of(arguments)
    train, held_out = arrays, []
    if share > 0:
        train, held_out = data.train_test_split(arrays, share, key=key)
    persons = None
    if getattr(arguments, "person", None) is not None:
        _, held_out, _ = _release.persons_of(arguments, held_out, features)
        persons, train, features = _release.persons_of(arguments, train, features)
    # Of training samples only, so that held-out samples have no influence.
    algorithm = Standardize(arguments.center, arguments.scale)
    exchanged = "shared" in (arguments.center, arguments.scale)
    if exchanged:
        algorithm = _run.robust(arguments, algorithm)
    clients = Clients.from_samples(train, missing="mask" if incomplete else "refuse")
    # Without an exchange, the round changes nothing; if its objective overflows, the fit says so.
    units = fit(algorithm, clients, rounds=1, key=key, throw=exchanged).result.local

    # With NumPy, since JAX would compile a division for each number of samples. Either all
    # clients have held-out samples or none.
    means, scales = np.asarray(units.mean), np.asarray(units.scale)
    train, held_out = (
        [(y - mean) / scale for y, mean, scale in zip(tables, means, scales, strict=False)]
        for tables in (train, held_out)
    )
    choices = arguments.center, arguments.scale
    return Split(names, train, held_out, units, choices, features, persons)


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
