"""Options and inputs of `jaxfed fit autoencoder` and `jaxfed fit diffusion`."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from inspect import Parameter
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cyclopts import Token
from jaxtyping import Array, Float, Int, PyTree

from jaxfed import plot, privacy
from jaxfed._checks import check_positive, check_probability
from jaxfed.cli._common import BACKEND, DELTA, files, held_out, rounds
from jaxfed.cli._options import define, option, optional_of
from jaxfed.cli.fit import _run
from jaxfed.cli.fit._image_files import Images, read
from jaxfed.cli.fit._run import CHECKPOINTS, PARTICIPATION, ROBUST, RUN
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.loop import Metrics
from jaxfed.core.run.solution import Solution
from jaxfed.generative import AdaptiveTraining, FedAvg, GradientNoise
from jaxfed.privacy.releases import secret_key

DATA = (
    "folder with the files of MNIST, Fashion-MNIST or CIFAR-10, whose images are distributed by "
    "class; of FEMNIST (.json), where each writer is a client; or one file for each client (.npy, "
    ".npz, .csv, .parquet), or one such file for all clients, whose rows are flattened images"
)
LABELLED = [
    option("--clients", int, "number of clients", 50),
    option("--classes-per-client", int, "classes of each client's images", 1),
    option("--images", int, "images of each client; default: as many as there are", None),
]

CONVERGENCE = "convergence.png"
PRIVACY = [
    option(
        "--epsilon",
        float,
        "noise in the gradients of single images protects each image in the messages and in what "
        "is learned from them, over all rounds (needs 'jaxfed[privacy]'); default: no noise",
        None,
    ),
    DELTA,
    option("--clip", float, "longest gradient of an image, with --epsilon; default: 1", None),
]
DRAWN = 10  # largest number of clients that pictures show

Trained = AdaptiveTraining | FedAvg


def _shape(_: Any, words: Sequence[Token]) -> tuple[int, int, int]:
    text = words[0].value
    match = re.fullmatch(r"([0-9]+)x([0-9]+)(?:x([0-9]+))?", text)
    if match is None:
        raise ValueError(f"wanted HxW or HxWxC, e.g. 28x28, got {text!r}")
    return int(match[1]), int(match[2]), int(match[3] or 1)


class Networks(NamedTuple):
    """How a command trains networks on images."""

    name: str  # of the command
    summary: str  # its line in the list of commands
    method: str  # name of the personalized method
    models: str  # what the networks are called in the message before the run
    rounds: int  # default number of rounds
    options: Mapping[str, Sequence[Parameter]]  # more options, by the title of their group
    prior: Mapping[str, str]  # defaults of the prior's options, as stated in the help
    captions: Mapping[str, str]  # of pictures of what the networks make, by file name
    make: Callable[[SimpleNamespace, Images], Trained]  # makes the algorithm
    # Measures and draws a solution.
    evaluate: Callable[[SimpleNamespace, Trained, Images, Solution], _run.Findings]


def command_of(networks: Networks) -> Callable[..., bool | None]:
    """Describe the command."""
    training = f"{networks.method}, federated averaging, or each client alone"
    shape = "shape of images that are read as arrays; default: square and gray"
    batch = "images in a local step; default: as many as make a round an epoch"
    published = "do what the authors' code does where it differs from the paper"
    options = {
        "": [
            *files(DATA),
            *RUN,
            option("--image-shape", str, shape, None, converter=_shape, metavar="HxW[xC]"),
            held_out("share of each client's images held out to measure the loss; 0 for none", 0.2),
            *networks.options[""],
            option("--training", ("personalized", "fedavg", "local"), training, "personalized"),
            *BACKEND,
        ],
        "Labelled images (MNIST, Fashion-MNIST, CIFAR-10)": LABELLED,
        "Rounds": [
            rounds(networks.rounds),
            PARTICIPATION,
            option("--local-steps", int, "steps of a client in a round", 20),
            option("--batch-size", int, batch, None),
            *networks.options["Rounds"],
            CHECKPOINTS,
        ],
        "Privacy": PRIVACY,
        "Faulty or malicious clients": ROBUST,
        "Prior, with --training personalized": [
            option("--published", bool, published, False),
            *optional_of(AdaptiveTraining, networks.prior),
        ],
    }
    # Groups that only these networks have come last.
    options = {**options, **networks.options, **options}
    run = partial(_run.run, prepare=partial(_prepare, networks=networks))
    return define(run, options, networks.summary, algorithm=networks.name, tol=None)


def prior_options(arguments: SimpleNamespace, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of the prior that were given.

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


def step_options(arguments: SimpleNamespace, images: Images) -> dict[str, Any]:
    """Return the number of local steps, their batch size, and the noise in their gradients."""
    size, steps = arguments.batch_size, arguments.local_steps
    if size is None:  # a round is an epoch of the smallest client
        size = max(1, min(map(len, images.train)) // max(steps, 1))
    found = {"local_steps": steps, "batch_size": size}
    if arguments.epsilon is None:
        if arguments.clip is not None:
            raise ValueError("--clip: is for --epsilon, which is not given")
        return found
    multiplier = privacy.training_noise(
        arguments.epsilon,
        Clients.from_samples(images.train),
        rounds=arguments.rounds,
        delta=arguments.delta,
        **found,
    )
    clip = 1.0 if arguments.clip is None else arguments.clip
    return {**found, "gradient_noise": GradientNoise(clip, multiplier)}


def protected(
    arguments: SimpleNamespace, algorithm: Trained, clients: Clients
) -> Callable[[Solution], Solution]:
    """Return what writes the guarantee of the noise in gradients into a solution.

    Args:
        arguments: values of the options.
        algorithm: that was trained.
        clients: that trained it.
    """
    if arguments.epsilon is None:
        return _run.unchanged
    guarantee = privacy.training_guarantee(
        algorithm, clients, rounds=arguments.rounds, delta=arguments.delta
    )

    def finish(solution: Solution) -> Solution:
        sent = [replace(each, guarantee=guarantee) for each in solution.releases]
        return replace(solution, releases=tuple(sent))

    return finish


# --- the inputs ----------------------------------------------------------------------------------


def _prepare(
    arguments: SimpleNamespace, precision: ExitStack, *, networks: Networks
) -> _run.FitInputs:
    del precision  # images are in single precision
    """Read the images, and make the algorithm."""
    for name in ("rounds", "samples", "sampling_steps"):
        if (value := getattr(arguments, name, 1)) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: wanted at least 1, got {value}")
    check_positive("--epsilon", arguments.epsilon, optional=True)
    check_positive("--clip", arguments.clip, optional=True)
    check_probability("--delta", arguments.delta)
    images = read(arguments)
    algorithm, clients = networks.make(arguments, images), Clients.from_samples(images.train)
    counts = [len(part) for part in images.train]
    weights = sum(leaf.size for leaf in jax.tree.leaves(algorithm.arrays))
    options: dict[str, Any] = {"metrics_every": max(1, arguments.rounds // 20)}
    if arguments.held_out:
        options["metrics"] = _held_out_loss(arguments, algorithm, images)

    def evaluate(solution: Solution) -> _run.Findings:
        found = networks.evaluate(arguments, algorithm, images, solution)
        figures = {**found.figures, CONVERGENCE: _convergence(solution)}
        arrays = {**found.arrays, "image_shape": images.shape}
        return found._replace(figures=figures, arrays=arrays, captions=networks.captions)

    return _run.FitInputs(
        algorithm,
        clients,
        images.names,
        f"{len(counts)} clients of {min(counts)} to {max(counts)} images to learn from and "
        f"{sum(map(len, images.held_out))} held out in all; {networks.models} of {weights:,} "
        "weights.",
        # With noise that nobody can draw again, whatever the seed.
        jax.random.key(arguments.seed) if arguments.epsilon is None else secret_key(),
        evaluate,
        options=options,
        finish=protected(arguments, algorithm, clients),
    )


def drawn(count: int) -> Int[np.ndarray, " drawn"]:
    """Choose the clients to show in pictures, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(DRAWN, count)).astype(int))


