"""Every algorithm in `Robust`: the same result where nothing is trimmed, or a clear refusal."""

import functools

import chex
import jax
import pytest

import jaxfed as jf
from jaxfed.aggregation import Robust, TrimmedMean
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
# Each kind of part in a first message and in a round's, and networks. The others
# send the same kinds and are slow.
WITNESSES = {
    "PerPCA-polar",  # Max and Symmetric before the rounds, arrays in them
    "VarProPerPCA-common",  # Gram; arrays and Mean
    "Pooled",  # Symmetric that is not weighted; nothing
    "SubspaceIteration-kkt",  # Sum; Sum
    "HierarchicalPCA-eigenvectors",  # Symmetric; Gram
    "Standardize-within",  # nothing; Sum of several arrays
    "Local",  # nothing at all
    "MaxVar",  # arrays; arrays
    "FedAvg",
}


def runs(name):
    """As it is and with group means, by a trimmed mean that trims nothing."""
    algorithm = GOOD[name].make(CLIENTS)
    clients = family(algorithm).draw()
    robust = Robust(algorithm, TrimmedMean(0.0), groups=CLIENTS)
    options = {"clients": clients, "rounds": 2, "key": jax.random.key(0)}
    return (functools.partial(jf.fit, each, **options) for each in (algorithm, robust))


@parametrized(SENT, set(SENT) - WITNESSES)
def test_without_trimming_the_result_is_that_of_the_mean(name, x64):
    plain, robust = runs(name)
    essence = family(GOOD[name].make(CLIENTS)).essence
    chex.assert_trees_all_close(
        essence(robust().result), essence(plain().result), rtol=1e-6, atol=1e-8
    )


@parametrized(REFUSED, ())
def test_what_has_no_robust_form_is_refused(name):
    _, robust = runs(name)
    with pytest.raises(ValueError, match=r"algorithm: wanted messages .* got Gather from"):
        robust()
