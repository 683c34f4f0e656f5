"""A comparison with NaN is false: one such number must not switch off what is said of the others.

See also the tests of `fit(best=...)` and of `EnergyWarning`.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from jaxfed.multi_start import Uplink
from jaxfed.pca.components import common_local
from jaxfed.pca.fitted import side_by_side

NAN = jnp.nan
CLIENTS = jf.Clients.from_samples(np.random.default_rng(0).normal(size=(4, 9, 5)))
KEY = jax.random.key(0)


def local(*columns):
    """A client's component along each of these axes; NaN for None."""
    frames = [jnp.full(5, NAN) if i is None else jnp.eye(5)[i] for i in columns]
    return jnp.stack(frames)[..., None]


def test_a_clients_failure_does_not_make_the_others_components_orthogonal():
    shared, own = side_by_side(jf.Personalized(jnp.eye(5)[:, :1], local(0, 0, None)))
    assert shared is None and own is not None
    shared, _ = side_by_side(jf.Personalized(jnp.eye(5)[:, :1], local(1, 2, None)))
    assert shared is not None


def test_a_clients_failure_does_not_silence_a_remark():
    for columns in ((1, 1, 1), (1, 1, None, 1)):
        (remark,) = common_local(jf.Personalized(None, local(*columns)))
        assert "common to all clients" in remark


def test_a_candidate_that_fails_is_not_the_best(monkeypatch):
    found = iter([NAN, 2.0, 1.0])
    module = importlib.import_module("jaxfed.pca.split_half")
    monkeypatch.setattr(module, "projector_distance", lambda *_: next(found))
    candidates = [jf.pca.Pooled(1)] * 3
    assert jf.pca.split_half(candidates, CLIENTS, rounds=1, key=KEY)[0] == 2


def test_a_start_that_fails_is_not_the_best():
    several = jf.MultiStart(jf.pca.SubspaceIteration(1), 3)
    server = jf.fit(several, CLIENTS, rounds=1, key=KEY).server
    uplink = Uplink(several.downlink(server).downlinks, jnp.asarray([NAN, 3.0, 2.0]))
    after, diagnostics = several.server_step(KEY, server, uplink)
    assert after.best == 2 and diagnostics["objective"] == 2


def test_a_round_without_participants_does_not_silence_a_remark():
    robust = jf.aggregation.Robust(jf.pca.PerPCA(1, 1, solver="gradient"), groups=3)
    history = {"not_finite": np.asarray([0.25, NAN]), "far_groups": np.asarray([1, NAN])}
    result = jf.Personalized(jnp.eye(5)[:, :1], local(1, 2, 3))
    assert len(robust.remarks(result, history)) == 2
