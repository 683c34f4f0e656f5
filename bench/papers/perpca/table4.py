"""Separate icons from a common background texture, by PerPCA and by robust PCA."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxfed import plot
from jaxfed.pca.applications import separate_video
from jaxfed.pca.robust import robust_pca
from papers.report import Found, Labels, ahead
from papers.runs import Seeds

SIDE, SHARED, OWN = 64, 4, 8
ICONS = ("triangle", "disk", "cross", "cloud")
OURS, ROBUST = "PerPCA, own part", "robust PCA, sparse part"
SAME, SHADOW = "correlation with the icon", "shadow of another icon"


def icons() -> Float[np.ndarray, "4 side side"]:
    """The four shapes, 1 inside and 0 outside, at different places."""
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE

    def disk(row: float, column: float, radius: float) -> np.ndarray:
        return (y - row) ** 2 + (x - column) ** 2 < radius**2

    triangle = (y > 0.2) & (y < 0.7) & (np.abs(x - 0.4) < (y - 0.2) / 2)
    cross = (np.abs(y - 0.45) < 0.3) & (np.abs(x - 0.5) < 0.3)
    cross &= (np.abs(y - 0.45) < 0.08) | (np.abs(x - 0.5) < 0.08)
    cloud = disk(0.6, 0.35, 0.15) | disk(0.5, 0.5, 0.2) | disk(0.6, 0.65, 0.15)
    return np.stack([triangle, disk(0.45, 0.6, 0.25), cross, cloud]).astype(float)


def pictures(seed: int) -> Float[np.ndarray, "4 side side"]:
    """The icons on a texture of a few waves, with a little noise of each picture's own."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    # Columns are combinations of two waves and of their phases, so the texture has rank four.
    texture = sum(
        np.cos(2 * np.pi * (across * x + down * y) + rng.uniform(0, 2 * np.pi))
        for across, down in ((3, 5), (7, 2))
    )
    noise = 0.02 * rng.normal(size=(len(ICONS), SIDE, SIDE))
    return 0.5 * texture + 0.8 * icons() + noise


def _correlations(parts: Float[np.ndarray, "4 s s"]) -> tuple[float, float]:
    """Of each picture's part with its icon and, at worst, with an icon of another picture."""
    shapes = icons().reshape(len(ICONS), -1)
    table = np.corrcoef(np.asarray(parts).reshape(len(ICONS), -1), shapes)
    found = table[: len(ICONS), len(ICONS) :]
    beyond = np.abs(found - np.corrcoef(shapes))[~np.eye(len(ICONS), dtype=bool)]
    return float(np.diagonal(found).mean()), float(beyond.max())


def run(seeds: Seeds, *, rounds: int = 300) -> Found:
    """Separate the pictures of every seed."""
    measured: dict[Labels, Any] = {}
    shown: dict[str, Any] = {}
    for seed in seeds:
        frames = pictures(seed)
        parts = separate_video(frames.astype(np.float32), SHARED, OWN, rounds=rounds)
        flat = jnp.asarray(frames.reshape(len(ICONS), -1).T)
        _, sparse = (np.asarray(part).T.reshape(frames.shape) for part in robust_pca(flat))
        for name, own in ((OURS, parts.foreground), (ROBUST, sparse)):
            for quantity, value in zip((SAME, SHADOW), _correlations(own), strict=True):
                measured.setdefault((name, quantity), []).append(value)
        shown = shown or {"pictures": frames, OURS: parts.foreground, ROBUST: sparse}
    claimed = {
        ("claim", "PerPCA's parts are more like the icons, by"): ahead(
            measured[ROBUST, SAME], measured[OURS, SAME], 0.1
        ),
        ("claim", "robust PCA leaves more of a shadow, by"): ahead(
            measured[OURS, SHADOW], measured[ROBUST, SHADOW], 0.1
        ),
    }

    def draw() -> Any:
        images = {name: np.asarray(part).reshape(len(ICONS), -1) for name, part in shown.items()}
        return plot.samples(images, (SIDE, SIDE))

    return Found(measured | claimed, figures={"table4": draw})
