"""`jaxfed reproduce TARGET`: the tables and figures of the papers, each by one command.

A target is a function that runs an experiment over several seeds and returns a `Report`, whose
cells hold what is measured beside what the paper prints and what an independent NumPy
implementation of the same experiment gives, with a verdict.
"""

import argparse
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxfed.cli import _report

# Each has a dict TARGETS; they are imported when a target is looked for.
_MODULES = (
    "perpca",
    "perpca_data",
    "faps",
    "hierarchical",
    "gcca",
    "deep_gcca",
    "adept",
    "adept_diffusion",
)


@dataclass(frozen=True)
class Interval:
    """A published value and what counts as the same: anything from `low` to `high`."""

    low: float
    high: float
    text: str


def around(mean: float, sd: float) -> Interval:
    """A mean over seeds; what lies within two standard deviations of it counts as the same."""
    return Interval(mean - 2 * sd, mean + 2 * sd, f"{mean:.4g} ± {sd:.2g}")


def near(value: float, tolerance: float) -> Interval:
    """A single number, without a spread of its own."""
    return Interval(value - tolerance, value + tolerance, f"{value:.4g}")


def between(low: float, high: float) -> Interval:
    """The range of a few runs; half of it more on each side counts as the same.

    The range of three runs is 1.7 standard deviations on average, so this is about `around` again.
    """
    half = (high - low) / 2
    return Interval(low - half, high + half, f"{low:.4g} to {high:.4g}")


def at_least(value: float) -> Interval:
    """A lower bound."""
    return Interval(value, math.inf, f">= {value:.4g}")


def at_most(value: float) -> Interval:
    """An upper bound."""
    return Interval(-math.inf, value, f"<= {value:.4g}")


@dataclass(frozen=True)
class Cell:
    """One number of a table, measured several times, beside what it is compared with.

    Attributes:
        measured: the value of each seed.
        reference: what the independent NumPy implementation of the same experiment gives.
        paper: what the paper prints; a bare number is allowed five per cent.
        incomparable: why there is nothing to compare with, if so.
        scatter: measured values are draws of something that depends strongly on chance, and so
            is what was published: it is compared with their range and not with their mean.
    """

    measured: Sequence[float]
    reference: Interval | None = None
    paper: Interval | float | None = None
    incomparable: str | None = None
    scatter: bool = False

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(np.mean(self.measured))

    @property
    def sd(self) -> float | None:
        """Standard deviation over seeds; None for a single one."""
        return float(np.std(self.measured, ddof=1)) if len(self.measured) > 1 else None

    @property
    def verdict(self) -> str:
        """`"reproduced"`, `"differs by ..."` or `"not comparable: ..."`.

        Against the reference where there is one, else against the paper; where there are both
        and only the paper differs, that is added.
        """
        if self.incomparable is not None:
            return f"not comparable: {self.incomparable}"
        if self.reference is None and self.paper is None:
            return "not comparable: no published value"
        if not math.isfinite(self.mean):
            return f"differs: measured {self.mean}"
        first = self._gap(self.paper if self.reference is None else self.reference)
        verdict = f"differs by {first:+.2g}" if first else "reproduced"
        if self.reference is not None and (second := self._gap(self.paper)):
            verdict += f"; from the paper by {second:+.2g}"
        return verdict

    def texts(self) -> dict[str, str]:
        """The four printed columns."""
        if self.scatter:
            low, high = np.min(self.measured), np.max(self.measured)
            measured = f"{np.median(self.measured):.3g} [{low:.2g}, {high:.2g}]"
        else:
            measured = f"{self.mean:.4g}"
            if self.sd is not None:
                # Equal values need not have exactly their mean.
                measured += f" ± {self.sd if self.sd > 1e-12 * abs(self.mean) else 0:.2g}"
        paper = self.paper.text if isinstance(self.paper, Interval) else self.paper
        return {
            "paper": "" if paper is None else str(paper),
            "reference": "" if self.reference is None else self.reference.text,
            "measured": measured,
            "verdict": self.verdict,
        }

    def _gap(self, published: Interval | float | None) -> float:
        """How far what was measured lies above (or, negative, below) what was published."""
        if published is None:
            return 0.0
        if not isinstance(published, Interval):
            published = near(published, 0.05 * abs(published))
        low = float(np.min(self.measured)) if self.scatter else self.mean
        high = float(np.max(self.measured)) if self.scatter else self.mean
        return max(low - published.high, 0.0) + min(high - published.low, 0.0)


