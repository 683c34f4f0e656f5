r"""Hierarchical-Bayes PCA: each client has its own components, tied together by a common prior.

A sample of client i is y = U_i x + e with normal scores x of variance l, here one, and noise of
variance s in every feature, and the components U_i scatter around shared ones V. Maximizing the
joint density means

    min over V, U_i of  mean_i  n_i/2 (log det W_i + tr W_i⁻¹ S_i) + d²(V, U_i) / (2 σ²),
    W_i = U_i U_iᵀ + s I,     d²(V, U) = ‖U - V sym(VᵀU)‖²

over matrices with orthonormal columns; d is the length of the projection of U onto the tangent
space at V. W is never formed or inverted: by Woodbury's identity W⁻¹ = (I - UUᵀ / (1 + s)) / s, and
log det W is constant. Scores of variance l are those of samples divided by √l, with noise s/l.

Source: Ozkara, Huang & Diggavi (2023), Personalized PCA for federated heterogeneous data.
"""

import dataclasses
from typing import Literal

from jaxtyping import Array

from jaxfed.contract import Algorithm
from jaxfed.pca._personalized import PersonalizedPCA
from jaxfed.pca._quasi_newton import refuse_implicit


class HierarchicalPCA(PersonalizedPCA):
    r"""Personalized components around shared ones, by alternating Stiefel gradient descent.

    Each round, a client takes a step with its local components, \(U \leftarrow GR(U - \alpha\,
    \mathrm{grad}_U f)\), then one with its copy of the shared ones, and sends the copy. The server
    averages the copies and retracts. `result.local` holds the clients' components, which
    reconstruct their samples; `result.shared` is the prior's centre V, which overlaps with them.

    The likelihood depends only on the subspace of U_i, but d²(V, U_i) depends on its basis. A
    random basis of V's own subspace is (r-1)/2 away from V on average, and where VᵀU_i is not
    positive semi-definite, descent is slow along flat valleys. So before its step, each client
    rotates its basis as near to V as possible (`align=True`). The minimum is the same, the prior
    becomes one of subspaces, and the bases of different clients are comparable. `align=False` is
    the algorithm as printed.

    By default, nothing depends on the units of the samples: the server estimates s and l (see
    `jaxfed.pca.likelihood.estimated`), and σ² is learned by expectation maximization. For that, the
    posterior of U_i and V is taken as normal, with the variances v σ²/(v + σ²) and (v + σ²)/m in
    each of D = r(d - r) directions; v = s (1 + s/l) / (n l) is the sampling variance and m the
    number of clients. Then mean d²/D + v σ²/(v + σ²) + σ⁴/((v + σ²) m) is the next σ². It is at
    least v/100, and for a single client it stays at its start, min(v, 1/d). If samples are fewer
    than features and the noise is strong, so that v is near 1/d, σ² comes out too large, because
    subspaces have no distances that large; `EmpiricalBayesPCA` is then better.

    Columns stay orthonormal at every step size, because the retraction is the orthonormal polar
    factor and not (U + X)(I + XᵀX)^(-1/2), whose rounding errors grow exponentially for long steps.

    Source: Ozkara, Huang & Diggavi (2023), Algorithm 1 and (4); the variance of V makes σ² that of
    restricted maximum likelihood: Laird & Ware (1982), Random-effects models for longitudinal data.
    """

    def __init__(
        self,
        rank: int,
        noise_variance: float | Array | None = None,
        prior_variance: float | Array | None = None,
        *,
        step_size: float | Array | None = None,
        global_step_size: float | Array | None = None,
        solver: Literal["gradient", "eigenvectors", "quasi_newton"] = "gradient",
        likelihood: Literal["exact", "half"] = "exact",
        start: Literal["pooled", "random"] = "pooled",
        align: bool = True,
    ):
        """Set up the algorithm.

        Args:
            rank: number of components of each client, less than the number of features.
            noise_variance: variance s of the noise in each feature, if scores have the variance l =
                1. By default the server estimates both from sums over the clients, before the
                first round; this needs a client with more than `rank` samples.
            prior_variance: variance σ² of the clients' components around the shared ones, whatever
                the units of the samples. By default it is learned from the data.
            step_size: step size of the local components. By default 1 / (c λ + 1/σ²) with the
                client's precision c = n / (s (1 + s/l)) and largest eigenvalue λ; steps up to twice
                that are stable.
            global_step_size: step size of the shared components. By default σ²; steps up to three
                times that are stable.
            solver: how components are updated. `"gradient"` takes gradient steps. `"eigenvectors"`
                alternates between the best local components, top eigenvectors of c S_i + VVᵀ/σ²,
                and the best shared ones, top eigenvectors of the mean U_iU_iᵀ. It takes an order of
                magnitude fewer rounds and no step size, but an eigendecomposition per client and
                round. `"quasi_newton"` takes the best local components, and limited-memory BFGS for
                the shared ones, and for σ² if that is learned. It takes still fewer rounds if the
                prior is tight. It needs every client in each round and `likelihood="exact"`, sends
                one more number, and has no implicit derivative if σ² is learned.
            likelihood: `"exact"`, or `"half"` for the gradient as printed in Fact 1, which is too
                small by a factor of two. That solves the problem with half the prior variance, with
                steps half as long.
            start: `"pooled"`: server and clients start at the top eigenvectors of the mean second
                moment, weighted by the numbers of samples. `"random"`: each starts at its own
                random components.
            align: whether each client rotates its basis towards the shared components every round;
                see the class.

        Raises:
            ValueError: if the rank is not a positive whole number, a variance or step size is not
                positive and finite, or a name is unknown. A run raises it if the noise variance is
                to be estimated and no client has more than `rank` samples.
        """
        steps = step_size, global_step_size
        self._set(rank, noise_variance, prior_variance, *steps, solver, likelihood, start, align)

    def through(self) -> Algorithm:
        """Return the algorithm itself; for the quasi-Newton solver, alternating eigenvectors.

        Both have the same stationary points, and the latter's state is a single point.

        Raises:
            ValueError: for the quasi-Newton solver, if the prior variance is learned.
        """
        if self.solver != "quasi_newton":
            return self
        refuse_implicit(self, self.prior_variance is None)
        return dataclasses.replace(self, solver="eigenvectors")
