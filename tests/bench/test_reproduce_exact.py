"""The targets that go digit by digit: their values are those of the references."""

import jax
import numpy as np
import pytest

import papers
from papers.faps import steps as faps
from papers.perpca import steps as perpca
from papers.runs import Seeds
from tests.references import consensus
from tests.references import perpca as reference

KNOWN = {paper: papers.known(f"{paper}/steps") for paper in ("faps", "perpca")}


def test_known_rounds_of_consensus_are_the_references():
    samples, start = faps.problem()
    runs = {
        faps.SSI: consensus.subspace_iteration(samples, start, faps.ROUNDS),
        faps.POWER: consensus.local_power(samples, start, faps.ROUNDS, alignment="procrustes"),
        faps.FIVE: consensus.faps(samples, start, faps.ROUNDS),
    }
    for name, run in runs.items():
        values = [consensus.scaled_kkt_violation(samples, run.iterates[k]) for k in faps.AT]
        known = [KNOWN["faps"][name, f"{faps.KKT} after {k} rounds"] for k in faps.AT]
        np.testing.assert_allclose(known, values, rtol=1e-10)


def test_known_rounds_of_perpca_are_the_references():
    samples, shared, local = perpca.problem()
    known = {}
    for variant in ("tangent", "polar"):
        for k in perpca.AT:
            run = reference.perpca(
                samples, shared, local, step_size=perpca.STEP, rounds=k, variant=variant
            )
            errors = reference.reconstruction_errors(samples, run.shared, run.locals_)
            known[f"PerPCA, {variant}", f"{perpca.ERROR} after {k} rounds"] = errors.mean()
    for method in ("projector", "spectrum", "local_first"):
        name = f"one_shot_{method}" if method != "local_first" else method
        found = getattr(reference, name)(samples, perpca.SHARED, perpca.LOCAL)
        errors = reference.reconstruction_errors(samples, *found)
        known[f"OneShot, {method}", perpca.ERROR] = errors.mean()
    assert set(known) == set(KNOWN["perpca"])
    for labels, value in known.items():
        np.testing.assert_allclose(KNOWN["perpca"][labels], value, rtol=1e-10, err_msg=str(labels))


@pytest.mark.slow
@pytest.mark.parametrize("paper", KNOWN)
def test_the_first_rounds_are_reproduced_digit_by_digit(paper):
    report = papers.find(f"{paper}/steps")(Seeds(1))
    assert set(report.verdicts()) == {"reproduced"}
    assert jax.numpy.ones(1).dtype == np.float32
