"""Real data of Shi & Kontar (2024), sections 7.3 and 7.4, or data of the same kind.

The paper's own files are not all public or not the ones at hand; each target says which data it
wants and where they come from. What is called the reference is an independent implementation of
the same experiment on the same data in NumPy, in double precision.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxfed import data as datasets
from jaxfed import metrics, plot
from jaxfed.cli.reproduce import Cell, Interval, Report, at_least, near
from jaxfed.core.algorithm import Algorithm, Personalized
from jaxfed.core.clients import Clients
from jaxfed.core.run import Solution, fit
from jaxfed.pca import Local, OneShot, PerPCA, Pooled
from jaxfed.pca.applications import cluster_clients, embed_clients, separate_video, topic_words
from jaxfed.pca.robust import robust_pca
from jaxfed.plot._figure import INK, SIGNED, bare, canvas, limit

# --- files ---------------------------------------------------------------------------------------


def data_folder(data: Path | None, name: str, wanted: str, origin: str) -> Path:
    """The subfolder of this name, or a plain word on what is missing and where it comes from."""
    if data is None:
        raise ValueError(
            f"--data: this target runs on real files. Wanted a folder with a subfolder {name}/ "
            f"that holds {wanted}. They come from {origin}."
        )
    if not (data / name).is_dir():
        raise ValueError(
            f"--data: {data} has no subfolder {name}/. Wanted {wanted} in it. They come from "
            f"{origin}."
        )
    return data / name


def data_file(folder: Path, *names: str) -> Path:
    """The first of these files that is there."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise ValueError(f"--data: no {names[0]} in {folder}")


def _within(value: float, share: float = 0.01) -> Interval:
    """A number whose spread is not known, allowed a share of itself."""
    return near(value, share * value)


def _run(
    algorithm: Algorithm, clients: Clients, seed: int, rounds: int = 1, start: Any = None
) -> Solution:
    key = jax.random.key(seed)
    return fit(algorithm, clients, rounds=rounds, key=key, warm_start=start)


def _step_size(samples: Float[Array, "m n d"], factor: float) -> float:
    """This many times one over the largest eigenvalue of any client's second moment."""
    return factor * samples.shape[1] / float(jnp.linalg.norm(samples, 2, axis=(1, 2)).max()) ** 2


# --- MNIST ---------------------------------------------------------------------------------------

MNIST_FILES = (
    "t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz",
    "the MNIST test set of LeCun, Cortes & Burges, e.g. github.com/kelas/mnist",
)


class _Split(NamedTuple):
    """How images are dealt out and fitted, and the reference's training and test errors."""

    clients: int
    train: int
    test: int
    shared_rank: int
    local_rank: int
    rounds: int
    errors: Mapping[str, tuple[float, float]]


_SPLITS = (
    _Split(
        clients=100, train=40, test=40, shared_rank=30, local_rank=5, rounds=100,
        errors={
            "each client alone": (0.53, 14.44),
            "pooled": (12.22, 12.46),
            "one shot (distPCA)": (8.93, 12.26),
            "PerPCA": (8.76, 12.07),
        },
    ),
    _Split(
        clients=50, train=120, test=58, shared_rank=10, local_rank=10, rounds=50,
        errors={
            "each client alone": (8.92, 14.10),
            "pooled": (18.46, 18.64),
            "one shot (distPCA)": (11.97, 15.11),
            "PerPCA": (11.91, 15.03),
        },
    ),
)  # fmt: skip


def _deal(
    images: Float[np.ndarray, "n 784"], digits: Int[np.ndarray, " n"], split: _Split, seed: int
) -> tuple[Float[Array, "m n 784"], Float[Array, "m k 784"], Int[Array, " m"]]:
    """Clients with images of one digit each, no image twice: training, test images and digits."""
    rng = np.random.default_rng(seed)
    of_one_digit, size = split.clients // 10, split.train + split.test
    rows = np.concatenate(
        [
            rng.permutation(np.flatnonzero(digits == digit))[: of_one_digit * size]
            for digit in range(10)
        ]
    )
    dealt = jnp.asarray(images[rows].reshape(split.clients, size, -1))
    labels = jnp.repeat(jnp.arange(10), of_one_digit)
    return dealt[:, : split.train], dealt[:, split.train :], labels


