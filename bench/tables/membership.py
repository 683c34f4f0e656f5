"""How often `jf.inference.membership` is wrong about unrelated clients, and finds related ones.

    python -m bench.tables.membership [size | power]

Ten clients, 20 features, two shared and two local components, noise of variance 1; shared
components have variances 10 and 6. Local components are drawn for each client, at random, except
that the first is the same for the first 2, 5 or 10 of them. Components are those of
`VarProPerPCA(2, 2)` after 30 rounds. Each cell is over 500 fresh draws, in single precision.

`size`: unrelated clients, local variances 8 and 4. "p ≤ 5 %" is the share of all tests, "any claim"
that of draws in which any p-value is at most 5 % after Holm's adjustment. The last two columns are
the same of a t-test of the samples' variance along the axis against that along an average
direction.

`power`: the planted component has variance 2 ("weak") or 8 ("strong"), the other 4. A cell contains
the share of pairs of clients that share the component and are found to, by Holm's adjustment and by
Benjamini and Hochberg's; and the share of draws with any false claim, by Holm's. A claim is false
if either client does not have the planted component.
"""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import jaxfed as jf
from bench.common import choose, machine, table
from jaxfed.inference import membership

CLIENTS, FEATURES, DRAWS, ROUNDS = 10, 20, 500, 30
SHARED = (10.0, 6.0)
MODEL = jf.pca.VarProPerPCA(2, 2)
TAILS = {"Gaussian": None, "t, 5 degrees": 5.0}
UNEQUAL = (20, 20, 20, 50, 50, 50, 100, 100, 200, 200)


class Setting(NamedTuple):
    """What is drawn."""

    samples: tuple[int, ...]
    freedom: float | None  # degrees of freedom of scores and noise; None if Gaussian
    local: tuple[float, float]  # variances of local components
    sharing: int = 0  # number of clients whose first local component is the same
    largest: float = 1.0  # the noise's variance in features grows from 1 to this


class Judged(NamedTuple):
    """What is computed of all draws, `(draws, m, r2, m)`; entries of a client with itself are NaN.

    The planted component is that of a client's axes which others overlap with, so both count.
    """

    p_values: np.ndarray
    holm: np.ndarray
    benjamini_hochberg: np.ndarray
    t_test: np.ndarray


def drawn(setting: Setting, key: jax.Array) -> jax.Array:
    """Samples of one draw, `(m, n, d)`, with zeros beyond each client's number."""
    keys = iter(jax.random.split(key, 5))
    n, d = max(setting.samples), FEATURES

    def numbers(*shape: int) -> jax.Array:
        if setting.freedom is None:
            return jax.random.normal(next(keys), shape)
        scale = ((setting.freedom - 2) / setting.freedom) ** 0.5
        return scale * jax.random.t(next(keys), setting.freedom, shape)

    common = jax.random.normal(next(keys), (d, 3))
    own = jax.random.normal(next(keys), (CLIENTS, d, 2))
    has = (jnp.arange(CLIENTS) < setting.sharing)[:, None]
    first = jnp.where(has, common[:, 2], own[:, :, 0])
    same = jnp.broadcast_to(common[:, :2], (CLIENTS, d, 2))
    bases = jnp.linalg.qr(jnp.concatenate([same, first[:, :, None], own[:, :, 1:]], axis=2))[0]
    scores = numbers(CLIENTS, n, 4) * jnp.sqrt(jnp.asarray(SHARED + setting.local))
    noise = numbers(CLIENTS, n, d) * jnp.sqrt(jnp.linspace(1, setting.largest, d))
    real = jnp.arange(n)[:, None] < jnp.asarray(setting.samples)[:, None, None]
    return jnp.where(real, scores @ bases.mT + noise, 0)


def clients_of(values: jax.Array, samples: tuple[int, ...]) -> jf.Clients:
    """The clients of one draw."""
    like = jf.Clients.from_samples([np.zeros((n, FEATURES), np.float32) for n in samples])
    return eqx.tree_at(lambda x: x.data, like, like.data.with_values(values))


@partial(jax.jit, static_argnames="samples")
def learned(values: jax.Array, samples: tuple[int, ...]) -> jf.Personalized:
    """What is learned of each draw."""

    def one(values):
        clients = clients_of(values, samples)
        return jf.rollout(MODEL, clients, rounds=ROUNDS, key=jax.random.key(0)).result

    return jax.lax.map(one, values, batch_size=25)


