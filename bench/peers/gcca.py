"""The common representation of three views, beside `MCCA` of mvlearn and cca-zoo."""

from functools import partial

import numpy as np

WORK, ANSWER, DIGITS, JOINT, OWN = "generalized CCA", "of the true scores", 6, 5, 3


def views(seed, entities, features):
    """Centred views with joint and individual parts, and the joint scores."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(entities, JOINT))
    found = {"scores": scores - scores.mean(0)}
    for name, count in zip("abc", features, strict=True):
        own = rng.normal(size=(entities, OWN)) @ rng.normal(size=(OWN, count))
        x = scores @ rng.normal(size=(JOINT, count)) + own + rng.normal(size=(entities, count))
        found[name] = x - x.mean(0)
    return found


def of(data):
    return [data[name] for name in "abc"]


def jaxfed():
    from jaxfed.estimators import FederatedGCCA

    return lambda data: FederatedGCCA(JOINT).fit(of(data)).representation_


# The sum of the views' scores spans the common representation.
def mvlearn():
    from mvlearn.embed import MCCA

    return lambda data: sum(MCCA(JOINT).fit_transform(of(data)))


def cca_zoo():
    from cca_zoo.linear import MCCA

    return lambda data: sum(MCCA(JOINT).fit_transform(of(data)))


def answer(data, scores):
    """The share of the true joint scores that the found ones explain."""
    true = np.linalg.qr(data["scores"])[0]
    return np.sum(np.square(true.T @ np.linalg.qr(scores)[0])) / JOINT


CASES = {"20,000 x (50, 40, 30)": partial(views, entities=20_000, features=(50, 40, 30))}
SIDES = {"jaxfed": jaxfed, "mvlearn": mvlearn, "cca-zoo": cca_zoo}
