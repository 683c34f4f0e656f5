"""Which algorithm converges through which channel, and at what cost.

    python -m bench.tables.channels            # every algorithm, every channel
    python -m bench.tables.channels papers     # three of them on their papers' settings

Every algorithm runs on the same small problem through every channel, in both directions. Masks
apply only to the uplinks of the rounds; everything else is then lossless. A cell contains the bits
of all messages, including those before the rounds, relative to the lossless run. Brackets mark an
objective that ends more than one percent away from that of the lossless run, and say how far. If an
algorithm refuses a channel, the cell says so.
"""

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfed as jf
from bench.common import machine, table
from papers import synthetic

CLIENTS, FEATURES, RANK, ROUNDS = 10, 30, 3, 150
C = jf.channel
NETWORK = functools.partial(jf.models.Perceptron, outputs=RANK, hidden=(16,))
ADAM = optax.adam(3e-3)
MODEL = jf.models.Autoencoder(FEATURES, RANK, key=jax.random.key(0))
LOSS = jf.models.reconstruction_loss
DESCENT = optax.sgd(1.0)
SPREAD = {"local_steps": 5, "initial_spread": 0.3, "hyper_prior": 1e-3}
CODED = C.quantize(levels=2, rounding="nearest", coding="entropy")
CHANNELS = {
    "bfloat16": C.cast("bfloat16"),
    "4 bits": C.quantize(4),
    "diff. 4 bits": C.difference(C.quantize(4)),
    "diff. 3 bits": C.difference(C.quantize(3)),
    "diff. 5 symbols, coded": C.difference(CODED),
    "diff. top quarter": C.difference(C.top_k(0.25)),
    "diff. signs": C.difference(C.sign()),
    "masks, 20 bits": None,  # with a bound from the lossless run
}


class Case(NamedTuple):
    """An algorithm with settings that suit the common problem."""

    make: Callable[[], jf.Algorithm]
    warm: bool = False  # from a common start, so that nothing is sent before the rounds
    rounds: int | None = None  # where one is all there is


# Each exported algorithm, under its class's name or one that begins with it.
CASES = {
    "PerPCA, gradient": Case(
        lambda: jf.pca.PerPCA(RANK, 2, solver="gradient", step_size=0.1), warm=True
    ),
    "PerPCA": Case(lambda: jf.pca.PerPCA(RANK, 2), warm=True),
    "HMF": Case(lambda: jf.pca.HMF(RANK, 2)),
    "TCMF": Case(lambda: jf.pca.TCMF(RANK, 2, 2.5)),
    "PerTucker": Case(lambda: jf.pca.PerTucker((6, 5), (2, 2), (2, 1))),
    "OneShot": Case(lambda: jf.pca.OneShot(RANK, 2), rounds=1),
    "Pooled": Case(lambda: jf.pca.Pooled(RANK), rounds=1),
    "Local": Case(lambda: jf.pca.Local(RANK), rounds=1),
    "SubspaceIteration": Case(lambda: jf.pca.SubspaceIteration(RANK)),
    "BlockLanczos": Case(lambda: jf.pca.BlockLanczos(RANK)),
    "LocalPower": Case(lambda: jf.pca.LocalPower(RANK)),
    "FAPS": Case(lambda: jf.pca.FAPS(RANK)),
    "HierarchicalPCA, given prior": Case(lambda: jf.pca.HierarchicalPCA(RANK, 0.5, 0.1), warm=True),
    "HierarchicalPCA": Case(lambda: jf.pca.HierarchicalPCA(RANK, 0.5), warm=True),
    "EmpiricalBayesPCA": Case(lambda: jf.pca.EmpiricalBayesPCA(RANK, 0.5), warm=True),
    "INMF": Case(lambda: jf.nmf.INMF(RANK, start="random")),
    "MaxVar": Case(lambda: jf.gcca.MaxVar(RANK)),
    "DeepMaxVar": Case(lambda: jf.gcca.DeepMaxVar(NETWORK, ADAM, rank=RANK, inner_epochs=30)),
    "MVLSA": Case(lambda: jf.gcca.MVLSA(RANK), rounds=1),
    "AJIVE": Case(lambda: jf.gcca.AJIVE(8, 8), rounds=1),
    "FedAvg": Case(
        lambda: jf.generative.FedAvg(MODEL, LOSS, DESCENT, local_steps=5, step_size=0.01)
    ),
    "AdaptiveTraining": Case(
        lambda: jf.generative.AdaptiveTraining(MODEL, LOSS, clip=None, **SPREAD)
    ),
    "AdaptiveTraining.autoencoder": Case(
        lambda: jf.generative.AdaptiveTraining.autoencoder(MODEL, preset="published", **SPREAD)
    ),
    "AdaptiveTraining.diffusion": Case(
        lambda: jf.generative.AdaptiveTraining.diffusion(MODEL, **SPREAD)
    ),
}


