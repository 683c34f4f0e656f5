"""Section 5.5 of Wang, Liu & Zhang (2022): images."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed import data as datasets
from jaxfed.pca import FAPS, SubspaceIteration
from jaxfed.plot.drawing import colour
from papers._files import data_file, data_folder
from papers.drawing import graphs, legend
from papers.faps import _problems as problems
from papers.report import Found, Labels, ahead, cells
from papers.runs import Seeds

IMAGES = {
    "mnist": ("MNIST", "the MNIST database of LeCun, Cortes & Burges, e.g. github.com/kelas/mnist"),
    "fashion-mnist": ("Fashion-MNIST", "github.com/zalandoresearch/fashion-mnist"),
}


class Images(NamedTuple):
    """What came of images."""

    runs: dict[tuple[str, str], problems.Outcomes]  # by data set and method
    notes: list[str]  # what the data sets were


def images(seeds: Seeds, *, data: Path | None = None) -> Images:
    """Every method on every data set; seeds are splits and starts."""
    data_folder(
        data,
        "mnist",
        "t10k-images-idx3-ubyte.gz (or the 60000 training images)",
        IMAGES["mnist"][1],
    )
    assert data is not None
    runs, notes = {}, []
    for folder, (name, _) in IMAGES.items():
        if not (data / folder).is_dir():
            continue
        names = ("train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz")
        pixels = datasets.read_idx(data_file(data / folder, *names, *(n[:-3] for n in names)))
        flat = np.asarray(pixels, np.float64).reshape(len(pixels), -1) / 255
        notes.append(f"{name}: {len(flat)} images of {flat.shape[1]} pixels, not centred.")
        with jax.enable_x64(True):
            pooled = jnp.asarray(flat.T @ flat)
            values = jnp.sqrt(jnp.maximum(jnp.linalg.eigvalsh(pooled)[::-1], 0))
            matrices = []
            for seed in seeds:
                order = np.random.default_rng(seed).permutation(len(flat))
                parts = [flat[part] for part in np.array_split(order, 16)]
                matrices.append(np.stack([part.T @ part for part in parts]))
            matrices, keys = jnp.asarray(np.stack(matrices)), seeds.keys(0)
            starts = problems.starts_of(seeds).keys(0)
            alone = problems.solved(
                SubspaceIteration(5, stop="objective"), pooled[None], pooled, values, starts, 1000
            )
            runs[name, problems.SSI] = alone
            for method, algorithm in (
                (problems.POWER, problems.power(5)),
                (problems.PRINTED, problems.printed(5)),
                (problems.FIVE, FAPS(5, stop="objective")),
            ):
                runs[name, method] = problems.solved(algorithm, matrices, pooled, values, keys, 400)
    return Images(runs, notes)


def rounds(found: Images) -> Found:
    """Figure 3: rounds by data set."""
    runs, notes = found
    measured: dict[Labels, Any] = {}
    for labels, run in runs.items():
        measured[(*labels, problems.ROUNDS)], measured[(*labels, problems.TO_KKT)] = (
            run.rounds,
            run.accurate,
        )

    def draw() -> Any:
        names = list(dict.fromkeys(name for name, _ in runs))
        axes = next(iter(graphs([("images", "", problems.ROUNDS)])))
        for i, method in enumerate((problems.SSI, problems.POWER, problems.PRINTED, problems.FIVE)):
            heights = [np.median(runs[name, method].rounds) for name in names]
            places = np.arange(len(names)) + 0.2 * (i - 1.5)
            axes.bar(places, heights, 0.18, color=colour(i), label=method)
        axes.set_xticks(range(len(names)), names)
        legend(axes)
        return axes.figure

    claimed = {}
    for name in dict.fromkeys(name for name, _ in runs):
        ours, theirs = runs[name, problems.PRINTED].rounds, runs[name, problems.SSI].rounds
        text = f"{problems.PRINTED} takes fewer rounds than {problems.SSI}, by"
        claimed[name, "claim", text] = ahead(ours, theirs[: len(ours)], 1)
    return Found(cells(measured, by="median") | claimed, notes, {"figure3": draw})


def errors(found: Images) -> Found:
    """Table 3: errors by data set."""
    runs, notes = found
    measured: dict[Labels, Any] = {}
    for labels, run in runs.items():
        measured[(*labels, problems.KKT)], measured[(*labels, problems.ERROR)] = run.kkt, run.error
    return Found(cells(measured, by="median"), notes)