def judged(setting: Setting) -> Judged:
    """Test all draws of a setting."""
    keys = jax.random.split(jax.random.key(0), DRAWS)
    values = jax.jit(jax.vmap(partial(drawn, setting)))(keys)
    results = learned(values, setting.samples)
    found = []
    for i in range(DRAWS):
        result, clients = (
            jax.tree.map(lambda x, i=i: x[i], results),
            clients_of(values[i], setting.samples),
        )
        holm = membership(result, clients)
        rates = membership(result, clients, adjustment="benjamini_hochberg")
        t_test = t_tests(holm.axes, result.shared, values[i], setting.samples)
        found.append((holm.p_values, holm.adjusted, rates.adjusted, t_test))
    return Judged(*map(np.stack, zip(*found, strict=True)))


def t_tests(
    axes: np.ndarray, shared: jax.Array, values: jax.Array, samples: tuple[int, ...]
) -> np.ndarray:
    """P-values of "no more variance along the axis than along an average direction"."""
    basis = np.asarray(shared)
    p_values = np.full((CLIENTS, axes.shape[2], CLIENTS), np.nan)
    for j, n in enumerate(samples):
        rows = np.asarray(values[j, :n])
        left = rows - (rows @ basis) @ basis.T
        average = np.sum(left**2, axis=1) / (FEATURES - basis.shape[1])
        more = (rows @ axes) ** 2 - average[:, None]  # (m, n, r2)
        ratios = more.mean(axis=1) / more.std(axis=1, ddof=1) * n**0.5
        p_values[:, :, j] = stats.t.sf(ratios, n - 1)
        p_values[j, :, j] = np.nan
    return p_values


def any_claim(adjusted: np.ndarray) -> np.ndarray:
    """Whether any adjusted p-value is at most 5 %, `(draws,)`; NaN is not."""
    return (adjusted <= 0.05).any(axis=(1, 2, 3))


def size() -> list[dict[str, object]]:
    """One row a number of samples and a distribution."""
    rows = []
    kinds = [(str(n), (n,) * CLIENTS, 1.0) for n in (20, 50, 200)]
    kinds += [("20 to 200", UNEQUAL, 1.0), ("50, noise 1 to 4", (50,) * CLIENTS, 4.0)]
    for name, samples, largest in kinds:
        for tails, freedom in TAILS.items():
            found = judged(Setting(samples, freedom, (8.0, 4.0), largest=largest))
            tested = ~np.isnan(found.p_values)
            tests = tested[0].sum()
            row: dict[str, object] = {"samples": name, "distribution": tails}
            row["p ≤ 5 %"] = f"{np.mean(found.p_values[tested] <= 0.05):.1%}"
            row["p ≤ 0.1 %"] = f"{np.mean(found.p_values[tested] <= 0.001):.2%}"
            row["any claim"] = f"{any_claim(found.holm).mean():.1%}"
            row["t-test, p ≤ 5 %"] = f"{np.mean(found.t_test[tested] <= 0.05):.1%}"
            row["t-test, any claim"] = f"{any_claim(found.t_test * tests).mean():.1%}"
            rows.append(row)
            print(row, flush=True)
    return rows


def power() -> list[dict[str, object]]:
    """One row a number of samples, a distribution and a strength."""
    rows = []
    for n in (20, 50, 200):
        for tails, freedom in TAILS.items():
            for strength, variance in (("weak", 2.0), ("strong", 8.0)):
                row: dict[str, object] = {"samples": n, "distribution": tails, "signal": strength}
                for sharing in (2, 5, 10):
                    setting = Setting((n,) * CLIENTS, freedom, (variance, 4.0), sharing)
                    found = judged(setting)
                    # By any axis of the first client: which of its axes is the planted one is not
                    # always determined.
                    holm, rates = (
                        (x[:, :sharing, :, :sharing] <= 0.05).any(axis=2)
                        for x in (found.holm, found.benjamini_hochberg)
                    )
                    pairs = ~np.eye(sharing, dtype=bool)
                    has = np.arange(CLIENTS) < sharing
                    unrelated = ~(has[:, None, None] & has)
                    false = any_claim(np.where(unrelated, found.holm, np.nan)).mean()
                    found_by = [f"{x[:, pairs].mean():.0%}" for x in (holm, rates)]
                    row[f"in {sharing}"] = f"{found_by[0]}, {found_by[1]}; {false:.1%}"
                rows.append(row)
                print(row, flush=True)
    return rows


if __name__ == "__main__":
    chosen = choose({"size": size, "power": power}, __doc__)
    print(machine())
    print(table(chosen.part()))
