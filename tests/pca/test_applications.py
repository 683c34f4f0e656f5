"""Grouping clients, separating videos, and topics, on synthetic data with known answers."""

import doctest
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.data import image_sequence_synthetic
from jaxfed.metrics import client_distances, clustering_accuracy, projector_distance
from jaxfed.pca import applications, robust
from jaxfed.pca.applications import cluster_clients, embed_clients, separate_video, topic_words


def _groups(groups=3, members=6, dim=20, rank=2, spread=0.1, dtype=np.float32):
    """Subspaces scattered around one of each group; members of a group are not neighbours."""
    rng = np.random.default_rng(0)
    centres = np.linalg.qr(rng.normal(size=(groups, dim, rank)))[0]
    labels = np.arange(groups * members) % groups
    noise = rng.normal(size=(len(labels), dim, rank))
    local = np.linalg.qr(centres[labels] + spread * noise)[0]
    return jnp.asarray(local.astype(dtype)), labels


# --- clients ------------------------------------------------------------------------------------


def test_clusters_are_the_groups():
    local, labels = _groups()
    found = cluster_clients(local, 3)
    assert found.shape == (18,)
    assert set(found.tolist()) == {0, 1, 2}
    assert clustering_accuracy(labels, found) == 1.0


def test_clusters_do_not_depend_on_the_bases():
    local, _ = _groups()
    turn = jnp.asarray([[0.6, -0.8], [0.8, 0.6]])
    np.testing.assert_array_equal(cluster_clients(local, 3), cluster_clients(local @ turn, 3))


def test_embedding_keeps_all_distances_in_enough_dimensions(x64):
    local, _ = _groups(spread=0.5, dtype=np.float64)
    points = embed_clients(local, dims=len(local))
    squared = jnp.sum((points[:, None] - points) ** 2, axis=-1)
    chex.assert_trees_all_close(squared, client_distances(local), atol=1e-9)
    chex.assert_trees_all_close(points.mean(axis=0), jnp.zeros(len(local)), atol=1e-7)
    spread = jnp.linalg.norm(points, axis=0)
    assert (spread[:-1] >= spread[1:] - 1e-7).all()


def test_embedding_is_principal_coordinates_of_the_projectors(x64):
    local, _ = _groups(dtype=np.float64)
    projectors = np.asarray(local @ local.mT).reshape(len(local), -1) / np.sqrt(2)
    left, values, _ = np.linalg.svd(projectors - projectors.mean(axis=0), full_matrices=False)
    points = jax.jit(embed_clients)(local)
    for k in range(2):
        assert abs(left[:, k] @ points[:, k]) == pytest.approx(values[k])


def test_embedding_separates_the_groups():
    local, labels = _groups()
    points = embed_clients(local)
    centres = jnp.stack([points[labels == k].mean(axis=0) for k in range(3)])
    nearest = jnp.argmin(jnp.linalg.norm(points[:, None] - centres, axis=-1), axis=1)
    np.testing.assert_array_equal(nearest, labels)


@pytest.mark.parametrize(
    ("function", "local", "count", "message"),
    [
        (cluster_clients, np.zeros((4, 3)), 2, "local: wanted an array"),
        (
            cluster_clients,
            np.zeros((4, 3, 1)),
            5,
            "clusters: wanted .* from 1 to 4, got 5",
        ),
        (cluster_clients, np.zeros((4, 3, 1)), 0, "clusters: wanted a whole number of at least 1"),
        (embed_clients, np.zeros((4, 3)), 2, "local: wanted an array"),
        (embed_clients, np.zeros((4, 3, 1)), 5, "dims: wanted a whole number from 1 to 4, got 5"),
        (embed_clients, np.zeros((4, 3, 1)), 1.5, "dims: wanted a whole number of at least 1"),
    ],
)
def test_client_functions_refuse_bad_input(function, local, count, message):
    with pytest.raises(ValueError, match=message):
        function(local, count)


# --- video --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def video():
    return image_sequence_synthetic(key=jax.random.key(1), frames=10, height=24, width=36, blobs=1)


def _correlation(x, y):
    return float(jnp.corrcoef(x.ravel(), y.ravel())[0, 1])


@pytest.mark.slow
def test_video_is_separated(video):
    parts = separate_video(video.frames, 3, 4, rounds=20)
    total = parts.background + parts.foreground + parts.residual
    chex.assert_trees_all_close(total, video.frames, atol=1e-5)
    shared, local = parts.solution.result
    chex.assert_trees_all_close(parts.background @ shared @ shared.T, parts.background, atol=1e-4)
    chex.assert_trees_all_close(parts.foreground @ shared, jnp.zeros((10, 24, 3)), atol=1e-4)
    assert local.shape == (10, 36, 4)
    # The blobs' profiles overlap with the background's, so neither part is exact.
    assert _correlation(parts.background.mean(axis=0), video.background) > 0.98
    assert _correlation(parts.foreground, video.foreground) > 0.75
    assert jnp.linalg.norm(parts.residual) < 0.05 * jnp.linalg.norm(video.frames)
    assert jf.metrics.misalignment(local) > 0.1


