"""Every algorithm in `Robust`: the same result where nothing is trimmed, or a clear refusal."""

import functools

import chex
import jax
import pytest

import jaxfed as jf
from jaxfed.aggregation import Robust, trimmed_mean
from tests.examples import CLIENTS, GOOD, family, parametrized

# What these send has no robust form.
REFUSED = [
    "OneShot-median",
    "MVLSA",
    "AJIVE",
    "AJIVE-ranks",
    "Standardize-robust",
    "LocalPower-procrustes",
]
SENT = [n for n in GOOD if n not in REFUSED and not n.startswith("Robust")]
# It sends maxima, symmetric matrices and sums. The others are slow.
WITNESSES = {"SubspaceIteration-kkt"}


def runs(name):
    """As it is and with group means, by a trimmed mean that trims nothing."""
    algorithm = GOOD[name].make(CLIENTS)
    clients = family(algorithm).draw()
    robust = Robust(algorithm, trimmed_mean(0.0), groups=CLIENTS)
    options = {"clients": clients, "rounds": 2, "key": jax.random.key(0)}
    return (functools.partial(jf.fit, each, **options) for each in (algorithm, robust))


@parametrized(SENT, WITNESSES)
def test_without_trimming_the_result_is_that_of_the_mean(name, x64):
    plain, robust = runs(name)
    essence = family(GOOD[name].make(CLIENTS)).essence
    chex.assert_trees_all_close(
        essence(robust().result), essence(plain().result), rtol=1e-6, atol=1e-8
    )


@parametrized(REFUSED, REFUSED)
def test_what_has_no_robust_form_is_refused(name):
    _, robust = runs(name)
    with pytest.raises(ValueError, match=r"algorithm: wanted messages .* got Gather from"):
        robust()
