"""Measure the energy that autoencoders of one-class MNIST clients capture."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxfed.data import read_mnist
from jaxfed.models import Autoencoder
from jaxfed.plot import reconstructions
from papers._files import MNIST_FILES, data_folder
from papers.adept import _autoencoders as common
from papers.report import Found, Labels
from papers.runs import Seeds

ROUNDS, STEPS, TRAIN, BATCH = 150, 20, 120, 6
CLASSES, PER_CLASS, VALIDATION = 10, 5, 60
LATENTS = (10, 20)
MORE = (240, 360, 480, 600)  # samples that local training is given instead of 120
SHAPE = (28, 28)


def _images(data: Path | None) -> tuple[Float[np.ndarray, "n d"], np.ndarray]:
    images, labels = read_mnist(data_folder(data, "mnist", *MNIST_FILES), "test")
    for digit in range(CLASSES):
        if (count := int((labels == digit).sum())) <= PER_CLASS * TRAIN + VALIDATION:
            raise ValueError(
                f"--data: {PER_CLASS} clients of {TRAIN} images and {VALIDATION} more are made of "
                f"each class, and some must be left to test; of class {digit} there are {count}"
            )
    return images.reshape(len(images), -1).astype(np.float32) / 255, labels


def _one_class_clients(
    pixels: Float[np.ndarray, "n d"],
    labels: np.ndarray,
    seed: int,
    per_class: int | None = None,
    train: int | None = None,
) -> common.Split:
    """Clients of a single class each; those of a class are measured by the same images."""
    per_class, train = per_class or PER_CLASS, train or TRAIN
    rng = np.random.default_rng(seed)
    parts: list[list[np.ndarray]] = [[], [], []]
    taken = PER_CLASS * TRAIN + VALIDATION
    # As many of each class as the rarest leaves.
    size = min(int((labels == digit).sum()) for digit in range(CLASSES)) - taken
    for digit in range(CLASSES):
        mine = pixels[rng.permutation(np.flatnonzero(labels == digit))]
        for own in mine[: per_class * train].reshape(per_class, train, -1):
            parts[0].append(own)
            parts[1].append(mine[taken - VALIDATION : taken])
            parts[2].append(mine[taken : taken + size])
    return common.Split(*(jnp.asarray(np.stack(part)) for part in parts))


def _needed(energies: Mapping[int, float], goal: float) -> float:
    """Samples at which local training reaches the goal, on lines between what was measured."""
    counts, values = np.array(list(energies)), np.maximum.accumulate(list(energies.values()))
    if values[-1] < goal:
        return np.inf
    return float(np.interp(goal, values, counts))


def run(
    seeds: Seeds, *, data: Path | None = None, scale: float = 1.0, latents: Sequence[int] = LATENTS
) -> Found:
    """Choose settings and measure with them, for every code."""
    pixels, labels = _images(data)
    size = common.Size(max(2, round(scale * ROUNDS)), STEPS, BATCH)
    short = common.Size(max(1, size.rounds // 3), STEPS, BATCH)
    usual = common.grid_of(step_size=(0.01, 0.03, 0.1, 0.3), momentum=(0.9,))
    prior = {"global_step_size": (1.0,), "initial_spread": (0.1, 0.2, 0.5)}
    grids = {
        common.LOCAL: usual,
        common.AVERAGED: usual,
        common.ADAPTIVE: common.grid_of(step_size=(0.03, 0.1), momentum=(0.9,), **prior),
        common.PUBLISHED: common.grid_of(
            step_size=(0.01, 0.03), global_step_size=(0.01, 0.1), initial_spread=(1.0,)
        ),
    }
    measured: dict[Labels, Any] = {}
    arrays, said, figures = {}, [], {}
    for latent in latents:

        def models(name, candidate, split, key, size=size, latent=latent):
            momentum, numbers = common.split_numbers(candidate)
            start = Autoencoder(pixels.shape[1], latent, hidden="relu", output="sigmoid", key=key)
            return common.trained(name, momentum, size, numbers, start, split.train, key)

        first, _ = common.tuning(seeds)
        split, key = _one_class_clients(pixels, labels, first, 2), jax.random.key(first)

        def energy(name, candidate, split=split, key=key, models=models):
            return common.energy_of(models(name, candidate, split, key, short)[0], split.validation)

        chosen = common.chosen_of(grids, energy)
        energies: dict[str, list[float]] = {name: [] for name in grids}
        spreads: dict[tuple[str, str], list[float]] = {}
        amplified: dict[int, list[float]] = {count: [] for count in (TRAIN, *MORE)}
        for seed in seeds:
            key = jax.random.key(seed)
            split = _one_class_clients(pixels, labels, seed)
            shown = {}
            for name, candidate in chosen.items():
                found, spread = models(name, candidate, split, key)
                own = common.energy_of(found, split.test)
                energies[name].append(float(own.mean()))
                arrays[f"latent {latent} | {name} | seed {seed}"] = np.asarray(own)
                if seed == seeds.at(0):
                    shown[name] = np.asarray(jax.vmap(lambda f, x: f(x))(found, split.test[:, 0]))
                for path, leaf in jax.tree.leaves_with_path(spread):
                    layer = jax.tree_util.keystr(path).strip(".")
                    spreads.setdefault((name, layer), []).append(float(leaf.mean()))
                    arrays[f"latent {latent} | {name} | spread of {layer} | seed {seed}"] = leaf
            if seed == seeds.at(0):
                figures[f"latent{latent}"] = partial(
                    reconstructions,
                    np.asarray(split.test[::PER_CLASS, 0]),
                    {name: images[::PER_CLASS] for name, images in shown.items()},
                    SHAPE,
                )
            amplified[TRAIN].append(energies[common.LOCAL][-1])
            for count in MORE:
                # The same number of steps, of batches that take all samples in a round.
                larger = _one_class_clients(pixels, labels, seed, 1, count)
                batches = common.Size(size.rounds, STEPS, count // STEPS)
                found = models(common.LOCAL, chosen[common.LOCAL], larger, key, batches)[0]
                amplified[count].append(float(common.energy_of(found, larger.test).mean()))
        curves = [{n: values[i] for n, values in amplified.items()} for i in range(len(seeds))]
        needed = [_needed(*pair) for pair in zip(curves, energies[common.ADAPTIVE], strict=True)]
        labelled = common.rows_of(energies, beyond_spread=True)
        labelled += [
            (f"{common.LOCAL}, {n} samples", "energy", v)
            for n, v in amplified.items()
            if n != TRAIN
        ]
        labelled += [(common.ADAPTIVE, "samples that local training needs", needed)]
        labelled += [
            (name, f"mean spread, {layer}", values) for (name, layer), values in spreads.items()
        ]
        measured |= {(latent, name, quantity): values for name, quantity, values in labelled}
        said += common.said_of(f"Latent {latent}", chosen)
    return Found(
        measured,
        notes=[
            *common.reduced(scale, f"{size.rounds} of {ROUNDS} rounds"),
            f"Two layers with ReLU and sigmoid; {size.rounds} rounds of {STEPS} steps of {BATCH} "
            "images, squared error summed over pixels, gradients clipped to norm 1.",
            f"Settings are chosen for each method on two clients of each class and {short.rounds} "
            "rounds, of the same images in an order that is not measured.",
            *said,
        ],
        figures=figures,
        arrays=arrays,
    )
