"""AJIVE with the interface of multiview libraries: a list of views."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from sklearn.utils.validation import check_is_fitted

from jaxfed import gcca
from jaxfed._checks import check_list, check_whole, is_whole, refuse
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.fit import fit
from jaxfed.estimators._arrays import checked
from jaxfed.estimators._components import ArrayOrFrame
from jaxfed.estimators._views import ViewEstimator, stacked
from jaxfed.linalg import Moment
from jaxfed.pca.shrinkage import shrink

Ranks = int | Sequence[int] | None  # one for all views, or one per view


class FederatedAJIVE(ViewEstimator):
    """Joint and individual parts of views (AJIVE); each view stays with its client.

    It runs `jaxfed.gcca.AJIVE`: a view of the same n entities is the sum of a joint part, whose
    scores all views share, an individual part, and noise. `fit` and `transform` take a list of
    views, as in `cca-zoo`; scores are joint ones, then the view's individual ones.

    Attributes after `fit`:

    - `joint_scores_`: scores of the entities that all views share, orthonormal, `(n, r)`.
    - `joint_components_`: a list of `(r, d_j)` arrays; `joint_scores_ @ joint_components_[j]` is
      the joint part of view j.
    - `individual_scores_`, `individual_components_`: lists of `(n, k_j)` and `(k_j, d_j)` arrays,
      whose product is the individual part. Individual scores are orthonormal, and orthogonal to the
      joint ones.
    - `joint_rank_`, `individual_ranks_`, `signal_ranks_`: r, which may be 0; a list of k_j; and a
      list of the numbers of directions of each view that are not noise.
    - `explained_variance_ratio_`: a list of `(r + k_j,)` arrays, each component's share of the sum
      of squares of its view minus `means_`.
    - `singular_values_`: agreement of the views in each joint component, `(r,)`, at most the root
      of the number of views.
    - `means_`, a list of `(d_j,)` arrays; `n_views_`; `n_iter_`; `summary_`; `saved_`, what
      `jaxfed.load` returns; `feature_names_in_`, if views are data frames, a list of the columns of
      each.

    `transform` computes scores of new entities from each view alone, by least squares. Noise makes
    them differ between views, so average joint scores over the views that have seen an entity.
    There is no likelihood: `score` tells how well joint scores of views agree.

    Source: Feng, Jiang, Hannig & Marron (2018), Angle-based joint and individual variation
    explained, Journal of Multivariate Analysis 166.
    """

    def __init__(
        self,
        joint_rank: int | None = None,
        individual_rank: Ranks = None,
        *,
        signal_rank: Ranks = None,
        center: bool = True,
        random_state: Any = None,
    ):
        """Set up the estimator.

        Args:
            joint_rank: number of joint components, 0 or more, before those that some view lacks are
                dropped; None to estimate it by `jaxfed.gcca.joint_rank`, the paper's two bounds.
            individual_rank: number of a view's individual components, one for all views or one per
                view; None for those above the view's noise.
            signal_rank: number of directions of a view that are not noise, joint and individual
                ones together, one for all views or one per view; None for those whose variance
                noise alone does not explain, at least one (see `jaxfed.pca.shrink`). Give it where
                all but one or two directions of a view of few features are signal, of which the
                noise cannot be told.
            center: whether to subtract each view's means.
            random_state: a seed or a `numpy.random.RandomState`, for the draws of the bounds.
        """
        self.joint_rank, self.individual_rank = joint_rank, individual_rank
        self.signal_rank, self.center = signal_rank, center
        self.random_state = random_state

    def _learn(self, tables):
        views, key = self._clients(tables), self._key()
        given = _ranks("signal_rank", self.signal_rank, len(tables), least=1)
        signal = tuple(map(_signal_rank, tables)) if given is None else given
        individual = _ranks("individual_rank", self.individual_rank, len(tables), least=0)
        most = min(len(tables[0]), sum(signal))
        rank = self.joint_rank
        if rank is None:
            rank = gcca.joint_rank(views, signal, key=key).rank
        else:
            check_whole("joint_rank", rank, least=0)
            if rank > most:
                raise refuse("joint_rank", f"at most {most}", rank)
        algorithm = gcca.AJIVE(max(int(rank), 1), signal, individual_rank=individual)
        solution = fit(algorithm, views, rounds=1, key=key)
        joint, parts = solution.result
        if rank == 0:  # a run has one direction or more
            nothing = jnp.zeros_like(joint.scores)
            joint = gcca.Joint(nothing, jnp.zeros_like(joint.singular_values))

            def of_one(view, number):
                return algorithm.client_result(nothing, None, algorithm.prepare(view, number, 1))

            parts = jax.vmap(of_one)(views.data, views.ids)
        kept = np.asarray(joint.singular_values) > 0
        loadings, scores, own = (np.asarray(part, np.float64) for part in parts)
        self.joint_scores_ = np.asarray(joint.scores, np.float64)[:, kept]
        self.singular_values_ = np.asarray(joint.singular_values, np.float64)[kept]
        self.joint_components_, self.individual_components_ = [], []
        self.individual_scores_, self.explained_variance_ratio_ = [], []
        for j, x in enumerate(tables):
            used = np.any(own[j] != 0, axis=0)
            self.joint_components_.append(loadings[j][: x.shape[1], kept].T)
            self.individual_components_.append(own[j][: x.shape[1], used].T)
            self.individual_scores_.append(scores[j][:, used])
            energy = np.sum(np.square(x - self.means_[j], dtype=np.float64))
            along = np.sum(self._loadings_of(j) ** 2, axis=1)
            self.explained_variance_ratio_.append(along / energy if energy > 0 else 0 * along)
        self.joint_rank_, self.signal_ranks_ = int(kept.sum()), list(signal)
        self.individual_ranks_ = [len(x) for x in self.individual_components_]
        self._record(solution)

    def inverse_transform(self, scores: Sequence[ArrayOrFrame]) -> list[Float[np.ndarray, "n d_j"]]:
        """Reconstruct views from scores: joint and individual parts, and means.

        Args:
            scores: as `transform` returns them, a list of `(n, r + k_j)` arrays.

        Returns:
            A list of `(n, d_j)` arrays.

        Raises:
            ValueError: if scores do not match the views of `fit`.
        """
        check_is_fitted(self)
        check_list("scores", scores, "tables (n, r + k_j)")
        types = [np.float64, np.float32]
        tables = [
            checked(x, dtype=types, input_name=f"scores[{j}]", ensure_min_features=0)
            for j, x in enumerate(scores)
        ]
        wanted = [self.joint_rank_ + k for k in self.individual_ranks_]
        if [x.shape[1] for x in tables] != wanted:
            raise refuse("scores", f"{wanted} columns", [x.shape[1] for x in tables])
        return [
            (x @ self._loadings_of(j) + self.means_[j]).astype(x.dtype)
            for j, x in enumerate(tables)
        ]

    def _loadings_of(self, view: int) -> Float[np.ndarray, "r d_j"]:
        return np.concatenate([self.joint_components_[view], self.individual_components_[view]])

    def _loadings(self):
        return [self._loadings_of(j).T for j in range(self.n_views_)]

    def _kinds(self):
        joint = [f"joint{i}" for i in range(self.joint_rank_)]
        return [joint + [f"individual{i}" for i in range(k)] for k in self.individual_ranks_]

    def _scores(self, tables):
        found = []
        for j, (x, mean) in enumerate(zip(tables, self.means_, strict=True)):
            joint, own = self.joint_components_[j].T, self.individual_components_[j].T
            if joint.size + own.size == 0:
                found.append(np.zeros((len(x), 0), x.dtype))
                continue
            parts = gcca.ViewParts(*(jnp.asarray(part) for part in (joint, own[:0], own)))
            scores = parts.transform(jnp.asarray(x - mean))
            found.append(np.concatenate([np.asarray(part, x.dtype) for part in scores], axis=1))
        return found

    def _common(self):
        return self.joint_rank_

    def _result(self) -> Personalized:
        joint: list[Any] = [self.joint_scores_, self.singular_values_]  # on the host
        parts: list[Any] = [
            stacked([x.T for x in self.joint_components_]),
            stacked(self.individual_scores_),
            stacked([x.T for x in self.individual_components_]),
        ]
        return Personalized(gcca.Joint(*joint), gcca.ViewParts(*parts))


def _signal_rank(table: np.ndarray) -> int:
    """Return how many directions of a view have more variance than noise alone explains."""
    with jax.enable_x64(True):
        centred = table.astype(np.float64) - table.mean(axis=0, dtype=np.float64)
        most = max(min(centred.shape) - 1, 1)
        factor = np.asarray(shrink(Moment.from_samples(jnp.asarray(centred)), most).samples)
    return max(int(np.linalg.matrix_rank(factor)), 1)


def _ranks(name: str, given: Ranks, views: int, *, least: int) -> tuple[int, ...] | None:
    """Return one rank for each view.

    Raises:
        ValueError: for other values than None, a whole number, and one for each view.
    """
    if given is None:
        return None
    ranks = [given] * views if is_whole(given) else given
    if not isinstance(ranks, list | tuple) or len(ranks) != views:
        raise refuse(name, f"a whole number, {views} of them or None", given)
    for rank in ranks:
        check_whole(name, rank, least=least)
    return tuple(map(int, ranks))
