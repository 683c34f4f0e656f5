"""A record to draw."""

import numpy as np

from jaxfed.inference import Confidence, Interval


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
