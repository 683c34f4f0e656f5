"""Tables of Ozkara, Huang, Zhou & Diggavi (ADEPT): personalized autoencoders.

The source at hand has lost the numbers of the paper's tables and of its step sizes. What is
compared is therefore what the text says of them: that the adaptive method is above local training
and above federated averaging. Step sizes, momentum and the first spread are tuned for each method
alike, on a draw of its own that is not measured.

Energies are shares: of a sample's squared length, what its reconstruction holds, as a mean over
held-out samples and clients.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key, PyTree

from jaxfed import Clients, rollout
from jaxfed.generative import AdaptiveTraining, FedAvg
from jaxfed.metrics import reconstructed_energy
from jaxfed.models import reconstruction_loss
from papers.intervals import at_least
from papers.report import Cell
from papers.runs import Seeds

LOCAL, AVERAGED = "local", "FedAvg"
ADAPTIVE, PUBLISHED = "ADEPT", "ADEPT as published"
MOMENTA = (0.0, 0.9)

# Every method clips its gradients, as in the authors' code.
CLIP = optax.clip_by_global_norm(1.0)
DESCENT = {momentum: optax.sgd(1.0, momentum=momentum or None) for momentum in MOMENTA}
CLIPPED = {momentum: optax.chain(CLIP, descent) for momentum, descent in DESCENT.items()}
STAY = optax.set_to_zero()

Candidate = Mapping[str, float]


class Split(NamedTuple):
    """The clients' samples."""

    train: Float[Array, "m n d"]
    validation: Float[Array, "m v d"]
    test: Float[Array, "m t d"]


@dataclass(frozen=True)
class Size:
    """How long everybody trains."""

    rounds: int
    local_steps: int
    batch_size: int | None


@partial(jax.jit, static_argnames=("name", "momentum", "size"))
def trained(
    name: str,
    momentum: float,
    size: Size,
    numbers: Mapping[str, Array],
    model: eqx.Module,
    train: Float[Array, "m n d"],
    key: Key[Array, ""],
) -> tuple[eqx.Module, PyTree | None]:
    """The models that the clients use, with a leading axis, and the learned spread, if any."""
    clients = Clients.from_samples(train)
    options: dict[str, Any] = {"batch_size": size.batch_size, **numbers}
    if name == LOCAL:
        # Fine-tuning alone: the server stays where it is.
        algorithm = FedAvg(
            model,
            reconstruction_loss,
            CLIPPED[momentum],
            local_steps=1,
            server_optimizer=STAY,
            fine_tuning_steps=size.rounds * size.local_steps,
            **options,
        )
        return rollout(algorithm, clients, rounds=1, key=key).result.local, None
    if name == AVERAGED:
        # Of a single step, the clients' momenta average to one at the server.
        alone = size.local_steps == 1
        algorithm = FedAvg(
            model,
            reconstruction_loss,
            CLIPPED[0.0 if alone else momentum],
            local_steps=size.local_steps,
            server_optimizer=DESCENT[momentum] if alone else None,
            **options,
        )
        shared = rollout(algorithm, clients, rounds=size.rounds, key=key).result.shared
        return jax.tree.map(lambda w: jnp.broadcast_to(w, (len(train), *w.shape)), shared), None
    if name == PUBLISHED:
        algorithm = AdaptiveTraining.autoencoder(
            model, preset="published", local_steps=size.local_steps, **options
        )
    else:
        algorithm = AdaptiveTraining.autoencoder(
            model, local_steps=size.local_steps, optimizer=DESCENT[momentum], **options
        )
    solution = rollout(algorithm, clients, rounds=size.rounds, key=key)
    return solution.result.local, solution.server.spread


@jax.jit
def energy_of(models: eqx.Module, samples: Float[Array, "m n d"]) -> Float[Array, " m"]:
    """Each client's mean captured energy."""
    found = jax.vmap(lambda model, x: jax.vmap(model)(x))(models, samples)
    return reconstructed_energy(samples, found, per_client=True)


def tuned(
    candidates: Sequence[Candidate], energy: Callable[[Candidate], Float[Array, " m"]]
) -> Candidate:
    """The candidate of the largest energy; what diverged has none."""
    found = [float(jnp.mean(energy(candidate))) for candidate in candidates]
    return candidates[int(np.argmax(np.nan_to_num(found, nan=-np.inf)))]


def grid_of(**values: Sequence[float]) -> list[Candidate]:
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def chosen_of(
    grids: Mapping[str, Sequence[Candidate]], energy: Callable[[str, Candidate], Float[Array, " m"]]
) -> dict[str, Candidate]:
    """The best settings of each method."""
    return {name: tuned(grid, partial(energy, name)) for name, grid in grids.items()}


def said_of(where: str, chosen: Mapping[str, Candidate]) -> list[str]:
    """Notes on the settings that were chosen."""
    return [
        f"{where}, {method}: "
        + ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in candidate.items())
        + "."
        for method, candidate in chosen.items()
    ]


def rows_of(
    energies: Mapping[str, Sequence[float]], *, beyond_spread: bool = False
) -> list[tuple[str, str, Any]]:
    """The energies by method, and the leads of the adaptive one."""
    rows: list[tuple[str, str, Any]] = [(name, "energy", x) for name, x in energies.items()]
    for other in (LOCAL, AVERAGED):
        cell = lead(energies, other, beyond_spread=beyond_spread)
        rows.append((ADAPTIVE, f"above {other}", cell))
    return rows


def split_numbers(candidate: Candidate) -> tuple[float, dict[str, Array]]:
    """Momentum, which is compiled in, and what is traced."""
    numbers = {k: jnp.asarray(v, jnp.float32) for k, v in candidate.items() if k != "momentum"}
    return candidate.get("momentum", 0.0), numbers


def lead(
    energies: Mapping[str, Sequence[float]], other: str, *, beyond_spread: bool = False
) -> Cell:
    """By how much the adaptive method is above another one, be it more than the seeds' spread."""
    pair = energies[ADAPTIVE], energies[other]
    spreads = [np.std(values, ddof=1) if len(values) > 1 else 0.0 for values in pair]
    gaps = [ours - theirs for ours, theirs in zip(*pair, strict=True)]
    wanted = at_least(float(max(spreads)) if beyond_spread else 0)
    return Cell(gaps, paper=wanted, by="claim")


def tuning(seeds: Seeds) -> list[int]:
    """Seeds of the draws that settings are chosen by, which are not measured."""
    return [seeds.at(1000), seeds.at(1001)]


def reduced(scale: float, what: str) -> list[str]:
    return [f"Reduced by --scale {scale:g}: {what}."] if scale < 1 else []
