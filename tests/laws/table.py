"""The law of each public function under a change of its data's unit, offset, order or number."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from jaxfed import aggregation, channel, estimators, gcca, inference, linalg, metrics, nmf, pca

KEY = jax.random.key(0)
CLIENTS, ROWS, FEATURES = 6, 60, 7
GROUPS = np.repeat(np.arange(CLIENTS), ROWS)


class Law(NamedTuple):
    """How a function's values follow its data.

    Attributes:
        function: from data `(clients, rows, features)` to the values.
        degree: the power of the data's unit that multiplies the values; as many as values, or one
            for all.
        centred: whether a constant that is added to the data changes nothing.
        ordered: whether the order of rows matters, as where they pair with something.
        counted: whether repetition of all rows matters, as to an interval.
        tol: relative tolerance, where rounds are not run to the optimum.
    """

    function: Callable[[Any], Any]
    degree: int | tuple[int, ...] = 0
    centred: bool = False
    ordered: bool = False
    counted: bool = False
    tol: float = 1e-3


def draw(rows: int = ROWS) -> np.ndarray:
    """Draw data with two shared loadings and scores, one local one, and noise; in double."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(FEATURES, FEATURES)))[0]
    scores = rng.normal(size=(rows, 2)) * [4, 2.5]
    local = rng.normal(size=(CLIENTS, 1, FEATURES - 2))
    local = 1.5 * local / np.linalg.norm(local, axis=2, keepdims=True) @ basis[:, 2:].T
    x = scores @ basis[:, :2].T + rng.normal(size=(CLIENTS, rows, 1)) * local
    x += 0.2 * rng.normal(size=x.shape)
    return x - x.mean(axis=1, keepdims=True)


# Not the optimum, where what should be zero is rounding.
SHARED = np.linalg.svd(draw().reshape(-1, FEATURES), full_matrices=False)[2][:2].T
SHARED = np.linalg.qr(SHARED + 0.1 * np.random.default_rng(2).normal(size=SHARED.shape))[0]
LOCAL = np.stack([np.linalg.svd(x[:5] - x[:5] @ SHARED @ SHARED.T)[2][:1].T for x in draw()])
FITTED = jf.Personalized(jnp.float32(SHARED), jnp.float32(LOCAL))


def clients_of(x: Any) -> jf.Clients:
    return jf.Clients.from_samples(x)


def views_of(x: Any) -> jf.Clients:
    return gcca.Views.from_arrays(list(x), center=True)


def projector(basis: Any) -> np.ndarray:
    return np.asarray(basis) @ np.swapaxes(basis, -1, -2)


def subspaces(result: jf.Personalized) -> list[np.ndarray]:
    return [projector(part) for part in result if part is not None]


def of_samples(function: Callable[..., Any], degree: int = 0, **more: Any) -> Law:
    """Of a function of a fitted result and samples."""
    return Law(lambda x: jax.tree.leaves(function(FITTED, x)), degree, **more)


def fit(algorithm: Any, data: Any, rounds: int = 40) -> jf.Solution:
    return jf.fit(algorithm, data, rounds=rounds, key=KEY)


def solved(
    algorithm: jf.Algorithm, rounds: int = 40, parts: int = 1, *, energy: bool = True, **more: Any
) -> Law:
    """Of an algorithm: its subspaces, `parts` many, and its objective if that is an energy.

    That of a likelihood is not: its logarithm changes by a constant.
    """

    def function(x):
        found = fit(algorithm, clients_of(x), rounds)
        end = [found.history["objective"][-1]] if energy else []
        return *subspaces(found.result), *end

    return Law(function, (0,) * parts + (2,) * energy, **more)


def of_views(algorithm: jf.Algorithm, **more: Any) -> Law:
    """Of an algorithm on views: its common scores."""
    return Law(
        lambda x: projector(jax.tree.leaves(fit(algorithm, views_of(x)).result.shared)[0]),
        centred=True,
        ordered=True,
        counted=True,
        **more,
    )


def robust(rule: aggregation.Rule | None) -> Law:
    algorithm = aggregation.Robust(pca.SubspaceIteration(2), rule, groups=CLIENTS)
    return Law(lambda x: projector(fit(algorithm, clients_of(x)).result.shared))


def sent(way: Any, degree: int = 1, **more: Any) -> Law:
    """Of a channel, or a channel for given data: what arrives."""

    def function(x):
        message = jnp.asarray(x[0], jnp.float32)
        made = way(x) if callable(way) and not isinstance(way, channel.Channel) else way
        payload, _ = made.encode(KEY, message, made.memory(message))
        return made.decode(payload)

    return Law(function, degree, ordered=True, counted=True, **more)


