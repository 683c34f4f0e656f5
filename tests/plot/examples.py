"""Records to draw."""

import numpy as np

from jaxfed.inference import Confidence, Interval
from jaxfed.pca import SuggestedRanks


def confidence():
    """Two clients and three axes of six features, the last two in one group."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(6, 3)))[0]
    replicates = axes + 0.1 * rng.normal(size=(10, 6, 3))
    share = Interval(np.array(0.6), np.array(0.5), np.array(0.7))
    return Confidence(
        level=0.95,
        of="samples",
        angle=np.pi / 10,
        groups=((0,), (1, 2)),
        group_angles=np.array([np.pi / 20, np.pi / 40]),
        axes=axes,
        axes_std=replicates.std(axis=0, ddof=1),
        variances=Interval(*np.array([[4.0, 2, 2], [3, 1, 1], [5, 3, 3]])),
        shared_energy=share,
        local_energy=share,
        distance=Interval(*np.array([[0.5, 0.2], [0.4, 0.05], [0.6, 0.3]])),
        replicates=replicates,
        remarks=("Too few samples.",),
    )


def ranks():
    """Two of four shared components and one of three local ones."""
    return SuggestedRanks(
        shared=2,
        local=1,
        suggested=None,
        support=0.8,
        shared_interval=(2, 3),
        local_interval=(0, 1),
        agreement=np.array([0.9, 0.8, 0.3, 0.2]),
        chance=np.full(4, 0.3),
        shared_scores=np.array([9.0, 7.0, 2.0, -1.0]),
        local_scores=np.array([6.0, 1.0, 0.0]),
        client_scores=np.ones((5, 3)),
        threshold=3.0,
        noise_variance=np.ones(5),
    )