@pytest.mark.slow
def test_video_from_another_start_with_another_algorithm(video):
    # A start at the answer, and one round that hardly moves: the parts are those of the start.
    known = separate_video(video.frames, 3, 4, rounds=20)
    algorithm = jf.pca.PerPCA(3, 4, solver="gradient", step_size=1e-6)
    again = separate_video(
        video.frames, 3, 4, rounds=1, algorithm=algorithm, warm_start=known.solution
    )
    chex.assert_trees_all_close(again.background, known.background, atol=1e-3)
    assert again.solution.rounds == 1


def test_video_refuses_bad_frames():
    with pytest.raises(ValueError, match="frames: wanted an array"):
        separate_video(np.zeros((3, 4)), 1, 1)
    with pytest.raises(ValueError, match="5 orthonormal components do not fit"):
        separate_video(np.ones((2, 3, 4), np.float32), 3, 2)


# --- topics -------------------------------------------------------------------------------------


class Topics(NamedTuple):
    """Counts of words in groups of documents, and the topics that they are drawn from."""

    counts: np.ndarray
    shared: np.ndarray
    local: np.ndarray


@pytest.fixture(scope="module")
def topics():
    """Counts of four groups, one topic common to all and one of each; each topic has 8 words."""
    rng = np.random.default_rng(3)
    weights = np.exp(rng.normal(size=(5, 8)))
    shares = weights / weights.sum(axis=1, keepdims=True)
    common, *own = (np.eye(5)[:, :, None] * shares[:, None]).reshape(5, 40)
    share = rng.uniform(size=(4, 60, 1))
    counts = rng.poisson(50 * (share * common + (1 - share) * np.stack(own)[:, None]))
    return Topics(counts.astype(np.float32), common, np.stack(own))


@pytest.mark.slow
def test_words_belong_to_their_topics(topics):
    vocabulary = [f"{'common' if k < 8 else (k - 8) // 8}-{k}" for k in range(40)]
    found = topic_words(topics.counts, vocabulary, shared_rank=1, local_rank=1, words=5, rounds=20)
    assert len(found.common) == 5
    assert all(word.startswith("common-") for word in found.common)
    for group, words in enumerate(found.own):
        assert len(words) == 5
        assert all(word.startswith(f"{group}-") for word in words)
    # The likeliest words of a topic are among its heaviest.
    assert vocabulary[int(topics.shared.argmax())] in found.common
    for words, topic in zip(found.own, topics.local, strict=True):
        assert vocabulary[int(topic.argmax())] in words


@pytest.mark.slow
def test_thin_start_is_the_thin_start(topics):
    ragged = [np.asarray(counts[: 30 + 10 * i]) for i, counts in enumerate(topics.counts)]
    clients = jf.Clients.from_samples(ragged, weights="samples")
    start = applications._thin_start(clients, 2, 1)
    full = jf.fit(jf.pca.OneShot(2, 1), clients, rounds=1, key=jax.random.key(0)).result
    assert projector_distance(start.shared, full.shared) < 1e-6
    chex.assert_trees_all_close(start.shared.T @ start.local, jnp.zeros((4, 2, 1)), atol=1e-5)
    # Own components are found among three, the best ones among all forty.
    error, best = (
        jf.metrics.reconstruction_error(jf.Personalized(*pair), ragged) for pair in (start, full)
    )
    assert best <= error * (1 + 1e-5)
    assert error < 1.05 * best


@pytest.mark.slow
def test_topics_refuse_bad_input(topics):
    with pytest.raises(ValueError, match="vocabulary: wanted 40 words"):
        topic_words(topics.counts, ["word"] * 3)
    with pytest.raises(ValueError, match="words: wanted a whole number of at least 1"):
        topic_words(topics.counts, ["word"] * 40, words=0)


@pytest.mark.slow
@pytest.mark.parametrize("module", [applications, robust])
def test_examples(module):
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0


def test_completion_is_least_squares_on_the_observed_rows():
    rng = np.random.default_rng(0)
    basis = rng.normal(size=(30, 3))
    # The observed rows of two components are nearly parallel: condition number 1,700.
    basis[:10, 2] = basis[:10, 1] + 1e-3 * rng.normal(size=10)
    basis = np.linalg.qr(basis)[0]
    full = rng.normal(size=(5, 3)) @ basis.T
    gaps = np.where(np.arange(30) < 10, full, np.nan).astype(np.float32)
    model = jf.Personalized(jnp.asarray(basis, jnp.float32), None)
    found = jf.pca.complete(model, jnp.asarray(gaps))
    assert np.abs(found - full).max() < 1e-3
    assert np.array_equal(found[:, :10], gaps[:, :10])
    slope = jax.grad(lambda x: jnp.sum(jf.pca.complete(model, x)[:, 10:]))(jnp.asarray(gaps))
    wanted = (basis[10:] @ np.linalg.pinv(basis[:10])).sum(axis=0)
    assert np.allclose(slope[:, :10], wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())
