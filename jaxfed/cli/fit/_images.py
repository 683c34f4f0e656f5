"""What `jaxfed fit autoencoder` and `diffusion` share: options, and the problem to fit."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxfed import plot
from jaxfed.cli._common import BACKEND, files, held_out, rounds
from jaxfed.cli._options import Option, option, optional_of
from jaxfed.cli.fit import _run
from jaxfed.cli.fit._image_files import Images
from jaxfed.cli.fit._run import CHECKPOINTS, PARTICIPATION, RUN
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.loop import Metrics
from jaxfed.core.run.solution import Solution
from jaxfed.generative import AdaptiveAutoencoder, AdaptiveDiffusion, AdaptiveTraining, FedAvg

DATA = (
    "folder of the files of MNIST, Fashion-MNIST or CIFAR-10, whose images are dealt out by class; "
    "of FEMNIST (.json), where each writer is a client; or with one file for each client (.npy, "
    ".npz, .csv, .parquet), or one such file for all, whose rows are flattened images"
)
LABELLED = [
    option("--clients", int, "number of clients", 50, metavar="M"),
    option("--classes-per-client", int, "classes that a client has images of", 1, metavar="K"),
    option("--images", int, "images of each client; default: as many as there are", None),
]

Trained = AdaptiveAutoencoder | AdaptiveDiffusion | FedAvg


def _shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"([0-9]+)x([0-9]+)(?:x([0-9]+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"wanted HxW or HxWxC, e.g. 28x28, got {text!r}")
    return int(match[1]), int(match[2]), int(match[3] or 1)


def options(
    method: str,
    count: int,
    *,
    model: Sequence[Option],
    steps: Sequence[Option],
    prior: Mapping[str, str],
) -> dict[str, Sequence[Option]]:
    """Describe the options of a command that trains networks on images.

    Args:
        method: name of the personalized method.
        count: default number of rounds.
        model: options of the model.
        steps: options of the steps.
        prior: how the help states the default of each option of the prior.
    """
    training = f"{method}, federated averaging, or each client alone"
    shape = "shape of images that are read as arrays; default: square gray ones"
    batch = "images of a local step; default: so many that a round is an epoch"
    published = "do what the authors' code does, where it differs from their text"
    return {
        "": [
            *files(DATA),
            *RUN,
            option("--image-shape", _shape, shape, None, metavar="HxW[xC]"),
            held_out("share of each client's images to measure the loss of; 0 for none", 0.2),
            *model,
            option("--training", ("personalized", "fedavg", "local"), training, "personalized"),
            *BACKEND,
        ],
        "labelled images (MNIST, Fashion-MNIST, CIFAR-10)": LABELLED,
        "rounds": [
            rounds(count),
            PARTICIPATION,
            option("--local-steps", int, "steps of a client in a round", 20),
            option("--batch-size", int, batch, None),
            *steps,
            CHECKPOINTS,
        ],
        "prior, with --training personalized": [
            option("--published", bool, published, False),
            *optional_of(AdaptiveTraining, prior),
        ],
    }


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Refuse options that are below 1."""
    for name in names:
        if (value := getattr(arguments, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: wanted at least 1, got {value}")


def prior_options(arguments: argparse.Namespace, names: Mapping[str, str]) -> dict[str, Any]:
    """Return those of the prior's options that were given.

    Raises:
        ValueError: if one was given for training without a prior.
    """
    options = {name: getattr(arguments, name) for name in names}
    present = {name: value for name, value in options.items() if value is not None}
    training = arguments.training
    if training != "personalized" and (present or arguments.published):
        name = "--" + (next(iter(present)) if present else "published").replace("_", "-")
        raise ValueError(f"{name}: is for --training personalized, got {training}")
    return {"prior_weight": 0.0} if training == "local" else present


def step_options(arguments: argparse.Namespace, images: Images) -> dict[str, Any]:
    """Return the number of local steps and the size of their batches."""
    size, steps = arguments.batch_size, arguments.local_steps
    if size is None:  # a round is an epoch of the smallest client
        size = max(1, min(map(len, images.train)) // max(steps, 1))
    return {"local_steps": steps, "batch_size": size}


# --- the problem ---------------------------------------------------------------------------------


def problem(
    arguments: argparse.Namespace,
    algorithm: Trained,
    images: Images,
    models: str,
    evaluate: Callable[[Solution], _run.Findings],
) -> _run.Problem:
    """Make the problem of training models of images.

    Args:
        arguments: values of the options.
        algorithm: what is run.
        images: the clients' images.
        models: what they are called in the message before the run.
        evaluate: measures and draws the solution.
    """
    counts = [len(part) for part in images.train]
    weights = sum(leaf.size for leaf in jax.tree.leaves(algorithm.arrays))
    options: dict[str, Any] = {"metrics_every": max(1, arguments.rounds // 20)}
    if arguments.held_out:
        options["metrics"] = _held_out_loss(arguments, algorithm, images)
    return _run.Problem(
        algorithm,
        Clients.from_samples(images.train),
        images.names,
        f"{len(counts)} clients of {min(counts)} to {max(counts)} images to learn from and "
        f"{sum(map(len, images.held_out))} held out in all; {models} of {weights:,} weights.",
        jax.random.key(arguments.seed),
        evaluate,
        options=options,
    )


def models_of(arguments: argparse.Namespace, result: Personalized) -> tuple[PyTree, int | None]:
    """Return the arrays of the trained models, and their axis of clients, if there is one."""
    return (result.shared, None) if arguments.training == "fedavg" else (result.local, 0)


def _held_out_loss(arguments: argparse.Namespace, algorithm: Trained, images: Images) -> Metrics:
    """Mean loss of the held-out images, of as many of each client as the smallest has."""
    least = min(map(len, images.held_out))
    held_out = jnp.asarray(np.stack([part[:least] for part in images.held_out]))
    keys = jax.random.split(jax.random.key(arguments.seed), len(held_out))

    def loss(arrays, samples, key):
        return algorithm.loss(algorithm.model_of(arrays), samples, key)

    def metrics(result: Personalized) -> Mapping[str, Float[Array, ""]]:
        arrays, axis = models_of(arguments, result)
        return {"held_out_loss": jax.vmap(loss, (axis, 0, 0))(arrays, held_out, keys).mean()}

    return metrics


def convergence(solution: Solution) -> Any:
    """Draw the losses of each round."""
    curves = [name for name in ("loss", "objective", "held_out_loss") if name in solution.history]
    if "loss" in curves:
        curves.remove("objective")  # it contains the prior's part, which is of another size
    return plot.convergence(solution.history, curves, label="squared error of an image")