def mnist(*, data: Path | None, seeds: int, out: Path | None) -> Report:
    """Section 7.3 on MNIST: reconstruction of held-out digits; clustering of clients.

    Args:
        data: folder with a subfolder `mnist/`.
        seeds: how many random splits.
        out: not used.

    Returns:
        The report.
    """
    del out
    folder = data_folder(data, "mnist", *MNIST_FILES)
    images, digits = (
        datasets.read_idx(data_file(folder, f"t10k-{name}.gz", f"t10k-{name}"))
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    pixels = images.reshape(len(images), -1).astype(np.float32) / 255

    errors: dict[tuple[int, str, str], list[float]] = {}
    agreement: dict[str, list[float]] = {"accuracy": [], "adjusted Rand index": []}
    pictures: dict[str, np.ndarray] = {}
    for split, seed in product(_SPLITS, range(seeds)):
        m, r1, r2 = split.clients, split.shared_rank, split.local_rank
        seen, unseen, labels = _deal(pixels, digits, split, seed)
        clients = Clients.from_samples(seen)
        one_shot = _run(OneShot(r1, r2), clients, seed)
        algorithm = PerPCA(r1, r2, step_size=_step_size(seen, 1.9))
        results = {
            "each client alone": _run(Local(r1 + r2), clients, seed).result,
            "pooled": _run(Pooled(r1 + r2), clients, seed).result,
            "one shot (distPCA)": one_shot.result,
            "PerPCA": _run(algorithm, clients, seed, split.rounds, one_shot).result,
        }
        for name, result in results.items():
            for part, samples in (("train", seen), ("test", unseen)):
                error = float(metrics.reconstruction_error(samples, *result))
                errors.setdefault((m, name, part), []).append(error)
        if split is _SPLITS[1]:
            # The clients of the second split are few and large enough to be told apart.
            shared, local = results["PerPCA"]
            found = jnp.asarray(cluster_clients(local, 10, seed=seed))
            agreement["accuracy"].append(metrics.clustering_accuracy(labels, found))
            agreement["adjusted Rand index"].append(metrics.adjusted_rand_index(labels, found))
            if seed == 0:
                pictures = {
                    "points": np.asarray(embed_clients(local)),
                    "digits": np.asarray(labels),
                    "shared": np.asarray(shared),
                    "local": np.asarray(local),
                }

    rows = []

    def add(m: int, method: str, quantity: str, values: list[float], reference: Interval) -> None:
        cell = Cell(values, reference)
        rows.append({"clients": m, "method": method, "quantity": quantity, "cell": cell})

    for split in _SPLITS:
        for method, published in split.errors.items():
            for part, value in zip(("train", "test"), published, strict=True):
                values = errors[split.clients, method, part]
                add(split.clients, method, f"{part} error", values, _within(value))
    for better, worse in (
        ("PerPCA", "one shot (distPCA)"),
        ("one shot (distPCA)", "pooled"),
        ("pooled", "each client alone"),
    ):
        pairs = zip(errors[100, better, "test"], errors[100, worse, "test"], strict=True)
        gap = [high - low for low, high in pairs]
        add(100, f"{better} below {worse}", "test error less by", gap, at_least(0.0))
    for quantity, values in agreement.items():
        add(50, "PerPCA, clusters", quantity, values, at_least(1.0))

    def clusters():
        figure = plot.clusters(pictures["points"], pictures["digits"])
        figure.suptitle("Clients of one digit each, by their own components", fontsize=10)
        return figure

    def learned():
        own = {f"own, a client of {k}s": pictures["local"][5 * k] for k in (0, 3, 8)}
        return plot.components({"shared": pictures["shared"]} | own, (28, 28), columns=10)

    return Report(
        title="Shi & Kontar (2024), Section 7.3, on MNIST: reconstruction error and clusters",
        columns=("clients", "method", "quantity"),
        rows=rows,
        notes=[
            "The paper uses FEMNIST and CIFAR-10; here clients hold MNIST test images of one "
            "digit, pixels from 0 to 1, not centred. The reference has other random splits.",
            "100 clients: 40 images to train, 40 to test, ranks 30 + 5, 100 rounds. 50 clients: "
            "120 and 58 images, ranks 10 + 10, 50 rounds. PerPCA starts from distPCA, step size "
            "1.9 over the largest eigenvalue. The others keep as many components in all.",
            "With 120 images a client does best on its own; that is what the reference finds too.",
            "Clusters: spectral clustering of the clients' own components into ten groups.",
        ],
        figures={"clusters": clusters, "components": learned},
        arrays=pictures,
    )


# --- thermal -------------------------------------------------------------------------------------

_THERMAL = (
    "ambench_layer361.npz with an array frames (18, 149, 199) of radiance temperatures and an "
    "array frame_numbers (18,)",
    "the thermography of NIST's Additive Manufacturing Benchmark 2018, layer 361 of build 1 "
    "(doi:10.6028/jres.125.005), as cut in github.com/UMDataScienceLab/LBMAM_perpca",
)


def thermal(*, data: Path | None, seeds: int, out: Path | None) -> Report:
    """Sections 7.2 and 7.4.1 on thermal images of a metal print: what moves, what stays.

    Args:
        data: folder with a subfolder `thermal/`.
        seeds: how many random starts of the clients' own components.
        out: not used.

    Returns:
        The report.
    """
    del out
    file = data_file(data_folder(data, "thermal", *_THERMAL), "ambench_layer361.npz")
    arrays, _ = datasets.read_arrays(file, names=["frames"])
    frames = np.stack(arrays).astype(np.float32) / 1000
    samples = jnp.asarray(frames)
    with np.load(file) as content:
        numbers = content["frame_numbers"]
    clients = Clients.from_samples(frames)
    count, height, width = frames.shape
    rank, rounds = min(5, width // 2), 1000

    projector = _run(OneShot(rank, rank), clients, 0)
    spectrum = _run(OneShot(rank, rank, method="spectrum"), clients, 0)
    learned: dict[str, list[Personalized]] = {
        "each client alone": [_run(Local(2 * rank), clients, 0).result],
        "pooled": [_run(Pooled(2 * rank), clients, 0).result],
        "one shot (distPCA)": [projector.result],
        "PerPCA": [],
    }
    for seed in range(seeds):
        own = jax.random.normal(jax.random.key(seed), (count, width, rank))
        start = Personalized(spectrum.result.shared, own)
        learned["PerPCA"].append(_run(PerPCA(rank, rank), clients, seed, rounds, start).result)
    parts = separate_video(frames, rank, rank, rounds=rounds, warm_start=projector)
    learned["PerPCA from distPCA"] = [parts.solution.result]
    # Frames in columns: the part of rank one is what they have in common.
    low, sparse = (
        np.asarray(part).T.reshape(frames.shape)
        for part in robust_pca(jnp.asarray(frames.reshape(count, -1).T))
    )

    reference: Mapping[tuple[str, str], Interval] = {
        ("each client alone", "error"): _within(0.072),
        ("pooled", "error"): _within(0.260),
        ("one shot (distPCA)", "error"): _within(0.116),
        ("PerPCA", "error"): _within(0.124, 0.02),
        ("PerPCA", "misalignment"): near(0.43, 0.05),
        ("PerPCA", "shared energy"): near(0.91, 0.01),
        ("PerPCA", "own energy"): near(0.067, 0.01),
        ("PerPCA", "correlation"): near(0.94, 0.01),
        ("PerPCA from distPCA", "error"): _within(0.113, 0.02),
    }
    mean = frames.mean(axis=0)
    rows = []

    def add(method: str, quantity: str, values: Sequence[float]) -> None:
        published = reference.get((method, quantity))
        reason = None if published else "no published value"
        cell = Cell(values, published, incomparable=reason)
        rows.append({"method": method, "quantity": quantity, "cell": cell})

    for method, results in learned.items():
        add(method, "error", [float(metrics.reconstruction_error(samples, *r)) for r in results])
        if not method.startswith("PerPCA"):
            continue
        add(method, "misalignment", [float(metrics.misalignment(r.local)) for r in results])
        shares = [metrics.separation(samples, *r) for r in results]
        add(method, "shared energy", [float(share.shared) for share in shares])
        add(method, "own energy", [float(share.local) for share in shares])
        add(
            method,
            "correlation",
            [_correlation(frames @ r.shared @ r.shared.T, mean) for r in results],
        )
    energy = float(np.sum(frames**2))
    rank_found = float(np.linalg.matrix_rank(low.reshape(count, -1), rtol=1e-3))
    add("robust PCA", "rank of the low-rank part", [rank_found])
    add("robust PCA", "low-rank energy", [float(np.sum(low**2)) / energy])
    add("robust PCA", "correlation", [_correlation(low, mean)])

    # Most of an image is colder than the camera can see.
    rows_seen, columns_seen = (
        slice(max(int(seen.min()) - 4, 0), int(seen.max()) + 5)
        for seen in np.nonzero(frames.max(axis=0))
    )
    window = (slice(None), rows_seen, columns_seen)
    shown = [place for place, number in enumerate(numbers) if number in (30, 125, 215, 270, 430)]
    shown = shown or list(range(min(5, count)))
    titles = [f"frame {number}" for number in numbers]

    def compare():
        lines = {
            "frame": (frames, False),
            "shared part": (np.asarray(parts.background), True),
            "own part": (np.asarray(parts.foreground), True),
            "robust PCA,\nlow rank": (low, True),
            "robust PCA,\nsparse": (sparse, True),
        }
        images = {name: (part[window][shown], signed) for name, (part, signed) in lines.items()}
        return _gallery(images, [titles[place] for place in shown])

    def every(part, name):
        def draw():
            half = -(-count // 3)
            chunks = [range(k, min(k + half, count)) for k in range(0, count, half)]
            return _sheet(np.asarray(part)[window], chunks, titles, name)

        return draw

    return Report(
        title="Shi & Kontar (2024), Sections 7.2 and 7.4.1, on thermal images of a metal print",
        columns=("method", "quantity"),
        rows=rows,
        notes=[
            f"{count} frames of {height} x {width} pixels in 1000 degrees Celsius, one client "
            f"each, image rows as samples; ranks {rank} + {rank}; PerPCA with step size one over "
            f"the largest eigenvalue, {rounds} rounds, from the spectrum start with random own "
            "components. Correlation: of each frame's shared or low-rank part with the mean "
            "frame, averaged.",
            "The paper separates a surveillance video that is not at hand. Pictures show PerPCA "
            "started from distPCA, which fits better: the shared part is the melt pool with its "
            "tail, the own part spatter, the plume and where the pool is out of place. Components "
            "describe columns only, hence vertical stripes.",
            "Robust PCA of the frames as columns finds one common image and leaves most of the "
            "melt pool to the sparse part.",
        ],
        figures={
            "separation": compare,
            "shared": every(parts.background, "shared part"),
            "own": every(parts.foreground, "own part"),
        },
        arrays={
            "background": parts.background,
            "foreground": parts.foreground,
            "residual": parts.residual,
            "low_rank": low,
            "sparse": sparse,
            "frame_numbers": numbers,
        },
    )


def _correlation(images: Float[Array | np.ndarray, "t h w"], mean) -> float:
    """Mean correlation of images with one image."""
    pairs = [np.corrcoef(np.ravel(image), np.ravel(mean))[0, 1] for image in np.asarray(images)]
    return float(np.mean(pairs))


def _image(axes, image: np.ndarray, end: float, signed: bool) -> None:
    colours = {"cmap": SIGNED, "vmin": -end, "vmax": end} if signed else {"cmap": INK, "vmax": end}
    axes.imshow(image, interpolation="nearest", **colours)
    bare(axes)


def _gallery(lines: Mapping[str, tuple[np.ndarray, bool]], titles: Sequence[str]) -> Any:
    """A row of images under each name, all on one scale; parts may be negative."""
    height, width = next(iter(lines.values()))[0].shape[1:]
    figure = canvas(None, 1.7 * len(titles) + 0.6, 1.7 * len(lines) * height / width + 0.4)
    grid = figure.subplots(len(lines), len(titles), squeeze=False)
    end = limit([images for images, _ in lines.values()])
    for (name, (images, signed)), row in zip(lines.items(), grid, strict=True):
        row[0].set_ylabel(name, fontsize=8)
        for axes, image in zip(row, images, strict=True):
            _image(axes, image, end, signed)
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, fontsize=8)
    return figure


def _sheet(images: np.ndarray, chunks, titles: Sequence[str], name: str) -> Any:
    """All images in a grid, on their own scale."""
    height, width = images.shape[1:]
    columns = max(map(len, chunks))
    figure = canvas(None, 1.7 * columns, len(chunks) * (1.7 * height / width + 0.2) + 0.4)
    figure.suptitle(name, fontsize=10)
    grid = figure.subplots(len(chunks), columns, squeeze=False)
    end = limit(images)
    for chunk, row in zip(chunks, grid, strict=True):
        for axes in row[len(chunk) :]:
            axes.set_axis_off()
        for place, axes in zip(chunk, row, strict=False):
            _image(axes, images[place], end, signed=True)
            axes.set_title(titles[place], fontsize=8)
    return figure


# --- debates -------------------------------------------------------------------------------------

_DEBATES = (
    "transcripts YYYY-MM-DD.txt, one turn per paragraph, each beginning with the speaker's name "
    "and a colon",
    "the Commission on Presidential Debates, as collected in "
    "github.com/mytakedotorg/us-presidential-debates (35 debates from 1960 to 2020)",
)

_REFERENCE = {
    "1960": "kennedy america world freedom africa castro",
    "1976": "dollars billion tax carter ford",
    "1980": "energy oil reagan inflation social security coal",
    "1984": "tax arms mondale",
    "1988": "drug housing families",
    "1992": "tax health care taxes",
    "1996": "medicare dole cut security",
    "2000": "security social schools money children seniors",
    "2004": "health iraq tax plan",
    "2008": "mccain obama health energy oil iran",
    "2012": "romney middle jobs tax income china medicare",
    "2016": "russia mosul trump isis iran border court",
    "2020": "vote health insurance ballots obamacare",
    "common": "people tax country government states united",
}
_PRINTED = {
    "1960": "peace castro africa kennedy world",
    "1976": "billion carter governor africa ford people world",
    "1980": "coal oil money energy social security reagan",
    "1984": "union tax soviet arms leadership proposal",
    "1988": "drug young strong build future enforcement good",
    "1992": "bill school children care health taxes reform plan control",
    "1996": "clinton security medicare budget tax dole bob",
    "2000": "school public plan children money social security health tax",
    "2004": "wrong plan cost free saddam troops iraq war health tax",
    "2008": "nuclear oil troops iraq afghanistan pakistan health iran energy",
    "2012": "million small business china medicare romney jobs tax",
    "2016": "russia trump hillary companies taxes mosul iran deal",
    "2020": "harris pence trump joe biden jobs donald health",
    "common": "tax country states world money people cut",
}
_TOP = 20


def debates(*, data: Path | None, seeds: int, out: Path | None) -> Report:
    """Table 7: topics of the U.S. presidential debates, year by year and common to all.

    Args:
        data: folder with a subfolder `debates/`.
        seeds: not used; nothing is random.
        out: not used.

    Returns:
        The report.
    """
    del seeds, out
    texts, names = datasets.read_text(data_folder(data, "debates", *_DEBATES))
    years = sorted({name[:4] for name in names})
    groups = [
        [
            datasets.strip_transcript(datasets.repair_mojibake(turn))
            for name, text in zip(names, texts, strict=True)
            if name[:4] == year
            for turn in datasets.paragraphs(text)
        ]
        for year in years
    ]
    stop_words = datasets.english_stop_words()
    # As in the reference: published stop words only, and turns without any counted word stay.
    counts, vocabulary = datasets.bag_of_words(groups, stop_words=stop_words, drop_empty=False)
    paper = PerPCA(2, 2, variant="polar", step_size=2.0)
    result = topic_words(counts, vocabulary, rounds=20, algorithm=paper).solution.result
    samples = [jnp.asarray(group) for group in counts]
    error = float(metrics.reconstruction_error(samples, *result))
    misalignment = float(metrics.misalignment(result.local))

    counts, vocabulary = datasets.bag_of_words(
        groups, stop_words=stop_words | datasets.SPOKEN_FILLERS
    )
    topics = topic_words(counts, vocabulary, rounds=20, algorithm=paper, words=_TOP)
    found = dict(zip(years, topics.own, strict=True)) | {"common": topics.common}
    rows: list[dict[str, Any]] = [
        {
            "year": year,
            "heaviest words": " ".join(words[:10]),
            "of the reference's": _overlap(words, _REFERENCE.get(year, "")),
            "of Table 7's": _overlap(words, _PRINTED.get(year, "")),
        }
        for year, words in found.items()
    ]
    # The reference's own lists agree to 0.8 between random starts.
    for quantity, value, reference, reason in (
        ("error", error, _within(58.8), None),
        ("misalignment", misalignment, near(0.71, 0.03), None),
        ("words of the reference found", _share(found, _REFERENCE), at_least(0.8), None),
        ("words of Table 7 found", _share(found, _PRINTED), None, "other transcripts"),
    ):
        cell = Cell([value], reference, incomparable=reason)
        rows.append({"quantity": quantity, "cell": cell})
    return Report(
        title="Shi & Kontar (2024), Table 7: topics of the U.S. presidential debates",
        columns=("year", "heaviest words", "of the reference's", "of Table 7's", "quantity"),
        rows=rows,
        notes=[
            "Words by the norm of their row of a year's own components, common ones by that of "
            f"the shared components; listed words are looked for among the {_TOP} heaviest.",
            "Error and misalignment: English stop words left out, words that occur six times or "
            "more. For the words also what speakers say whatever the topic is left out.",
            "The paper has 46 debates of another collection, presumably vice-presidential ones "
            "among them (hence Harris and Pence); stop words in its lists are left out here.",
            'Ranks 2 + 2, 20 rounds of variant="polar" with step size 2, as in the paper, from the '
            "distPCA start. Nothing is random, so seeds change nothing.",
        ],
        arrays={
            "years": np.array(list(found)),
            "words": np.array(list(found.values())),
        },
    )


def _overlap(words: Sequence[str], listed: str) -> str:
    """How many of the listed words are among the words."""
    wanted = listed.split()
    return f"{sum(word in words for word in wanted)} of {len(wanted)}" if wanted else ""


def _share(found: Mapping[str, Sequence[str]], lists: Mapping[str, str]) -> float:
    """Which share of all listed words was found."""
    hits = [word in found[year] for year in found for word in lists.get(year, "").split()]
    return float(np.mean(hits)) if hits else float("nan")


TARGETS = {"perpca/mnist": mnist, "perpca/thermal": thermal, "perpca/debates": debates}
