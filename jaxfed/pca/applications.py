"""Applications of shared and local components: client clusters, moving objects in videos, topics.

Video separation and topics start personalized PCA from `OneShot`, which estimates the shared
components first: in images and texts most of the variance is shared, and a start from the local
components would assign it to every client again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from jaxfed._checks import check_list, check_texts, checked_array
from jaxfed._optional import require
from jaxfed.contract import Personalized, check_count, check_instance
from jaxfed.core.clients.clients import Clients
from jaxfed.core.run.fit import fit
from jaxfed.core.run.result import Fitted
from jaxfed.core.run.solution import Solution
from jaxfed.linalg import top_eigenvectors
from jaxfed.metrics import client_distances
from jaxfed.pca.one_shot import Local, OneShot
from jaxfed.pca.perpca import PerPCA


def cluster_clients(
    local: Float[ArrayLike, "m d r"], clusters: int, *, seed: int = 0
) -> Int[np.ndarray, " m"]:
    r"""Cluster clients by their local components.

    This is spectral clustering with affinities \(1 - \rho_{ij} / 2 = \|V_i^\top V_j\|_F^2 / r\),
    the mean squared cosines of the principal angles between two clients' subspaces: 1 for equal
    subspaces, 0 for orthogonal ones.

    Args:
        local: local components, `(m, d, r)`, orthonormal.
        clusters: number of clusters.
        seed: seed of the k-means step.

    Returns:
        The cluster of each client, `(m,)`, counted from 0.

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: if `local` is not `(m, d, r)`, its columns are not orthonormal, or there are
            more clusters than clients.

    Source: Shi & Kontar (2024), Section 7.1.7, distances (31).

    Example:
        >>> import jax, jaxfed as jf
        >>> data = jf.data.perpca_synthetic(
        ...     key=jax.random.key(0), clients=8, features=12, shared_rank=1, local_rank=2,
        ...     samples=100, shared_scale=3.0, local="random", groups=2,
        ... )
        >>> clients = jf.Clients.from_samples(data.samples)
        >>> solution = jf.fit(jf.pca.OneShot(1, 2), clients, rounds=1, key=jax.random.key(1))
        >>> labels = jf.pca.cluster_clients(solution.result.local, 2)
        >>> jf.metrics.clustering_accuracy(data.labels, labels)
        1.0
    """
    local = checked_array("local", local, "clients features rank", finite=True)
    distances = client_distances(local)
    check_count("clusters", clusters, most=len(distances))
    check_count("seed", seed, least=0)
    # Rounding may leave an affinity slightly negative.
    affinity = np.clip(1 - np.asarray(distances, float) / 2, 0, 1)
    spectral = require("sklearn.cluster", extra="data").SpectralClustering
    return spectral(clusters, affinity="precomputed", random_state=seed).fit_predict(affinity)


def embed_clients(local: Float[ArrayLike, "m d r"], dims: int = 2) -> Float[Array, "m dims"]:
    r"""Compute coordinates of clients, so that distances show how much local components differ.

    This is classical multidimensional scaling. \(\rho_{ij}\) is a squared Euclidean distance
    between projectors, so the top eigenvectors of \(-\tfrac12 J \rho J\), scaled by the square
    roots of their eigenvalues, are the coordinates that preserve most of it. \(J\) is the centring
    matrix.

    Args:
        local: local components, `(m, d, r)`, orthonormal.
        dims: number of coordinates.

    Returns:
        Coordinates, `(m, dims)`, centred at zero, in order of decreasing spread.

    Raises:
        ValueError: if `local` is not `(m, d, r)`, its columns are not orthonormal, or there are
            more coordinates than clients.

    Source: Shi & Kontar (2024), Section 7.1.7; Torgerson (1952), Multidimensional scaling: I.
    Theory and method.

    Example:
        >>> import jax.numpy as jnp, jaxfed as jf
        >>> axes = jnp.eye(4)[:, :, None]  # four clients with a component of their own each
        >>> points = jf.pca.embed_clients(axes, dims=3)
        >>> bool(jnp.allclose(((points[0] - points[1]) ** 2).sum(), 2.0, atol=1e-5))
        True
    """
    distances = client_distances(checked_array("local", local, "clients features rank"))
    check_count("dims", dims, most=len(distances))
    centred = distances - distances.mean(axis=0)
    centred = centred - centred.mean(axis=1, keepdims=True)
    # -JρJ/2, symmetrized because the two centrings round differently.
    values, vectors = top_eigenvectors(-(centred + centred.T) / 4, dims)
    return vectors * jnp.sqrt(jnp.maximum(values, 0))


class VideoSeparation(NamedTuple):
    """Three image sequences that sum to the frames, and the fit behind them.

    Attributes:
        background: the part in the span of the shared components, `(t, h, w)`.
        foreground: the part in the span of each frame's local components, `(t, h, w)`.
        residual: the rest, `(t, h, w)`.
        solution: the fitted components.
    """

    background: Float[Array, "t h w"]
    foreground: Float[Array, "t h w"]
    residual: Float[Array, "t h w"]
    solution: Solution


def separate_video(
    frames: Float[ArrayLike, "t h w"],
    shared_rank: int,
    local_rank: int,
    *,
    rounds: int = 100,
    algorithm: PerPCA | None = None,
    warm_start: Fitted | None = None,
) -> VideoSeparation:
    r"""Separate the moving parts of an image sequence from its background.

    Each frame is a client whose samples are the rows of the image. A frame \(Y_i\) is the sum of
    its background \(Y_i U U^\top\), its foreground \(Y_i V_i V_i^\top\) and a residual.

    Components describe only the horizontal profile of an image. If the profile of a moving object
    resembles that of the background, part of the object is assigned to the background, with
    vertical stripes as a result. Pass transposed frames to use columns as samples instead.

    Args:
        frames: grayscale images, `(t, h, w)`.
        shared_rank: rank of the background.
        local_rank: rank of the moving part of each frame.
        rounds: rounds of `algorithm`.
        algorithm: by default `PerPCA(shared_rank, local_rank, local_penalty=0)`, which minimizes
            the paper's objective.
        warm_start: where to start; by default `OneShot(shared_rank, local_rank)`.

    Returns:
        Background, foreground, residual and the solution.

    Raises:
        ValueError: if `frames` is not `(t, h, w)`, holds anything but finite floating-point
            numbers, or is narrower than the ranks need.

    Source: Shi & Kontar (2024), Sections 7.2 and 7.4.1.

    Example:
        >>> import jax, jax.numpy as jnp, jaxfed as jf
        >>> video = jf.data.image_sequence_synthetic(key=jax.random.key(0), frames=8, blobs=1)
        >>> parts = jf.pca.separate_video(video.frames, 3, 3, rounds=20)
        >>> brightest = parts.foreground.reshape(8, -1).argmax(axis=1, keepdims=True)
        >>> there = jnp.take_along_axis(video.foreground.reshape(8, -1), brightest, axis=1)
        >>> bool((there > 0).all())  # where the foreground is brightest, something moves
        True
    """
    frames = checked_array("frames", frames, "frames height width", finite=True, whole=False)
    clients = Clients.from_samples(frames)
    algorithm = _checked(algorithm, shared_rank, local_rank, rounds)
    if warm_start is None:
        warm_start = _fit(OneShot(shared_rank, local_rank), clients)
    solution = _fit(algorithm, clients, rounds=rounds, warm_start=warm_start)
    shared, local = solution.result
    background = frames @ shared @ shared.T
    foreground = frames @ local @ local.mT
    return VideoSeparation(background, foreground, frames - background - foreground, solution)


class Topics(NamedTuple):
    """Words that characterize groups of documents, and the fit behind them.

    Attributes:
        common: words of the shared components, in order of decreasing weight.
        own: words of each group's local components, in order of decreasing weight.
        solution: the fitted components.
    """

    common: list[str]
    own: list[list[str]]
    solution: Solution


def topic_words(
    counts: Sequence[Float[ArrayLike, "n_i words"]]
    | Float[Array, "groups n words"]
    | Float[np.ndarray, "groups n words"],
    vocabulary: Sequence[str],
    *,
    shared_rank: int = 2,
    local_rank: int = 2,
    words: int = 10,
    rounds: int = 100,
    algorithm: PerPCA | None = None,
    warm_start: Fitted | None = None,
) -> Topics:
    """Find the words common to all groups of documents, and those specific to each group.

    Each group is a client whose samples are its documents' word counts. The weight of a word is the
    norm of its row of the components, which does not depend on their basis: rows of U for common
    words, rows of V_i for a group's words.

    Args:
        counts: word counts of each group's documents, a list of `(n_i, words)` arrays, as from
            scikit-learn's `CountVectorizer`.
        vocabulary: the word of each column.
        shared_rank: number of shared components.
        local_rank: number of each group's local components.
        words: how many words to return for the common part and for each group.
        rounds: rounds of `algorithm`.
        algorithm: by default `PerPCA(shared_rank, local_rank, local_penalty=0)`, which minimizes
            the paper's objective.
        warm_start: where to start; by default the shared components of
            `OneShot(shared_rank, local_rank)`, computed without a words x words matrix.

    Returns:
        The words and the solution.

    Raises:
        ValueError: if the vocabulary does not have one word per column of the counts, or
            `Clients.from_samples` refuses the counts.

    Source: Shi & Kontar (2024), Section 7.4.2.

    Example:
        >>> import jaxfed as jf
        >>> texts = [["tax war", "war oil oil", "tax war oil"], ["tax school", "school tax tax"]]
        >>> from sklearn.feature_extraction.text import CountVectorizer
        >>> words = CountVectorizer(dtype="float32").fit(sum(texts, []))
        >>> counts = [words.transform(group).toarray() for group in texts]
        >>> vocabulary = list(words.get_feature_names_out())
        >>> topics = jf.pca.topic_words(
        ...     counts, vocabulary, shared_rank=1, local_rank=1, words=1, rounds=10
        ... )
        >>> topics.common, topics.own
        (['tax'], [['oil'], ['school']])
    """
    if not isinstance(counts, np.ndarray | Array) or np.ndim(counts) == 0:
        check_list("counts", counts, "arrays (documents, words)")
    counts = [
        checked_array(f"counts[{i}]", rows, "documents words", whole=False, finite=True)
        for i, rows in enumerate(counts)
    ]
    clients = Clients.from_samples(counts)
    check_texts("vocabulary", vocabulary)
    if len(vocabulary) != clients.features:
        raise ValueError(
            f"vocabulary: wanted {clients.features} words, one per column of the counts, got "
            f"{len(vocabulary)}"
        )
    check_count("words", words)
    algorithm = _checked(algorithm, shared_rank, local_rank, rounds)
    if warm_start is None:
        warm_start = _thin_start(clients, shared_rank, local_rank)
    solution = _fit(algorithm, clients, rounds=rounds, warm_start=warm_start)

    def heaviest(components: np.ndarray) -> list[str]:
        order = np.argsort(-np.linalg.norm(components, axis=1), kind="stable")
        return [str(vocabulary[int(place)]) for place in order[:words]]

    shared, local = map(np.asarray, solution.result)
    return Topics(heaviest(shared), [heaviest(components) for components in local], solution)


def _thin_start(clients: Clients, shared_rank: int, local_rank: int) -> Personalized:
    """Compute the shared components of `OneShot`, and local ones, without a d x d matrix.

    The mean projector onto the clients' top components is a thin factor times its transpose. With
    thousands of words, the singular vectors of the factor cost less than the mean. The local
    components are the best ones within the span of the client's top components.
    """
    top = _fit(Local(shared_rank + local_rank), clients).result.local
    # Singular vectors of the clients' weighted bases side by side: the top eigenvectors of the mean
    # projector, as `OneShot` computes.
    weighted = top * jnp.sqrt(clients.weights)[:, None, None]
    stacked = jnp.moveaxis(weighted, 0, 1).reshape(clients.features, -1)
    shared = jnp.linalg.svd(stacked, full_matrices=False)[0][:, :shared_rank]
    data = clients.data
    variances = jnp.sum((data.values @ top) ** 2, axis=1) / data.count[:, None]
    scaled = top * jnp.sqrt(variances)[:, None]
    rest = scaled - shared @ (shared.T @ scaled)
    local = jnp.linalg.svd(rest, full_matrices=False)[0][..., :local_rank]
    return Personalized(shared, local)


def _checked(algorithm: PerPCA | None, shared_rank: int, local_rank: int, rounds: int) -> PerPCA:
    """Return the algorithm, by default `PerPCA` with these ranks and the paper's objective."""
    check_count("rounds", rounds)  # before anything is computed
    default = PerPCA(shared_rank, local_rank, local_penalty=0.0)
    if algorithm is not None:
        check_instance("algorithm", algorithm, PerPCA, "jaxfed.pca.PerPCA or None")
    return algorithm or default


def _fit(algorithm, clients: Clients, *, rounds: int = 1, warm_start=None) -> Solution:
    # Any key will do: one-shot estimates and warm starts draw no random numbers.
    return fit(algorithm, clients, rounds=rounds, key=jax.random.key(0), warm_start=warm_start)
