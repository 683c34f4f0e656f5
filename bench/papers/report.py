"""Targets and their reports: rows, verdicts, the printed table and the files."""

import csv
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import stats

from jaxfed.cli import _report
from jaxfed.cli._folder import RESULT, Folder
from papers.intervals import Interval, at_least, within
from papers.runs import Seeds

Labels = tuple[Any, ...]  # what tells a row from the others, an entry for each column

MANY = 10  # seeds from which on a claim is judged by a confidence bound, not seed by seed

# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One number of a table, measured several times, beside what it is compared with.

    Attributes:
        measured: the value of each seed.
        reference: what the independent NumPy implementation of the same experiment gives.
        paper: what the paper prints; a bare number is allowed five per cent.
        incomparable: why there is nothing to compare with, if so.
        by: what is compared. `"mean"`: the mean over seeds. `"range"`: from the least to the
            largest value, for measured and published values that are draws of something that
            depends strongly on chance. `"median"`: the median for a number that scatters widely,
            but the range where a bare number of the paper is of one run. `"claim"`: the number
            that a statement of a paper is about, which must hold with every seed or, from ten
            seeds on, for the one-sided 95 % confidence bounds of the mean.
    """

    measured: Sequence[float]
    reference: Interval | None = None
    paper: Interval | float | None = None
    incomparable: str | None = None
    by: Literal["mean", "median", "range", "claim"] = "mean"

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(np.mean(self.measured))

    @property
    def sd(self) -> float | None:
        """Standard deviation over seeds; None for a single one, NaN where one is not finite."""
        if len(self.measured) < 2:
            return None
        return float(np.std(self.measured, ddof=1)) if math.isfinite(self.mean) else math.nan

    @property
    def standard_error(self) -> float | None:
        """Of the mean over seeds; None for a single one."""
        return None if self.sd is None else self.sd / math.sqrt(len(self.measured))

    @property
    def verdict(self) -> str:
        """`"reproduced"`, `"differs by ..."` or `"not comparable: ..."`.

        Against the reference where there is one, else against the paper; where there are both
        and only the paper differs, that is added. A goal that was never reached differs.
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

    @property
    def accepts(self) -> str:
        """The interval that the verdict accepts, and the paper's where it is another one."""
        if self.incomparable is not None:
            return ""
        paper = "" if self.paper is None else _interval(self.paper).accepted
        if self.reference is None:
            return paper
        return self.reference.accepted + (f"; paper {paper}" if paper else "")

    def texts(self) -> dict[str, str]:
        """The printed columns."""
        middle = np.median(self.measured)
        if self.by == "range":
            low, high = np.min(self.measured), np.max(self.measured)
            measured = f"{middle:.3g} [{low:.2g}, {high:.2g}]"
        elif self.by == "median":
            low, high = np.percentile(self.measured, [25, 75])
            measured = f"{middle:.3g} [{low:.3g}, {high:.3g}]"
        elif self.by == "claim" and (error := self.standard_error) is not None:
            low, high = np.min(self.measured), np.max(self.measured)
            measured = f"{self.mean:.3g}, s.e. {error:.2g} [{low:.3g}, {high:.3g}]"
        else:
            measured = f"{self.mean:.4g}"
            if self.sd is not None:
                # Equal values need not have exactly their mean.
                measured += f" ± {0 if self.sd <= 1e-12 * abs(self.mean) else self.sd:.2g}"
        return {
            "paper": "" if self.paper is None else _interval(self.paper).text,
            "reference": "" if self.reference is None else self.reference.text,
            "measured": measured,
            "accepts": self.accepts,
            "verdict": self.verdict,
        }

    def _gap(self, published: Interval | float | None) -> float:
        """How far what was measured lies above (or, negative, below) what was published."""
        if published is None:
            return 0.0
        low = high = self.mean
        if self.by == "range" or (self.by == "median" and not isinstance(published, Interval)):
            low, high = float(np.min(self.measured)), float(np.max(self.measured))
        elif self.by == "median":
            low = high = float(np.median(self.measured))
        published = _interval(published)
        if self.by == "claim":
            low, high = self._bounds()
            # All of it has to lie inside.
            below, above = min(low - published.low, 0.0), max(high - published.high, 0.0)
            return below if below else above
        return max(low - published.high, 0.0) + min(high - published.low, 0.0)

    def _bounds(self) -> tuple[float, float]:
        """What a claim has to hold for: every seed, or the confidence bounds of many."""
        if len(self.measured) < MANY:
            return float(np.min(self.measured)), float(np.max(self.measured))
        assert self.standard_error is not None
        width = float(stats.t.ppf(0.95, len(self.measured) - 1)) * self.standard_error
        return self.mean - width, self.mean + width


def _interval(published: Interval | float) -> Interval:
    return published if isinstance(published, Interval) else within(published, 0.05)


def cells(measured: Mapping[Labels, Any], **options: Any) -> dict[Labels, Cell]:
    """Measured values as cells with the same options."""
    return {labels: Cell(_flat(values), **options) for labels, values in measured.items()}


def claim(values: Any, wanted: Interval) -> Cell:
    """A statement of a paper: a value for each seed, and the interval it must lie in."""
    return Cell(_flat(values), wanted, by="claim")


def ahead(smaller: Any, larger: Any, least: float) -> Cell:
    """The claim that one value is smaller than another by at least `least`, seed by seed."""
    return claim(np.asarray(larger) - np.asarray(smaller), at_least(least))


def _flat(values: Any) -> list[float]:
    return [float(value) for value in np.ravel(values)]


