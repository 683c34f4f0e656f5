"""Every exported algorithm of every family runs through one common list.

A new algorithm is found through the package's exports; it only needs an entry in `EXAMPLES`.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf

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


def adaptive(make=jf.generative.AdaptiveAutoencoder, **options):
    """Training of it under a learned prior, so fast that all of it matters."""
    rates = {"step_size": 0.02, "global_step_size": 0.01, "spread_step_size": 0.01}
    common = {"local_steps": 2, "hyper_prior": 0.01, "initial_spread": 0.5, "lazy_rounds": 1}
    return make(autoencoder(), **(rates | common | options))


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
            "tangent": Example(lambda _: jf.pca.PerPCA(2, 2, step_size=0.05), (TRIANGLE, 12, 12)),
            "polar": Example(
                lambda _: jf.pca.PerPCA(2, 1, variant="polar", retraction="qr", decay=0.7),
                (TRIANGLE + 1, 13, 13),
            ),
            "ranks": Example(
                lambda m: jf.pca.PerPCA(1, tuple(2 - i % 3 for i in range(m)), start="random"),
                (6 + 1, 6, 7),
            ),
            "shrinkage": Example(
                lambda _: jf.pca.PerPCA(1, 1, shrinkage=True, step_size=0.1), (TRIANGLE, 6, 6)
            ),
        },
        refused={
            "shared_rank": lambda: jf.pca.PerPCA(0, 2),
            "local_rank": lambda: jf.pca.PerPCA(2, 0),
            "step_size": lambda: jf.pca.PerPCA(2, 2, step_size=-0.1),
            "decay": lambda: jf.pca.PerPCA(2, 2, decay=float("nan")),
            "variant": lambda: jf.pca.PerPCA(2, 2, variant="tangential"),
            "retraction": lambda: jf.pca.PerPCA(2, 2, retraction="cayley"),
            "start": lambda: jf.pca.PerPCA(2, 2, start="zeros"),
        },
    ),
    jf.pca.VarProPerPCA: Examples(
        good={"": Example(lambda _: jf.pca.VarProPerPCA(2, 2), (TRIANGLE, 13, 12))},
        refused={
            "shared_rank": lambda: jf.pca.VarProPerPCA(-1, 2),
            "local_rank": lambda: jf.pca.VarProPerPCA(2, 2.0),
        },
    ),
    jf.pca.OneShot: Examples(
        good={
            "projector": Example(lambda _: jf.pca.OneShot(2, 2), (24, 0, 12)),
            "spectrum": Example(lambda _: jf.pca.OneShot(1, 2, method="spectrum"), (18, 0, 6)),
            "local_first": Example(
                lambda _: jf.pca.OneShot(2, 2, method="local_first"), (TRIANGLE, 0, 12)
            ),
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
    jf.pca.HierarchicalPCA: Examples(
        good={
            "": Example(lambda _: jf.pca.HierarchicalPCA(2, 0.2, 0.1), (TRIANGLE, 12, 12)),
            "eigenvectors": Example(
                lambda _: jf.pca.HierarchicalPCA(2, 0.2, 0.1, solver="eigenvectors"),
                (TRIANGLE, 12, 12),
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
            "training": lambda: jf.pca.HierarchicalPCA(2, 0.2, 0.1, training="federated"),
            "start": lambda: jf.pca.HierarchicalPCA(2, 0.2, 0.1, start="zeros"),
        },
    ),
    jf.pca.LocalProbabilisticPCA: Examples(
        good={"": Example(lambda _: jf.pca.LocalProbabilisticPCA(2, 0.2), (0, 0, 0))},
        refused={
            "rank": lambda: jf.pca.LocalProbabilisticPCA(0, 0.2),
            "noise_variance": lambda: jf.pca.LocalProbabilisticPCA(2, 0.0),
            "step_size": lambda: jf.pca.LocalProbabilisticPCA(2, 0.2, step_size=-1.0),
        },
    ),
    jf.pca.GlobalProbabilisticPCA: Examples(
        good={
            "": Example(lambda _: jf.pca.GlobalProbabilisticPCA(2, 0.2), (TRIANGLE, 12, 12)),
            "random": Example(
                lambda _: jf.pca.GlobalProbabilisticPCA(2, 0.2, start="random"), (1, 12, 12)
            ),
        },
        refused={
            "rank": lambda: jf.pca.GlobalProbabilisticPCA(2.0, 0.2),
            "noise_variance": lambda: jf.pca.GlobalProbabilisticPCA(2, -1.0),
            "step_size": lambda: jf.pca.GlobalProbabilisticPCA(2, 0.2, step_size=0.0),
            "start": lambda: jf.pca.GlobalProbabilisticPCA(2, 0.2, start="local_first"),
        },
    ),
    jf.pca.AdaptivePCA: Examples(
        good={
            "": Example(lambda _: jf.pca.AdaptivePCA(2, 0.2), (TRIANGLE + 1, 13, 13)),
            "gradient": Example(
                lambda _: jf.pca.AdaptivePCA(
                    2, 0.2, hyper_prior=0.1, spread="gradient", dimension="frame"
                ),
                (TRIANGLE, 13, 13),
            ),
            "log": Example(
                lambda _: jf.pca.AdaptivePCA(2, 0.2, spread="log", solver="eigenvectors"),
                (TRIANGLE + 1, 13, 13),
            ),
        },
        refused={
            "prior_variance": lambda: jf.pca.AdaptivePCA(2, 0.2, 0.0),
            "hyper_prior": lambda: jf.pca.AdaptivePCA(2, 0.2, hyper_prior=-1.0),
            "spread": lambda: jf.pca.AdaptivePCA(2, 0.2, spread="newton"),
            "spread_step_size": lambda: jf.pca.AdaptivePCA(2, 0.2, spread_step_size=0.0),
            "dimension": lambda: jf.pca.AdaptivePCA(2, 0.2, dimension="grassmann"),
        },
    ),
    jf.pca.EmpiricalBayesPCA: Examples(
        good={"": Example(lambda _: jf.pca.EmpiricalBayesPCA(2, 0.2), (TRIANGLE + 1, 12, 13))},
        refused={
            "rank": lambda: jf.pca.EmpiricalBayesPCA(1.5, 0.2),
            "noise_variance": lambda: jf.pca.EmpiricalBayesPCA(2, -0.2),
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
                lambda _: jf.gcca.MaxVar(2, solver="exact", ridge=0.1, proximal=0.1), (18, 18, 18)
            ),
            "batch": Example(
                lambda _: jf.gcca.MaxVar(2, batch_size=5, inner_steps=2), (18, 18, 18)
            ),
        },
        refused={
            "rank": lambda: jf.gcca.MaxVar(2.0),
            "solver": lambda: jf.gcca.MaxVar(2, solver="newton"),
            "inner_steps": lambda: jf.gcca.MaxVar(2, inner_steps=0),
            "batch_size": lambda: jf.gcca.MaxVar(2, solver="exact", batch_size=2),
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
        },
        refused={
            "model": lambda: jf.generative.FedAvg(len, len, SGD, local_steps=1),
            "loss": lambda: jf.generative.FedAvg(autoencoder(), "l2", SGD, local_steps=1),
            "client_optimizer": lambda: jf.generative.FedAvg(
                autoencoder(), jf.models.reconstruction_loss, 0.1, local_steps=1
            ),
            "server_optimizer": lambda: fedavg(server_optimizer="adam"),
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
        },
        refused={
            "hyper_prior": lambda: adaptive(hyper_prior=0.0),
            "initial_spread": lambda: adaptive(initial_spread=200.0),
            "prior_weight": lambda: adaptive(prior_weight=-1.0),
            "lazy_rounds": lambda: adaptive(lazy_rounds=-1),
            "clip": lambda: adaptive(clip=0.0),
            "spread_clip": lambda: adaptive(spread_clip=float("nan")),
            "bounds": lambda: adaptive(bounds=(1.0, 0.1)),
            "spread_step_size": lambda: adaptive(spread_step_size=-1.0),
            "global_step_size": lambda: adaptive(global_step_size=float("inf")),
            "optimizer": lambda: adaptive(optimizer="sgd"),
            "global_optimizer": lambda: adaptive(global_optimizer=0.1),
            "preset": lambda: adaptive(preset="paper"),
        },
    ),
    jf.generative.AdaptiveAutoencoder: Examples(
        good={
            "": Example(lambda _: adaptive(), (0, 2 * WEIGHTS, 2 * WEIGHTS)),
            "published": Example(
                lambda _: adaptive(jf.generative.AdaptiveAutoencoder.published, batch_size=3),
                (0, 2 * WEIGHTS, 2 * WEIGHTS),
            ),
        },
        refused={
            "model": lambda: jf.generative.AdaptiveAutoencoder(len),
            "batch_size": lambda: adaptive(batch_size=0),
            "local_steps": lambda: adaptive(local_steps=0),
            "step_size": lambda: adaptive(step_size=float("nan")),
        },
    ),
    jf.generative.AdaptiveDiffusion: Examples(
        good={
            "": Example(
                lambda _: adaptive(
                    jf.generative.AdaptiveDiffusion, optimizer=ADAM, global_optimizer=SGD
                ),
                (0, 2 * WEIGHTS, 2 * WEIGHTS),
            ),
        },
        refused={
            "corruption": lambda: jf.generative.AdaptiveDiffusion(autoencoder(), "uniform"),
            "decay_after": lambda: jf.generative.AdaptiveDiffusion(autoencoder(), decay_after=0),
        },
    ),
}

# Here a client's components are near the shared ones and not beside them.
OVERLAPPING = (jf.pca.HierarchicalPCA, jf.pca.AdaptivePCA, jf.pca.EmpiricalBayesPCA)

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


def parametrized(kinds, *, every):
    """Over all examples of the algorithms, or the first of each.

    The first will do for what takes long to compile and depends little on the settings.
    """
    return pytest.mark.parametrize(
        "make",
        [
            pytest.param(example.make, id=f"{kind.__name__}{'-' if name else ''}{name}")
            for kind in kinds
            for name, example in list(EXAMPLES[kind].good.items())[: None if every else 1]
        ],
    )


every_algorithm = parametrized(EXAMPLES, every=True)
each_algorithm = parametrized(EXAMPLES, every=False)
# Networks that are trained have no such constraint.
WITH_COMPONENTS = [kind for kind in EXAMPLES if kind not in vars(jf.generative).values()]
every_algorithm_with_components = parametrized(WITH_COMPONENTS, every=True)
each_algorithm_with_components = parametrized(WITH_COMPONENTS, every=False)


def draw_samples(seed, dtype):
    """Clients of different lengths, each with two directions in common and two of its own."""
    rng = np.random.default_rng(seed)
    shared = np.linalg.qr(rng.normal(size=(FEATURES, 2)))[0] * [3.0, 2.5]
    arrays = []
    for n in COUNTS:
        own = np.linalg.qr(rng.normal(size=(FEATURES, 2)))[0] * [2.0, 1.5]
        signal = rng.normal(size=(n, 2)) @ shared.T + rng.normal(size=(n, 2)) @ own.T
        arrays.append((signal + 0.3 * rng.normal(size=(n, FEATURES))).astype(dtype))
    return jf.Clients.from_samples(arrays)


def draw_views(seed, dtype):
    """Views of different widths with two dimensions in common."""
    rng = np.random.default_rng(seed)
    latent = rng.normal(size=(ENTITIES, 2))
    signals = (latent @ rng.normal(size=(2, d)) for d in WIDTHS)
    views = [(x + 0.3 * rng.normal(size=x.shape)).astype(dtype) for x in signals]
    return jf.gcca.Views.from_arrays(views)


def left_over(result, samples):
    """Of samples: what is in no component."""
    shared, local = result
    missed = samples - samples @ shared @ shared.T
    return ((missed - samples @ local @ jnp.swapaxes(local, 1, 2)) ** 2).sum()


def spans(result):
    """Of components, free of the choice of bases."""
    return jax.tree.map(lambda w: w @ jnp.swapaxes(w, -1, -2), result)


class Family(NamedTuple):
    """What data a family of algorithms takes, and what it learns."""

    draw: Callable[..., jf.Clients]  # from a seed and a type
    padded: int  # the axis of a client's data, counted from the end, that is padded
    check: Callable[..., None]  # of an algorithm and its result, what shapes it has
    essence: Callable[..., tuple]  # of a result: the shared part and the local ones
    loss: Callable[..., jax.Array]  # of an algorithm, its result and other values
    narrow: Callable[[], jf.Clients]
    refusal: str  # of the narrow clients, by an algorithm with two components
    rounds: int = ROUNDS


def narrow_samples():
    """With fewer features than components."""
    return jf.Clients.from_samples(np.ones((CLIENTS, 4, 1), np.float32))


def narrow_views():
    """With fewer entities than components."""
    return jf.gcca.Views.from_arrays([np.ones((1, 4), np.float32)] * CLIENTS)


def missed_by_networks(algorithm, result, values):
    """Of samples: what the shared network does not reconstruct."""
    network = algorithm.model_of(result.shared)
    return ((jax.vmap(jax.vmap(network))(values) - values) ** 2).sum()


def shapes(tree, *axes):
    """Of the arrays in a tree, with leading axes."""
    return [(*axes, *leaf.shape) for leaf in jax.tree.leaves(tree)]


def check_components(rows):
    """That shared components have these rows and clients' own, or their maps, one a feature."""

    def check(algorithm, result):
        del algorithm
        assert result.shared.shape[:1] == (rows,)
        assert result.local.shape[:2] == (CLIENTS, FEATURES)

    return check


