"""Measure the energy that autoencoders of synthetic clients capture, by heterogeneity."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from jaxfed import Clients, rollout
from jaxfed.generative import FedAvg
from jaxfed.models import Autoencoder, reconstruction_loss
from papers.adept import _autoencoders as common
from papers.report import Found, Labels
from papers.runs import Seeds

CLIENTS = 50
TRUE_DECODER = "true decoder"
EAGER = "ADEPT, spread learned fast"  # with a hundred times the step size of the spread
FEATURES, SAMPLES, TRUE_LATENT, LATENT = 64, 10, 5, 10
SIGNAL, CODE = 0.1, 0.5  # standard deviations of the decoder's weights and of the codes
RATIOS = (20, 10, 5, 0)  # dB
SYNTHETIC_ROUNDS = 150


class Synthetic(NamedTuple):
    """Draws of personal decoders."""

    split: common.Split
    decoder: eqx.nn.Linear  # with a leading axis


def _synthetic(key: Key[Array, ""], ratio: float, clients: int) -> Synthetic:
    """Samples of decoders that are a common one and each client's own noise.

    Source: ADEPT, Section 5.1, with the authors' numbers; samples and decoders are in units of
    the client's standard deviation.
    """
    common_key, own_key, code_key = jax.random.split(key, 3)
    shapes = {"weight": (FEATURES, TRUE_LATENT), "bias": (FEATURES,)}
    noise = SIGNAL * 10 ** (-ratio / 20)
    keys = jax.random.split(common_key), jax.random.split(own_key)
    weight, bias = (
        SIGNAL * jax.random.normal(common, shape)
        + noise * jax.random.normal(own, (clients, *shape))
        for common, own, shape in zip(*keys, shapes.values(), strict=True)
    )
    counts = np.cumsum([SAMPLES, 20])
    codes = CODE * jax.random.normal(code_key, (clients, SAMPLES + 120, TRUE_LATENT))
    samples = jnp.einsum("mnl,mdl->mnd", codes, weight) + bias[:, None]
    unit = jnp.std(samples[:, :SAMPLES], axis=(1, 2))[:, None, None]
    decoder = eqx.tree_at(
        lambda layer: (layer.weight, layer.bias),
        eqx.nn.Linear(TRUE_LATENT, FEATURES, key=key),
        (weight / unit, bias / unit[:, 0]),
    )
    return Synthetic(common.Split(*jnp.split(samples / unit, counts, axis=1)), decoder)


@partial(jax.jit, static_argnames=("momentum", "rounds"))
def _encoders(
    momentum: float, rounds: int, numbers: Mapping[str, Array], draw: Synthetic, key: Key[Array, ""]
) -> eqx.Module:
    """Local training of encoders alone, to the true decoders."""

    def loss(model, batch, key):
        decoder = jax.lax.stop_gradient(model.decoder)
        return reconstruction_loss(eqx.tree_at(lambda m: m.decoder, model, decoder), batch, key)

    def one(samples, decoder):
        model = Autoencoder(FEATURES, TRUE_LATENT, key=key)
        model = eqx.tree_at(lambda m: m.decoder, model, decoder)
        algorithm = FedAvg(
            model,
            loss,
            common.CLIPPED[momentum],
            local_steps=1,
            server_optimizer=common.STAY,
            step_size=numbers["step_size"],
            fine_tuning_steps=rounds,
        )
        result = rollout(algorithm, Clients.from_samples(samples[None]), rounds=1, key=key).result
        return jax.tree.map(lambda w: w[0], result.local)

    return jax.vmap(one)(draw.split.train, draw.decoder)


def _mean_of(tree: PyTree) -> float:
    leaves = jax.tree.leaves(tree)
    return float(sum(jnp.sum(leaf) for leaf in leaves) / sum(leaf.size for leaf in leaves))


def run(
    seeds: Seeds,
    *,
    scale: float = 1.0,
    ratios: Sequence[float] = RATIOS,
    rounds: int = SYNTHETIC_ROUNDS,
) -> Found:
    """Choose settings and measure with them, for every noise."""
    clients = max(2, round(scale * CLIENTS))
    size = common.Size(rounds, 1, None)
    rates = (0.003, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)
    usual = common.grid_of(step_size=rates, momentum=common.MOMENTA)
    prior = {"global_step_size": (0.1, 1.0), "initial_spread": (0.2, 0.5, 1.0)}
    few = {"step_size": (0.01, 0.02, 0.05, 0.1)}
    grids = {
        common.LOCAL: usual,
        common.AVERAGED: usual,
        TRUE_DECODER: usual,
        common.ADAPTIVE: common.grid_of(**few, momentum=common.MOMENTA, **prior),
        common.PUBLISHED: common.grid_of(**few, **prior),
    }

    def models(name: str, candidate: common.Candidate, draw: Synthetic, key: Key[Array, ""]):
        momentum, numbers = common.split_numbers(candidate)
        if name == TRUE_DECODER:
            return _encoders(momentum, size.rounds, numbers, draw, key), None
        start = Autoencoder(FEATURES, LATENT, key=key)
        return common.trained(name, momentum, size, numbers, start, draw.split.train, key)

    measured: dict[Labels, Any] = {}
    arrays, said = {}, []
    for ratio in ratios:
        keys = [jax.random.key(seed) for seed in common.tuning(seeds)]
        draws = [_synthetic(key, ratio, clients) for key in keys]

        def energy(name: str, candidate: common.Candidate, draws=draws, keys=keys):
            found = [models(name, candidate, *pair)[0] for pair in zip(draws, keys, strict=True)]
            pairs = zip(found, draws, strict=True)
            return jnp.concatenate(
                [common.energy_of(own, draw.split.validation) for own, draw in pairs]
            )

        chosen = common.chosen_of(grids, energy)
        chosen[EAGER] = {**chosen[common.ADAPTIVE], "spread_step_size": 0.1}
        energies: dict[str, list[float]] = {name: [] for name in chosen}
        spreads: dict[str, list[float]] = {}
        for seed in seeds:
            key = jax.random.key(seed)
            draw = _synthetic(key, ratio, clients)
            for name, candidate in chosen.items():
                found, spread = models(name, candidate, draw, key)
                own = common.energy_of(found, draw.split.test)
                energies[name].append(float(own.mean()))
                arrays[f"{ratio} dB | {name} | seed {seed}"] = np.asarray(own)
                if spread is not None:
                    spreads.setdefault(name, []).append(_mean_of(spread))
        labels = common.rows_of(energies)
        labels += [(name, "mean spread", values) for name, values in spreads.items()]
        measured |= {(ratio, name, quantity): values for name, quantity, values in labels}
        said += common.said_of(f"{ratio} dB", chosen)
    return Found(
        measured,
        notes=[
            *common.reduced(scale, f"{clients} of {CLIENTS} clients"),
            f"Linear autoencoders with a code of {LATENT} for samples of a code of {TRUE_LATENT}; "
            f"{size.rounds} rounds of one step with all samples, gradients clipped to norm 1. The "
            "true decoder is held, and each client trains its own encoder to it; samples have no "
            "noise of their own, so that is all but exact.",
            f"Step sizes of {', '.join(map(str, rates))}, momentum of 0 or 0.9 and, for the "
            "adaptive method, global step size and first spread are chosen by the validation "
            "samples of two draws that are not measured. The text names a momentum for all methods "
            "and none for the adaptive one; what was chosen is for its personal models alone.",
            *said,
        ],
        arrays=arrays,
    )
