"""The run of all `jaxfed fit` commands: read data, fit, evaluate and write results."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from jaxfed import aggregation, participation, report
from jaxfed._optional import require
from jaxfed.aggregation.robust import last_known
from jaxfed.cli import _report
from jaxfed.cli._common import OUTPUT, backend_of
from jaxfed.cli._folder import Folder
from jaxfed.cli._options import option
from jaxfed.cli.fit import _confidence
from jaxfed.cli.fit._processes import Together
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.standardization import Standardization
from jaxfed.core.common.files import locked
from jaxfed.core.common.processes import attempted
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.contract.remarks import Words
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution, guarantees_of, name_of
from jaxfed.core.store.checkpoint import Checkpoint
from jaxfed.core.store.saved import ended_badly
from jaxfed.inference import Confidence
from jaxfed.privacy import statement

REPORT = "report.html"
WORDS = Words(rounds="--rounds", start="--start common", shared="--shared-rank")

RUN = [
    *OUTPUT,
    option("--report", bool, f"also write {REPORT}, one page about the run for any browser", False),
    option("--seed", int, "seed of everything drawn at random", 0),
]
TOL = option(
    "--tol", float, "stop once the objective will fall by less (relative); default: never", None
)
PARTICIPATION = option("--participation", int, "clients in a round; default: all", None)
CHECKPOINTS = option(
    "--checkpoint-every",
    int,
    "rounds between saved states; the same command resumes an interrupted run from the last",
    50,
)
RULES = {
    "biweight": aggregation.biweight,
    "geometric-median": aggregation.geometric_median,
    "coordinate-median": aggregation.coordinate_median,
    "trimmed-mean": aggregation.trimmed_mean,
    "clipping": aggregation.centred_clipping,
}
ROBUST = [
    option(
        "--groups",
        int,
        "aggregate the means of this many groups of clients with a rule that a minority of groups "
        "cannot move far; default: one mean of all",
        None,
    ),
    option("--aggregate", tuple(RULES), "aggregation rule, with --groups", "biweight"),
]
# For algorithms without rounds.
ONE_EXCHANGE = {"rounds": 1, "tol": None, "participation": None, "checkpoint_every": None}


class Findings(NamedTuple):
    """Results of evaluating a solution."""

    # Lines of the table, between the number of rounds and the traffic.
    quantities: Mapping[str, Any]
    figures: Mapping[str, Any]  # pictures by file name
    # Further arrays for `result.npz`, in addition to the solution and the clients' names.
    arrays: Mapping[str, Any] = {}
    summary: Mapping[str, Any] = {}  # further entries for `result.json`
    # Captions of pictures that the report does not draw itself.
    captions: Mapping[str, str] = {}
    confidence: Confidence | None = None  # how sure the components are, if it was requested


def unchanged(solution: Solution) -> Solution:
    """Return the solution."""
    return solution


class FitInputs(NamedTuple):
    """What a command fits, derived from its options and files."""

    algorithm: Algorithm
    clients: Clients  # the clients of this process, usually all, as they are fitted
    names: list[str]  # their names
    message: str  # printed before the run
    key: Key[Array, ""]  # randomness of the run
    evaluate: Callable[[Solution], Findings]  # measures and draws a solution
    start: Algorithm | None = None  # whose solution the run starts from
    start_rounds: int = 1
    options: Mapping[str, Any] = {}  # further arguments of `jaxfed.fit`
    page: Mapping[str, Any] = {}  # further arguments of `jaxfed.report.html`
    preprocessing: Standardization | None = None  # applied to the samples
    imputed: Solution | None = None  # the run that imputed them afterwards
    finish: Callable[[Solution], Solution] = unchanged  # what clients do at home


def run(
    arguments: SimpleNamespace,
    *,
    prepare: Callable[[SimpleNamespace, ExitStack], FitInputs],
) -> bool:
    """Fit an algorithm with the given options, and write the results.

    Args:
        arguments: values of the options.
        prepare: reads the data, enters their precision, and makes the inputs of the fit.

    Returns:
        Whether the run did not converge.
    """
    with ExitStack() as precision:
        return _run(arguments, lambda arguments: prepare(arguments, precision))


def _run(arguments: SimpleNamespace, prepare: Callable[[SimpleNamespace], FitInputs]) -> bool:
    together = Together.join(arguments)
    require("matplotlib.figure", extra="plot")
    backend = backend_of(arguments)
    folder = Folder(arguments.out)
    if getattr(arguments, "epsilon", None) is not None:
        arguments.checkpoint_every = None  # a resumed run would release once more
    resumable = arguments.checkpoint_every is not None

    def ready() -> FitInputs:
        folder.check(force=arguments.force, resumable=resumable)
        return prepare(arguments)

    inputs = together.read(ready)
    start = None if inputs.start is None else robust(arguments, inputs.start)
    inputs = inputs._replace(algorithm=robust(arguments, inputs.algorithm), start=start)
    clients = together.spread(inputs.clients, backend)
    # Before `_begin`, which removes the results of an earlier run.
    for algorithm in (inputs.start, inputs.algorithm):
        if algorithm is not None:
            algorithm.check(clients, None)
    with _begin(folder, arguments, together) as attempt:
        if together.processes > 1:
            print(f"{len(clients)} clients, {len(inputs.clients)} in this process.")
        print(inputs.message)
        start_time = time.perf_counter()
        common = {"key": inputs.key, "backend": backend}
        start = None
        if inputs.start is not None:
            start = fit(inputs.start, clients, rounds=inputs.start_rounds, **common)
            if isinstance(inputs.start, aggregation.Robust):
                start = replace(start, result=jax.tree.map(_finite, start.result))
        count = arguments.participation
        solution = attempt(
            partial(
                fit,
                inputs.algorithm,
                clients,
                rounds=arguments.rounds,
                warm_start=start,
                participation=None if count is None else participation.uniform(count),
                tol=arguments.tol,
                progress=_report.on_terminal() and arguments.rounds > 1,
                **common,
                **inputs.options,
            )
        )
        seconds = time.perf_counter() - start_time
    far = _far(solution, clients, inputs.names)
    solution = inputs.finish(together.local(solution, clients, inputs.clients))
    findings = inputs.evaluate(solution)
    quantities = {
        "rounds": int(solution.rounds),
        "how the run ended": name_of(solution.status).replace("_", " "),
        **findings.quantities,
        **far,
        **_traffic(inputs.imputed, start, solution),
    }
    rows = [{"quantity": name, "value": value} for name, value in quantities.items()]
    print()
    _report.show(rows)
    words = WORDS
    if hasattr(arguments, "step_size"):
        words = words._replace(steps="--step-size")
    remarks = [*solution.remarks(words)]
    if inputs.imputed is not None:
        # Of its model alone: its rounds are no choice of the reader.
        of_model = inputs.imputed.algorithm.remarks(inputs.imputed.result, inputs.imputed.history)
        remarks += [f"--impute: {remark}" for remark in of_model]
    for remark in remarks:
        print(f"\n{remark}")
    print()
    protected = bool(guarantees_of(solution.releases))
    if protected:
        print(statement(solution), end="\n\n")
    if findings.confidence is not None:
        _confidence.show_intervals(findings.confidence)
    others = dict(findings.figures)
    if arguments.report:
        others[REPORT] = report.html(
            solution,
            names=inputs.names,
            title=f"jaxfed fit {arguments.algorithm}, {arguments.data.absolute().name}",
            seconds=seconds,
            table=rows,
            confidence=findings.confidence,
            pictures={text: findings.figures[name] for name, text in findings.captions.items()},
            **{"clients": inputs.clients, **inputs.page},
        )
    entries = solution.entries(
        preprocessing=inputs.preprocessing,
        imputation=None if inputs.imputed is None else inputs.imputed.result.local,
        words=words,
    )
    arrays = {**entries, "names": inputs.names, **findings.arrays}
    summary = {"seconds": seconds, **findings.summary, "table": rows}
    if protected:
        summary["privacy"] = statement(solution).splitlines()
    _report.finish(folder, arguments, arrays, summary, others)
    status = name_of(solution.status)
    # How long a network is trained is a choice, and hardly any training is long enough.
    chosen = status == "round_limit" and solution.algorithm.stochastic
    return ended_badly(status, solution.history) and not chosen


def _finite(array: Array) -> Array:
    """Return zeros for what a client outside of the aggregate failed to compute."""
    return jnp.where(jnp.isfinite(array), array, 0)


def robust(arguments: SimpleNamespace, algorithm: Algorithm) -> Algorithm:
    """Return the algorithm, with robust aggregation if groups are requested."""
    groups = getattr(arguments, "groups", None)
    if groups is None:
        return algorithm
    return aggregation.Robust(algorithm, RULES[arguments.aggregate](), groups=groups)


def _far(solution: Solution, clients: Clients, names: Sequence[str]) -> dict[str, Any]:
    """Return the number of groups far from the aggregate, and this process's clients in them.

    All processes call this together.
    """
    if not isinstance(solution.algorithm, aggregation.Robust):
        return {}
    ids = np.asarray(clients.own(clients.ids))
    listed = np.isin(ids, aggregation.far_clients(solution, ids))
    return {
        "groups far from the aggregate": int(last_known(solution.history, "far_groups")),
        "clients in them": ", ".join(np.asarray(names)[listed]) or "none",
    }


@contextmanager
def _begin(
    folder: Folder, arguments: SimpleNamespace, together: Together
) -> Iterator[Callable[[Callable[..., Solution]], Solution]]:
    """Prepare the folder of results, and lock its checkpoint during the run.

    Yields:
        A function that calls `jaxfed.fit`, with the checkpoint if there is one.
    """
    every = arguments.checkpoint_every
    if every is None:
        folder.begin()
        yield lambda fit: fit()
        return
    # All processes save one checkpoint, in the folder of the first.
    first = folder if together.processes == 1 else Folder(together.out / "process0")
    checkpoint = Checkpoint(first.checkpoint, every=every)
    attempt = folder.resume_or_begin("run", force=arguments.force)
    with ExitStack() as stack:

        def lock() -> None:
            if together.process == 0:
                stack.enter_context(locked(checkpoint.path, "--out"))

        # In all processes or none: if one could not lock, the others would wait for it in the first
        # round.
        attempted("--out", lock)
        yield lambda fit: attempt(partial(fit, checkpoint=checkpoint))


def _traffic(*solutions: Solution | None) -> dict[str, int]:
    """Return how many bits a client has sent and received in all runs."""
    up, down = (
        sum(float(each.history[way][-1]) for each in solutions if each is not None)
        for way in ("bits_up", "bits_down")
    )
    return {"bits sent by a client": round(up), "bits received by a client": round(down)}
