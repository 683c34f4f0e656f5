"""A map in blocks is a map of every element."""

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxfed.linalg.blocks import map_in_blocks


@pytest.mark.parametrize("count", [1, 4, 5, 7, 8])
def test_blocks_equal_the_elements_one_by_one(count):
    keys = jax.random.split(jax.random.key(0), count)
    scales = jnp.arange(1.0, count + 1)

    def draw(given):
        key, scale = given
        return {"scaled": scale * jax.random.normal(key, (3,)), "scale": scale}

    found = map_in_blocks(draw, (keys, scales), 4)
    wanted = [draw(given) for given in zip(keys, scales, strict=True)]
    chex.assert_trees_all_close(found, jax.tree.map(lambda *x: jnp.stack(x), *wanted), rtol=1e-6)


def test_the_function_is_in_the_program_once():
    traced = jax.make_jaxpr(lambda x: map_in_blocks(jnp.sin, x, 4))(jnp.ones(7))
    assert str(traced).count("= sin ") == 1