def check_networks(algorithm, result):
    """That there is a shared network and, but for federated averaging alone, one a client."""
    assert shapes(result.shared) == shapes(algorithm.arrays)
    alone = getattr(algorithm, "fine_tuning_steps", 1) == 0
    assert shapes(result.local) == ([] if alone else shapes(algorithm.arrays, CLIENTS))


def check_networks_of_views(algorithm, result):
    """That there is a representation and a network for each view."""
    assert result.shared.shape == (ENTITIES, algorithm.rank)
    network = eqx.filter(NETWORK(FEATURES, key=jax.random.key(0)), eqx.is_array)
    assert shapes(result.local) == shapes(network, CLIENTS)


def energy_of_outputs(algorithm, result, values):
    """Of other entities of the same views: that of the mean of what the networks give."""
    views = eqx.tree_at(lambda v: v.data.values, draw(algorithm), values)
    return (algorithm.outputs(result.local, views).mean(0) ** 2).sum()


FAMILIES = {
    jf.pca: Family(
        draw_samples, -2, check_components(FEATURES), spans,
        lambda _, result, values: left_over(result, values),
        narrow_samples, r"rank.* do not fit into 1 features",
    ),
    jf.gcca: Family(
        draw_views, -1, check_components(ENTITIES), spans,
        lambda _, result, values: ((values @ result.local - result.shared) ** 2).sum(),
        narrow_views, r"rank: 2 .* do not fit 1 entities",
    ),
    jf.generative: Family(
        draw_samples, -2, check_networks, lambda result: result, missed_by_networks,
        narrow_samples, r"loss: it fails for this model", ROUNDS_OF_TRAINING,
    ),
}  # fmt: skip
# What learns something else than the others of its package.
OTHERS = {
    jf.gcca.DeepMaxVar: FAMILIES[jf.gcca]._replace(
        check=check_networks_of_views, essence=lambda result: (spans(result.shared), result.local),
        loss=energy_of_outputs, rounds=ROUNDS_OF_TRAINING,
    ),
}  # fmt: skip


