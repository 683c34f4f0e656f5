"""Writes the sections of a report on a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Array, Int

from jaxfed import plot
from jaxfed._checks import host_array
from jaxfed._versions import versions
from jaxfed.aggregation import Robust, far_clients
from jaxfed.aggregation.robust import FAR
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Samples
from jaxfed.core.common.printing import in_bytes
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.solution import Solution
from jaxfed.core.store.saved import Saved, story
from jaxfed.inference import Confidence
from jaxfed.metrics import misalignment, separation
from jaxfed.metrics.components import side_by_side
from jaxfed.pca.fitted import finite_clients
from jaxfed.pca.ranks import SuggestedRanks
from jaxfed.plot.projections import tables_of, turned
from jaxfed.report import intervals
from jaxfed.report._page import Section, facts, figure, folded, paragraph, table
from jaxfed.report._revealed import revealed
from jaxfed.report._spectra import spectra

LISTED = 200  # largest number of clients in the list of clients
DRAWN = 4  # largest number of clients whose local components are drawn
POINTS = 500  # largest number of clients in a picture of all
SCORES = 1000  # largest number of samples in a picture
NUMBERS = 10**8  # largest number of entries in the samples for spectra and variances


@dataclass(frozen=True)
class Given:
    """The arguments of a report, and values that several sections need."""

    record: Saved
    solution: Solution | None  # None if only its result is known
    clients: Clients
    names: tuple[str, ...]
    metadata: Any
    label: str | None
    image_shape: tuple[int, int] | None
    feature_names: Sequence[str] | None
    ranks: SuggestedRanks | None
    confidence: Confidence | None
    seconds: float | None
    table: tuple[Mapping[str, Any], ...]
    pictures: dict[str, Any]

    @cached_property
    def counts(self) -> np.ndarray:
        """Each client's number of samples; for views, of features."""
        return np.asarray(self.clients.counts, float)

    @cached_property
    def parts(self) -> tuple[Array | None, Array | None] | None:
        """Orthogonal shared and local components; None if the run was not PCA."""
        if not isinstance(self.clients.parts[0], Samples):
            return None
        try:
            shared, local = side_by_side(self.record)
        except ValueError:
            return None
        # Components outside of feature space cannot be drawn or compared with samples.
        features = [x.shape[-2] for x in (shared, local) if x is not None]
        if set(features) != {self.clients.features}:
            return None
        return shared, local

    @cached_property
    def samples(self) -> list[np.ndarray] | None:
        """Each client's samples; None if they are not in memory or too many."""
        clients = self.clients
        if not (clients.layout.in_memory and clients.layout.in_one_process):
            return None
        if self.counts.sum() * clients.features > NUMBERS:
            return None
        return tables_of(clients)

    @cached_property
    def groups(self) -> dict[str, np.ndarray]:
        """Shared components and the local ones of some clients, as principal axes, by name."""
        shared, local = self.parts or (None, None)
        found, chosen = {}, self.finite[:DRAWN]
        if shared is not None:
            found["shared"] = turned(np.asarray(shared), self.drawn(self.finite))
        if local is not None:
            for i in chosen:
                found[self.names[i]] = turned(np.asarray(local[i]), self.drawn(chosen[chosen == i]))
        return found

    @cached_property
    def finite(self) -> np.ndarray:
        """The clients whose components and samples can be drawn: all, but in robust runs."""
        if self.parts is None or self.samples is None:
            return np.arange(len(self.names))
        return finite_clients(self.parts[1], self.samples)

    @property
    def some(self) -> np.ndarray:
        """The clients to draw: all of these, or an even selection if there are too many."""
        number = len(self.finite)
        return self.finite[np.unique(np.linspace(0, number - 1, min(number, POINTS)).astype(int))]

    def drawn(self, chosen: Int[np.ndarray, " chosen"]) -> list[np.ndarray] | None:
        """The samples of these clients, if there are any samples."""
        return None if self.samples is None else [self.samples[i] for i in chosen]


def summary(given: Given) -> str:
    """What ran and how it ended."""
    return facts(story(given.record)) + folded("Versions", facts(versions()))


def all_of(given: Given) -> list[Section]:
    """The sections that have content."""
    number = iter(range(10**6))  # distinguishes the ids of the pictures

    def picture(drawn: Any, caption: str) -> str:
        return figure(drawn, caption, next(number))

    pictured = (
        _results,
        _ranks,
        _convergence,
        _components,
        _loadings,
        _scores,
        _intervals,
        _clients,
    )
    sections = (
        _data(given),
        *(make(given, picture) for make in pictured),
        _far(given),
        _costs(given),
        _revealed(given),
    )
    return [section for section in sections if section is not None]