# --- targets and reports -------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The outcome of a target's run.

    Attributes:
        measured: values of all seeds by the row's labels; a `Cell` where a row is to be compared
            in its own way, None where it has words only.
        notes: how this run was made, before the target's own notes.
        claims: statements of the paper: for each the number of every seed, and what it has to be.
        figures: functions that draw a Matplotlib figure, by the name of its file.
        arrays: what goes into the `.npz` file; all that was measured, by default.
    """

    measured: Mapping[Labels, Any]
    notes: Sequence[str] = ()
    figures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    arrays: Mapping[str, Any] | None = None
    claims: Mapping[str, tuple[Any, Interval]] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """A reproduced table or figure.

    Attributes:
        title: what was reproduced.
        columns: the columns that tell the rows apart, in printed order.
        rows: one dict per row: an entry for each of `columns` and, where something was measured,
            a `Cell` under `"cell"`.
        notes: what a reader of the table must know.
        figures: functions that draw a Matplotlib figure, by the name of its file.
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


@dataclass(frozen=True)
class Target:
    """A table or figure of a paper, and the values that are known.

    Attributes:
        run: the experiment, `run(seeds, **options) -> Found`. One on files takes a keyword `data`,
            their folder or None; one that trains networks a keyword `scale`, the share of the
            published size. Both, and whatever else it takes, have defaults.
        title: what is reproduced.
        columns: names of the parts of the rows' labels.
        reference: what an independent implementation gives, by labels.
        paper: what the paper prints, by labels.
        notes: what a reader must know, however it was run.
        experiment: `experiment(seeds, **options)`, where several targets tell of one: it is made
            once for all that run together, and their `run` takes what came of it, nothing else.
    """

    run: Callable[..., Found]
    title: str
    columns: Sequence[str]
    reference: Mapping[Labels, Interval] = field(default_factory=dict)
    paper: Mapping[Labels, Interval | float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    experiment: Callable[..., Any] | None = None

    def takes(self, option: str) -> bool:
        """Whether the experiment has an option of this name."""
        return option in inspect.signature(self.experiment or self.run).parameters

    def __call__(
        self,
        seeds: Seeds,
        *,
        data: Path | None = None,
        made: dict[Callable[..., Any], Any] | None = None,
        **options: Any,
    ) -> Report:
        """Run the target and compare what it found with the known values.

        Args:
            seeds: of the experiment.
            data: folder of the data files.
            made: what came of experiments, with the same seeds and options; one that is not in it
                is made and put there.
            options: further ones of the experiment.
        """
        if self.takes("data"):
            options["data"] = data
        if self.experiment is None:
            found = self.run(seeds, **options)
        else:
            made = {} if made is None else made
            if self.experiment not in made:
                made[self.experiment] = self.experiment(seeds, **options)
            found = self.run(made[self.experiment])
        between = [""] * (len(self.columns) - 2)
        measured = dict(found.measured) | {
            ("claim", *between, text): claim(*given) for text, given in found.claims.items()
        }
        rows = [self._row(labels, values) for labels, values in measured.items()]
        arrays = found.arrays
        if arrays is None:
            arrays = {
                " | ".join(map(str, labels)): values.measured
                if isinstance(values, Cell)
                else values
                for labels, values in measured.items()
                if values is not None
            }
        notes = [*found.notes, *self.notes]
        return Report(self.title, self.columns, rows, notes, found.figures, arrays)

    def _row(self, labels: Labels, values: Any) -> dict[str, Any]:
        row = dict(zip(self.columns, labels, strict=True))
        if values is None:
            return row
        cell = values if isinstance(values, Cell) else Cell(_flat(values))
        known = {
            "reference": cell.reference or self.reference.get(labels),
            "paper": self.paper.get(labels) if cell.paper is None else cell.paper,
        }
        return row | {"cell": replace(cell, **known)}


def text(report: Report) -> str:
    """The report as text: its table, how many cells were reproduced, its notes."""
    parts = [report.title, _report.text_table(_printed(report))]
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
    """Write `result.npz`, `result.json`, the table as `table.csv` and the pictures.

    Returns:
        Their paths.
    """
    others = ["table.csv", *(f"{name}.png" for name in report.figures)]
    results = Folder(folder)
    results.begin()
    for name, draw in zip(others[1:], report.figures.values(), strict=True):
        with results.writing(name) as part:
            draw().savefig(part, dpi=150)
    printed = _printed(report)
    with results.writing(others[0]) as part, part.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(printed[0]))
        table.writeheader()
        table.writerows(printed)
    rows = []
    for row in report.rows:
        entry = {column: row.get(column) for column in report.columns}
        if "cell" in row:
            cell = row["cell"]
            entry |= cell.texts()
            entry |= {"mean": cell.mean, "sd": cell.sd, "values": _flat(cell.measured)}
        rows.append(entry)
    summary = {
        "title": report.title,
        "columns": list(report.columns),
        "rows": rows,
        "notes": list(report.notes),
    }
    _report.write(results, report.arrays, summary)
    return [folder / name for name in (*RESULT, *others)]


def _printed(report: Report) -> list[dict[str, Any]]:
    """The rows as they are printed, the same columns in each."""
    compared = [row["cell"].texts() if "cell" in row else {} for row in report.rows]
    columns = [*report.columns, *dict.fromkeys(name for texts in compared for name in texts)]
    return [
        {column: {**row, **texts}.get(column, "") for column in columns}
        for row, texts in zip(report.rows, compared, strict=True)
    ]