def family(algorithm):
    """That of an algorithm."""
    kind = type(algorithm)
    (found,) = [f for package, f in FAMILIES.items() if kind in vars(package).values()]
    return OTHERS.get(kind, found)


def draw(algorithm, seed=0, dtype=np.float64):
    """Clients for an algorithm."""
    return family(algorithm).draw(seed, dtype)


# One compiled function for all tests: what one of them compiles is there for the next.
@jax.jit
def solve(algorithm, clients, key):
    return jf.rollout(algorithm, clients, rounds=family(algorithm).rounds, key=key)


def shapes_of(algorithm, clients, key, rounds):
    """Shapes and types of a solution, without computing it."""
    return jax.eval_shape(functools.partial(jf.rollout, rounds=rounds), algorithm, clients, key=key)


def essence(algorithm, solution):
    """What a solution says, free of the choice of bases."""
    return family(algorithm).essence(solution.result), solution.history["objective"]


def typed(algorithm, dtype):
    """The same algorithm with networks of a type, which is kept whatever the data are."""
    if not isinstance(getattr(algorithm, "arrays", None), eqx.Module):
        return algorithm
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), algorithm.arrays)
    return eqx.tree_at(lambda a: a.arrays, algorithm, cast)


def scaled(algorithm, factor):
    """The same algorithm with other hyperparameters."""
    return jax.tree.map(lambda leaf: factor * leaf, algorithm)