def _data(given: Given) -> Section:
    counts, clients = given.counts, given.clients
    kind, unit = "clients", "samples"
    rows = {"clients": len(clients), "features": clients.features}
    if not isinstance(clients.parts[0], Samples) and hasattr(clients.parts[0], "shape"):
        # Views: features are samples of the same entities.
        kind, unit = "views", "features"
        rows = {"views": len(clients), "entities": int(clients.parts[0].shape[0])}
    rows |= {
        f"{unit} in total": int(counts.sum()),
        f"{unit} per {kind[:-1]}": f"{counts.min():,.0f} to {counts.max():,.0f}, median "
        f"{np.median(counts):,.0f}",
    }
    weights = np.asarray(clients.weights)
    # Equal weights need no row.
    if len(weights) == len(counts) and np.ptp(weights) > 1e-6 * weights.max():
        rows["weights"] = f"from {weights.min():.3g} to {weights.max():.3g}"
    each = [
        {kind.removesuffix("s"): name, unit: int(count)}
        for name, count in zip(given.names[:LISTED], counts, strict=False)
    ]
    parts = [facts(rows), folded(f"All {kind}", table(each))]
    if len(counts) > LISTED:
        parts.append(paragraph(f"The list shows the first {LISTED:,} of them.", note=True))
    return Section("Data", parts)


def _results(given: Given, picture: Any) -> Section | None:
    parts = [table(given.table)] if given.table else []
    parts += [picture(drawn, caption) for caption, drawn in given.pictures.items()]
    return Section("Results", parts) if parts else None


def _ranks(given: Given, picture: Any) -> Section | None:
    if given.parts is None:
        return None
    parts = []
    if given.ranks is not None:
        ranks = given.ranks
        rows = [
            {"component": i + 1, "shared score": _one_of(ranks.shared_scores, i)}
            | {"local score": _one_of(ranks.local_scores, i)}
            for i in range(max(len(ranks.shared_scores), len(ranks.local_scores)))
        ]
        text = (
            f"{ranks.shared} shared and {ranks.local} local components score above the threshold "
            f"of {ranks.threshold:.1f}, the same in {ranks.support:.0%} of random subsets of the "
            "clients."
        )
        if ranks.suggested is None:
            text += " It is too weak to tell, or there may be more, so no ranks were suggested."
        caption = "Scores of components; those in the grey band are not significant"
        parts += [paragraph(text), picture(plot.ranks(ranks), caption), table(rows)]
    found = None
    samples, (shared, local) = given.drawn(given.finite), given.parts
    if samples:
        own = None if local is None else np.asarray(local)[given.finite]
        found = spectra(samples, None if shared is None else np.asarray(shared), own)
    if found is not None:
        drawn = plot.scree(found.variances, total=found.total, chosen=found.chosen)
        parts.append(picture(drawn, found.caption))
        text = "Computed from all clients' samples, which only a simulation has in one place."
        parts.append(paragraph(text, note=True))
    return Section("Choice of ranks", parts) if parts else None


def _one_of(scores: Any, i: int) -> float | str:
    return float(scores[i]) if i < len(scores) else ""


def _convergence(given: Given, picture: Any) -> Section | None:
    history = given.record.history
    if not history:
        return None
    objective = np.asarray(history.get("objective", ()), float)
    known = objective[np.isfinite(objective)]
    if len(known) < 2:
        text = "The algorithm exchanges messages only once, so there is no convergence to show."
        return Section("Convergence", [paragraph(text)])
    change = abs(known[-1] - known[-2]) / (abs(known[-2]) or 1)
    text = (
        f"The objective went from {known[0]:.6g} to {known[-1]:.6g} in {given.record.rounds}"
        f" rounds, with a relative change of {change:.1e} in the last round. It is evaluated at "
        "the iterate that enters a round."
    )
    drawn = plot.convergence(history, bits=bool(np.nanmax(history["bits_up"]) > 0))
    return Section("Convergence", [paragraph(text), picture(drawn, "The objective by round")])


def _components(given: Given, picture: Any) -> Section | None:
    if given.parts is None:
        return None
    drawn = plot.components(given.groups, given.image_shape, feature_names=given.feature_names)
    caption = f"Components ({_listed(given)}), red above zero and blue below"
    return Section("Components", [picture(drawn, caption)])


def _listed(given: Given) -> str:
    """Whose components are drawn, in words."""
    shared, local = given.parts or (None, None)
    words = ["shared"] * (shared is not None)
    if local is not None:
        words.append(f"local of {len(given.finite[:DRAWN])} of {len(local):,} clients")
    return " and ".join(words)


def _loadings(given: Given, picture: Any) -> Section | None:
    if given.parts is None or given.image_shape is not None:
        return None
    drawn = plot.loadings(given.groups, feature_names=given.feature_names)
    caption = f"Loadings ({_listed(given)}); of many features, the largest"
    return Section("Loadings", [picture(drawn, caption)])


