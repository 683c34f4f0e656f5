"""False alarms of a control chart of the drift, and what it finds.

    python -m bench.tables.alerts

In each of 200 streams, ten clients have thirty new samples of twenty features a day, with two
shared components of standard deviations 3 and 2, one local component of 1.5, and noise of 0.5.
`jf.update` follows them with one round of `PerPCA(2, 1)` a day on moments that `Forgetting`
keeps. Ten days or more are for settling. The limit is that of `limit` from the drifts of the days
before the last sixty, which are compared with it. "false alarms" is the share of these days beyond
the limit of the given rate. In a second run of the same streams, the first shared component turns
by five degrees on the thirtieth of these days; "found" is the share of streams with an alarm within
five days.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import stats

import jaxfed as jf
from bench.common import machine, table
from jaxfed.manifolds import grassmann

STREAMS, CLIENTS, SAMPLES, FEATURES = 200, 10, 30, 20
SETTLING, REFERENCES, WATCHED, DEGREES = 10, (20, 50), 60, 5
MODEL = jf.pca.PerPCA(2, 1)


def limit(drifts: Float[np.ndarray, " days"], false_alarms: float) -> float:
    """The upper limit of the next drift, from Student's t for one more value.

    Square roots of drifts are close to normal: drifts are too skewed to the right, and logarithms
    to the left.
    """
    roots, days = np.sqrt(drifts), len(drifts)
    reach = stats.t.ppf(1 - false_alarms, days - 1) * np.sqrt(1 + 1 / days)
    return float((roots.mean() + reach * roots.std(ddof=1)) ** 2)


@partial(jax.jit, static_argnames="days")
def drifts_of(
    key: Array, rate: float, days: int, turned: Float[Array, " days"]
) -> Float[Array, " days"]:
    """Drifts of one stream; its first component has turned by these angles, in radians."""
    own_key, start_key, day_key = jax.random.split(key, 3)
    own = jax.random.normal(own_key, (CLIENTS, FEATURES)).at[:, :3].set(0)
    own = own / jnp.linalg.norm(own, axis=1, keepdims=True)
    forgetting = jf.stream.Forgetting(rate)

    def batch(day, angle):
        keys = jax.random.split(jax.random.fold_in(day_key, day), 3)
        scores = jax.random.normal(keys[0], (CLIENTS, SAMPLES, 2)) * jnp.asarray([3.0, 2.0])
        basis = jnp.zeros((2, FEATURES)).at[0, 0].set(jnp.cos(angle)).at[0, 2].set(jnp.sin(angle))
        private = 1.5 * jax.random.normal(keys[1], (CLIENTS, SAMPLES, 1)) * own[:, None]
        noise = 0.5 * jax.random.normal(keys[2], (CLIENTS, SAMPLES, FEATURES))
        return jf.Clients.from_samples(scores @ basis.at[1, 1].set(1) + private + noise)

    run = partial(jf.rollout, MODEL, key=start_key)
    moments = forgetting.update(None, batch(days, 0.0))
    result = run(moments, rounds=30).result

    def one_day(before, today):
        moments = forgetting.update(before[0], batch(*today))
        result = run(moments, rounds=1, warm_start=before[1]).result
        angles = grassmann.principal_angles(before[1].shared, result.shared)
        return (moments, result), jnp.sin(jnp.max(angles))

    return jax.lax.scan(one_day, (moments, result), (jnp.arange(days), turned))[1]


def rows_of(rate: float) -> list[dict[str, object]]:
    """The rows of one rate of forgetting."""
    days, keys = SETTLING + max(REFERENCES) + WATCHED, jax.random.split(jax.random.key(0), STREAMS)
    first, change = days - WATCHED, days - WATCHED // 2
    turning = np.deg2rad(DEGREES) * (np.arange(days) >= change)
    run = jax.vmap(drifts_of, (0, None, None, None))
    still, turned = (
        np.asarray(run(keys, rate, days, jnp.asarray(x))) for x in (np.zeros(days), turning)
    )
    rows = []
    for reference in REFERENCES:
        row: dict[str, object] = {"rate": rate, "days of reference": reference}
        for share in (0.01, 0.001):
            known = still[:, first - reference : first]
            limits = np.asarray([limit(each, share) for each in known])[:, None]
            row[f"false alarms for {100 * share:g} %"] = _share(still[:, first:] > limits)
            found = (turned[:, change : change + 5] > limits).any(axis=1)
            row[f"found at {100 * share:g} %"] = _share(found)
        rows.append(row)
    return rows


def _share(which: Any) -> str:
    return f"{100 * which.mean():.3g} %"


if __name__ == "__main__":
    print(machine())
    print(table([row for rate in (0.2, 0.5) for row in rows_of(rate)]))
