"""Errors of each algorithm with bad clients, alone and with `jf.aggregation.Robust`.

    python -m bench.tables.robust attacks
    python -m bench.tables.robust omniscient
    python -m bench.tables.robust rules
    python -m bench.tables.robust outliers

A bad client replaces each array of its message by one with the same norm times a factor: a random
array, a direction on which all bad clients agree, or its own array with the sign reversed. Errors
are half the squared distance of projectors to the true subspace; for `FedAvg`, they are the squared
distance of the parameters of linear regression. Cells are medians of five draws of 100 clients.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfed as jf
from bench.common import choose, label, machine, table
from jaxfed import aggregation
from jaxfed.core.contract.reduction import Gather, Gram, Max, Sum, Symmetric, is_part

CLIENTS, FEATURES, SEEDS = 100, 30, 5
SGD = optax.sgd(1.0)


class Attack(NamedTuple):
    """What bad clients send in place of a message, and how many they are of a hundred."""

    bad: int
    own: float = 0.0  # factor of the client's own message
    common: float = 0.0  # of a direction in common, as long as the client's own message
    random: float = 0.0  # of a direction of its own
    teams: float = 1.0  # how many directions there are in common


ATTACKS = {
    "none": [Attack(0)],
    "30 random": [Attack(30, random=1.0)],
    "10 collude, worst size": [Attack(10, common=c) for c in (0.1, 0.3, 1.0, 3.0, 10.0, 100.0)],
    "12 collude": [Attack(12, common=1.0)],
    "30 collude": [Attack(30, common=1.0)],
    "30 collude, in three teams": [Attack(30, common=1.0, teams=3.0)],
    "20 reversed, times 10": [Attack(20, own=-10.0)],
}


class Member(NamedTuple):
    """One client's prepared data."""

    data: Any
    bad: jax.Array
    key: jax.Array
    team: jax.Array


class Attacked(jf.contract.Wrapper):
    """An algorithm some of whose clients lie in every message."""

    algorithm: jf.Algorithm
    attack: Attack
    bad: jax.Array  # of each client

    def inner_data(self, data):
        """Without whether the client is bad."""
        return data.data

    def prepare(self, data, client_id, rounds):
        """And whether the client is bad."""
        key = jax.random.fold_in(jax.random.key(11), client_id)
        prepared = self.algorithm.prepare(data, client_id, rounds)
        return Member(prepared, self.bad[client_id], key, client_id)

    def first_message(self, key, data, warm_start):
        """Perhaps another one."""
        return self._sent(key, data, self.algorithm.first_message(key, data.data, warm_start))

    def client_step(self, key, downlink, local, data):
        """With another message from a bad client."""
        sent, local, diagnostics = self.algorithm.client_step(key, downlink, local, data.data)
        return self._sent(key, data, sent), local, diagnostics

    def _sent(self, key, data, message):
        def other(x):
            length = jnp.linalg.norm(x)
            together = jax.random.fold_in(jax.random.key(7), data.team % self.attack.teams)
            common, own = (jax.random.normal(k, x.shape, x.dtype) for k in (together, key))
            common, own = (y / jnp.linalg.norm(y) for y in (common, own))
            how = self.attack
            lie = how.own * x + length * (how.common * common + how.random * own)
            return jnp.where(data.bad, lie.astype(x.dtype), x)

        def part(x):
            lies = not is_part(x) or isinstance(x, Sum | Max | Gather | Symmetric | Gram)
            return jax.tree.map(other, x) if lies else x

        return jax.tree.map(part, message, is_leaf=is_part)