@dataclass(frozen=True)
class Report:
    """A reproduced table or figure.

    Attributes:
        title: what was reproduced.
        columns: the columns that tell the rows apart, in printed order.
        rows: one dict per row: an entry for each of `columns` and, where something was measured,
            a `Cell` under `"cell"`.
        notes: what a reader of the table must know.
        figures: functions that draw a matplotlib figure, by the name of its file.
        arrays: curves and raw values that belong to it, for the `.npz` file.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()
    figures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)

    def verdicts(self) -> list[str]:
        """The verdicts of all cells."""
        return [row["cell"].verdict for row in self.rows if "cell" in row]


class Target(Protocol):
    """A function that reproduces one table or figure.

    One that trains networks takes a keyword `scale` as well, with a default: the share of the
    published size that it runs at. Its report's notes say what is reduced.
    """

    def __call__(self, *, data: Path | None, seeds: int, out: Path | None, **options) -> Report:
        """Run it.

        Args:
            data: folder of the data files, for targets on real data.
            seeds: how many seeds.
            out: folder that the report will be written to, if any.
            options: `scale`, where it is given and the target has it.
        """
        ...


def targets() -> dict[str, Target]:
    """All targets by name."""
    return {name: target for module in _MODULES for name, target in _targets_of(module).items()}


def find(name: str) -> Target:
    """The target of this name; modules are imported until it is found.

    Raises:
        ValueError: if there is none; the message lists those there are.
    """
    for module in _MODULES:
        if name in (known := _targets_of(module)):
            return known[name]
    raise ValueError(f"TARGET: {name!r} is not one of {', '.join(targets())}")


def _targets_of(module: str) -> dict[str, Target]:
    return importlib.import_module(f"{__name__}.{module}").TARGETS


def add_parser(subparsers) -> None:
    """Add the `reproduce` command.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "reproduce",
        help="reproduce a table or figure of a paper",
        description="Reproduce a table or figure of a paper, beside the published numbers.",
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", help="e.g. perpca/table2")
    parser.add_argument("--list", action="store_true", help="list all targets and stop")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the data files")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--scale",
        type=float,
        metavar="SHARE",
        help="of the published size, for targets that train networks; 1 is all of it",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write results to")
    parser.add_argument("--force", action="store_true", help="overwrite earlier results")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for an unknown target, no target, seeds that are not positive, a data folder
            that does not exist, a scale that is none or of a target that has none, and results
            that would be overwritten without `--force`.
    """
    if arguments.list:
        known = targets()
        width = max(map(len, known))
        for name, target in known.items():
            print(f"{name:{width}}  {(target.__doc__ or '').strip().splitlines()[0]}")
        return 0
    if arguments.target is None:
        raise ValueError(f"TARGET: wanted one of {', '.join(targets())}")
    if arguments.seeds < 1:
        raise ValueError(f"--seeds: wanted a positive number, got {arguments.seeds}")
    if arguments.data is not None and not arguments.data.is_dir():
        raise ValueError(f"--data: {arguments.data} is not a folder")
    target = find(arguments.target)
    options = {}
    if arguments.scale is not None:
        if "scale" not in inspect.signature(target).parameters:
            raise ValueError(f"--scale: {arguments.target} always runs at its full size")
        if not 0 < arguments.scale <= 1:
            raise ValueError(f"--scale: wanted a share above 0 and up to 1, got {arguments.scale}")
        options["scale"] = arguments.scale
    out = arguments.out
    if out is not None:
        out = _report.refuse(out, force=arguments.force)
    if _report.on_terminal():
        print("this may take a few minutes ...", file=sys.stderr)
    report = target(data=arguments.data, seeds=arguments.seeds, out=out, **options)
    print(text(report))
    if out is not None:
        for path in write(report, out):
            print(f"wrote {path}")
    return 0


def text(report: Report) -> str:
    """The report as text: its table, how many cells were reproduced, its notes."""
    compared = [row["cell"].texts() if "cell" in row else {} for row in report.rows]
    columns = [*report.columns, *dict.fromkeys(name for texts in compared for name in texts)]
    rows = [
        {column: {**row, **texts}.get(column, "") for column in columns}
        for row, texts in zip(report.rows, compared, strict=True)
    ]
    parts = [report.title, _report.table(rows)]
    if verdicts := report.verdicts():
        good = sum(verdict.startswith("reproduced") for verdict in verdicts)
        bad = sum(verdict.startswith("differs") for verdict in verdicts)
        rest = len(verdicts) - good - bad
        unlike = sum(verdict.startswith("reproduced;") for verdict in verdicts)
        parts.append(
            f"{good} reproduced ({unlike} of them unlike the paper), {bad} differ, "
            f"{rest} not comparable"
        )
    if report.notes:
        parts.append("\n".join(f"* {note}" for note in report.notes))
    return "\n\n".join(parts)


def write(report: Report, folder: Path) -> list[Path]:
    """Write `result.npz`, `result.json` and the pictures; returns their paths."""
    pictures = [f"{name}.png" for name in report.figures]
    _report.take(folder, pictures)
    for name, draw in zip(pictures, report.figures.values(), strict=True):
        draw().savefig(folder / name, dpi=150)
    rows = []
    for row in report.rows:
        entry = {column: row.get(column) for column in report.columns}
        if "cell" in row:
            cell = row["cell"]
            values = [float(value) for value in cell.measured]
            entry |= cell.texts() | {"mean": cell.mean, "sd": cell.sd, "values": values}
        rows.append(entry)
    summary = {"title": report.title, "rows": rows, "notes": list(report.notes)}
    _report.write(folder, report.arrays, summary)
    return [folder / name for name in (*_report.RESULT, *pictures)]