def estimated(estimator: Any, *names: tuple[str, int]) -> Law:
    """Of an estimator: these attributes with their degrees, and the error of reconstruction."""

    def function(x):
        groups = np.repeat(range(len(x)), len(x[0]))
        rows = np.asarray(x).reshape(-1, FEATURES)
        model = estimator.fit(rows, groups=groups)
        again = model.inverse_transform(model.transform(rows, groups=groups), groups=groups)
        error = np.linalg.norm(again - rows) / np.sqrt(len(rows))
        return *(np.asarray(getattr(model, name)) for name, _ in names), error

    return Law(function, (*(degree for _, degree in names), 1), centred=True)


def completed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """With every eleventh entry missing."""

    def with_gaps(x):
        x = np.array(x)
        x.reshape(-1)[::11] = np.nan
        return function(x)

    return with_gaps


def impute(x):
    clients = jf.Clients.from_samples(x, missing="mask")
    # To its end, since a start in double precision is another one.
    found = fit(jf.preprocess.Impute(2, 1), clients, 2000)
    return found.result.local.transform(clients).data.values


def standardize(x):
    clients = clients_of(x)
    return fit(jf.preprocess.Standardize(), clients, 1).result.local.transform(clients).data.values


def forgetting(x):
    half, stream = len(x[0]) // 2, jf.stream.Forgetting(0.3)
    first = jnp.einsum("mnd,mne->mde", x[:, :half], x[:, :half]) / half
    return stream.update(jf.Clients.from_moments(first), clients_of(x[:, half:])).data.dense


def minimise(x):
    square = jnp.einsum("mnd,mne->de", x, x) / len(x[0])
    found = jf.manifolds.minimise(
        lambda u: -jnp.trace(u.T @ square @ u), jnp.eye(FEATURES)[:, :2], max_steps=300
    )
    return projector(found.point), found.value, found.status == jf.manifolds.Ended.converged


def rotated(x):
    values, axes = linalg.top_eigenvectors(x[0].T @ x[0] / len(x[0]), 3)
    return pca.rotate(axes * jnp.sqrt(values)).loadings


def confidence(x):
    clients = clients_of(x)
    solution = fit(pca.PerPCA(2, 1), clients)
    found = inference.confidence(solution, clients, key=KEY, resamples=20)
    return found.variances, found.shared_energy, found.angle


def released(x):
    clients = clients_of(x)
    out = jf.privacy.release_moments(clients, epsilon=5.0, delta=1e-5, key=KEY)
    return projector(fit(pca.Pooled(2), out, 1).result.shared)


def units_of(x):
    most = 2 * float(np.abs(x).max())
    options = {"epsilon": 5.0, "delta": 1e-5, "key": KEY}
    found = jf.privacy.release_units(clients_of(x), -most, most, **options)
    return found.units.mean, found.units.scale, found.mean_error


def attacked(x):
    """Attacks on the first messages of a run, whose answers are not exact yet."""
    clients = clients_of(x)
    heard = jf.privacy.record(pca.SubspaceIteration(2), clients, rounds=2, key=KEY)
    secret = jf.privacy.client_matrix(clients)
    estimate = jf.privacy.minimum_norm(heard.received, heard.sent)
    return (
        secret,
        jf.privacy.linear_attack(heard, secret)[-1],
        jf.privacy.norm_leak(heard, secret),
        jf.privacy.relative_error(estimate, secret, calibrated=True),
        jf.privacy.public_guess(clients),
    )


def ranks(x):
    found = pca.suggest_ranks(clients_of(x), key=KEY, most_shared=3, most_local=2, subsets=5)
    return found.shared, found.local, found.shared_scores, found.noise_variance


def ranks_of_variance(x):
    found = pca.ranks_for_variance(clients_of(x), 0.5, 0.9)
    return found.shared, found.local, found.shared_share, found.share


def optimal(x):
    found = gcca.optimum(views_of(x), 2)
    return projector(found.shared), found.cost, found.eigenvalues[:2]


def largest_eigenvalue(x):
    return linalg.largest_eigenvalue(
        lambda a, v: a.T @ (a @ v) / len(a), jnp.asarray(x[0], jnp.float32), jnp.ones(FEATURES)
    )


def svd(x):
    u, s, vt = linalg.svd(x[0])
    return projector(u[:, :2]), s / np.sqrt(len(x[0])), projector(vt[:2].T)


def nonnegative(x):
    x = np.abs(x)
    found = fit(nmf.INMF(3, start="random"), clients_of(x), 20)
    return found.history["objective"][-1], nmf.transform(found, x)[0] @ found.result.shared.T