class Omniscient(jf.contract.Wrapper):
    """A robust algorithm, some of whose groups send what they make of all honest messages."""

    algorithm: aggregation.Robust
    bad: jax.Array  # of each group
    mean: float  # factor of the honest mean
    spread: float  # of the standard deviation of each number

    def server_step(self, key, server, uplink):
        """As the algorithm, of other messages."""

        def sent(x):
            if not x.ndim:  # a mean over all clients, by name
                return x
            bad = self.bad.reshape(-1, *[1] * (x.ndim - 1))
            mean = jnp.mean(x, 0, where=~bad)
            spread = jnp.std(x, 0, where=~bad)
            return jnp.where(bad, self.mean * mean + self.spread * spread, x)

        # Groups of one client, which weigh the same.
        uplink = uplink._replace(parts=jax.tree.map(sent, uplink.parts))
        return self.algorithm.server_step(key, server, uplink)


class Problem(NamedTuple):
    """Clients and what to learn from them."""

    clients: jf.Clients
    error: Callable[[Any], float]  # of the shared part
    truth: np.ndarray | None = None


class Case(NamedTuple):
    """An algorithm and its problems."""

    algorithm: jf.Algorithm
    problem: Callable[[int], Problem]  # from a seed
    rounds: int


def subspace(truth: np.ndarray) -> Callable[[Any], float]:
    """The error of a basis."""
    return lambda found: float(jf.metrics.projector_distance(found, jnp.asarray(truth))) / 2


def orthonormal(rng: np.random.Generator, columns: int, besides: np.ndarray | None = None):
    """A random basis, orthogonal to another one."""
    basis = rng.normal(size=(FEATURES, columns))
    if besides is not None:
        basis -= besides @ (besides.T @ basis)
    return np.linalg.qr(basis)[0]


def personalized(
    seed: int, clients: int = CLIENTS, outliers: int = 0, scale: float = 1.0
) -> Problem:
    """Three shared and five local components; the first clients may be outliers."""
    rng = np.random.default_rng(seed)
    shared, other = orthonormal(rng, 3), orthonormal(rng, 3)
    samples = []
    for i in range(clients):
        mine, size = (other, 3) if i < outliers else (shared, 1)
        local = orthonormal(rng, 5, mine)
        noise = 0.3 * rng.normal(size=(100, FEATURES))
        signal = size * rng.normal(size=(100, 3)) @ mine.T + rng.normal(size=(100, 5)) @ local.T
        samples.append(signal + noise)
    samples[0] = samples[0] * scale
    return Problem(jf.Clients.from_samples(np.array(samples, np.float32)), subspace(shared), shared)


def around(seed: int) -> Problem:
    """Three components of each client around common ones."""
    rng = np.random.default_rng(seed)
    shared = orthonormal(rng, 3)
    samples = []
    for _ in range(CLIENTS):
        own = np.linalg.qr(shared + 0.08 * rng.normal(size=shared.shape))[0]
        samples.append(2 * rng.normal(size=(100, 3)) @ own.T + rng.normal(size=(100, FEATURES)) / 3)
    return Problem(jf.Clients.from_samples(np.array(samples, np.float32)), subspace(shared))


def views(seed: int) -> Problem:
    """Views of 60 entities with three dimensions in common."""
    rng = np.random.default_rng(seed)
    latent = np.linalg.qr(rng.normal(size=(60, 3)))[0] * 60**0.5
    found = [latent @ rng.normal(size=(3, 8)) + rng.normal(size=(60, 8)) for _ in range(CLIENTS)]
    clients = jf.gcca.Views.from_arrays([x.astype(np.float32) for x in found])
    return Problem(clients, subspace(latent / 60**0.5))


