"""Joint and individual parts of three views with given ranks, beside mvlearn's `AJIVE`."""

from functools import partial
from typing import Any

import numpy as np

from bench.peers.gcca import ANSWER, DIGITS, JOINT, OWN, answer, of, views

__all__ = ["ANSWER", "DIGITS", "answer"]

WORK = "AJIVE"


def jaxfed():
    import jax

    import jaxfed as jf

    fit, from_arrays = jf.fit, jf.gcca.Views.from_arrays
    algorithm = jf.gcca.AJIVE(JOINT, JOINT + OWN, individual_rank=OWN)

    def solve(data):
        solution = fit(algorithm, from_arrays(of(data)), rounds=1, key=jax.random.key(0))
        return np.asarray(jax.block_until_ready(solution.result).shared.scores)

    return solve


def mvlearn():
    from mvlearn.decomposition import AJIVE

    ranks: Any = {"joint_rank": JOINT, "individual_ranks": [OWN] * 3}
    return lambda data: AJIVE([JOINT + OWN] * 3, **ranks).fit(of(data)).joint_scores_


CASES = {"2,000 x (200, 150, 100)": partial(views, entities=2_000, features=(200, 150, 100))}
SIDES = {"jaxfed": jaxfed, "mvlearn": mvlearn}