def models_of(arguments: SimpleNamespace, result: Personalized) -> tuple[PyTree, int | None]:
    """Return the arrays of the trained models, and their axis of clients if there is one."""
    return (result.shared, None) if arguments.training == "fedavg" else (result.local, 0)


def _held_out_loss(arguments: SimpleNamespace, algorithm: Trained, images: Images) -> Metrics:
    """Return the mean loss of held-out images, as many of each client as the smallest has."""
    least = min(map(len, images.held_out))
    held_out = jnp.asarray(np.stack([part[:least] for part in images.held_out]))
    keys = jax.random.split(jax.random.key(arguments.seed), len(held_out))

    def loss(arrays, samples, key):
        return algorithm.loss(algorithm.model_of(arrays), samples, key)

    def metrics(result: Personalized) -> Mapping[str, Float[Array, ""]]:
        arrays, axis = models_of(arguments, result)
        return {"held_out_loss": jax.vmap(loss, (axis, 0, 0))(arrays, held_out, keys).mean()}

    return metrics


def _convergence(solution: Solution) -> Any:
    """Plot the losses over the rounds."""
    # Besides the loss, an objective contains the prior's term, of another magnitude.
    objective = "loss" if "loss" in solution.history else "objective"
    curves = [x for x in (objective, "held_out_loss") if x in solution.history]
    return plot.convergence(solution.history, curves, label="squared error of an image")