def nonnegative_completed(x):
    x = np.abs(x)
    found = fit(nmf.INMF(3, start="random"), clients_of(x), 20)
    return completed(partial(nmf.complete, found))(x)


def of_nmf(x):
    rows, groups = np.abs(np.asarray(x)).reshape(-1, FEATURES), np.repeat(range(len(x)), len(x[0]))
    model = estimators.IntegrativeNMF(3, rounds=20, n_init=1, random_state=0)
    scores = model.fit_transform(rows, groups=groups)
    again = model.inverse_transform(scores, groups=groups)
    return again[: len(x[0])], model.reconstruction_err_ / np.sqrt(len(rows))


def of_ajive(x):
    model = estimators.FederatedAJIVE(2, signal_rank=3).fit(list(x))
    again = model.inverse_transform(model.transform(list(x)))
    error = np.linalg.norm(np.stack(again) - np.asarray(x)) / np.sqrt(x.size)
    return model.score(list(x)), model.explained_variance_ratio_, error


SHARES = (("explained_variance_ratio_", 0), ("noise_variance_", 2))


# A number of the first client's first coordinate at each client: any metric of clients.
def number_of_each(x):
    return jnp.abs(x[:, 0, 0])


LAWS: dict[str, Law | str] = {
    "aggregation.Robust": robust(None),
    "aggregation.biweight": robust(aggregation.biweight()),
    "aggregation.centred_clipping": robust(aggregation.centred_clipping()),
    "aggregation.coordinate_median": robust(aggregation.coordinate_median()),
    "aggregation.geometric_median": robust(aggregation.geometric_median()),
    "aggregation.trimmed_mean": robust(aggregation.trimmed_mean()),
    "aggregation.client_influence": Law(
        lambda x: aggregation.client_influence(
            fit(pca.Pooled(2), clients_of(x), 1), clients_of(x), key=KEY, rounds=1
        )
    ),
    "aggregation.far_clients": "ids",
    "aggregation.Rule": "a class of rules",
    "channel.cast": sent(channel.cast("float16"), tol=2e-3),
    "channel.chain": sent(channel.chain(channel.top_k(0.5), channel.quantize(6))),
    "channel.difference": sent(channel.difference(channel.quantize(6))),
    "channel.error_feedback": sent(channel.error_feedback(channel.top_k(0.5))),
    "channel.gaussian": sent(lambda x: channel.gaussian(float(np.linalg.norm(x[0])), 1e-3)),
    "channel.lossless": sent(channel.lossless()),
    "channel.quantize": sent(channel.quantize(6, norm="frobenius")),
    "channel.random_k": sent(channel.random_k(0.5)),
    "channel.sign": sent(channel.sign()),
    "channel.top_k": sent(channel.top_k(0.5)),
    "channel.secure_sum": "its bound has a unit; see the tests of masks",
    "channel.straight_through": "for derivatives",
    "channel.bits": "a count",
    "channel.to_bytes": "exact",
    "channel.from_bytes": "exact",
    "estimators.FederatedPCA": estimated(estimators.FederatedPCA(2), *SHARES),
    "estimators.PersonalizedPCA": estimated(
        estimators.PersonalizedPCA(2, 1, random_state=0), *SHARES
    ),
    "estimators.HierarchicalBayesPCA": estimated(estimators.HierarchicalBayesPCA(3)),
    "estimators.FederatedGCCA": Law(
        lambda x: estimators.FederatedGCCA(2).fit(list(x)).score(list(x)), centred=True
    ),
    "estimators.FederatedAJIVE": Law(of_ajive, (0, 0, 1), centred=True, counted=True),
    "estimators.HeterogeneousMF": estimated(
        estimators.HeterogeneousMF(2, 1, n_init=1, random_state=0), *SHARES
    ),
    "estimators.TripleComponentMF": estimated(
        estimators.TripleComponentMF(2, 1, n_init=1, random_state=0), *SHARES, ("threshold_", 1)
    ),
    "estimators.IntegrativeNMF": Law(of_nmf, (1, 1), ordered=True, counted=True, tol=1e-2),
    "gcca.AJIVE": of_views(gcca.AJIVE(2, 3)),
    "gcca.MVLSA": of_views(gcca.MVLSA(2)),
    "gcca.MaxVar": of_views(gcca.MaxVar(2)),
    "gcca.DeepMaxVar": "a network",
    "gcca.cost": Law(
        lambda x: gcca.cost(
            views_of(x), *fit(gcca.MaxVar(2, solver="exact"), views_of(x), 1).result
        ),
        centred=True,
    ),
    "gcca.optimum": Law(optimal, centred=True, ordered=True, counted=True),
    "gcca.joint_rank": Law(
        lambda x: gcca.joint_rank(views_of(x), 3, key=KEY, samples=50)[:2],
        centred=True,
        counted=True,
    ),
    "gcca.permutation_test": Law(
        lambda x: gcca.permutation_test(views_of(x), 2, key=KEY, permutations=9).agreement,
        centred=True,
        ordered=True,
        counted=True,
    ),
    "gcca.transform": Law(
        lambda x: gcca.alignment_accuracy(
            gcca.transform(fit(gcca.MVLSA(2), views_of(x), 1), views_of(x))
        ),
        centred=True,
        counted=True,
    ),
    "gcca.align": "ids",
    "gcca.pseudonyms": "ids",
    "gcca.alignment_accuracy": Law(
        lambda x: gcca.alignment_accuracy(jnp.asarray(x[..., :2], jnp.float32)), counted=True
    ),
    "gcca.subspace_distance": Law(
        lambda x: gcca.subspace_distance(*(linalg.svd(y[:, :2])[0] for y in x[:2]))
    ),
    "inference.confidence": Law(confidence, (2, 0, 0), ordered=True, counted=True, tol=0.05),
    "inference.bootstrap": "confidence calls it",
    "inference.Resampled": "made by them",
    "inference.membership": Law(
        lambda x: inference.membership(FITTED, clients_of(x))[1:3], ordered=True, counted=True
    ),
    "linalg.largest_eigenvalue": Law(largest_eigenvalue, 2),
    "linalg.svd": Law(svd, (0, 1, 0), ordered=True, counted=True),
    "linalg.polar": Law(lambda x: linalg.polar(x[0]), ordered=True, counted=True),
    "linalg.orthonormalize": Law(
        lambda x: projector(linalg.orthonormalize(x[0, :, :3])), ordered=True, counted=True
    ),
    "linalg.top_eigenvectors": Law(
        lambda x: linalg.top_eigenvectors(x[0].T @ x[0] / len(x[0]), 2)[0], 2
    ),
    "linalg.matmul": Law(lambda x: linalg.matmul(x[0].T, x[0]) / len(x[0]), 2),
    "linalg.thin_product": Law(
        lambda x: linalg.thin_product(x[0], SHARED), 1, ordered=True, counted=True
    ),
    "linalg.transposed_product": Law(
        lambda x: linalg.transposed_product(x[0], x[0][:, :2]) / len(x[0]), 2
    ),
    "manifolds.minimise": Law(minimise, (0, 2, 0)),
    "manifolds.riemannian": "minimise calls it",
    "metrics.captured_energy": of_samples(metrics.captured_energy),
    "metrics.reconstructed_energy": Law(lambda x: metrics.reconstructed_energy(x, 0.5 * x)),
    "metrics.separation": of_samples(metrics.separation),
    "metrics.reconstruction_error": of_samples(metrics.reconstruction_error, 2),
    "metrics.kkt_violation": of_samples(metrics.kkt_violation, 2),
    "metrics.scaled_kkt_violation": of_samples(metrics.scaled_kkt_violation),
    "metrics.frechet_distance": Law(
        lambda x: metrics.frechet_distance(x[0], x[1]), 2, counted=True
    ),
    "metrics.client_distribution": Law(
        lambda x: metrics.client_distribution(number_of_each(x), good="small")[2], 1, ordered=True
    ),
    "metrics.noise_level": Law(metrics.noise_level, 1, ordered=True, counted=True),
    "metrics.relative_singular_value_error": Law(
        lambda x: metrics.relative_singular_value_error(
            FITTED, x, jnp.linalg.norm(x.reshape(-1, FEATURES) @ SHARED, axis=0) * 1.01
        )
    ),
    "metrics.expected_reconstruction_error": "of given variances",
    "metrics.kernel_distance": "its kernel has a unit",
    "metrics.kernel_distance_of_subsets": "its kernel has a unit",
    "metrics.kernel_distance_with_error": "its kernel has a unit",
    **dict.fromkeys(
        (
            f"metrics.{name}"
            for name in (
                "client_distances",
                "clustering_accuracy",
                "misalignment",
                "projector_distance",
                "spectral_clustering_accuracy",
                "subspace_error",
                "svm_accuracy",
            )
        ),
        "of angles and labels",
    ),
    "nmf.INMF": Law(lambda x: nonnegative(x)[0], 2, ordered=True, counted=True, tol=1e-2),
    "nmf.transform": Law(lambda x: nonnegative(x)[1], 1, ordered=True, counted=True, tol=2e-2),
    "nmf.complete": Law(nonnegative_completed, 1, ordered=True, counted=True, tol=2e-2),
    "nmf.annotate": "writes what transform returns",
    "pca.PerPCA": solved(pca.PerPCA(2, 1), parts=2),
    "pca.HMF": solved(pca.HMF(2, 1), parts=2, counted=True),
    "pca.TCMF": Law(
        lambda x: fit(pca.TCMF(2, 1, 0.1 * float(jnp.abs(x).max())), clients_of(x)).history[
            "objective"
        ][-1],
        2,
        counted=True,
    ),
    "pca.HierarchicalPCA": solved(pca.HierarchicalPCA(3), 60, 2, energy=False, counted=True),
    "pca.EmpiricalBayesPCA": solved(pca.EmpiricalBayesPCA(3), 40, 2, energy=False, counted=True),
    "pca.PerTucker": "arrays of images; see its own tests",
    "pca.Local": solved(pca.Local(3), 1),
    "pca.Pooled": solved(pca.Pooled(2), 1),
    "pca.OneShot": solved(pca.OneShot(2, 1), 1, parts=2),
    "pca.SubspaceIteration": solved(pca.SubspaceIteration(2)),
    "pca.BlockLanczos": solved(pca.BlockLanczos(2), 3),
    "pca.LocalPower": solved(pca.LocalPower(2), 20),
    "pca.FAPS": solved(pca.FAPS(2), 60),
    "pca.anomaly_score": of_samples(pca.anomaly_score, 2, ordered=True, counted=True),
    "pca.cluster_clients": "of components",
    "pca.embed_clients": "of components",
    "pca.complete": Law(completed(partial(pca.complete, FITTED)), 1, ordered=True, counted=True),
    "pca.explained_variance": of_samples(pca.explained_variance, 2),
    "pca.fit_local": Law(lambda x: subspaces(pca.fit_local(FITTED, x, 1))),
    "pca.transform": of_samples(pca.transform, 1, ordered=True, counted=True),
    "pca.inverse_transform": Law(
        lambda x: pca.inverse_transform(FITTED, pca.transform(FITTED, x)),
        1,
        ordered=True,
        counted=True,
    ),
    "pca.principal_axes": Law(lambda x: np.abs(pca.principal_axes(SHARED, list(x)))),
    "pca.rotate": Law(rotated, 1),
    "pca.robust_pca": Law(lambda x: pca.robust_pca(x[0]), 1, ordered=True, counted=True),
    "pca.separate_video": "PerPCA's; of pictures",
    "pca.shrink": Law(
        lambda x: pca.shrink(
            linalg.Moment.from_samples(jnp.asarray(x[0], jnp.float32)), 2
        ).matrix(),
        2,
        counted=True,
    ),
    "pca.ranks_for_variance": Law(ranks_of_variance, ordered=True, counted=True),
    "pca.split_half": Law(
        lambda x: pca.split_half([pca.Pooled(2)], clients_of(x), rounds=1, key=KEY)[1],
        ordered=True,
        counted=True,
    ),
    "pca.suggest_ranks": Law(ranks, (0, 0, 0, 2), ordered=True, counted=True, tol=1e-2),
    "pca.topic_words": "counts of words",
    "preprocess.Impute": Law(
        completed(impute), 1, ordered=True, counted=True, centred=False, tol=2e-2
    ),
    "preprocess.Standardize": Law(standardize, 0, centred=True, ordered=True, counted=True),
    "privacy.release_moments": Law(released, ordered=True, counted=True),
    "privacy.release_units": Law(units_of, (1, 1, 1), ordered=True, counted=True),
    "privacy.release_once": "release_moments, whose result is kept in a file",
    "privacy.client_matrix": Law(attacked, (2, 0, 0, 0, 0), ordered=True, counted=True, tol=1e-2),
    **dict.fromkeys(
        (
            f"privacy.{name}"
            for name in (
                "linear_attack",
                "minimum_norm",
                "norm_leak",
                "outside_span",
                "public_guess",
                "record",
                "relative_error",
                "restart_attack",
                "first_message_attack",
            )
        ),
        "client_matrix's law calls them, or one that does",
    ),
    **dict.fromkeys(
        (
            f"privacy.{name}"
            for name in (
                "audit",
                "epsilon",
                "expected_error",
                "noise_multiplier",
                "persons_needed",
                "spent",
                "statement",
                "training_guarantee",
                "training_noise",
            )
        ),
        "of mechanisms and given variances",
    ),
    "stream.Forgetting": Law(forgetting, 2, ordered=True, counted=True),
}
