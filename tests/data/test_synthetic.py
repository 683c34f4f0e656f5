"""Synthetic clients: the truth they report is the truth, and samples follow the stated law."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfed.data import image_sequence_synthetic, perpca_synthetic
from papers.synthetic import PERPCA_SETTINGS, misalignment_pair, spectrum_synthetic


def projection(w):
    return w @ jnp.swapaxes(w, -1, -2)


def misalignment(local):
    return 1 - jnp.linalg.eigvalsh(projection(local).mean(0))[-1]


SMALL: dict[str, Any] = {
    "clients": 6,
    "features": 8,
    "shared_rank": 2,
    "local_rank": 2,
    "samples": 5,
}


def small(key, **changes: Any):
    return perpca_synthetic(key=key, **{**SMALL, **changes})


def published(key, name, **changes: Any):
    return perpca_synthetic(key=key, **{**PERPCA_SETTINGS[name], **changes})


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("local", ["window", "random"])
@pytest.mark.parametrize(("shared_rank", "local_rank"), [(1, 1), (2, 5)])
def test_components_are_orthonormal_and_local_ones_orthogonal_to_shared(
    key, shared_rank, local_rank, local, rotate
):
    data = perpca_synthetic(
        key=key,
        clients=4,
        features=7,
        shared_rank=shared_rank,
        local_rank=local_rank,
        samples=2,
        local=local,
        rotate=rotate,
    )
    both = jnp.concatenate(
        [jnp.broadcast_to(data.shared, (4, *data.shared.shape)), data.local], axis=-1
    )
    gram = jnp.swapaxes(both, -1, -2) @ both
    chex.assert_trees_all_close(
        gram, jnp.broadcast_to(jnp.eye(gram.shape[-1]), gram.shape), atol=1e-5
    )
    if not rotate:
        assert not jnp.any(data.shared.T @ data.local)  # exactly


def test_window_cycles_and_labels_say_who_agrees(key):
    data = small(key, clients=9, window=4)
    distance = jnp.sum(
        (projection(data.local)[:, None] - projection(data.local)[None]) ** 2, axis=(-1, -2)
    )
    np.testing.assert_array_equal(data.labels, np.arange(9) % 4)
    np.testing.assert_array_equal(distance == 0, data.labels[:, None] == data.labels)
    assert not jnp.any(data.local[:, 6:])  # two shared axes, four in the window


def test_window_of_the_local_rank_is_one_group(key):
    data = small(key, window=2)
    assert not jnp.any(data.labels)
    chex.assert_trees_all_close(
        projection(data.local), jnp.broadcast_to(projection(data.local[0]), (6, 8, 8))
    )


def test_random_groups_share_a_subspace(key):
    data = small(key, local="random", groups=3)
    chex.assert_trees_all_equal(data.local[:3], data.local[3:])
    assert jnp.sum((projection(data.local[0]) - projection(data.local[1])) ** 2) > 0.1


@pytest.mark.slow
def test_second_moments_are_those_of_the_law(key):
    data = perpca_synthetic(
        key=key,
        clients=2,
        features=5,
        shared_rank=1,
        local_rank=2,
        samples=40_000,
        shared_scale=2.0,
        local_scale=[3.0, 1.0],
        noise_variance=0.25,
        rotate=True,
    )
    local = data.local * jnp.asarray([3.0, 1.0])
    expected = 4 * projection(data.shared) + projection(local) + 0.25 * jnp.eye(5)
    moment = jnp.swapaxes(data.samples, 1, 2) @ data.samples / 40_000
    chex.assert_trees_all_close(moment, expected, atol=0.25)
    chex.assert_trees_all_close(data.samples.mean(1), jnp.zeros((2, 5)), atol=0.1)


def test_noiseless_samples_lie_in_the_components(key):
    data = small(key, rotate=True)
    both = projection(data.shared) + projection(data.local)
    chex.assert_trees_all_close(data.samples @ both, data.samples, atol=1e-5)


def test_samples_are_independent_between_clients(key):
    samples = small(key, samples=2000, window=2).samples
    correlation = jnp.corrcoef(samples[:, :, 0])
    assert jnp.max(jnp.abs(correlation - jnp.eye(6))) < 0.1


def test_sizes_per_client_give_a_list(key):
    sizes = (3, 7, 3, 7, 7, 3)
    data = small(key, samples=sizes)
    assert [y.shape for y in data.samples] == [(n, 8) for n in sizes]
    assert len({float(y[0, 0]) for y in data.samples}) == 6


def test_draw_is_fresh_deterministic_and_of_the_same_components(key):
    data = small(key)
    first, again = data.draw(jax.random.key(7), 5), data.draw(jax.random.key(7), 5)
    chex.assert_trees_all_equal(first, again)
    assert not jnp.allclose(first, data.samples)
    both = projection(data.shared) + projection(data.local)
    chex.assert_trees_all_close(first @ both, first, atol=1e-5)
    chex.assert_trees_all_equal(data, small(key))


def test_draw_from_a_changed_law(key):
    data = small(key)
    silent = data._replace(shared_scale=0.0).draw(key, 4)
    assert not jnp.any(silent @ data.shared)
    assert jnp.any(silent @ data.local)


def test_vmap_over_keys_and_scales_is_a_sweep(key):
    keys = jax.random.split(key, 3)
    scales = jnp.asarray([0.5, 1.0, 2.0])

    @jax.jit
    @jax.vmap
    def sweep(key, scale):
        return small(key, local_scale=scale, noise_variance=scale).samples

    for i, stacked in enumerate(sweep(keys, scales)):
        one = perpca_synthetic(
            key=keys[i], **SMALL, local_scale=float(scales[i]), noise_variance=float(scales[i])
        )
        chex.assert_trees_all_close(stacked, one.samples, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_double_precision_is_kept(x64):
    data = small(jax.random.key(0), rotate=True, dtype=jnp.float64)
    assert data.samples.dtype == data.shared.dtype == data.local.dtype == jnp.float64
    chex.assert_trees_all_close(data.shared.T @ data.shared, jnp.eye(2), atol=1e-14)
    assert small(jax.random.key(0)).samples.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", PERPCA_SETTINGS)
def test_published_settings_can_be_drawn(key, name):
    setting = PERPCA_SETTINGS[name]
    data = published(key, name, samples=3)
    assert data.samples.shape == (setting["clients"], 3, setting["features"])
    assert len(np.unique(data.labels)) == setting.get("window", 13)
    assert float(misalignment(data.local)) > 0.19


def test_table_2_has_sparse_and_rich_clients_and_its_true_error(key):
    data = published(key, "table2")
    assert [len(y) for y in data.samples] == [10] * 50 + [100] * 50
    test = jnp.stack(data.samples[50:])
    residual = test - test @ (projection(data.shared) + projection(data.local[50:]))
    # Ten directions hold nothing but noise of variance 1/2.
    chex.assert_trees_all_close(jnp.mean(jnp.sum(residual**2, -1)), 5.0, atol=0.1)


def test_figure_9_has_ten_groups(key):
    data = published(key, "figure9", samples=1)
    np.testing.assert_array_equal(np.bincount(data.labels), np.full(10, 10))


@given(st.floats(0, 0.5))
def test_pair_has_the_misalignment_asked_for(theta):
    data = misalignment_pair(jax.random.key(0), theta, samples=4)
    chex.assert_trees_all_close(misalignment(data.local), jnp.float32(theta), atol=1e-6)
    v = data.local[..., 0]
    chex.assert_trees_all_close(jnp.linalg.norm(v, axis=-1), jnp.ones(2), atol=1e-6)
    assert not jnp.any(data.shared.T @ data.local)


def test_pair_can_be_swept_over_theta(key):
    thetas = jnp.linspace(0.01, 0.3, 4)
    data = jax.vmap(lambda theta: misalignment_pair(key, theta, samples=6))(thetas)
    assert data.samples.shape == (4, 2, 6, 3)
    chex.assert_trees_all_close(jax.vmap(misalignment)(data.local), thetas, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": 0}, "clients"),
        ({"features": 3}, "at most the features = 3"),
        ({"shared_rank": 0}, "shared_rank"),
        ({"local_rank": 7}, r"shared_rank \+ local_rank"),
        ({"samples": 0}, "samples"),
        ({"samples": [1, 2]}, "samples: wanted one whole number or 6"),
        ({"samples": [1, 2, 3, 4, 5, 0]}, "samples: wanted a whole number of at least 1, got 0"),
        ({"shared_scale": -1.0}, "shared_scale"),
        ({"local_scale": [1.0, 2.0, 3.0]}, "local_scale"),
        ({"noise_variance": float("nan")}, "noise_variance"),
        ({"noise_variance": [1.0, 2.0]}, "noise_variance"),
        ({"window": 1}, "window"),
        ({"window": 7}, "window"),
        ({"groups": 2}, "groups: wanted None"),
        ({"local": "random", "window": 3}, "window: wanted None"),
        ({"local": "random", "groups": 7}, "groups: wanted a whole number from 1 to 6"),
        ({"local": "elsewhere"}, "elsewhere"),
    ],
)
def test_impossible_settings_are_refused(key, changes, message):
    with pytest.raises(ValueError, match=message):
        small(key, **changes)


@pytest.mark.slow
def test_images_are_a_low_rank_background_and_sparse_blobs(key):
    video = image_sequence_synthetic(key=key)
    assert video.frames.shape == (20, 32, 48)
    chex.assert_trees_all_close(video.frames, video.background + video.foreground, atol=1e-6)
    assert jnp.linalg.matrix_rank(video.background, rtol=1e-5) <= 3
    assert 0 <= video.frames.min() <= video.frames.max() <= 1
    chex.assert_trees_all_close(video.background.max(), 0.5, atol=1e-6)
    covered = jnp.mean(video.foreground > 0, axis=(1, 2))
    assert jnp.all((covered > 0.02) & (covered < 0.1))  # two discs of radius 4
    assert jnp.all(jnp.any(video.foreground[1:] != video.foreground[:-1], axis=(1, 2)))
    # Blobs stay whole: none is cut by the border.
    chex.assert_trees_all_close(video.foreground[:, [0, -1]], jnp.zeros((20, 2, 48)), atol=0.03)


def test_images_have_noise_of_the_given_variance(key):
    video = image_sequence_synthetic(key=key, noise_variance=0.01)
    noise = video.frames - video.background - video.foreground
    chex.assert_trees_all_close(jnp.var(noise), 0.01, rtol=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {"frames": 0},
        {"radius": 16.0},
        {"radius": 0.0},
        {"brightness": 1.0},
        {"background_rank": 1},
        {"noise_variance": -1.0},
    ],
)
def test_impossible_images_are_refused(key, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        image_sequence_synthetic(key=key, **changes)


# --- a given spectrum ----------------------------------------------------------------------------

SPECTRA = {
    "geometric": ({"decay": 1.3}, 1.3 ** -np.arange(6.0)),
    "arithmetic": ({"condition": 10.0}, np.linspace(1, 0.1, 6)),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("rotate", [False, True])
def test_pooled_samples_have_the_stated_decomposition(key, x64, spectrum, rotate):
    ratios, values = SPECTRA[spectrum]
    data = spectrum_synthetic(
        key,
        clients=4,
        features=6,
        samples=8,
        spectrum=spectrum,
        rotate=rotate,
        dtype=jnp.float64,
        **ratios,
    )
    assert data.samples.shape == (4, 8, 6)
    pooled = np.asarray(data.samples).reshape(32, 6).T
    np.testing.assert_allclose(data.singular_values, values, rtol=1e-12)
    np.testing.assert_allclose(np.linalg.svd(pooled)[1], values, rtol=1e-12)
    np.testing.assert_allclose(data.basis.T @ data.basis, np.eye(6), atol=1e-12)
    np.testing.assert_allclose(
        data.basis.T @ pooled @ pooled.T @ data.basis, np.diag(values**2), atol=1e-12
    )
    assert (np.abs(data.basis - np.eye(6)).max() > 0.1) == rotate


def test_a_sweep_over_the_spectrum(key):
    def values(decay):
        data = spectrum_synthetic(key, clients=2, features=3, samples=4, decay=decay)
        return jnp.linalg.svd(data.samples.reshape(8, 3))[1], data.singular_values

    found, stated = jax.vmap(values)(jnp.asarray([1.1, 2.0]))
    chex.assert_trees_all_close(found, stated, rtol=1e-5)
    np.testing.assert_allclose(stated[1], [1, 0.5, 0.25], rtol=1e-6)


def test_draws_of_a_spectrum_differ_by_the_key(key):
    one, other = (
        spectrum_synthetic(k, clients=2, features=3, samples=4) for k in jax.random.split(key)
    )
    assert jnp.abs(one.samples - other.samples).max() > 0.01
    assert jnp.abs(one.basis - other.basis).max() > 0.01
    assert one.samples.dtype == jnp.float32