def regressions(seed: int) -> Problem:
    """Linear regressions whose parameters differ by client."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=FEATURES)
    samples = []
    for _ in range(CLIENTS):
        inputs = rng.normal(size=(100, FEATURES))
        outputs = inputs @ (truth + 0.1 * rng.normal(size=FEATURES)) + rng.normal(size=100)
        samples.append(np.column_stack([inputs, outputs]))
    clients = jf.Clients.from_samples(np.array(samples, np.float32))
    return Problem(clients, lambda found: float(np.sum((np.asarray(found["w"]) - truth) ** 2)))


def loss(model, batch, key):
    """Of linear regression."""
    del key
    return jnp.mean((batch[:, :-1] @ model["w"] - batch[:, -1]) ** 2) / 2


CASES = {
    "PerPCA, gradient": Case(jf.pca.PerPCA(3, 5, solver="gradient"), personalized, 150),
    "PerPCA": Case(jf.pca.PerPCA(3, 5), personalized, 80),
    "HierarchicalPCA": Case(jf.pca.HierarchicalPCA(3, 0.1, 0.1), around, 150),
    "SubspaceIteration": Case(jf.pca.SubspaceIteration(3), around, 50),
    "MaxVar": Case(jf.gcca.MaxVar(3), views, 50),
    "FedAvg": Case(
        jf.generative.FedAvg({"w": jnp.zeros(FEATURES)}, loss, SGD, local_steps=5, step_size=0.1),
        regressions,
        50,
    ),
}
AGGREGATES = {
    "mean": None,
    "100 groups": functools.partial(aggregation.Robust, groups=100),
    "50 groups": functools.partial(aggregation.Robust, groups=50),
}


@functools.cache
def problem_of(case: str, seed: int) -> Problem:
    """One draw."""
    return CASES[case].problem(seed)


def error(case: str, wrap: Callable | None, attack: Attack, seed: int) -> float:
    """Of the shared part."""
    made, key = CASES[case], jax.random.key(seed)
    problem = problem_of(case, seed)
    bad = np.isin(
        np.arange(CLIENTS), np.random.default_rng(seed).permutation(CLIENTS)[: attack.bad]
    )
    how = jax.tree.map(jnp.float32, attack)

    attacked = Attacked(made.algorithm, how, jnp.asarray(bad))
    wrapped = attacked if wrap is None else wrap(attacked)
    try:
        found = jf.fit(wrapped, problem.clients, rounds=made.rounds, key=key).result.shared
    except jf.DivergenceError:
        return np.inf
    return problem.error(found)


def worst(case: str, wrap: Callable | None, attacks: list[Attack]) -> float:
    """The largest over sizes of the medians over draws."""
    return max(
        float(np.median([error(case, wrap, attack, seed) for seed in range(SEEDS)]))
        for attack in attacks
    )


def attacks(seed: int) -> list[dict[str, object]]:
    """A row an algorithm and aggregate, a column an attack; in brackets over the mean's clean."""
    del seed
    found = []
    for case in CASES:
        clean = None
        for name, wrap in AGGREGATES.items():
            row = {"algorithm": case, "aggregate": name}
            for attack, sizes in ATTACKS.items():
                value = worst(case, wrap, sizes)
                clean = value if clean is None else clean
                row[attack] = f"{value:.2g} ({value / clean:.3g})"
            found.append(row)
    return found


def omniscient(seed: int) -> list[dict[str, object]]:
    """Thirty of a hundred clients that know all honest messages; ratios to the clean mean.

    A little is enough (Baruch, Baruch & Goldberg 2019): the mean less a multiple of the standard
    deviations. Inner products (Xie, Koyejo & Gupta 2020): the mean times a negative number.
    """
    del seed
    attacks = {
        "a little, 0.52": (1.0, -0.52),
        "a little, 1.5": (1.0, -1.5),
        "inner products, 0.5": (-0.5, 0.0),
        "inner products, 10": (-10.0, 0.0),
    }
    rules = {
        "mean": aggregation.trimmed_mean(0.0),
        "biweight": aggregation.biweight(),
        "geometric_median": aggregation.geometric_median(),
    }
    found = []
    for case, made in CASES.items():
        clean = worst(case, None, ATTACKS["none"])
        for name, rule in rules.items():
            robust = aggregation.Robust(made.algorithm, rule, groups=CLIENTS)
            row = {"algorithm": case, "rule": name}
            for attack, (mean, spread) in attacks.items():
                errors = [known(case, robust, mean, spread, draw) for draw in range(SEEDS)]
                row[attack] = f"{np.median(errors) / clean:.3g}"
            found.append(row)
    return found