def _scores(given: Given, picture: Any) -> Section | None:
    if given.parts is None or given.parts[0] is None or not given.samples or not len(given.finite):
        return None
    if given.record.guarantees:  # which do not cover points of persons
        return None
    shared = Personalized(given.parts[0], None)
    options: dict[str, Any] = {"names": [given.names[i] for i in given.finite], "most": SCORES}
    clients, caption = given.clients.take(given.finite), "Samples along shared axes, by client"
    if given.image_shape is None:
        drawn = plot.biplot(shared, clients, feature_names=given.feature_names, **options)
        caption += "; arrows are features, the longest with their names"
    else:
        drawn = plot.scores(shared, clients, **options)
    number = int(given.counts[given.finite].sum())
    text = "Computed from all clients' samples, which only a simulation has in one place."
    if number > SCORES:
        text += f" The picture shows {SCORES:,} of {number:,} samples, selected evenly."
    return Section("Scores", [picture(drawn, caption), paragraph(text, note=True)])


def _intervals(given: Given, picture: Any) -> Section | None:
    if given.confidence is None:
        return None
    features = given.image_shape, given.feature_names
    return intervals.section(given.confidence, given.names, *features, LISTED, picture)


def _clients(given: Given, picture: Any) -> Section | None:
    if given.parts is None:
        return None
    shared, local = given.parts
    some, parts = given.some, []
    names = [given.names[i] for i in some]
    samples = given.drawn(some)
    if samples:
        chosen = None if local is None else local[some]
        found = separation(Personalized(shared, chosen), samples, per_client=True)
        drawn = plot.variance_shares(found, names=names)
        parts.append(picture(drawn, "How each client's variance splits"))
    if local is not None and len(some) > 2:
        data, label = given.metadata, given.label
        if data is None:
            data, label = given.counts, "samples"
        data = host_array("metadata", data, "a number or a class for each client")[some]
        written = names if len(some) <= 30 else None
        drawn = plot.client_map(local[some], data, label=label, names=written)
        caption = "Clients, closer together if their local components are more similar"
        parts.append(picture(drawn, caption))
        found = float(misalignment(local[given.finite]))
        text = (
            f"Misalignment of the local components: {found:.4f}. It is 0 if all clients share a "
            "direction, which should not be local."
        )
        parts.append(paragraph(text))
    if lost := len(given.names) - len(given.finite):
        text = f"Not drawn: {lost:,} clients whose components or energy are not finite numbers."
        parts.append(paragraph(text, note=True))
    if len(some) < len(given.finite):
        text = f"Pictures show {len(some):,} of {len(given.finite):,} clients, selected evenly."
        parts.append(paragraph(text, note=True))
    return Section("Clients", parts) if parts else None


def _revealed(given: Given) -> Section | None:
    if given.solution is None:
        return None
    return Section("What was revealed", revealed(given.solution, given.clients))


def _far(given: Given) -> Section | None:
    solution = given.solution
    if solution is None or not isinstance(solution.algorithm, Robust):
        return None
    algorithm, ids = solution.algorithm, np.asarray(given.clients.ids)
    listed = np.flatnonzero(np.isin(ids, far_clients(solution, ids)))
    distances = np.asarray(solution.server.distances)
    count = int((distances > FAR).sum())
    text = (
        f"The clients fell into {algorithm.groups} groups, and a minority of these could not move "
        f"the result far. Groups that were more than {FAR:g} times as far from the aggregate as "
        f"the median group in the last round: {count or 'none'}."
    )
    if not len(listed):
        return Section("Clients that stand out", [paragraph(text)])
    rows = [
        {"client": given.names[i], "group": int(group), "distance": float(distances[group])}
        for i, group in zip(listed, ids[listed] % algorithm.groups, strict=True)
    ]
    advice = (
        "Look at these clients' data: units, missing values, duplicates, another population. Where "
        "groups have several members, most of a listed group may be in order."
    )
    parts = [paragraph(text), table(rows[:LISTED]), paragraph(advice, note=True)]
    return Section("Clients that stand out", parts)


def _costs(given: Given) -> Section | None:
    history, rounds = given.record.history, given.record.rounds
    if not history:
        return None
    rows: dict[str, Any] = {"rounds": rounds}
    participants = np.asarray(history.get("participants", ()), float)
    if participants.size:
        rows["clients in a round, on average"] = float(np.nanmean(participants))
    for way, words in (("bits_up", "sent"), ("bits_down", "received")):
        known = np.asarray(history[way], float)
        known = known[np.isfinite(known)]
        total = float(known[-1]) if known.size else 0.0
        rows[f"bits {words} by a client"] = f"{total:,.0f} ({in_bytes(total / 8)})"
    rows["sent by all clients together"] = in_bytes(
        float(history["bits_up"][-1]) / 8 * len(given.clients)
    )
    rows["seconds, including compilation"] = given.seconds
    return Section("Costs", [facts({k: v for k, v in rows.items() if v is not None})])
