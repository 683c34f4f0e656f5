"""`jaxfed fit autoencoder`: an autoencoder for every client."""

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from jaxfed import plot, report
from jaxfed._optional import require
from jaxfed.cli.fit import _common, _images
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.loop import Metrics
from jaxfed.core.run.solution import Solution
from jaxfed.generative import AdaptiveAutoencoder, FedAvg
from jaxfed.metrics import reconstructed_energy
from jaxfed.models import Autoencoder, reconstruction_loss

PICTURES = ("reconstructions.png", "convergence.png")
DRAWN = 10  # images that are drawn at most, one a client

# What is said of the defaults of the prior's settings.
_PRIOR = {
    "global_step_size": "1, with --published 0.01",
    "initial_spread": "0.2, with --published 1",
    "spread_step_size": "0.001",
    "hyper_prior": "1e-06",
    "prior_weight": "one by the number of samples, with --published 0.1",
    "lazy_rounds": "2",
}


def add_parser(subparsers) -> None:
    """Add the algorithm.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    summary = "an autoencoder for every client (ADEPT-AE of Ozkara et al.), or one for all"
    parser = subparsers.add_parser("autoencoder", help=summary, description=summary)
    _common.add_files(parser, _images.DATA)
    _images.add_images(parser)
    parser.add_argument("--latent", type=int, required=True, metavar="K", help="size of the code")
    parser.add_argument(
        "--hidden",
        choices=("linear", "relu"),
        default="relu",
        help="activation of the code; default: %(default)s",
    )
    parser.add_argument(
        "--output",
        choices=("linear", "sigmoid"),
        default="sigmoid",
        help="activation of the reconstruction; default: %(default)s",
    )
    _images.add_training(parser, "ADEPT-AE")
    _common.add_backend(parser)
    group = _images.add_rounds(parser, 150)
    group.add_argument(
        "--step-size",
        type=float,
        metavar="X",
        help="of the clients' models; default: 0.03, with --published 0.01",
    )
    group.add_argument(
        "--momentum",
        type=float,
        default=0.9,
        metavar="X",
        help="of these steps; default: %(default)s",
    )
    _common.add_checkpoints(group)
    _images.add_prior(parser, _PRIOR)
    parser.set_defaults(run=run, algorithm="autoencoder")


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
    if arguments.rounds < 1:
        raise ValueError(f"--rounds: wanted at least 1, got {arguments.rounds}")
    if not 0 <= arguments.momentum < 1:
        raise ValueError(f"--momentum: wanted from 0 to below 1, got {arguments.momentum}")
    images = _images.read(arguments)
    algorithm = _algorithm(arguments, images)
    clients = Clients.from_samples(images.train)
    algorithm.check(clients, None)
    backend = _common.chosen_backend(arguments)
    participants = _common.chosen_participation(arguments)

    run = _common.Run.begin(folder, arguments)
    print(_images.said(images, "autoencoders", algorithm.arrays))
    begun = time.perf_counter()
    metrics = _held_out(algorithm, images.held_out) if arguments.held_out else None
    solution = run.fit(
        algorithm, clients, rounds=arguments.rounds, key=jax.random.key(arguments.seed),
        backend=backend, participation=participants, metrics=metrics,
        metrics_every=max(1, arguments.rounds // 20),
    )  # fmt: skip
    seconds = time.perf_counter() - begun

    measured = images.held_out if arguments.held_out else images.train
    found = _reconstructions(algorithm, solution.result, measured)
    energies = _energies(measured, found)
    rows = _table(solution, energies, arguments)
    _common.show(rows, solution)
    drawn = _drawn(solution, measured, found, images)
    saved = solution.entries() | {
        "energies": energies, "names": images.names, "image_shape": images.shape,
    }  # fmt: skip
    if arguments.training == "personalized":
        saved |= _images.named("spread", solution.server.spread)
    page = partial(report.html, solution, clients, names=images.names)
    run.write(arguments, saved, {"seconds": seconds, "table": rows}, drawn, page)
    return 0


def _algorithm(
    arguments: argparse.Namespace, images: _images.Images
) -> AdaptiveAutoencoder | FedAvg:
    given: dict[str, Any] = _images.prior_options(arguments, _PRIOR)
    training = arguments.training
    batch = _images.batch_size(arguments, images)
    model = Autoencoder(
        int(np.prod(images.shape)), arguments.latent, hidden=arguments.hidden,
        output=arguments.output, key=jax.random.key(arguments.seed),
    )  # fmt: skip
    descent = optax.sgd(1.0, momentum=arguments.momentum or None)
    common: dict[str, Any] = {"local_steps": arguments.local_steps, "batch_size": batch}
    if arguments.step_size is not None:
        common["step_size"] = arguments.step_size
    elif not arguments.published:
        common["step_size"] = 0.03
    if training == "fedavg":
        clipped = optax.chain(optax.clip_by_global_norm(1.0), descent)
        return FedAvg(model, reconstruction_loss, clipped, **common)
    if training == "local":
        given = {"prior_weight": 0.0}
    elif not arguments.published:
        given = {"global_step_size": 1.0, "initial_spread": 0.2, **given}
    make = AdaptiveAutoencoder.published if arguments.published else AdaptiveAutoencoder
    return make(model, optimizer=descent, **common, **given)


def _personal(algorithm: AdaptiveAutoencoder | FedAvg, result: Personalized) -> tuple[PyTree, Any]:
    """The models in use and the axis along which they are the clients' own."""
    if isinstance(algorithm, FedAvg):
        return result.shared, None
    return result.local, 0