def known(case: str, robust: aggregation.Robust, mean: float, spread: float, seed: int) -> float:
    """The error of the shared part, by thirty clients that know all honest messages."""
    made, key, problem = CASES[case], jax.random.key(seed), problem_of(case, seed)
    bad = np.isin(np.arange(CLIENTS), np.random.default_rng(seed).permutation(CLIENTS)[:30])
    attacked = Omniscient(robust, jnp.asarray(bad), jnp.float32(mean), jnp.float32(spread))
    try:
        solution = jf.fit(attacked, problem.clients, rounds=made.rounds, key=key)
    except jf.DivergenceError:
        return np.inf
    return problem.error(solution.result.shared)


def rules(seed: int) -> list[dict[str, object]]:
    """The same for every rule, of `PerPCA` with groups of one client."""
    del seed
    every = {
        "mean": None,
        "biweight": aggregation.biweight(),
        "geometric_median": aggregation.geometric_median(),
        "coordinate_median": aggregation.coordinate_median(),
        "trimmed_mean": aggregation.trimmed_mean(),
        "centred_clipping": aggregation.centred_clipping(),
    }
    found = []
    for name, rule in every.items():
        wrap = None
        if rule is not None:
            wrap = functools.partial(aggregation.Robust, rule=rule, groups=CLIENTS)
        row = {
            attack: f"{worst('PerPCA, gradient', wrap, sizes):.2g}"
            for attack, sizes in ATTACKS.items()
        }
        found.append({"rule": name} | row)
    return found


def outliers(seed: int) -> list[dict[str, object]]:
    """Twenty clients: two whose shared components are others, or one times 1,000.

    The sine of the largest angle to the true space, medians of five draws, and who is named.
    """
    del seed
    found = []
    for name, options in {
        "none": {},
        "two": {"outliers": 2},
        "one times 1,000": {"scale": 1000.0},
    }.items():
        for algorithm in (jf.pca.PerPCA(3, 5, solver="gradient"), jf.pca.PerPCA(3, 5)):
            rows = []
            for draw in range(SEEDS):
                problem, key = personalized(draw, 20, **options), jax.random.key(draw)
                fit = functools.partial(jf.fit, clients=problem.clients, key=key)
                start = fit(jf.pca.OneShot(3, 5, method="median"), rounds=1)
                robust = aggregation.Robust(algorithm, groups=20)
                alone = fit(algorithm, rounds=150)
                cold, warm = (fit(robust, rounds=150, warm_start=x) for x in (None, start))
                most = influence(alone, problem.clients, key)
                rows.append(
                    [
                        *(sine(x.result.shared, problem.truth) for x in (alone, start, cold, warm)),
                        " ".join(map(str, aggregation.far_clients(warm, problem.clients.ids))),
                        most,
                    ]
                )
            sines = np.median([row[:4] for row in rows], axis=0)
            columns = ("mean", "OneShot median", "robust", "robust after it")
            found.append(
                {"outliers": name, "algorithm": label(algorithm)}
                | {c: f"{x:.2g}" for c, x in zip(columns, sines, strict=True)}
                | {"far, by draw": "; ".join(row[4] or "none" for row in rows)}
                | {"of most influence on the mean": "; ".join(row[5] for row in rows)}
            )
    return found


def influence(solution: jf.Solution, clients: jf.Clients, key: jax.Array) -> str:
    """The two clients of most influence."""
    found = aggregation.client_influence(solution, clients, key=key)
    return " ".join(map(str, np.argsort(found)[:-3:-1]))


def sine(found: jax.Array, truth: np.ndarray) -> float:
    """Of the largest angle between two subspaces."""
    found = np.asarray(found)
    return float(np.linalg.norm(found - truth @ (truth.T @ found), 2))


if __name__ == "__main__":
    arguments = choose(
        {"attacks": attacks, "omniscient": omniscient, "rules": rules, "outliers": outliers},
        __doc__,
    )
    print(machine())
    print(table(arguments.part(arguments.seed)))
