"""Algorithms around another one."""

import chex
import jax.numpy as jnp
import pytest

import jaxfed as jf
from tests.helpers import fit, gaussian


class Plain(jf.contract.Wrapper):
    """Changes nothing."""

    algorithm: jf.Algorithm


class Counting(jf.contract.Wrapper):
    """With a state and data of its own."""

    algorithm: jf.Algorithm

    def inner_server(self, server):
        return server[0]

    def inner_data(self, data):
        return data[0]

    def prepare(self, data, client_id, rounds):
        return self.algorithm.prepare(data, client_id, rounds), client_id

    def server_init(self, key, first, like, warm_start):
        return self.algorithm.server_init(key, first, like[0], warm_start), jnp.zeros(())

    def server_step(self, key, server, uplink):
        after, diagnostics = self.algorithm.server_step(key, server[0], uplink)
        return (after, server[1] + 1), diagnostics


def test_what_a_wrapper_does_not_define_is_the_algorithms():
    clients, algorithm = gaussian((20, 12, 16)), jf.pca.PerPCA(2, 1, solver="gradient", decay=0.1)
    options = {"rounds": 5, "channel": jf.channel.quantize(3)}
    wanted = fit(algorithm, clients, **options)
    for wrapper in (Plain(algorithm), Counting(algorithm)):
        found = fit(wrapper, clients, **options)
        chex.assert_trees_all_equal(found.result, wanted.result)
        chex.assert_trees_all_equal(found.history, wanted.history)
        assert found.remarks() == wanted.remarks()
    assert found.server[1] == 5


def test_a_wrapper_is_differentiated_around_the_same_kind_of_algorithm():
    other = Plain(jf.pca.SubspaceIteration(2)).through()
    assert isinstance(other, Plain) and other.algorithm.retraction == "polar"
    for algorithm in (
        jf.pca.PerPCA(2, 1, solver="gradient"),
        jf.pca.PerPCA(2, 1),
    ):  # through one of another
        wrapper = Plain(algorithm)
        assert wrapper.through() is wrapper
    with pytest.raises(ValueError, match=r"^adjoint: wanted for Plain .* got PerPCA"):
        wrapper.bases(None, None)