class _Peak(C.Channel):
    """Loses nothing, and remembers the largest magnitude that it has seen."""

    def memory(self, message):
        del message
        return jnp.zeros(())

    def encode(self, key, message, memory):
        del key
        largest = [jnp.max(jnp.abs(x), initial=0) for x in jax.tree.leaves(message)]
        return message, jnp.max(jnp.stack([memory, *largest]))

    def decode(self, payload):
        return payload

    def differentiable(self, decoded, message, memory):
        del message, memory
        return decoded

    def receive(self, decoded, last):
        del last
        return decoded


class Outcome(NamedTuple):
    """How a run ends."""

    objective: float
    bits: float  # of all messages, both ways
    shared: np.ndarray | None = None
    peak: float = 0.0  # the largest magnitude that a client sent through a channel that remembers
    refusal: str | None = None


@functools.cache
def problem(name: str) -> tuple[jf.Clients, jf.Personalized]:
    """The clients, and a start, for an algorithm of `CASES`."""
    algorithm = CASES[name].make()
    key = jax.random.key(0)
    start = jnp.linalg.qr(jax.random.normal(key, (FEATURES, RANK)))[0]
    warm = jf.Personalized(start, None)
    if isinstance(algorithm, (jf.gcca.MaxVar, jf.gcca.DeepMaxVar, jf.gcca.MVLSA, jf.gcca.AJIVE)):
        drawn = synthetic.gcca_synthetic(key, entities=200, features=20, latent=8)
        return jf.gcca.Views.from_arrays(drawn.views), warm
    drawn = jf.data.perpca_synthetic(
        key=key,
        clients=CLIENTS,
        features=FEATURES,
        shared_rank=RANK,
        local_rank=2,
        samples=60,
        shared_scale=[3.0, 2.5, 2.0],
        local_scale=1.5,
        noise_variance=0.25,
    )
    samples = jnp.abs(drawn.samples) if isinstance(algorithm, jf.nmf.INMF) else drawn.samples
    return jf.Clients.from_samples(samples), warm


@functools.partial(jax.jit, static_argnames="rounds")
def run(algorithm, clients, channel, start, rounds):
    """The last objective, cumulative bits both ways, shared components, the uplinks' memory."""
    solution = jf.rollout(
        algorithm, clients, rounds=rounds, key=jax.random.key(0), channel=channel, warm_start=start
    )
    history = solution.history
    bits = history["bits_up"], history["bits_down"]
    return history["objective"][-1], *bits, solution.result.shared, solution.state.uplink.sender


def outcome(algorithm: jf.Algorithm, clients: jf.Clients, channel, start, rounds: int) -> Outcome:
    """Run it."""
    try:
        objective, up, down, shared, memory = run(algorithm, clients, channel, start, rounds)
    except ValueError as refused:
        return Outcome(np.nan, np.nan, refusal=str(refused))
    bits = float(up[-1]) + float(down[-1])
    remembers = isinstance(channel, jf.Wire) and isinstance(channel.up, _Peak)
    peak = float(memory.max()) if remembers else 0.0
    components = np.asarray(shared, np.float64) if isinstance(shared, jax.Array) else None
    return Outcome(float(objective), bits, components, peak)


