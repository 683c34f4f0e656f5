"""`jaxfed fit diffusion`: a diffusion model for every client."""

import argparse
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxfed import plot, report
from jaxfed._optional import require
from jaxfed.cli.fit import _common, _images
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.loop import Metrics
from jaxfed.core.run.solution import Solution
from jaxfed.generative import AdaptiveDiffusion, FedAvg, sample
from jaxfed.generative.diffusion import decaying_adam
from jaxfed.metrics import noise_level
from jaxfed.models import DenoisingLoss, UNet, interpolation, variance_preserving

PICTURES = ("samples.png", "convergence.png")
DRAWN = 10  # clients whose samples are drawn, and samples of each
CORRUPTIONS = {"preserving": variance_preserving(), "interpolation": interpolation()}

# What is said of the defaults of the prior's settings.
_PRIOR = {
    "global_step_size": "0.001, with --published 0.1",
    "initial_spread": "0.8",
    "spread_step_size": "0.001",
    "hyper_prior": "1e-05",
    "lazy_rounds": "2",
}


def add_parser(subparsers) -> None:
    """Add the algorithm.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    summary = "a diffusion model for every client (ADEPT-DGM of Ozkara et al.), or one for all"
    parser = subparsers.add_parser("diffusion", help=summary, description=summary)
    _common.add_files(parser, _images.DATA)
    _images.add_images(parser)
    _images.add_training(parser, "ADEPT-DGM")
    parser.add_argument(
        "--fine-tuning",
        type=int,
        metavar="ROUNDS",
        help="of each client alone after the rounds of fedavg; default: 0, one model for all",
    )
    parser.add_argument(
        "--widths",
        type=int,
        nargs=3,
        default=(32, 64, 64),
        metavar=("A", "B", "C"),
        help="channels of the U-Net; default: 32 64 64",
    )
    parser.add_argument(
        "--corruption",
        choices=tuple(CORRUPTIONS),
        help="normal noise that preserves the variance, or interpolation with uniform noise; "
        "default: preserving, with --published interpolation",
    )
    _common.add_backend(parser)
    group = _images.add_rounds(parser, 100)
    group.add_argument(
        "--step-size",
        type=float,
        default=1e-3,
        metavar="X",
        help="of the clients' models; default: %(default)s",
    )
    group.add_argument(
        "--decay-after",
        type=int,
        metavar="ROUNDS",
        help="after which step sizes are a tenth; default: three quarters of all",
    )
    _common.add_checkpoints(group)
    _images.add_prior(parser, _PRIOR)
    group = parser.add_argument_group("samples")
    group.add_argument(
        "--samples",
        type=int,
        default=DRAWN,
        metavar="N",
        help="of each model; default: %(default)s",
    )
    group.add_argument(
        "--sampling-steps",
        type=int,
        default=500,
        metavar="N",
        help="from noise to a sample; default: %(default)s",
    )
    parser.set_defaults(run=run, algorithm="diffusion")


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: the parsed arguments.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for arguments, data or a checkpoint that do not fit.
        FileNotFoundError: if there are no data.
        ImportError: if an optional package is missing.
        FloatingPointError: if the objective becomes infinite.
    """
    folder = _common.checked_folder(arguments, PICTURES)
    require("matplotlib.figure", extra="plot")
    for name, least in (("rounds", 1), ("samples", 1), ("sampling_steps", 1)):
        if getattr(arguments, name) < least:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option}: wanted at least {least}, got {getattr(arguments, name)}")
    images = _images.read(arguments)
    algorithm = _algorithm(arguments, images)
    clients = Clients.from_samples(images.train)
    algorithm.check(clients, None)
    backend = _common.chosen_backend(arguments)
    participants = _common.chosen_participation(arguments)

    run = _common.Run.begin(folder, arguments)
    print(_images.said(images, "a U-Net", algorithm.arrays))
    begun = time.perf_counter()
    metrics = _validation(algorithm, images, arguments) if arguments.held_out else None
    every = max(1, arguments.rounds // 20)
    solution = run.fit(
        algorithm, clients, rounds=arguments.rounds, key=jax.random.key(arguments.seed),
        backend=backend, participation=participants, metrics=metrics, metrics_every=every,
    )  # fmt: skip
    seconds = time.perf_counter() - begun

    print("Drawing samples ...")
    arrays, names = _models(solution, arguments, images.names)
    together = 2 if jax.default_backend() == "cpu" else None  # as many as a cache holds
    drawn = jax.jit(
        lambda key, arrays: sample(
            algorithm, key, arrays, arguments.samples, steps=arguments.sampling_steps,
            at_once=together,
        )
    )(jax.random.key(arguments.seed + 1), arrays)  # fmt: skip
    samples = np.asarray(drawn).clip(0, 1).reshape(len(names), arguments.samples, -1)
    rows = _table(solution, samples, images, arguments)
    _common.show(rows, solution)
    drawn = _drawn(solution, samples, names, images.shape)
    saved = solution.entries() | {
        "samples": samples, "names": images.names, "image_shape": images.shape,
    }  # fmt: skip
    page = partial(report.html, solution, clients, names=images.names)
    run.write(arguments, saved, {"seconds": seconds, "table": rows}, drawn, page)
    return 0


def _algorithm(arguments: argparse.Namespace, images: _images.Images) -> AdaptiveDiffusion | FedAvg:
    given: dict[str, Any] = _images.prior_options(arguments, _PRIOR)
    training = arguments.training
    if training != "fedavg" and arguments.fine_tuning is not None:
        raise ValueError(f"--fine-tuning: is for --training fedavg, got {training}")
    fine_tuning = arguments.fine_tuning or 0
    if fine_tuning < 0:
        raise ValueError(f"--fine-tuning: wanted at least 0, got {fine_tuning}")
    batch = _images.batch_size(arguments, images)
    corruption = CORRUPTIONS[
        arguments.corruption or ("interpolation" if arguments.published else "preserving")
    ]
    model = UNet(images.shape, widths=arguments.widths, key=jax.random.key(arguments.seed))
    if training == "fedavg":
        return FedAvg(
            model, DenoisingLoss(corruption), decaying_adam(None), step_size=arguments.step_size,
            local_steps=arguments.local_steps, batch_size=batch,
            fine_tuning_steps=fine_tuning * arguments.local_steps,
        )  # fmt: skip
    decay = arguments.decay_after
    if decay is None:
        decay = max(1, 3 * arguments.rounds // 4)
    make = AdaptiveDiffusion.published if arguments.published else AdaptiveDiffusion
    if training == "local":
        given = {"prior_weight": 0.0}
    return make(
        model, corruption, step_size=arguments.step_size, local_steps=arguments.local_steps,
        batch_size=batch, decay_after=decay, **given,
    )  # fmt: skip


def _validation(
    algorithm: AdaptiveDiffusion | FedAvg, images: _images.Images, arguments: argparse.Namespace
) -> Metrics:
    """Mean loss of the held-out images, as many of each client as the least has."""
    least = min(map(len, images.held_out))
    held_out = jnp.asarray(np.stack([part[:least] for part in images.held_out]))
    keys = jax.random.split(jax.random.key(arguments.seed), len(held_out))

    def loss(arrays, samples, key):
        return algorithm.loss(algorithm.model_of(arrays), samples, key)

    def metrics(result: Personalized) -> Mapping[str, Float[Array, ""]]:
        if arguments.training == "fedavg":
            losses = jax.vmap(loss, (None, 0, 0))(result.shared, held_out, keys)
        else:
            losses = jax.vmap(loss)(result.local, held_out, keys)
        return {"held_out_loss": losses.mean()}

    return metrics


def _models(
    solution: Solution, arguments: argparse.Namespace, names: list[str]
) -> tuple[Any, list[str]]:
    """The models to draw from, and whose they are."""
    if arguments.training == "fedavg" and not arguments.fine_tuning:
        return solution.result.shared, ["all clients"]
    return solution.result.local, names


def _table(
    solution: Solution,
    samples: Float[np.ndarray, "m n d"],
    images: _images.Images,
    arguments: argparse.Namespace,
) -> list[Mapping[str, Any]]:
    def noise(flat: np.ndarray) -> float:
        # Channels first: the level is that of the last two axes.
        stack = jnp.moveaxis(jnp.asarray(flat).reshape(-1, *images.shape), -1, 1)
        return float(noise_level(stack).mean())

    history = solution.history
    quantities: dict[str, Any] = {
        "rounds": int(solution.rounds),
        "objective": float(history["objective"][-1]),
    }
    if "held_out_loss" in history:
        measured = history["held_out_loss"]
        quantities["loss of held-out images"] = float(measured[~np.isnan(measured)][-1])
    if "spread" in history and arguments.training == "personalized":
        quantities["mean spread"] = float(history["spread"][-1])
    quantities |= {
        "noise of samples": noise(samples),
        "noise of images": noise(np.concatenate(images.train)[:1000]),
        **_common.traffic(solution),
    }
    return [{"quantity": name, "value": value} for name, value in quantities.items()]


def _drawn(
    solution: Solution,
    samples: Float[np.ndarray, "m n d"],
    names: list[str],
    shape: tuple[int, int, int],
) -> dict[str, Any]:
    chosen = np.unique(np.linspace(0, len(names) - 1, min(DRAWN, len(names))).astype(int))
    groups = {names[i]: samples[i][:DRAWN] for i in chosen}
    figure = plot.samples(groups, shape)
    return {PICTURES[0]: figure, PICTURES[1]: _images.convergence(solution)}
