"""`jaxfed fit autoencoder`: train an autoencoder for each client, or one for all."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax

from jaxfed import plot
from jaxfed.cli._options import option
from jaxfed.cli.fit import _images, _run
from jaxfed.cli.fit._image_files import Images
from jaxfed.core.clients.clients import Clients
from jaxfed.core.run.solution import Solution
from jaxfed.generative import AdaptiveTraining, FedAvg
from jaxfed.metrics import reconstructed_energy
from jaxfed.models import Autoencoder, reconstruction_loss

PICTURE = "reconstructions.png"
# Defaults of the prior's settings, as stated in the help.
PRIOR = {
    "global_step_size": "1, with --published 0.01",
    "initial_spread": "0.2, with --published 1",
    "spread_step_size": "0.001",
    "hyper_prior": "1e-06",
    "prior_weight": "one by the number of samples, with --published 0.1",
    "lazy_rounds": "2",
}


def commands() -> dict[str, Callable[..., bool | None]]:
    """Describe the command."""
    step = "step size of the clients' models; default: 0.03, with --published 0.01"
    output = "activation of the reconstruction"
    networks = _images.Networks(
        name="autoencoder",
        summary="an autoencoder for every client (ADEPT-AE of Ozkara et al.), or one for all",
        method="ADEPT-AE",
        models="autoencoders",
        rounds=150,
        options={
            "": [
                option("--latent", int, "size of the code"),
                option("--hidden", ("linear", "relu"), "activation of the code", "relu"),
                option("--output", ("linear", "sigmoid"), output, "sigmoid"),
            ],
            "Rounds": [
                option("--step-size", float, step, None),
                option("--momentum", float, "momentum of the local steps", 0.9),
            ],
        },
        prior=PRIOR,
        captions={PICTURE: "Images, and what the models make of them"},
        make=_make,
        evaluate=_evaluate,
    )
    return {networks.name: _images.command_of(networks)}


def _make(arguments: SimpleNamespace, images: Images) -> AdaptiveTraining | FedAvg:
    if not 0 <= arguments.momentum < 1:
        raise ValueError(f"--momentum: wanted from 0 to below 1, got {arguments.momentum}")
    prior = _images.prior_options(arguments, PRIOR)
    model = Autoencoder(
        int(np.prod(images.shape)),
        arguments.latent,
        hidden=arguments.hidden,
        output=arguments.output,
        key=jax.random.key(arguments.seed),
    )
    descent = optax.sgd(1.0, momentum=arguments.momentum or None)
    steps = _images.step_options(arguments, images)
    if arguments.step_size is not None:
        steps["step_size"] = arguments.step_size
    elif not arguments.published:
        steps["step_size"] = 0.03
    if arguments.training == "fedavg":
        # Gradients with noise are long, and those of single images are clipped before.
        clipped = optax.chain(optax.clip_by_global_norm(1.0), descent)
        clipped = clipped if arguments.epsilon is None else descent
        return FedAvg(model, reconstruction_loss, clipped, **steps)
    if arguments.published:
        return AdaptiveTraining.autoencoder(
            model, preset="published", optimizer=descent, **steps, **prior
        )
    if arguments.training == "personalized":
        prior = {"global_step_size": 1.0, "initial_spread": 0.2, **prior}
    if arguments.epsilon is not None:
        prior["clip"] = None
    return AdaptiveTraining.autoencoder(model, optimizer=descent, **steps, **prior)


def _evaluate(
    arguments: SimpleNamespace, algorithm: Any, images: Images, solution: Solution
) -> _run.Findings:
    samples, which = images.train, "images"
    if arguments.held_out:
        samples, which = images.held_out, "held-out images"
    arrays, axis = _images.models_of(arguments, solution.result)
    padded = Clients.from_samples(samples).data
    reconstruct = jax.vmap(lambda arrays, x: jax.vmap(algorithm.model_of(arrays))(x), (axis, 0))
    reconstructions = jax.jit(reconstruct)(arrays, padded.values)
    shares = reconstructed_energy(padded.values, reconstructions, padded.count, per_client=True)
    energies = np.asarray(shares, np.float64)
    quantities = {
        "objective": float(solution.history["objective"][-1]),
        f"captured energy of {which}": float(energies.mean()),
        "that of the worst client": float(energies.min()),
    }
    found: dict[str, Any] = {"energies": energies}
    if arguments.training == "personalized":
        quantities["mean spread"] = float(solution.history["spread"][-1])
        for path, leaf in jax.tree.leaves_with_path(solution.server.spread):
            found[f"spread{jax.tree_util.keystr(path)}"] = leaf
    chosen = _images.drawn(len(samples))
    original, reconstructed = (np.asarray(x)[chosen, 0] for x in (padded.values, reconstructions))
    picture = plot.reconstructions(original, {"reconstructed": reconstructed}, images.shape)
    return _run.Findings(quantities, {PICTURE: picture}, found)
