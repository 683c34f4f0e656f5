"""`jaxfed plan`: predict the cost of a run on TPUs or GPUs you need not have, or of privacy."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cyclopts import App

from jaxfed import nmf, privacy
from jaxfed._checks import refuse
from jaxfed._optional import require
from jaxfed.cli import _report
from jaxfed.cli._common import BITS, DELTA, SHARERS, channel_of, rounds
from jaxfed.cli._options import call, define, first_line, option, options_of
from jaxfed.cli.fit.pca import ALGORITHMS, Entry
from jaxfed.core.common.files import replacing
from jaxfed.planning.plan import plan, shapes_of
from jaxfed.plot import drawing

SHAPES = [
    option("--clients", int, "number of clients"),
    option("--samples", int, "number of samples of each client"),
    option("--features", int, "number of features of each sample"),
]
TOPOLOGY = (
    "slice of TPUs such as v5e:4x4, one chip such as v5e, h100, h100:8, or cpu for the CPU of this "
    "machine; TPUs and h100 need pip install 'jaxfed[aot]'"
)
PLANNED = {**ALGORITHMS, "inmf": Entry(nmf.INMF)}
MACHINE = [
    option("--topology", str, TOPOLOGY, "v5e", metavar="TOPOLOGY"),
    rounds(100),
    option("--clients-per-block", int, "clients in a block; default: what fits", None),
    BITS,
]
ALONG = "of the samples along"
GUESS = [
    option("--clients", int, "number of clients"),
    option("--features", int, "number of features of each sample"),
    option("--shared-variances", list[float], f"variances {ALONG} each shared component"),
    option(
        "--local-variances", list[float], f"variances {ALONG} each local component of a client", ()
    ),
    option("--noise-variance", float, f"variance {ALONG} every other direction"),
]
ASKED = [
    option("--persons", int, "number of persons of each client, whose error is predicted", None),
    option("--error", float, "the error for which the persons needed are computed", None),
    option("--epsilon", list[float], "of the guarantee for each person, one or several"),
    DELTA,
    SHARERS,
    option(
        "--picture",
        Path,
        "also draw the expected error against epsilon into this file, such as cost.png, with "
        "--persons and several epsilons",
        None,
        metavar="FILE",
    ),
]
PRIVACY = """predict the error that noise for the privacy of persons costs, from no data

    The error is that of shared components which jaxfed fit --epsilon learns, with the true numbers
    of components: 0 if they are exact. It needs guessed variances and nothing else."""


def run_privacy(arguments: SimpleNamespace) -> None:
    """Print the expected errors and the numbers of persons needed."""
    if arguments.persons is None and arguments.error is None:
        raise ValueError("--persons: wanted a number, or an error in --error, got neither")
    if arguments.picture is not None:
        if arguments.persons is None or len(set(arguments.epsilon)) < 2:
            raise ValueError("--picture: wanted --persons and several epsilons with it")
        _check_picture(arguments.picture)
    rows = []
    for epsilon in (*arguments.epsilon, None):
        row: dict[str, Any] = {"epsilon": "no noise" if epsilon is None else epsilon}
        if arguments.persons is not None:
            row["expected error"] = call(arguments, privacy.expected_error, epsilon=epsilon)
        if arguments.error is not None:
            needed = call(arguments, privacy.persons_needed, epsilon=epsilon)
            row[f"persons of each client for {arguments.error:g}"] = needed
        rows.append(row)
    _report.show(rows)
    shared = len(arguments.shared_variances)
    chance = (shared * (1 - shared / arguments.features)) ** 0.5
    print(f"\nRandom components have the error {chance:.3g}.")
    if arguments.picture is not None:
        errors = [row["expected error"] for row in rows]
        levels = {"no noise": errors.pop(), "random components": chance}
        figure = _picture(arguments.epsilon, errors, levels)
        with replacing(arguments.picture) as part:
            figure.savefig(part, dpi=150, format=arguments.picture.suffix[1:])
        print(f"Written to {arguments.picture}.")


def _check_picture(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed.

    Raises:
        ValueError: says why.
        ImportError: if Matplotlib is not installed.
    """
    require("matplotlib.figure", extra="plot")
    if path.suffix not in (".png", ".svg", ".pdf") or not path.absolute().parent.is_dir():
        raise refuse("--picture", "a .png, .svg or .pdf in an existing folder", str(path))
    if path.exists():
        raise refuse("--picture", "a file that does not exist yet", str(path))


def _picture(epsilons: Sequence[float], errors: Sequence[float], levels: dict[str, float]) -> Any:
    """Draw expected errors, and those to compare them with."""
    target = drawing.one_axes(None, None, 5.0, 3.0)
    order = sorted(zip(epsilons, errors, strict=True))
    target.axes.loglog(*zip(*order, strict=True), "o-", color=drawing.colour(0), label="expected")
    drawing.marked(target.axes.axhline, levels)
    drawing.light(target.axes)
    target.axes.set_xlabel("epsilon", fontsize=9)
    target.axes.set_ylabel("error of the shared components", fontsize=9)
    target.axes.legend(fontsize=8, frameon=False)
    return target.returned


def run(arguments: SimpleNamespace, *, entry: Entry) -> None:
    """Run the command."""
    prediction = plan(
        call(arguments, entry.algorithm),
        shapes_of(arguments.clients, arguments.samples, arguments.features),
        topology=arguments.topology,
        rounds=arguments.rounds if entry.has_rounds else 1,
        channel=channel_of(arguments),
        clients_per_block=arguments.clients_per_block,
    )
    print(prediction)


command = App("plan")
for name, entry in PLANNED.items():
    options = {
        "Clients": SHAPES,
        "Algorithm": options_of(entry.algorithm),
        "Where and how": MACHINE,
    }
    about = first_line(entry.algorithm)
    command.command(define(partial(run, entry=entry), options, about), name=name)
options = {"What you guess": GUESS, "What you ask": ASKED}
command.command(define(run_privacy, options, PRIVACY), name="privacy")
