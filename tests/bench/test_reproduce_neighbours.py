"""The targets of neighbouring papers: each finds a planted mistake in the algorithm."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import papers
from jaxfed.gcca import ajive as ajive_code
from jaxfed.nmf import inmf as inmf_code
from jaxfed.pca import _tucker as tucker_code
from jaxfed.pca import hmf as hmf_code
from jaxfed.pca import tcmf as tcmf_code
from papers.neighbours import ajive, hmf, inmf, pertucker
from papers.runs import Seeds
from tests.bench.targets import differing


@pytest.fixture
def fresh():
    """Run with nothing compiled, and leave nothing behind that was compiled with a mistake."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
def test_local_components_that_are_not_made_orthogonal_differ(fresh, monkeypatch):
    run = partial(papers.find("neighbours/hmf"), Seeds(1), rounds=150, at=(20,))
    rate = (hmf.ALIKE, hmf.OWN_STEPS, hmf.RATE, hmf.SHARED)
    assert rate not in differing(run())
    jax.clear_caches()
    monkeypatch.setattr(hmf_code, "_corrected", lambda local, shared: local)
    assert rate in differing(run())


@pytest.mark.slow
def test_soft_in_the_place_of_hard_thresholds_differ(fresh, monkeypatch):
    run = partial(papers.find("neighbours/tcmf"), Seeds(1), shares=(0.1,))
    assert not differing(run())

    def soft(data, low_rank, threshold):
        return low_rank + jnp.clip(data.values - low_rank, -threshold, threshold)

    jax.clear_caches()
    monkeypatch.setattr(tcmf_code, "_without_errors", soft)
    rows = differing(run())
    assert {("10%", "TCMF", 40, part) for part in ("shared", "local", "sparse")} <= rows


@pytest.mark.slow
def test_joint_scores_of_views_in_the_place_of_bases_differ(fresh, monkeypatch):
    monkeypatch.setattr(ajive, "DRAWS", 20)
    parts = {("AJIVE", ajive.SCORES), ("AJIVE", "Y joint")}
    assert not differing(papers.find("neighbours/ajive")(Seeds(1))) & parts

    def weighted(view, ranks, client_id):
        signal = signal_of(view, ranks, client_id)
        return signal._replace(left=signal.left * signal.singular)

    jax.clear_caches()
    signal_of = ajive_code.signal_of
    monkeypatch.setattr(ajive_code, "signal_of", weighted)
    assert parts <= differing(papers.find("neighbours/ajive")(Seeds(1)))


@pytest.mark.slow
def test_local_factors_that_are_not_orthogonal_differ(fresh, monkeypatch):
    run = partial(papers.find("neighbours/pertucker"), Seeds(1), counts=(5, 50))
    assert not differing(run())
    jax.clear_caches()
    monkeypatch.setattr(tucker_code, "best_local", lambda moment, shared, rank: moment.top(rank)[1])
    right = {(pertucker.TUCKER, count, pertucker.RIGHT) for count in (5, 50)}
    assert right <= differing(run())


@pytest.mark.slow
def test_components_that_move_all_at_once_differ(fresh, monkeypatch):
    run = partial(papers.find("neighbours/inmf"), Seeds(1), ranks=(5, 6, 7), penalties=(5.0,))
    assert not differing(run())

    def at_once(factor, gram, product):
        step = (product - gram @ factor) / jnp.diag(gram)[:, None]
        return jnp.maximum(factor + jnp.nan_to_num(step), 0)

    jax.clear_caches()
    monkeypatch.setattr(inmf_code, "hals_sweep", at_once)
    assert (5.0, 7, inmf.OBJECTIVE) in differing(run())


def test_rates_are_slopes_below_a_thousandth():
    assert np.isnan(hmf.rate([-1.0, -2.0, -2.5]))
    np.testing.assert_allclose(hmf.rate([-1.0, -4.0, -5.0, -6.0, -12.0]), -1 / hmf.EVERY)
