"""Examples of every exported algorithm, with settings that are refused, and data for each family.

A new algorithm is found through the package's exports; it only needs an entry in `EXAMPLES`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf
from tests.helpers import planted_samples

FEATURES, CLIENTS, ROUNDS, ROUNDS_OF_TRAINING = 6, 5, 150, 20
COUNTS = (12, 9, 10, 12, 7)
ENTITIES, WIDTHS = 9, (6, 4, 5, 6, 3)


TRIANGLE = FEATURES * (FEATURES + 1) // 2  # numbers in a symmetric matrix
LATENT = 2
WEIGHTS = 2 * FEATURES * LATENT + FEATURES + LATENT  # of the networks below

# One object each, as other ones would be compiled anew.
SGD, MOMENTUM, ADAM = optax.sgd(1.0), optax.sgd(0.5, momentum=0.5), optax.adam(1e-2, eps_root=1e-8)
NETWORK = functools.partial(jf.models.Perceptron, outputs=LATENT, hidden=(4,))


def autoencoder():
    """A network that is trained."""
    return jf.models.Autoencoder(FEATURES, LATENT, key=jax.random.key(0))


def fedavg(**options):
    """Federated averaging of it."""
    options = {"local_steps": 2, "step_size": 0.02} | options
    return jf.generative.FedAvg(autoencoder(), jf.models.reconstruction_loss, SGD, **options)


def adaptive(make=jf.generative.AdaptiveTraining.autoencoder, **options):
    """Training of it under a learned prior, so fast that all of it matters."""
    rates = {"step_size": 0.02, "global_step_size": 0.01, "spread_step_size": 0.01}
    common = {"local_steps": 2, "hyper_prior": 0.01, "initial_spread": 0.5, "lazy_rounds": 1}
    return make(autoencoder(), **(rates | common | options))


def robust(groups=3, **options):
    """Robust aggregation of what has means alone."""
    return jf.aggregation.Robust(
        jf.pca.PerPCA(2, 2, solver="gradient", step_size=0.05), groups=groups, **options
    )


class Example(NamedTuple):
    """An algorithm, and what it sends."""

    make: Callable[[int], jf.Algorithm]  # from the number of clients
    # Numbers in a client's first message, in a round's uplink and in its downlink. With the
    # samples below a second moment is smaller than the samples behind it.
    cost: tuple[float, float, float]


class Examples(NamedTuple):
    """How an algorithm is made, and how it must not be."""

    good: dict[str, Example]
    refused: dict[str, Callable[[], jf.Algorithm]]  # by the argument that the message names


EXAMPLES = {
    jf.pca.PerPCA: Examples(
        good={
            "": Example(lambda _: jf.pca.PerPCA(2, 2), (4 * FEATURES, 16, 12)),
            "ranks": Example(
                lambda m: jf.pca.PerPCA(1, tuple(2 - i % 3 for i in range(m)), memory=3),
                (3 * FEATURES, 10, 6),
            ),
            "shrinkage": Example(
                lambda _: jf.pca.PerPCA(1, 1, shrinkage=True), (2 * FEATURES, 10, 6)
            ),
            "local_first": Example(
                lambda _: jf.pca.PerPCA(1, 1, start="local_first"), (TRIANGLE, 10, 6)
            ),
            "gradient": Example(
                lambda _: jf.pca.PerPCA(2, 2, solver="gradient", step_size=0.05),
                (4 * FEATURES, 12, 12),
            ),
            "polar": Example(
                lambda _: jf.pca.PerPCA(
                    2, 1, solver="gradient", variant="polar", retraction="qr", decay=0.7
                ),
                (3 * FEATURES + 1, 13, 13),
            ),
            "gradient_ranks": Example(
                lambda m: jf.pca.PerPCA(
                    1, tuple(2 - i % 3 for i in range(m)), solver="gradient", start="random"
                ),
                (1, 6, 7),
            ),
            "gradient_shrinkage": Example(
                lambda _: jf.pca.PerPCA(
                    1, 1, solver="gradient", shrinkage=True, step_size=0.1, start="local_first"
                ),
                (TRIANGLE, 6, 6),
            ),
            "power": Example(
                lambda _: jf.pca.PerPCA(2, 1, solver="gradient", variant="power"),
                (3 * FEATURES, 12, 12),
            ),
        },
        refused={
            "shared_rank": lambda: jf.pca.PerPCA(0, 2),
            "local_rank": lambda: jf.pca.PerPCA(2, 0),
            "solver": lambda: jf.pca.PerPCA(2, 2, solver="newton"),
            "start": lambda: jf.pca.PerPCA(2, 2, start="zeros"),
            "shrinkage": lambda: jf.pca.PerPCA(2, 2, shrinkage=1),
            "local_penalty": lambda: jf.pca.PerPCA(2, 2, local_penalty=-0.1),
            "memory": lambda: jf.pca.PerPCA(2, 2, solver="gradient", memory=3),
            "step_size": lambda: jf.pca.PerPCA(2, 2, step_size=0.1),
            "decay": lambda: jf.pca.PerPCA(2, 2, solver="gradient", decay=float("nan")),
            "variant": lambda: jf.pca.PerPCA(2, 2, solver="gradient", variant="tangential"),
            "retraction": lambda: jf.pca.PerPCA(2, 2, solver="gradient", retraction="cayley"),
        },
    ),
    jf.pca.OneShot: Examples(
        good={
            "projector": Example(lambda _: jf.pca.OneShot(2, 2), (24, 0, 12)),
            "spectrum": Example(lambda _: jf.pca.OneShot(1, 2, method="spectrum"), (18, 0, 6)),
            "local_first": Example(
                lambda _: jf.pca.OneShot(2, 2, method="local_first"), (TRIANGLE, 0, 12)
            ),
            "median": Example(lambda _: jf.pca.OneShot(2, 1, method="median"), (18, 0, 12)),
        },
        refused={
            "shared_rank": lambda: jf.pca.OneShot(True, 2),
            "local_rank": lambda: jf.pca.OneShot(2, -2),
            "method": lambda: jf.pca.OneShot(2, 2, method="mean"),
        },
    ),
    jf.pca.Pooled: Examples(
        good={"": Example(lambda _: jf.pca.Pooled(2), (TRIANGLE, 0, 12))},
        refused={"rank": lambda: jf.pca.Pooled(0)},
    ),
    jf.pca.SubspaceIteration: Examples(
        good={
            "": Example(lambda _: jf.pca.SubspaceIteration(2), (0, 12, 12)),
            "kkt": Example(lambda _: jf.pca.SubspaceIteration(2, stop="kkt"), (1, 12, 12)),
        },
        refused={
            "rank": lambda: jf.pca.SubspaceIteration(0),
            "stop": lambda: jf.pca.SubspaceIteration(2, stop="gradient"),
        },
    ),
    # The number of local steps goes down as a whole number of 32 bits, half one of the others.
    jf.pca.LocalPower: Examples(
        good={
            "": Example(lambda _: jf.pca.LocalPower(2), (0, 13, 12.5)),
            "procrustes": Example(
                lambda _: jf.pca.LocalPower(2, alignment="procrustes", stop="kkt"), (1, 25.5, 12.5)
            ),
        },
        refused={
            "rank": lambda: jf.pca.LocalPower(2.0),
            "local_steps": lambda: jf.pca.LocalPower(2, local_steps=0),
            "alignment": lambda: jf.pca.LocalPower(2, alignment="polar"),
            "stop": lambda: jf.pca.LocalPower(2, stop="rounds"),
        },
    ),
    jf.pca.FAPS: Examples(
        good={
            "": Example(lambda _: jf.pca.FAPS(2), (0, 13, 12)),
            "kkt": Example(
                lambda _: jf.pca.FAPS(2, local_steps=2, penalty_growth=None, stop="kkt"),
                (1, 24, 12),
            ),
        },
        refused={
            "rank": lambda: jf.pca.FAPS(-1),
            "penalty": lambda: jf.pca.FAPS(2, penalty=0.0),
            "penalty_growth": lambda: jf.pca.FAPS(2, penalty_growth=float("nan")),
            "local_solver": lambda: jf.pca.FAPS(2, local_solver="newton"),
            "local_steps": lambda: jf.pca.FAPS(2, local_steps=0),
            "local_tol": lambda: jf.pca.FAPS(2, local_solver="relative_change", local_tol=-1.0),
            "stop": lambda: jf.pca.FAPS(2, stop=True),
        },
    ),
    # First the energy and the number of the samples.
    jf.pca.BlockLanczos: Examples(
        good={"": Example(lambda _: jf.pca.BlockLanczos(2), (2, 12, 12))},
        refused={
            "rank": lambda: jf.pca.BlockLanczos(True),
            "memory": lambda: jf.pca.BlockLanczos(2, memory=2),
            "stop": lambda: jf.pca.BlockLanczos(2, stop="tol"),
        },
    ),
    jf.pca.HMF: Examples(
        good={
            "": Example(lambda _: jf.pca.HMF(2, 2), (4 * FEATURES, 16, 12)),
            "paper": Example(
                lambda _: jf.pca.HMF(
                    2, 1, solver="gradient", step_size=2e-3, penalty=1.0, start="local_first"
                ),
                (TRIANGLE, 12, 12),
            ),
            "gradient": Example(
                lambda _: jf.pca.HMF(2, 2, solver="gradient"), (4 * FEATURES + 1, 13, 13)
            ),
        },
        refused={
            "shared_rank": lambda: jf.pca.HMF(0, 2),
            "local_rank": lambda: jf.pca.HMF(2, 1.0),
            "solver": lambda: jf.pca.HMF(2, 2, solver="newton"),
            "start": lambda: jf.pca.HMF(2, 2, start="zero"),
            "step_size": lambda: jf.pca.HMF(2, 2, solver="gradient", step_size=0.0),
            "penalty": lambda: jf.pca.HMF(2, 2, penalty=1.0),
        },
    ),
    jf.pca.TCMF: Examples(
        good={
            "": Example(lambda _: jf.pca.TCMF(2, 2, 1.0), (4 * FEATURES, 12, 12)),
            "paper": Example(
                lambda _: jf.pca.TCMF(2, 1, 1.0, first_threshold=3.0, inner_rounds=3),
                (3 * FEATURES, 12, 12),
            ),
        },
        refused={
            "shared_rank": lambda: jf.pca.TCMF(0, 2, 1.0),
            "local_rank": lambda: jf.pca.TCMF(2, 1.0, 1.0),
            "threshold": lambda: jf.pca.TCMF(2, 2, -1.0),
            "first_threshold": lambda: jf.pca.TCMF(2, 2, 1.0, first_threshold=0.0),
            "decay": lambda: jf.pca.TCMF(2, 2, 1.0, decay=1.0),
            "start": lambda: jf.pca.TCMF(2, 2, 1.0, start="zero"),
            "inner_rounds": lambda: jf.pca.TCMF(2, 2, 1.0, inner_rounds=0),
        },
    ),
    # A message is as large as the largest mode, the first one larger: a factor for each mode.
    jf.pca.PerTucker: Examples(
        good={
            "": Example(lambda _: jf.pca.PerTucker((3, 2), (1, 1), (2, 1)), (13, 6, 5)),
            "one": Example(
                lambda _: jf.pca.PerTucker(
                    (2, 3, 1), (1, 2, 1), (1, 1, 1), orthogonal_modes=(0,), proximal=0.1
                ),
                (14, 6, 9),
            ),
        },
        refused={
            "shape": lambda: jf.pca.PerTucker(6, (1, 1), (1, 1)),
            "shared_ranks": lambda: jf.pca.PerTucker((3, 2), (1, 3), (1, 1)),
            "local_ranks": lambda: jf.pca.PerTucker((3, 2), (1, 1), (1,)),
            r"shared_ranks \+ local_ranks": lambda: jf.pca.PerTucker((3, 2), (1, 2), (1, 1)),
            "orthogonal_modes": lambda: jf.pca.PerTucker(
                (3, 2), (1, 1), (1, 1), orthogonal_modes=(2,)
            ),
            "proximal": lambda: jf.pca.PerTucker((3, 2), (1, 1), (1, 1), proximal=-1.0),
        },
    ),
    jf.pca.HierarchicalPCA: Examples(
        good={
            "": Example(lambda _: jf.pca.HierarchicalPCA(2), (TRIANGLE + 6, 13, 16)),
            "quasi_newton": Example(
                lambda _: jf.pca.HierarchicalPCA(2, 0.2, solver="quasi_newton"),
                (TRIANGLE + 2, 14, 14),
            ),
            "hyper_prior": Example(
                lambda _: jf.pca.HierarchicalPCA(
                    2, 0.2, hyper_prior=0.1, variance_update="gradient", dimension="frame"
                ),
                (TRIANGLE, 13, 13),
            ),
            "log": Example(
                lambda _: jf.pca.HierarchicalPCA(
                    2, 0.2, hyper_prior=0.1, variance_update="log", solver="eigenvectors"
                ),
                (TRIANGLE, 13, 13),
            ),
            "given": Example(lambda _: jf.pca.HierarchicalPCA(2, 0.2, 0.1), (TRIANGLE, 12, 12)),
            "estimated": Example(
                lambda _: jf.pca.HierarchicalPCA(2, prior_variance=0.1), (TRIANGLE + 4, 12, 14)
            ),
            "learned": Example(lambda _: jf.pca.HierarchicalPCA(2, 0.2), (TRIANGLE + 2, 13, 14)),
            "given_eigenvectors": Example(
                lambda _: jf.pca.HierarchicalPCA(2, 0.2, 0.1, solver="eigenvectors"),
                (TRIANGLE, 12, 12),
            ),
            "given_quasi_newton": Example(
                lambda _: jf.pca.HierarchicalPCA(2, 0.2, 0.1, solver="quasi_newton"),
                (TRIANGLE, 13, 12),
            ),
            "printed": Example(
                lambda _: jf.pca.HierarchicalPCA(
                    2,
                    0.2,
                    0.1,
                    likelihood="half",
                    start="random",
                    align=False,
                    step_size=1e-3,
                    global_step_size=0.1,
                ),
                (0, 12, 12),
            ),
        },
        refused={
            "rank": lambda: jf.pca.HierarchicalPCA(0, 0.2, 0.1),
            "noise_variance": lambda: jf.pca.HierarchicalPCA(2, 0.0, 0.1),
            "prior_variance": lambda: jf.pca.HierarchicalPCA(2, 0.2, float("inf")),
            "step_size": lambda: jf.pca.HierarchicalPCA(2, 0.2, 0.1, step_size=-1.0),
            "global_step_size": lambda: jf.pca.HierarchicalPCA(2, 0.2, 0.1, global_step_size=0),
            "solver": lambda: jf.pca.HierarchicalPCA(2, 0.2, 0.1, solver="newton"),
            "likelihood": lambda: jf.pca.HierarchicalPCA(2, 0.2, 0.1, likelihood="fact1"),
            "start": lambda: jf.pca.HierarchicalPCA(2, 0.2, 0.1, start="zeros"),
            "initial_variance": lambda: jf.pca.HierarchicalPCA(2, 0.2, initial_variance=0.0),
            "hyper_prior": lambda: jf.pca.HierarchicalPCA(2, 0.2, hyper_prior=-1.0),
            "variance_update": lambda: jf.pca.HierarchicalPCA(2, 0.2, variance_update="newton"),
            "variance_step_size": lambda: jf.pca.HierarchicalPCA(
                2, 0.2, 0.1, variance_step_size=0.1
            ),
            "dimension": lambda: jf.pca.HierarchicalPCA(2, 0.2, dimension="grassmann"),
        },
    ),
    jf.pca.EmpiricalBayesPCA: Examples(
        good={
            "": Example(lambda _: jf.pca.EmpiricalBayesPCA(2), (TRIANGLE + 5, 13, 15)),
            "given": Example(lambda _: jf.pca.EmpiricalBayesPCA(2, 0.2), (TRIANGLE + 1, 13, 13)),
            "quasi_newton": Example(
                lambda _: jf.pca.EmpiricalBayesPCA(2, 0.2, solver="quasi_newton"),
                (TRIANGLE + 1, 14, 13),
            ),
        },
        refused={
            "rank": lambda: jf.pca.EmpiricalBayesPCA(1.5, 0.2),
            "noise_variance": lambda: jf.pca.EmpiricalBayesPCA(2, -0.2),
            "solver": lambda: jf.pca.EmpiricalBayesPCA(2, 0.2, solver="gradient"),
        },
    ),
    jf.pca.Local: Examples(
        good={"": Example(lambda _: jf.pca.Local(2), (0, 0, 0))},
        refused={"rank": lambda: jf.pca.Local(1.5)},
    ),
    # The scores of nine entities.
    jf.gcca.MaxVar: Examples(
        good={
            "": Example(lambda _: jf.gcca.MaxVar(2), (18, 18, 18)),
            "exact": Example(
                lambda _: jf.gcca.MaxVar(2, memory=0, ridge=0.1, proximal=0.1), (18, 18, 18)
            ),
            "gradient": Example(lambda _: jf.gcca.MaxVar(2, solver="gradient"), (18, 18, 18)),
            "batch": Example(
                lambda _: jf.gcca.MaxVar(2, batch_size=5, inner_steps=2), (18, 18, 18)
            ),
            "memory": Example(lambda _: jf.gcca.MaxVar(2, memory=2, ridge=0.1), (18, 18, 18)),
        },
        refused={
            "rank": lambda: jf.gcca.MaxVar(2.0),
            "solver": lambda: jf.gcca.MaxVar(2, solver="newton"),
            "inner_steps": lambda: jf.gcca.MaxVar(2, inner_steps=0),
            "batch_size": lambda: jf.gcca.MaxVar(2, solver="exact", batch_size=2),
            "memory": lambda: jf.gcca.MaxVar(2, inner_steps=3, memory=2),
            "ridge": lambda: jf.gcca.MaxVar(2, ridge=-0.1),
            "proximal": lambda: jf.gcca.MaxVar(2, proximal=float("inf")),
        },
    ),
    jf.gcca.MVLSA: Examples(
        good={"": Example(lambda _: jf.gcca.MVLSA(2, view_rank=3), (27, 0, 18))},
        refused={
            "rank": lambda: jf.gcca.MVLSA(0),
            "view_rank": lambda: jf.gcca.MVLSA(2, view_rank=True),
        },
    ),
    # A basis of the signal; which directions the view lacks; the joint scores.
    jf.gcca.AJIVE: Examples(
        good={
            "": Example(lambda _: jf.gcca.AJIVE(2, 3), (27, 2, 18)),
            "ranks": Example(
                lambda m: jf.gcca.AJIVE(
                    2, tuple(3 - i % 2 for i in range(m)), individual_rank=(1, *[0] * (m - 1))
                ),
                (27, 2, 18),
            ),
        },
        refused={
            "rank": lambda: jf.gcca.AJIVE(0, 2),
            "signal_rank": lambda: jf.gcca.AJIVE(2, (2, 0)),
            "individual_rank": lambda: jf.gcca.AJIVE(2, 2, individual_rank=(0, 0)),
        },
    ),
    jf.gcca.DeepMaxVar: Examples(
        good={
            "": Example(
                lambda _: jf.gcca.DeepMaxVar(NETWORK, SGD, rank=2, step_size=0.05, inner_epochs=2),
                (18, 18, 18),
            ),
            "batch": Example(
                lambda _: jf.gcca.DeepMaxVar(
                    NETWORK, ADAM, rank=2, batch_size=4, inner_epochs=1, proximal=0.1
                ),
                (18, 18, 18),
            ),
        },
        refused={
            "network": lambda: jf.gcca.DeepMaxVar("perceptron", SGD, rank=2),
            "optimizer": lambda: jf.gcca.DeepMaxVar(NETWORK, 0.1, rank=2),
            "rank": lambda: jf.gcca.DeepMaxVar(NETWORK, SGD, rank=0),
            "inner_epochs": lambda: jf.gcca.DeepMaxVar(NETWORK, SGD, rank=2, inner_epochs=0),
            "batch_size": lambda: jf.gcca.DeepMaxVar(NETWORK, SGD, rank=2, batch_size=2.0),
            "step_size": lambda: jf.gcca.DeepMaxVar(NETWORK, SGD, rank=2, step_size=-1.0),
            "proximal": lambda: jf.gcca.DeepMaxVar(NETWORK, SGD, rank=2, proximal=float("nan")),
        },
    ),
    # Products of loadings with themselves and with samples; the shared parts.
    jf.nmf.INMF: Examples(
        good={
            "": Example(lambda _: jf.nmf.INMF(2), (36, 16, 12)),
            "batches": Example(lambda _: jf.nmf.INMF(2, 1.0, batches=3), (36, 16, 12)),
            "active": Example(lambda _: jf.nmf.INMF(3, 0.5, active_rank=2), (36, 27, 18)),
        },
        refused={
            "rank": lambda: jf.nmf.INMF(0),
            "penalty": lambda: jf.nmf.INMF(2, -1.0),
            "active_rank": lambda: jf.nmf.INMF(2, active_rank=3),
            "batches": lambda: jf.nmf.INMF(2, batches=0),
        },
    ),
    # The changes of the weights, and the weights.
    jf.generative.FedAvg: Examples(
        good={
            "": Example(lambda _: fedavg(), (0, WEIGHTS, WEIGHTS)),
            "batch": Example(
                lambda _: fedavg(
                    batch_size=3, proximal=0.1, fine_tuning_steps=3, server_optimizer=MOMENTUM
                ),
                (0, WEIGHTS, WEIGHTS),
            ),
            "gradient noise": Example(
                lambda _: fedavg(
                    batch_size=3, gradient_noise=jf.generative.GradientNoise(1.0, 0.1)
                ),
                (0, WEIGHTS, WEIGHTS),
            ),
        },
        refused={
            "gradient_noise": lambda: fedavg(gradient_noise=1.0),
            "model": lambda: jf.generative.FedAvg(len, len, SGD, local_steps=1),
            "local_steps": lambda: fedavg(local_steps=0),
            "batch_size": lambda: fedavg(batch_size=2.5),
            "fine_tuning_steps": lambda: fedavg(fine_tuning_steps=-1),
            "step_size": lambda: fedavg(step_size=float("inf")),
            "proximal": lambda: fedavg(proximal=-0.1),
        },
    ),
    # Both the weights and their spreads.
    jf.generative.AdaptiveTraining: Examples(
        good={
            "": Example(
                lambda _: adaptive(
                    jf.generative.AdaptiveTraining,
                    loss=jf.models.reconstruction_loss,
                    clip=0.5,
                    spread_clip=None,
                    prior_weight=0.2,
                    bounds=(0.1, 0.6),
                ),
                (0, 2 * WEIGHTS, 2 * WEIGHTS),
            ),
            "autoencoder": Example(lambda _: adaptive(), (0, 2 * WEIGHTS, 2 * WEIGHTS)),
            "published": Example(
                lambda _: adaptive(preset="published", batch_size=3), (0, 2 * WEIGHTS, 2 * WEIGHTS)
            ),
            "diffusion": Example(
                lambda _: adaptive(
                    jf.generative.AdaptiveTraining.diffusion, optimizer=ADAM, global_optimizer=SGD
                ),
                (0, 2 * WEIGHTS, 2 * WEIGHTS),
            ),
        },
        refused={
            "gradient_noise": lambda: adaptive(gradient_noise=1.0),
            "model": lambda: jf.generative.AdaptiveTraining.autoencoder(len),
            "batch_size": lambda: adaptive(batch_size=0),
            "local_steps": lambda: adaptive(local_steps=0),
            "step_size": lambda: adaptive(step_size=float("nan")),
            "hyper_prior": lambda: adaptive(hyper_prior=0.0),
            "initial_spread": lambda: adaptive(initial_spread=200.0),
            "prior_weight": lambda: adaptive(prior_weight=-1.0),
            "lazy_rounds": lambda: adaptive(lazy_rounds=-1),
            "clip": lambda: adaptive(clip=0.0),
            "spread_clip": lambda: adaptive(spread_clip=float("nan")),
            "bounds": lambda: adaptive(bounds=(1.0, 0.1)),
            "spread_step_size": lambda: adaptive(spread_step_size=-1.0),
            "global_step_size": lambda: adaptive(global_step_size=float("inf")),
            "preset": lambda: adaptive(preset="paper"),
            "decay_after": lambda: jf.generative.AdaptiveTraining.diffusion(
                autoencoder(), decay_after=0
            ),
        },
    ),
    # Counts, sums and squares; mean and variance.
    jf.preprocess.Standardize: Examples(
        good={
            "": Example(lambda _: jf.preprocess.Standardize(), (7, 13, 12)),
            "energy": Example(lambda _: jf.preprocess.Standardize(scale="energy"), (7, 7, 6)),
            "within": Example(lambda _: jf.preprocess.Standardize("local"), (0, 7, 6)),
            "local": Example(lambda _: jf.preprocess.Standardize("local", "local"), (0, 0, 0)),
            "robust": Example(
                lambda _: jf.preprocess.Standardize("none", robust=True), (7, 13, 12)
            ),
        },
        refused={
            "center": lambda: jf.preprocess.Standardize("mean"),
            "scale": lambda: jf.preprocess.Standardize(scale="unit"),
            "robust": lambda: jf.preprocess.Standardize(robust="median"),
        },
    ),
    # Shares, sums and squares; a gradient, a bound, errors and two variances; the model.
    jf.preprocess.Impute: Examples(
        good={
            "": Example(lambda _: jf.preprocess.Impute(2, 1), (24, 31, 36)),
            "more": Example(lambda _: jf.preprocess.Impute(1, 2), (24, 25, 30)),
            "default": Example(lambda _: jf.preprocess.Impute(), (24, 37, 42)),
            "means": Example(lambda _: jf.preprocess.Impute(2, 0), (24, 31, 36)),
        },
        refused={
            "shared_rank": lambda: jf.preprocess.Impute(0, 1),
            "local_rank": lambda: jf.preprocess.Impute(1, -1),
        },
    ),
    # As the algorithm, and what the group weighs; as masked, for every group.
    jf.aggregation.Robust: Examples(
        good={
            "sums": Example(
                lambda _: jf.aggregation.Robust(
                    jf.pca.SubspaceIteration(2, stop="kkt"),
                    jf.aggregation.trimmed_mean(),
                    groups=4,
                ),
                (2, 13, 12),
            ),
            # The median that biweights start from ends at a tolerance, and with other rounding
            # errors one step later: more than the checks in double precision allow.
            "": Example(
                lambda m: robust(groups=m, rule=jf.aggregation.geometric_median()),
                (TRIANGLE + 1, 13, 12),
            ),
            "few": Example(lambda _: robust(), (TRIANGLE + 1, 13, 12)),
            "masked": Example(lambda _: robust(masked=True), (3 * TRIANGLE + 3, 39, 12)),
            "curvature": Example(
                lambda _: jf.aggregation.Robust(jf.pca.PerPCA(2, 2, solver="gradient"), groups=3),
                (TRIANGLE + 2, 13, 13),
            ),
        },
        refused={
            "algorithm": lambda: jf.aggregation.Robust("PerPCA", groups=3),
            "rule": lambda: jf.aggregation.Robust(
                jf.pca.PerPCA(2, 2, solver="gradient"), "median", groups=3
            ),
            "groups": lambda: robust(groups=2),
            "masked": lambda: robust(masked=1),
        },
    ),
    # As the algorithm from each start, and a number for each, or the best one's in 32 bits.
    jf.MultiStart: Examples(
        good={
            "keys": Example(
                lambda _: jf.MultiStart(
                    jf.pca.PerPCA(1, 1, solver="gradient", start="random", step_size=0.1), 2
                ),
                (0, 14, 12.5),
            ),
            "": Example(
                lambda _: jf.MultiStart(
                    jf.pca.PerPCA(2, 1),
                    [
                        jf.pca.PerPCA(2, 1, start=start)
                        for start in ("common", "local_first", "random")
                    ],
                ),
                (TRIANGLE + 3 * FEATURES, 3 * 16 + 3, 3 * 12 + 0.5),
            ),
        },
        refused={
            "algorithm": lambda: jf.MultiStart("PerPCA", 2),
            "starts": lambda: jf.MultiStart(jf.pca.PerPCA(2, 2, solver="gradient"), 1),
            "number of starts": lambda: jf.MultiStart(jf.pca.PerPCA(2, 2, solver="gradient"), []),
        },
    ),
    # As the algorithm on each resample.
    jf.inference.Resampled: Examples(
        good={
            "": Example(
                lambda _: jf.inference.Resampled(
                    jf.pca.PerPCA(1, 1, solver="gradient", start="random", step_size=0.1), 2
                ),
                (0, 12, 12),
            ),
            "clients": Example(
                lambda clients: jf.inference.Resampled(
                    jf.pca.PerPCA(1, 1, solver="gradient", start="random", step_size=0.1),
                    2,
                    clients=clients,
                ),
                (0, 12, 12),
            ),
            "starts": Example(
                lambda _: jf.inference.Resampled(jf.pca.PerPCA(2, 1), 2),
                (2 * 3 * FEATURES, 2 * 16, 2 * 12),
            ),
        },
        refused={
            "algorithm": lambda: jf.inference.Resampled("PerPCA", 2),
            "resamples": lambda: jf.inference.Resampled(jf.pca.PerPCA(2, 2, solver="gradient"), 1),
            "clients": lambda: jf.inference.Resampled(jf.pca.FAPS(2), 2, clients=5),
        },
    ),
}

# Here a client's components are near the shared ones and not beside them.
OVERLAPPING = (jf.pca.HierarchicalPCA, jf.pca.EmpiricalBayesPCA)

GOOD = {
    f"{kind.__name__}{'-' if name else ''}{name}": example
    for kind, examples in EXAMPLES.items()
    for name, example in examples.good.items()
}
REFUSED = [
    pytest.param(make, argument, id=f"{kind.__name__}-{argument}")
    for kind, examples in EXAMPLES.items()
    for argument, make in examples.refused.items()
]
# The first of each algorithm, the most usual settings.
FIRST = {k: next(n for n in GOOD if n.split("-")[0] == k.__name__) for k in EXAMPLES}


# A run of each algorithm compiles for seconds. Where a test compiles runs of all of them, these two
# are its default: one with components of shared and local kind, one whose messages are sums.
TYPICAL = {"PerPCA", "MVLSA"}


def parametrized(names, quick=TYPICAL):
    """A test of these examples, which is slow but for the quick ones."""
    marks = {True: [], False: [pytest.mark.slow]}
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=marks[n in quick]) for n in names]
    )


first_example = parametrized(FIRST.values())
settings_example = parametrized(GOOD)
every_example = parametrized(GOOD, GOOD)
quick_first_example = parametrized(GOOD, FIRST.values())


def draw_samples(seed=0):
    """Clients of different lengths, each with two directions in common and two of its own."""
    samples = planted_samples(COUNTS, FEATURES, [3.0, 2.5], [2.0, 1.5], seed=seed)
    return jf.Clients.from_samples(samples)


def draw_counts(seed=0):
    """Non-negative samples of as many clients, of two components with parts of their own."""
    rng = np.random.default_rng(seed)
    shared = rng.gamma(0.5, size=(2, FEATURES))
    arrays = []
    for n in COUNTS:
        own = 0.3 * rng.gamma(0.5, size=(2, FEATURES))
        arrays.append(
            rng.gamma(1.0, size=(n, 2)) @ (shared + own) + 0.1 * rng.random((n, FEATURES))
        )
    return jf.Clients.from_samples(arrays)


def draw_views(seed=0):
    """Views of different widths with two dimensions in common."""
    rng = np.random.default_rng(seed)
    latent = rng.normal(size=(ENTITIES, 2))
    signals = (latent @ rng.normal(size=(2, d)) for d in WIDTHS)
    return jf.gcca.Views.from_arrays([x + 0.3 * rng.normal(size=x.shape) for x in signals])


def more_features(views):
    """With more zeros than the widest view needs."""
    values = jnp.pad(views.data.values, [(0, 0), (0, 0), (0, 4)])
    return eqx.tree_at(lambda v: v.data.values, views, values)


def unexplained(algorithm, result, values):
    """Of samples: what is in no component."""
    del algorithm
    missed = values
    for components in result:
        if components is not None:
            missed = missed - values @ components @ jnp.swapaxes(components, -1, -2)
    return (missed**2).sum()


def unaligned(algorithm, result, values):
    """Of views: how far they are from the representation."""
    del algorithm
    return ((values @ result.local - result.shared) ** 2).sum()


def scores_by_views(algorithm, result, values):
    """Of other entities of the same views: the energy of their scores."""
    del algorithm
    found = jax.vmap(lambda view, x: view.transform(x))(result.local, values)
    return sum((jnp.tanh(scores) ** 2).sum() for scores in found)


def missed_by_networks(algorithm, result, values):
    """Of samples: what the shared network does not reconstruct."""
    network = algorithm.model_of(result.shared)
    return ((jax.vmap(jax.vmap(network))(values) - values) ** 2).sum()


def energy_of_outputs(algorithm, result, values):
    """Of other entities of the same views: that of the mean of what the networks give."""
    views = eqx.tree_at(lambda v: v.data.values, draw_views(), values)
    return (algorithm.outputs(result.local, views).mean(0) ** 2).sum()


def spans(result):
    """Of components, free of the choice of bases."""
    return jax.tree.map(lambda w: w @ jnp.swapaxes(w, -1, -2), result)


def check_components(algorithm, result):
    """Orthonormal columns, of the rows that there are."""
    for part, leading in zip(result, ((), (CLIENTS,)), strict=True):
        assert part is None or part.shape[:-1] == (*leading, FEATURES)
    check_orthonormal(algorithm, result)


def resamples(result):
    """The results of each resample."""
    return [jf.Personalized(shared, result.local[:, i]) for i, shared in enumerate(result.shared)]


def check_resamples(algorithm, result):
    """Components of each resample."""
    for each in resamples(result):
        check_components(algorithm, each)


def unexplained_of_each(algorithm, result, values):
    """Of samples: what is in no component, over all resamples."""
    return sum(unexplained(algorithm, each, values) for each in resamples(result))


def check_scores(algorithm, result):
    """Orthonormal scores of the entities, and a map for each view."""
    assert result.shared.shape == (ENTITIES, algorithm.rank)
    assert result.local.shape == (CLIENTS, FEATURES, algorithm.rank)
    check_orthonormal(algorithm, result._replace(local=None))


def check_parts(algorithm, result):
    """Orthonormal scores, the individual ones to the joint ones too, and parts of each view."""
    scores, local = result.shared.scores, result.local
    width = local.individual_scores.shape[-1]
    assert scores.shape == (ENTITIES, algorithm.rank)
    assert local.joint_loadings.shape == (CLIENTS, FEATURES, algorithm.rank)
    assert local.individual_loadings.shape == (CLIENTS, FEATURES, width)
    for own in local.individual_scores:
        w = np.concatenate([scores, own], axis=1)
        used = np.linalg.norm(w, axis=0) > 0.5
        np.testing.assert_allclose(w.T @ w, np.diag(used), atol=1e-12 if w.dtype == float else 1e-5)


def check_orthonormal(algorithm, result):
    """That components are orthonormal, those of a client to the shared ones too."""
    tolerance = 1e-5 if jax.tree.leaves(result)[0].dtype == np.float32 else 1e-12
    shared, local = result
    groups = [shared] if local is None else list(local)
    if local is not None and shared is not None:
        beside = not isinstance(algorithm, OVERLAPPING)
        groups = [np.concatenate([shared, own], 1) for own in local] if beside else [*local, shared]
    for group in groups:
        w = np.asarray(group, np.float64)
        gram = w.T @ w
        # A client with fewer components than others has columns of zeros in their place.
        used = np.diag(gram) > 0.5
        assert np.linalg.norm(gram - np.diag(used)) <= tolerance * w.shape[1]
        fewer = isinstance(getattr(algorithm, "local_rank", None), tuple)
        assert used[: algorithm.shared_rank].all() if fewer else used.all()
    if isinstance(getattr(algorithm, "local_rank", None), tuple):
        ranks = np.linalg.norm(local, axis=1).round().sum(axis=1)
        assert tuple(ranks) == algorithm.local_rank


def joint_and_individual(result):
    """Of views: their parts, free of the choice of signs."""
    shared, local = result
    return shared.singular_values, (local.joint(shared), local.individual())


def shapes(tree, *axes):
    """Of the arrays in a tree, with leading axes."""
    return [(*axes, *leaf.shape) for leaf in jax.tree.leaves(tree)]


def check_factors(algorithm, result):
    """Non-negative components, the shared parts of unit length."""
    assert result.shared.shape == (FEATURES, algorithm.rank)
    assert result.local.shape == (CLIENTS, FEATURES, algorithm.rank)
    assert all((np.asarray(part) >= 0).all() for part in result)
    lengths = np.linalg.norm(result.shared, axis=0)
    np.testing.assert_allclose(lengths[lengths > 0], 1, rtol=1e-5)


def energy_of_products(algorithm, result, values):
    """Of samples: the energy of their products with components."""
    del algorithm
    components = result.shared + result.local
    return ((values @ components) ** 2).sum()


def check_networks(algorithm, result):
    """That there is a shared network and, but for federated averaging alone, one a client."""
    assert shapes(result.shared) == shapes(algorithm.arrays)
    alone = getattr(algorithm, "fine_tuning_steps", 1) == 0
    assert shapes(result.local) == ([] if alone else shapes(algorithm.arrays, CLIENTS))


def check_networks_of_views(algorithm, result):
    """That there is a representation and a network for each view."""
    assert result.shared.shape == (ENTITIES, algorithm.rank)
    check_orthonormal(algorithm, result._replace(local=None))
    network = eqx.filter(NETWORK(FEATURES, key=jax.random.key(0)), eqx.is_array)
    assert shapes(result.local) == shapes(network, CLIENTS)


def narrow_samples():
    """With fewer features than components."""
    return jf.Clients.from_samples(np.ones((CLIENTS, 4, 1), np.float32))


def narrow_views():
    """With fewer entities than components."""
    return jf.gcca.Views.from_arrays([np.ones((1, 4), np.float32)] * CLIENTS)


def moments():
    """Of samples that are not known."""
    return jf.Clients.from_moments(np.stack([np.eye(FEATURES)] * CLIENTS))


def check_units(algorithm, result):
    """A mean and a positive scale of each client."""
    local = result.local
    assert local.mean.shape == local.scale.shape == (CLIENTS, FEATURES)
    assert (np.asarray(local.scale) > 0).all()
    assert (result.shared is None) == (algorithm.center == "local" or algorithm.scale == "energy")


def standardized(algorithm, result, values):
    """Of samples: their energy in other units."""
    del algorithm
    mean, scale = result.local.mean[:, None], result.local.scale[:, None]
    return (jnp.tanh((values - mean) / scale) ** 2).sum()


def draw_incomplete(seed=0):
    """The same samples, of whose entries some are missing, but none of the first feature."""
    rng = np.random.default_rng(seed)
    arrays = draw_samples(seed).data.values
    arrays = [np.array(x[:n]) for x, n in zip(arrays, COUNTS, strict=True)]
    for x in arrays:
        x[:, 1:][rng.random((len(x), FEATURES - 1)) < 0.2] = np.nan
    return jf.Clients.from_samples(arrays, missing="mask")


def check_imputation(algorithm, result):
    """A model of each client with positive variances."""
    local = result.local
    rank = sum(algorithm.ranks(local.mean.shape[-1]))
    assert local.loadings.shape == (CLIENTS, FEATURES, rank)
    assert (np.asarray(local.noise) > 0).all() and (np.asarray(local.mean_variance) > 0).all()


def turned(result):
    """Without the choice of a basis."""

    def one(model):
        loadings = model.loadings @ jnp.swapaxes(model.loadings, -1, -2)
        return model.mean, loadings, model.noise, model.mean_variance, model.loadings_variance

    return one(result.shared), one(result.local)


def completed(algorithm, result, values):
    """Of samples: their energy, once they are complete."""
    del algorithm
    model = result.local
    found = jax.vmap(lambda own, x: own.transform(x))(model, values)
    return (jnp.tanh(found / 3) ** 2).sum()


class Family(NamedTuple):
    """What data a family of algorithms takes, and what it learns."""

    draw: Callable[..., jf.Clients]  # from a seed
    check: Callable[..., None]  # of an algorithm and its result
    essence: Callable[..., tuple]  # of a result: the shared part and the local ones
    loss: Callable[..., jax.Array]  # of an algorithm, its result and other values
    narrow: Callable[[], jf.Clients]
    refusal: str  # of the narrow clients, by an algorithm with two components
    pad: Callable[[jf.Clients], jf.Clients] | None = None
    rounds: int = ROUNDS


FAMILIES = {
    jf.pca: Family(
        draw_samples,
        check_components,
        spans,
        unexplained,
        narrow_samples,
        r"rank.* do not fit into 1 features",
    ),
    jf.gcca: Family(
        draw_views,
        check_scores,
        spans,
        unaligned,
        narrow_views,
        r"rank: 2 .* do not fit 1 entities",
        more_features,
    ),
    jf.generative: Family(
        draw_samples,
        check_networks,
        lambda result: result,
        missed_by_networks,
        narrow_samples,
        r"loss: it fails for this model",
        rounds=ROUNDS_OF_TRAINING,
    ),
    jf.nmf: Family(
        draw_counts,
        check_factors,
        lambda result: result,
        energy_of_products,
        narrow_samples,
        r"rank.* do not fit into 1 features",
    ),
    jf.preprocess: Family(
        draw_samples,
        check_units,
        lambda result: result,
        standardized,
        moments,
        r"clients: wanted samples, .* got data of type Moment",
        rounds=2,
    ),
}
FAMILIES[jf.aggregation] = FAMILIES[jf.pca]  # of the algorithms in it here
FAMILIES[jf.inference] = FAMILIES[jf.pca]._replace(check=check_resamples, loss=unexplained_of_each)
# What learns something else than the others of its package.
OTHERS = {
    jf.preprocess.Impute: FAMILIES[jf.preprocess]._replace(
        draw=draw_incomplete,
        check=check_imputation,
        essence=turned,
        loss=completed,
        rounds=6,
    ),
    jf.pca.PerTucker: FAMILIES[jf.pca]._replace(
        refusal=r"^shape: wanted 1 entries, as many as features, got"
    ),
    jf.gcca.AJIVE: FAMILIES[jf.gcca]._replace(
        check=check_parts,
        essence=joint_and_individual,
        loss=scores_by_views,
        rounds=2,
    ),
    jf.gcca.DeepMaxVar: FAMILIES[jf.gcca]._replace(
        check=check_networks_of_views,
        essence=lambda result: (spans(result.shared), result.local),
        loss=energy_of_outputs,
        rounds=ROUNDS_OF_TRAINING,
    ),
}


def family(algorithm):
    """That of an algorithm."""
    kind = type(algorithm)
    if kind is jf.MultiStart:
        return family(algorithm.algorithm)
    (found,) = [f for package, f in FAMILIES.items() if kind in vars(package).values()]
    return OTHERS.get(kind, found)
