"""`jaxfed fit diffusion`: train a diffusion model for each client, or one for all."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed import plot
from jaxfed.cli._options import option
from jaxfed.cli.fit import _images, _run
from jaxfed.cli.fit._image_files import Images
from jaxfed.core.run.solution import Solution
from jaxfed.generative import AdaptiveTraining, FedAvg, sample
from jaxfed.generative.adaptive import decaying_adam
from jaxfed.metrics import noise_level
from jaxfed.models import DenoisingLoss, UNet, interpolation, variance_preserving

PICTURE = "samples.png"
CORRUPTIONS = {"preserving": variance_preserving(), "interpolation": interpolation()}
# Defaults of the prior's settings, as stated in the help.
PRIOR = {
    "global_step_size": "0.001, with --published 0.1",
    "initial_spread": "0.8",
    "spread_step_size": "0.001",
    "hyper_prior": "1e-05",
    "lazy_rounds": "2",
}


def commands() -> dict[str, Callable[..., bool | None]]:
    """Describe the command."""
    tuning = "rounds of each client alone after --training fedavg; default: 0, one model for all"
    corruption = (
        "normal noise that preserves the variance, or interpolation with uniform noise; default: "
        "preserving, with --published interpolation"
    )
    decay = "rounds after which step sizes are divided by ten; default: three quarters of all"
    networks = _images.Networks(
        name="diffusion",
        summary="a diffusion model for every client (ADEPT-DGM of Ozkara et al.), or one for all",
        method="ADEPT-DGM",
        models="a U-Net",
        rounds=100,
        options={
            "": [
                option("--fine-tuning", int, tuning, None),
                option("--widths", tuple[int, int, int], "channels of the U-Net", (32, 64, 64)),
                option("--corruption", tuple(CORRUPTIONS), corruption, None),
            ],
            "Rounds": [
                option("--step-size", float, "step size of the clients' models", 1e-3),
                option("--decay-after", int, decay, None),
            ],
            "Samples": [
                option("--samples", int, "samples of each model", _images.DRAWN),
                option("--sampling-steps", int, "steps from noise to a sample", 500),
            ],
        },
        prior=PRIOR,
        captions={PICTURE: "Samples drawn from the models"},
        make=_make,
        evaluate=_evaluate,
    )
    return {networks.name: _images.command_of(networks)}


def _make(arguments: SimpleNamespace, images: Images) -> AdaptiveTraining | FedAvg:
    prior = _images.prior_options(arguments, PRIOR)
    training, fine_tuning = arguments.training, arguments.fine_tuning
    if training != "fedavg" and fine_tuning is not None:
        raise ValueError(f"--fine-tuning: is for --training fedavg, got {training}")
    if fine_tuning is not None and fine_tuning < 0:
        raise ValueError(f"--fine-tuning: wanted at least 0, got {fine_tuning}")
    decay = arguments.decay_after
    if training == "fedavg" and decay is not None:
        raise ValueError(f"--decay-after: is not for --training fedavg, got {decay}")
    corruption = CORRUPTIONS[
        arguments.corruption or ("interpolation" if arguments.published else "preserving")
    ]
    model = UNet(images.shape, widths=arguments.widths, key=jax.random.key(arguments.seed))
    steps = _images.step_options(arguments, images) | {"step_size": arguments.step_size}
    if training == "fedavg":
        return FedAvg(
            model,
            DenoisingLoss(corruption),
            decaying_adam(None),
            fine_tuning_steps=(fine_tuning or 0) * arguments.local_steps,
            **steps,
        )
    if decay is None:
        decay = max(1, 3 * arguments.rounds // 4)
    if arguments.epsilon is not None:  # gradients with noise are long
        prior["clip"] = None
    preset = "published" if arguments.published else "text"
    return AdaptiveTraining.diffusion(
        model, corruption, preset=preset, decay_after=decay, **steps, **prior
    )


def _evaluate(
    arguments: SimpleNamespace, algorithm: Any, images: Images, solution: Solution
) -> _run.Findings:
    print("Drawing samples ...")
    arrays, names = solution.result.local, images.names
    if arguments.training == "fedavg" and not arguments.fine_tuning:
        arrays, names = solution.result.shared, ["all clients"]
    draw = partial(
        sample,
        algorithm,
        count=arguments.samples,
        steps=arguments.sampling_steps,
        clients_per_block=2
        if jax.default_backend() == "cpu"
        else None,  # as many as fit into a cache
    )
    samples = jax.jit(draw)(arrays, key=jax.random.key(arguments.seed + 1))
    samples = np.asarray(samples).clip(0, 1).reshape(len(names), arguments.samples, -1)

    history = solution.history
    quantities = {"objective": float(history["objective"][-1])}
    if "held_out_loss" in history:
        losses = history["held_out_loss"]
        quantities["loss of held-out images"] = float(losses[~np.isnan(losses)][-1])
    if "spread" in history and arguments.training == "personalized":
        quantities["mean spread"] = float(history["spread"][-1])
    quantities["noise of samples"] = _noise(samples, images.shape)
    quantities["noise of images"] = _noise(np.concatenate(images.train)[:1000], images.shape)
    shown = {names[i]: samples[i][: _images.DRAWN] for i in _images.drawn(len(names))}
    picture = plot.samples(shown, images.shape)
    return _run.Findings(quantities, {PICTURE: picture}, {"samples": samples})


def _noise(flat: np.ndarray, shape: tuple[int, int, int]) -> float:
    """Return the mean noise level of flattened images."""
    # Channels come before height and width, the two axes along which the level is measured.
    images = jnp.moveaxis(jnp.asarray(flat).reshape(-1, *shape), -1, 1)
    return float(noise_level(images).mean())
