"""Sections 7.2 and 7.4.1 on thermal images of a metal print: what moves, what stays."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxfed import Clients, Personalized, metrics
from jaxfed import data as datasets
from jaxfed.pca import Local, OneShot, PerPCA, Pooled
from jaxfed.pca.applications import separate_video
from jaxfed.pca.robust import robust_pca
from jaxfed.plot.drawing import INK, SIGNED, bare, canvas, limit
from papers._files import data_file, data_folder
from papers.perpca._real import fitted
from papers.report import Found, Labels
from papers.runs import Seeds

_THERMAL = (
    "ambench_layer361.npz with an array frames (18, 149, 199) of radiance temperatures and an "
    "array frame_numbers (18,)",
    "the thermography of NIST's Additive Manufacturing Benchmark 2018, layer 361 of build 1 "
    "(doi:10.6028/jres.125.005), as cut in github.com/UMDataScienceLab/LBMAM_perpca",
)


def run(seeds: Seeds, *, data: Path | None = None) -> Found:
    """Separate the frames; seeds are random starts of the clients' own components."""
    file = data_file(data_folder(data, "thermal", *_THERMAL), "ambench_layer361.npz")
    arrays = datasets.read_arrays(file, names=["frames"]).samples
    frames = np.stack(arrays).astype(np.float32) / 1000
    samples = jnp.asarray(frames)
    with np.load(file, allow_pickle=False) as content:
        numbers = content["frame_numbers"]
    clients = Clients.from_samples(frames)
    count, height, width = frames.shape
    rank, rounds = min(5, width // 2), 1000

    projector = fitted(OneShot(rank, rank), clients, 0)
    spectrum = fitted(OneShot(rank, rank, method="spectrum"), clients, 0)
    learned: dict[str, list[Personalized]] = {
        "each client alone": [fitted(Local(2 * rank), clients, 0).result],
        "pooled": [fitted(Pooled(2 * rank), clients, 0).result],
        "one shot (distPCA)": [projector.result],
        "PerPCA": [],
    }
    for seed in seeds:
        own = jax.random.normal(jax.random.key(seed), (count, width, rank))
        start = Personalized(spectrum.result.shared, own)
        learned["PerPCA"].append(
            fitted(PerPCA(rank, rank, solver="gradient"), clients, seed, rounds, start).result
        )
    parts = separate_video(frames, rank, rank, rounds=rounds, warm_start=projector)
    learned["PerPCA from distPCA"] = [parts.solution.result]
    # Frames in columns: the part of rank one is what they have in common.
    low, sparse = (
        np.asarray(part).T.reshape(frames.shape)
        for part in robust_pca(jnp.asarray(frames.reshape(count, -1).T))
    )

    mean = frames.mean(axis=0)
    measured: dict[Labels, Any] = {}

    def add(method: str, quantity: str, values: Sequence[float]) -> None:
        measured[method, quantity] = values

    for method, results in learned.items():
        add(method, "error", [float(metrics.reconstruction_error(r, samples)) for r in results])
        if not method.startswith("PerPCA"):
            continue
        add(method, "misalignment", [float(metrics.misalignment(r.local)) for r in results])
        shares = [metrics.separation(r, samples) for r in results]
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

    return Found(
        measured,
        notes=[
            f"{count} frames of {height} x {width} pixels in 1000 degrees Celsius, one client "
            f"each, image rows as samples; ranks {rank} + {rank}; PerPCA with step size one over "
            f"the largest eigenvalue, {rounds} rounds, from the spectrum start with random own "
            "components. Correlation: of each frame's shared or low-rank part with the mean "
            "frame, averaged."
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