@contextlib.contextmanager
def nothing_compiles(caplog):
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        yield
        compiled = [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
    assert not compiled, compiled


def test_every_exported_algorithm_has_examples():
    exported = {
        value
        for package in FAMILIES
        for value in vars(package).values()
        if isinstance(value, type) and issubclass(value, jf.Algorithm)
    }
    missing = sorted(kind.__name__ for kind in exported - EXAMPLES.keys())
    assert not missing, f"add an entry for {', '.join(missing)} to EXAMPLES in {__file__}"
    assert all(examples.good and examples.refused for examples in EXAMPLES.values())


# The loop knows nothing of the algorithm: one that iterates and one that does not will do.
@pytest.mark.parametrize("name", ["PerPCA-ranks", "OneShot-local_first"])
def test_traced_and_driven_from_the_host_are_the_same(name, key, x64):
    algorithm = GOOD[name].make(CLIENTS)
    clients = draw(algorithm)
    traced = solve(algorithm, clients, key)
    driven = jf.fit(algorithm, clients, rounds=ROUNDS, key=key)
    assert driven.rounds == traced.rounds == ROUNDS
    chex.assert_trees_all_equal_shapes_and_dtypes(driven.result, traced.result)
    chex.assert_trees_all_close(
        essence(algorithm, driven), essence(algorithm, traced), rtol=1e-6, atol=1e-6
    )
    assert driven.history.keys() == traced.history.keys()
    for name, values in driven.history.items():
        # Without noise the objective falls to rounding, where no digit of it is the same.
        np.testing.assert_allclose(values, traced.history[name], rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("name", GOOD)
def test_bits_are_exact(name, key, x64):
    make, (first, up, down) = GOOD[name]
    algorithm = make(CLIENTS)
    history = solve(algorithm, draw(algorithm), key).history
    rounds = np.arange(1, family(algorithm).rounds + 1)
    # Compiled, a mean over the clients is a product with a rounded reciprocal.
    np.testing.assert_allclose(history["bits_up"], 64 * (first + up * rounds), rtol=1e-15)
    np.testing.assert_allclose(history["bits_down"], 64 * down * rounds, rtol=1e-15)
    assert (history["participants"] == CLIENTS).all()


@pytest.mark.parametrize("name", ["PerPCA-ranks", "OneShot-local_first"])
def test_a_second_call_compiles_nothing(name, key, caplog, x64):
    algorithm = GOOD[name].make(CLIENTS)
    first = algorithm, draw(algorithm)
    second = scaled(algorithm, 0.9), draw(algorithm, seed=1)
    other = jax.random.key(7)
    solve(*first, key)
    jf.fit(*first, rounds=ROUNDS, key=key)
    with nothing_compiles(caplog):
        solve(*second, other)
        jf.fit(*second, rounds=ROUNDS, key=other)


def test_compilation_is_seen(caplog):
    with pytest.raises(AssertionError, match="Compiling"), nothing_compiles(caplog):
        jax.jit(lambda x: x + 1)(jnp.zeros(3))


@each_algorithm
def test_vmap_is_a_loop(make, key, x64):
    algorithms = [make(CLIENTS), scaled(make(CLIENTS), 0.8)]
    clients, keys = [draw(algorithms[0], seed) for seed in (0, 1)], jax.random.split(key)
    several = jax.jit(jax.vmap(solve))(jf.stack(algorithms), jf.stack(clients), keys)
    for i, one in enumerate(map(solve, algorithms, clients, keys)):
        chosen = jax.tree.map(lambda leaf, i=i: leaf[i], essence(algorithms[i], several))
        chex.assert_trees_all_close(chosen, essence(algorithms[i], one), rtol=1e-6, atol=1e-6)


@each_algorithm
def test_gradients_are_finite(make, key, x64):
    algorithm = make(CLIENTS)
    clients = draw(algorithm)
    others = draw(algorithm, seed=1).data.values

    @jax.jit
    @jax.grad
    def gradient(differentiated):
        algorithm, values = differentiated
        changed = eqx.tree_at(lambda c: c.data.values, clients, values)
        result = jf.rollout(algorithm, changed, rounds=5, key=key).result
        return family(algorithm).loss(algorithm, result, others)

    gradients = gradient((algorithm, clients.data.values))
    chex.assert_tree_all_finite(gradients)
    assert jnp.abs(gradients[1]).max() > 1e-3


@each_algorithm
@pytest.mark.parametrize("dtype", ["float32", "float64", "float32 where 64 bits are enabled"])
def test_the_data_decide_the_type(make, dtype, key):
    with jax.enable_x64(dtype != "float32"):
        wanted = jnp.dtype(dtype.split()[0])
        algorithm = typed(make(CLIENTS), wanted)
        solution = shapes_of(algorithm, draw(algorithm, dtype=wanted), key, rounds=2)
        history = {k: v for k, v in solution.history.items() if not k.startswith("bits")}
        for leaf in jax.tree.leaves((solution.result, solution.server, solution.local, history)):
            assert leaf.dtype in (wanted, jnp.int32)


@each_algorithm
def test_shapes_are_stable(make, key):
    algorithm = make(CLIENTS)
    clients = draw(algorithm)
    one, three = (shapes_of(algorithm, clients, key, rounds) for rounds in (1, 3))
    chex.assert_trees_all_equal_shapes_and_dtypes(one.state, three.state)
    chex.assert_trees_all_equal_shapes_and_dtypes(one.result, three.result)
    family(algorithm).check(algorithm, three.result)
    assert {leaf.shape for leaf in jax.tree.leaves(three.history)} == {(3,)}
    for leaf in jax.tree.leaves(three.local):
        assert leaf.shape[0] == CLIENTS


@each_algorithm_with_components
def test_components_stay_orthonormal_in_single_precision(make, key):
    check_orthonormal(make, np.float32, 1e-5, key)


@every_algorithm_with_components
def test_components_stay_orthonormal(make, key):
    check_orthonormal(make, np.float64, 1e-12, key)


def check_orthonormal(make, dtype, tolerance, key):
    with jax.enable_x64(dtype is np.float64):
        algorithm = make(CLIENTS)
        shared, local = solve(algorithm, draw(algorithm, dtype=dtype), key).result
        if family(algorithm).draw is draw_views:
            local = jnp.zeros((1, len(shared), 0))  # maps, not components
        for own in local:
            if isinstance(algorithm, OVERLAPPING):
                np.testing.assert_allclose(own.T @ own, np.eye(own.shape[1]), atol=tolerance)
                own = own[:, :0]
            w = np.concatenate([shared, own], axis=1, dtype=np.float64)
            gram = w.T @ w
            # A client with fewer components than others has columns of zeros in their place.
            used = np.diag(gram) > 0.5
            assert np.linalg.norm(gram - np.diag(used)) <= tolerance * w.shape[1]
            assert used[: shared.shape[1]].all()
        if isinstance(getattr(algorithm, "local_rank", None), tuple):
            ranks = np.linalg.norm(local, axis=1).round().sum(axis=1)
            assert tuple(ranks) == algorithm.local_rank


@parametrized([k for k in EXAMPLES if issubclass(k, jf.generative.AdaptiveTraining)], every=True)
def test_spreads_stay_within_their_bounds(make, key, x64):
    algorithm = eqx.tree_at(lambda a: a.spread_step_size, make(CLIENTS), jnp.asarray(1e3))
    spread = solve(algorithm, draw(algorithm), key).server.spread
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(spread)])
    least, most = algorithm.bounds
    assert least <= values.min() and values.max() <= most
    assert np.abs(values - algorithm.initial_spread).max() > 0.05