def rows(names=tuple(CASES), channels=tuple(CHANNELS), rounds: int = ROUNDS) -> list[dict]:
    """One row an algorithm, one column a channel."""
    table = []
    for case in names:
        clients, warm = problem(case)
        algorithm, start = CASES[case].make(), warm if CASES[case].warm else None
        length = CASES[case].rounds or rounds
        exact = outcome(algorithm, clients, jf.Wire(_Peak(), C.lossless()), start, length)
        row = {"algorithm": case}
        for name in channels:
            channel = CHANNELS[name]
            if channel is None:
                bound = 1.5 * exact.peak or 1.0
                masks = C.secure_sum(len(clients), bits=20, bound=bound)
                channel = jf.Wire(masks, C.lossless(), C.lossless())
            row[name] = _cell(outcome(algorithm, clients, channel, start, length), exact)
        table.append(row)
        jax.clear_caches()  # compiled programs hold memory maps, of which a process has so many
    return table


def _cell(given: Outcome, exact: Outcome) -> str:
    if given.refusal is not None:
        return "refused"
    if exact.bits == 0:
        return "nothing sent"
    off = abs(given.objective / exact.objective - 1)
    # No more digits than processors, which round otherwise, agree on.
    cost = f"{given.bits / exact.bits:.2f}"
    if not np.isfinite(off):
        return f"({cost}: diverges)"
    if off <= 0.01:
        return cost
    far = f"{_rounded(1 + off)}-fold" if off >= 10 else f"{_rounded(100 * off)} % off"
    return f"({cost}: {far})"


def _rounded(value: float) -> str:
    return f"{float(f'{value:.1g}'):g}"


# --- three algorithms on their papers' settings --------------------------------------------------


def papers() -> list[dict]:
    """Bits, objectives and shared components, with and without feedback, against full precision.

    Most of the objectives of the first two is noise that no components capture, so that one percent
    of it says little; the angle between the shared components and those of full precision says
    more. Without feedback an objective can even be too low: what clients receive is not
    orthonormal.
    """
    key = jax.random.key(0)
    perpca = jf.data.perpca_synthetic(key=key, **synthetic.PERPCA_SETTINGS["figure4"])
    adept = jf.data.hierarchical_synthetic(
        key=key, clients=200, features=30, rank=10, samples=20, prior_variance=0.04
    )
    faps = synthetic.spectrum_synthetic(key, clients=8, features=200, samples=1000)
    settings = {
        "PerPCA, gradient": (
            jf.pca.PerPCA(2, 4, solver="gradient", step_size=0.05),
            perpca.samples,
            300,
        ),
        "HierarchicalPCA, hyperprior": (
            jf.pca.HierarchicalPCA(10, 0.5, initial_variance=0.1, hyper_prior=1.25),
            adept.samples,
            40,
        ),
        "FAPS": (jf.pca.FAPS(20), faps.samples, 100),
    }
    table = []
    for name, (algorithm, samples, rounds) in settings.items():
        clients = jf.Clients.from_samples(samples)
        exact = outcome(algorithm, clients, C.lossless(), None, rounds)
        for coarse, compressor in (
            ("3 bits", C.quantize(3, scale_bits=16)),
            ("4 bits", C.quantize(4, scale_bits=16)),
            ("5 symbols, coded", CODED),
        ):
            fed, direct = (
                outcome(algorithm, clients, channel, None, rounds)
                for channel in (C.difference(compressor), compressor)
            )
            table.append(
                {
                    "algorithm": name,
                    "messages": coarse,
                    "bits saved": 1 - fed.bits / exact.bits,
                    "objective off": fed.objective / exact.objective - 1,
                    "without feedback": direct.objective / exact.objective - 1,
                    "sine of angle": _sine(fed, exact),
                    "without it": _sine(direct, exact),
                }
            )
    return table


def _sine(given: Outcome, exact: Outcome) -> float:
    """Of the largest angle between the spans."""
    bases = [np.linalg.qr(run.shared)[0] for run in (given, exact)]
    return float(np.linalg.norm(bases[0] - bases[1] @ (bases[1].T @ bases[0]), 2))


if __name__ == "__main__":
    print(machine())
    print(table(papers() if "papers" in sys.argv[1:] else rows()))
