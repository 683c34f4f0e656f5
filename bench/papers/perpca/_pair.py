"""The two clients of Shi & Kontar (2024), appendix C, (39) to (49), and how far they lead astray.

Four features, one shared and one local component. The moments are those of the law but for small
perturbations, and to first order the error of the shared component is known in closed form.

The paper's perturbations (42) fit neither its "7 eps²" nor its solution (47). Both come out with
v_1 v_1^perp in the first, and minus v_2 v_2^perp in the second, in the place of v_1 v_2^perp and
v_2 v_1^perp. So that pair is run. Formula (49) has half of the squared distance then: it is of
|u_1|², and the distance of projectors is twice that.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxfed import Clients, Personalized, metrics, rollout
from jaxfed.pca import PerPCA
from papers.drawing import curves
from papers.intervals import near
from papers.report import Cell, Found, Labels
from papers.runs import Seeds

SIZE = 1e-5  # of the perturbations
ALPHA = np.pi / 6  # for which (47) becomes (48)
STEP, ROUNDS = 0.4, 6000
MEASURED, RATIO = "distance / eps²", "distance / printed (49)"


def predicted(theta: Float[Array, ""], gap: Float[Array, ""]) -> Float[Array, ""]:
    """The squared distance of the shared projectors over eps², as (49) prints it."""
    return (3 / theta + (2 * 3**0.5 - 1 - 4 * gap) ** 2 / (gap * (gap + 1)) ** 2) / 64


def moments(
    theta: Float[Array, ""], gap: Float[Array, ""]
) -> tuple[Float[Array, "2 4 4"], Float[Array, "4 1"], Float[Array, "2 4 1"]]:
    """The perturbed moments of both clients, and the true components."""
    cosine, sine = jnp.sqrt(1 - theta), jnp.sqrt(theta)
    u, noise = jnp.eye(4)[2], jnp.eye(4)[3]
    found, own = [], []
    for sign in (1, -1):
        v = jnp.stack([cosine, sign * sine, 0 * sine, 0 * sine])
        across = jnp.stack([-sign * sine, cosine, 0 * sine, 0 * sine])
        first = np.sin(ALPHA) * v + np.cos(ALPHA) * u
        second = np.cos(ALPHA) * v - np.sin(ALPHA) * u
        law = 2 * jnp.outer(first, first) + jnp.outer(second, second)
        half = jnp.outer(v, noise) + jnp.outer(v, u) + sign * jnp.outer(v, across)
        if sign == 1:
            half = half + jnp.outer(noise, u)
        found.append(law + (1 - gap) * jnp.outer(noise, noise) + SIZE * (half + half.T))
        own.append(v[:, None])
    return jnp.stack(found), u[:, None], jnp.stack(own)


@jax.jit
@jax.vmap
def _distance(theta: Float[Array, ""], gap: Float[Array, ""]) -> Float[Array, ""]:
    s, shared, local = moments(theta, gap)
    solution = rollout(
        PerPCA(1, 1, solver="gradient", step_size=STEP),
        Clients.from_moments(s),
        rounds=ROUNDS,
        key=jax.random.key(0),
        warm_start=Personalized(shared, local),
    )
    return metrics.projector_distance(solution.result.shared, shared) / SIZE**2


def eigengap(seeds: Seeds) -> Found:
    """Figure 10: several gaps at one misalignment; nothing is random, so seeds are not used."""
    del seeds
    gaps = (0.05, 0.1, 0.2, 0.4, 0.8)
    return _against_prediction("delta", gaps, (0.25,) * len(gaps), gaps)


def misalignment(seeds: Seeds) -> Found:
    """Figure 11: several misalignments at one gap; nothing is random, so seeds are not used."""
    del seeds
    thetas = (0.05, 0.1, 0.2, 0.3, 0.45)
    return _against_prediction("theta", thetas, thetas, (0.5,) * len(thetas))


def _against_prediction(
    name: str, values: Sequence[float], thetas: Sequence[float], gaps: Sequence[float]
) -> Found:
    """Distances for all pairs of theta and gap, of which one takes the values."""
    with jax.enable_x64(True):
        pair = jnp.asarray(thetas, float), jnp.asarray(gaps, float)
        distances, printed = np.asarray(_distance(*pair)), np.asarray(predicted(*pair))
    measured: dict[Labels, Any] = {}
    for value, distance, formula in zip(values, distances, printed.tolist(), strict=True):
        first_order = near(2 * formula, 2e-3 * formula)
        measured[value, MEASURED] = Cell([float(distance)], first_order)
        measured[value, RATIO] = distance / formula
    lines = {"PerPCA": (values, distances), "twice (49)": (values, 2 * printed)}
    return Found(measured, figures={"distance": curves({("", name, MEASURED): lines})})