@each_algorithm
def test_padding_and_weightless_clients_are_ignored(make, key, x64):
    algorithm, wider = make(CLIENTS), make(CLIENTS + 1)
    clients, axis = draw(algorithm), family(algorithm).padded
    values, count = clients.data.values, clients.data.count
    stranger = 5 * draw(algorithm, seed=3).data.values[:1]
    # More zeros than the longest client needs, and one client more that weighs nothing.
    padding = [(0, 0)] * 3
    padding[axis] = (0, 4)
    larger = type(clients)(
        data=type(clients.data)(
            values=jnp.pad(jnp.concatenate([values, stranger]), padding),
            count=jnp.append(count, count[0]),
        ),
        ids=jnp.arange(CLIENTS + 1, dtype=jnp.int32),
        weights=jnp.append(clients.weights, 0.0),
    )
    (shared, local), objective = essence(algorithm, solve(algorithm, clients, key))
    (shared_2, local_2), objective_2 = essence(wider, solve(wider, larger, key))
    local_2 = jax.tree.map(lambda leaf: leaf[:CLIENTS], local_2)
    chex.assert_trees_all_close(shared_2, shared, atol=1e-6)
    chex.assert_trees_all_close(jax.tree.map(unpadded, local_2, local), local, atol=1e-6)
    chex.assert_trees_all_close(objective_2, objective, rtol=1e-6, atol=1e-9)


