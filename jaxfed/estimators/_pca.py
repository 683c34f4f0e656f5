"""The estimators of the PCA family, one class for each model."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxfed import pca
from jaxfed.core.common.checks import check_name
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.estimators._clients import ClientPCA, Learned
from jaxfed.linalg import Moment
from jaxfed.pca.likelihood import joint_moment, precision

STARTS = ("local_first", "projector")


class PersonalizedPCA(ClientPCA):
    """Components that all clients share, and beside them some of each client's own.

    `jaxfed.pca.PerPCA` on the rows of each group. What scores of a client's own components and
    clients that were not there in `fit` are about is said at `transform`.

    Source: Shi & Kontar (2024), Personalized PCA: decoupling shared and unique features, JMLR.
    """

    def __init__(
        self,
        shared_rank: int = 1,
        local_rank: int = 1,
        *,
        rounds: int = 100,
        start: Literal["better", "local_first", "projector"] = "better",
        shrinkage: bool = False,
        center: bool = True,
        random_state: Any = None,
    ):
        """Set the estimator up.

        Args:
            shared_rank: number of shared components.
            local_rank: number of each client's own.
            rounds: of the iteration.
            start: `"local_first"` suits own components that vary more than shared ones,
                `"projector"` the other way round; `"better"` runs both and keeps what leaves
                less of the samples' variance.
            shrinkage: take the noise out of the second moments first.
            center: whether the mean of all samples is subtracted.
            random_state: a seed or a `numpy.random.RandomState`.
        """
        self.shared_rank, self.local_rank, self.rounds = shared_rank, local_rank, rounds
        self.start, self.shrinkage = start, shrinkage
        self.center, self.random_state = center, random_state

    def _columns(self):
        return self.shared_rank + self.local_rank

    def _spare(self):
        return 0

    def _learned(self, run, tables):
        ranks = int(self.shared_rank), int(self.local_rank)
        check_name("start", self.start, ("better", *STARTS))
        algorithm, solutions = pca.PerPCA(*ranks, shrinkage=self.shrinkage), []
        starts: tuple[Any, ...] = STARTS if self.start == "better" else (self.start,)
        for start in starts:
            warm = run(pca.OneShot(*ranks, method=start), rounds=1)
            solutions.append(run(algorithm, warm_start=warm))
        solution = min(solutions, key=lambda each: each.history["objective"][-1])
        shared, local = map(_host, solution.result)
        return Learned(shared, local, True, solution)

    def _newcomer(self, table):
        shared = np.asarray(self.components_).T
        known = Personalized(jnp.asarray(shared), None)
        (own,) = _host(pca.personalize(known, [table], int(self.local_rank)).local)
        return own


class FederatedPCA(ClientPCA):
    """The principal components of all clients' samples together, without pooling them.

    `jaxfed.pca.BlockLanczos`: the server sees sums of products, and needs a few rounds.

    Source: Golub & Underwood (1977), The block Lanczos method for computing eigenvalues.
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        rounds: int = 50,
        tol: float | None = 1e-6,
        center: bool = True,
        random_state: Any = None,
    ):
        """Set the estimator up.

        Args:
            n_components: number of components.
            rounds: at most.
            tol: stop once the captured variance changes by at most this share of it; None never
                does.
            center: whether the mean of all samples is subtracted.
            random_state: a seed or a `numpy.random.RandomState`.
        """
        self.n_components, self.rounds, self.tol = n_components, rounds, tol
        self.center, self.random_state = center, random_state

    def _columns(self):
        return self.n_components

    def _spare(self):
        return 0

    def _learned(self, run, tables):
        solution = run(pca.BlockLanczos(int(self.n_components)), tol=self.tol)
        shared = _host(solution.result.shared)
        return Learned(shared, np.zeros((len(tables), len(shared), 0)), True, solution)

    def _newcomer(self, table):
        return np.zeros((table.shape[1], 0))


class HierarchicalPCA(ClientPCA):
    """Components of each client that scatter around common ones: few samples lean on the others.

    `jaxfed.pca.HierarchicalPCA` where the prior's variance is given, `jaxfed.pca.AdaptivePCA`
    where it is learned. `components_` is the prior's centre, `local_components_` is what a client
    is described by; a client that was not there in `fit` gets the most likely components for its
    samples under the prior. Samples are thought of as scores of variance one and noise: scale them
    so.

    Source: Ozkara, Huang & Diggavi (2023); Ozkara, Huang, Zhou & Diggavi, ADEPT.
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        noise_variance: float = 0.5,
        prior_variance: float | None = None,
        rounds: int = 30,
        center: bool = True,
        random_state: Any = None,
    ):
        """Set the estimator up.

        Args:
            n_components: number of components of each client, less than the number of features.
            noise_variance: of each feature; that of a score is one.
            prior_variance: of the clients' components around the common ones; None to learn it.
            rounds: of the iteration.
            center: whether the mean of all samples is subtracted.
            random_state: a seed or a `numpy.random.RandomState`.
        """
        self.n_components, self.noise_variance = n_components, noise_variance
        self.prior_variance, self.rounds = prior_variance, rounds
        self.center, self.random_state = center, random_state

    def _columns(self):
        return self.n_components

    def _spare(self):
        return 1

    def _learned(self, run, tables):
        settings = int(self.n_components), self.noise_variance
        algorithm: Algorithm
        if self.prior_variance is None:
            algorithm = pca.AdaptivePCA(*settings, solver="eigenvectors")
        else:
            algorithm = pca.HierarchicalPCA(*settings, self.prior_variance, solver="eigenvectors")
        solution = run(algorithm)
        learned: Any = getattr(solution.server, "prior_variance", self.prior_variance)
        self.prior_variance_ = float(learned)
        shared, local = map(_host, solution.result)
        return Learned(shared, local, False, solution)

    def _newcomer(self, table):
        moment = Moment.from_samples(jnp.asarray(table))
        weight = precision(jnp.asarray(float(len(table))), self.noise_variance)
        shared = jnp.asarray(np.asarray(self.components_).T, moment.trace.dtype)
        joint = joint_moment(moment, weight, shared, self.prior_variance_)
        return _host(joint.top(int(self.n_components))[1])


def _host(array: Any) -> np.ndarray:
    """Orthonormal columns in the precision that tells them from others."""
    return np.asarray(array, np.float64)
