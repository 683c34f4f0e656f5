"""How often `jf.inference.membership` is wrong about unrelated clients, and finds related ones.

    python -m bench.tables.membership [size | power]

Ten clients, 20 features, two shared and two local components, noise of variance 1; shared
components have variances 10 and 6. Local components are drawn for each client, at random, except
that the first is the same for the first 2, 5 or 10 of them. Components are those of
`PerPCA(2, 2, start="common")` after 30 rounds, which is at the optimum. Each cell is over 500
fresh draws, in single precision.

`size`: unrelated clients, local variances 8 and 4. "p ≤ 5 %" is the share of all tests, "any claim"
that of draws in which any p-value is at most 5 % after Holm's adjustment. The last two columns are
the same of a t-test of the samples' variance along the axis against that along an average
direction.

`power`: the planted component has variance 2 ("weak") or 8 ("strong"), the other 4. A cell contains
the share of pairs of clients that share the component and are found to, by Holm's adjustment and by
Benjamini and Hochberg's; and the share of draws with any false claim, by Holm's. A claim is false
if either client does not have the planted component.
"""

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
MODEL = jf.pca.PerPCA(2, 2, start="common")
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
    """What is computed of all draws, `(draws, m, r2, m)` unless another shape is given."""

    p_values: np.ndarray
    holm: np.ndarray
    benjamini_hochberg: np.ndarray
    axes: np.ndarray  # (draws, m, d, r2)
    shared: np.ndarray  # (draws, d, r1)
    values: np.ndarray  # (draws, m, n, d)


def drawn(setting: Setting) -> np.ndarray:
    """Samples of all draws, `(draws, m, n, d)`, with zeros beyond each client's number."""
    rng = np.random.default_rng(0)
    n, d = max(setting.samples), FEATURES

    def numbers(*shape: int) -> np.ndarray:
        if setting.freedom is None:
            return rng.standard_normal(shape)
        return rng.standard_t(setting.freedom, shape) * (1 - 2 / setting.freedom) ** 0.5

    common = rng.standard_normal((DRAWS, 1, d, 3))
    bases = rng.standard_normal((DRAWS, CLIENTS, d, 4))
    bases[..., :2] = common[..., :2]
    bases[:, : setting.sharing, :, 2] = common[..., 2]
    bases = np.linalg.qr(bases)[0]
    scores = numbers(DRAWS, CLIENTS, n, 4) * np.sqrt(SHARED + setting.local)
    noise = numbers(DRAWS, CLIENTS, n, d) * np.sqrt(np.linspace(1, setting.largest, d))
    real = np.arange(n)[:, None] < np.asarray(setting.samples)[:, None, None]
    return np.where(real, scores @ np.swapaxes(bases, -1, -2) + noise, 0).astype(np.float32)


@jax.jit
def learned(like: jf.Clients, values: np.ndarray) -> jf.Personalized:
    """What is learned of each draw."""

    def one(values):
        clients = with_values(like, values)
        return jf.rollout(MODEL, clients, rounds=ROUNDS, key=jax.random.key(0)).result

    return jax.lax.map(one, values, batch_size=25)


def with_values(like: jf.Clients, values: np.ndarray | jax.Array) -> jf.Clients:
    """The clients with other samples."""
    return eqx.tree_at(lambda x: x.data.values, like, jnp.asarray(values))


def judged(setting: Setting) -> Judged:
    """Test all draws of a setting."""
    values = drawn(setting)
    like = jf.Clients.from_samples([np.ones((n, FEATURES), np.float32) for n in setting.samples])
    shared, local = jax.device_get(tuple(learned(like, values)))
    p_values, holm, rates, axes = [], [], [], []
    for i in range(DRAWS):
        found = membership(jf.Personalized(shared[i], local[i]), with_values(like, values[i]))
        p_values.append(found.p_values)
        holm.append(found.adjusted)
        tested = ~np.isnan(found.p_values)
        rates.append(np.full_like(found.p_values, np.nan))
        rates[-1][tested] = stats.false_discovery_control(found.p_values[tested])
        axes.append(found.axes)
    return Judged(*map(np.stack, (p_values, holm, rates, axes)), shared, values)


def t_tests(
    axes: np.ndarray, shared: np.ndarray, values: np.ndarray, samples: tuple[int, ...]
) -> np.ndarray:
    """P-values of "no more variance along the axis than along an average direction"."""
    p_values = np.full((CLIENTS, axes.shape[2], CLIENTS), np.nan)
    for j, n in enumerate(samples):
        rows = values[j, :n]
        left = rows - (rows @ shared) @ shared.T
        average = np.sum(left**2, axis=1) / (FEATURES - shared.shape[1])
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
            each = zip(found.axes, found.shared, found.values, strict=True)
            t_test = np.stack([t_tests(*draw, samples) for draw in each])
            row: dict[str, object] = {"samples": name, "distribution": tails}
            row["p ≤ 5 %"] = f"{np.mean(found.p_values[tested] <= 0.05):.1%}"
            row["p ≤ 0.1 %"] = f"{np.mean(found.p_values[tested] <= 0.001):.2%}"
            row["any claim"] = f"{any_claim(found.holm).mean():.1%}"
            row["t-test, p ≤ 5 %"] = f"{np.mean(t_test[tested] <= 0.05):.1%}"
            row["t-test, any claim"] = f"{any_claim(t_test * tested[0].sum()).mean():.1%}"
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
                    cell = ", ".join(f"{x[:, pairs].mean():.0%}" for x in (holm, rates))
                    has = np.arange(CLIENTS) < sharing
                    unrelated = ~(has[:, None, None] & has)
                    if unrelated.any():
                        false = any_claim(np.where(unrelated, found.holm, np.nan)).mean()
                        cell += f"; {false:.1%}"
                    row[f"in {sharing}"] = cell
                rows.append(row)
                print(row, flush=True)
    return rows


if __name__ == "__main__":
    chosen = choose({"size": size, "power": power}, __doc__)
    print(machine())
    print(table(chosen.part()))