def unpadded(leaf, like):
    """Without what padding adds to it, which is nothing but zeros."""
    inside = tuple(map(slice, like.shape))
    outside = np.asarray(leaf).copy()
    outside[inside] = 0
    np.testing.assert_array_equal(outside, 0)
    return leaf[inside]


@every_algorithm
def test_the_order_of_clients_does_not_matter(make, key, x64):
    algorithm = make(CLIENTS)
    clients = draw(algorithm)
    order = np.array([3, 0, 4, 1, 2])
    (shared, local), objective = essence(algorithm, solve(algorithm, clients, key))
    other = solve(algorithm, clients.take(order), key)
    (shared_2, local_2), objective_2 = essence(algorithm, other)
    local = jax.tree.map(lambda leaf: leaf[order], local)
    chex.assert_trees_all_close(shared_2, shared, atol=1e-6)
    chex.assert_trees_all_close(local_2, local, atol=1e-6)
    chex.assert_trees_all_close(objective_2, objective, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("make", "argument"), REFUSED)
def test_bad_hyperparameters_are_refused(make, argument):
    with pytest.raises(ValueError, match=rf"^{argument}: .*(got|needs)"):
        make()


@every_algorithm
def test_bad_arguments_are_refused(make, key):
    algorithm = make(CLIENTS)
    clients = draw(algorithm)
    with pytest.raises(ValueError, match=family(algorithm).refusal):
        jf.fit(algorithm, family(algorithm).narrow(), rounds=1, key=key)
    with pytest.raises(ValueError, match=r"^rounds: "):
        jf.fit(algorithm, clients, rounds=0, key=key)
    foreign = eqx.tree_at(lambda c: c.data, clients, clients.data.values)
    with pytest.raises(ValueError, match=r"^clients: "):
        jf.fit(algorithm, foreign, rounds=1, key=key)