def _reconstructions(
    algorithm: AdaptiveAutoencoder | FedAvg,
    result: Personalized,
    samples: Sequence[Float[np.ndarray, "n_i d"]],
) -> list[Float[np.ndarray, "n_i d"]]:
    """What each client's model makes of its samples."""
    arrays, axis = _personal(algorithm, result)
    rows = max(map(len, samples))
    padded = np.stack([np.pad(x, ((0, rows - len(x)), (0, 0))) for x in samples])
    reconstruct = jax.vmap(lambda arrays, x: jax.vmap(algorithm.model_of(arrays))(x), (axis, 0))
    found = np.asarray(jax.jit(reconstruct)(arrays, padded))
    return [part[: len(x)] for part, x in zip(found, samples, strict=True)]


def _energies(
    samples: Sequence[Float[np.ndarray, "n_i d"]], found: Sequence[Float[np.ndarray, "n_i d"]]
) -> Float[np.ndarray, " m"]:
    pairs = (map(jnp.asarray, pair) for pair in zip(samples, found, strict=True))
    return np.array([float(reconstructed_energy(x[None], y[None])) for x, y in pairs])


def _held_out(
    algorithm: AdaptiveAutoencoder | FedAvg, samples: Sequence[Float[np.ndarray, "n_i d"]]
) -> Metrics:
    """Mean loss of the held-out images, as many of each client as the least has."""
    least = min(map(len, samples))
    batch = jnp.asarray(np.stack([x[:least] for x in samples]))

    def metrics(result: Personalized) -> Mapping[str, Float[Array, ""]]:
        arrays, axis = _personal(algorithm, result)

        def loss(arrays, x):
            return reconstruction_loss(algorithm.model_of(arrays), x, jax.random.key(0))

        return {"held_out_loss": jax.vmap(loss, (axis, 0))(arrays, batch).mean()}

    return metrics


def _table(
    solution: Solution, energies: Float[np.ndarray, " m"], arguments: argparse.Namespace
) -> list[Mapping[str, Any]]:
    history = solution.history
    which = "held-out images" if arguments.held_out else "images"
    quantities: dict[str, Any] = {
        "rounds": int(solution.rounds),
        "objective": float(history["objective"][-1]),
        f"captured energy of {which}": float(energies.mean()),
        "that of the worst client": float(energies.min()),
    }
    if arguments.training == "personalized":
        quantities["mean spread"] = float(history["spread"][-1])
    quantities |= {
        **_common.traffic(solution),
    }
    return [{"quantity": name, "value": value} for name, value in quantities.items()]


def _drawn(
    solution: Solution,
    samples: Sequence[Float[np.ndarray, "n_i d"]],
    found: Sequence[Float[np.ndarray, "n_i d"]],
    images: _images.Images,
) -> dict[str, Any]:
    number = len(samples)
    chosen = np.unique(np.linspace(0, number - 1, min(DRAWN, number)).astype(int))
    original, reconstructed = (np.stack([part[i][0] for i in chosen]) for part in (samples, found))
    figure = plot.reconstructions(original, {"reconstructed": reconstructed}, images.shape)
    return {PICTURES[0]: figure, PICTURES[1]: _images.convergence(solution)}
