"""Maximum likelihood PCA by gradient descent, for each client alone or for all together.

Source: Ozkara, Huang & Diggavi (2023), Personalized PCA for federated heterogeneous data, which
calls them local and global training.
"""

from typing import Literal, NamedTuple, final

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from jaxfed.contract import Algorithm, Bases, Diagnostics, check_name, hyperparameter
from jaxfed.core.clients.samples import Samples
from jaxfed.linalg import Moment
from jaxfed.pca import likelihood
from jaxfed.pca.components import Frame, Rows, check_warm_start, moment_received
from jaxfed.pca.likelihood import LikelihoodMember, Number, Scalar, Variances, check_settings


class _Descent(Algorithm):
    """Base of both: gradient descent on the negative log-likelihood."""

    quadratic_in_samples = True

    noise_variance: Float[Array, ""]
    step_size: Float[Array, ""] | None
    rank: int = eqx.field(static=True)

    @final
    def _set(self, rank: int, noise_variance: Number, step_size: Number | None) -> None:
        check_settings(rank, noise_variance, step_size)
        self.rank, self.noise_variance = rank, hyperparameter(noise_variance)
        self.step_size = hyperparameter(step_size)

    @final
    def _evaluated(self, frame: Rows, data: LikelihoodMember) -> tuple[Rows, Scalar]:
        """Return the gradient of the likelihood, and the objective."""
        variances = Variances(self.noise_variance.astype(frame.dtype))
        objective = likelihood.negative_log_likelihood(data.moment, frame, variances)
        return likelihood.likelihood_gradient(data.moment, frame, data.precision), objective


class LocalProbabilisticPCA(_Descent):
    """Each client's most likely components, by Stiefel gradient descent without any exchange.

    `result.local` holds the components; `result.shared` is None. `Local` has the same optimum.
    """

    def __init__(
        self, rank: int, noise_variance: float | Array, *, step_size: float | Array | None = None
    ):
        """Set up the algorithm.

        Args:
            rank: number of components of each client, less than the number of features.
            noise_variance: variance s of the noise in each feature; the latent variance is one.
                With the default step size, the components do not depend on it.
            step_size: step size of the gradient steps. By default 1 / (c λ) with the client's
                precision c = n / (s (1 + s)) and largest eigenvalue λ; steps up to twice that are
                stable. A client whose samples are all zero takes no step.

        Raises:
            ValueError: if the rank, the variance or the step size is not positive.
        """
        self._set(rank, noise_variance, step_size)

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the rank or the warm start does not fit."""
        likelihood.check_proper_rank(self.rank, clients)
        check_warm_start(warm_start, clients, None, self.rank)

    def prepare(self, data: Samples | Moment, client_id, rounds) -> LikelihoodMember:
        """Return the client's second moment, with its curvature if the step size is automatic."""
        automatic = self.step_size is None
        return likelihood.member(data, self.noise_variance, self.rank, rounds, curvature=automatic)

    def server_init(self, key, first: None, like, warm_start) -> None:
        """Return None: nothing is shared."""

    def downlink(self, server: None) -> None:
        """Return None: nothing is sent."""

    def client_init(self, key, downlink: None, data: LikelihoodMember, warm_start) -> Rows:
        """Return the warm start's components, or random ones."""
        return likelihood.initial_local(self.rank, key, data, warm_start)

    def client_step(self, key, downlink: None, local: Rows, data: LikelihoodMember):
        """Take a gradient step."""
        gradient, objective = self._evaluated(local, data)
        moved = likelihood.stepped(local, gradient, self.step_size, data.curvature)
        return None, moved, {"objective": objective}

    def server_step(self, key, server: None, uplink: None) -> tuple[None, Diagnostics]:
        """Change nothing."""
        return server, {}

    def client_result(self, downlink: None, local: Rows, data: LikelihoodMember) -> Frame:
        """Return the client's components."""
        return local.T

    def bases(self, server: None, local: Rows) -> Bases:
        """Return each client's components."""
        return Bases(own=(local.T,))


class Server(NamedTuple):
    """The server's state in global training."""

    shared: Rows
    curvature: Scalar | None  # for an automatic step size


class GlobalProbabilisticPCA(_Descent):
    """Most likely components, the same for all clients, by Stiefel gradient descent.

    Clients send gradients of their likelihood. The server steps along the mean and retracts.
    `result.shared` holds the components; `result.local` is None. If all clients have the same
    weight, `Pooled` has the same optimum.
    """

    start: Literal["pooled", "random"] = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        noise_variance: float | Array,
        *,
        step_size: float | Array | None = None,
        start: Literal["pooled", "random"] = "pooled",
    ):
        """Set up the algorithm.

        Args:
            rank: number of components, less than the number of features.
            noise_variance: variance s of the noise in each feature; the latent variance is one.
                With the default step size, the components do not depend on it.
            step_size: step size of the gradient steps. By default one over the largest eigenvalue
                of the mean of c S, c = n / (s (1 + s)), or, without a pooled start, over an upper
                bound of it.
            start: `"pooled"`: the top eigenvectors of that mean, which are the optimum. `"random"`:
                random components.

        Raises:
            ValueError: if the rank, the variance or the step size is not positive, or the start is
                unknown.
        """
        self._set(rank, noise_variance, step_size)
        check_name("start", start, ("pooled", "random"))
        self.start = start

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the rank or the warm start does not fit."""
        likelihood.check_proper_rank(self.rank, clients)
        check_warm_start(warm_start, clients, self.rank, None)

    def prepare(self, data: Samples | Moment, client_id, rounds) -> LikelihoodMember:
        """Return the client's second moment."""
        return likelihood.member(data, self.noise_variance, self.rank, rounds)

    def first_message(self, key, data: LikelihoodMember, warm_start) -> dict[str, PyTree]:
        """Return the second moment for a pooled start, or the curvature for the step size."""
        first = likelihood.pooled_message(data, self.start, warm_start)
        if self.step_size is None and not first:
            first["curvature"] = data.precision * data.moment.largest_eigenvalue()
        return first

    def server_init(self, key, first: dict[str, PyTree], like, warm_start) -> Server:
        """Return the components, and the curvature if the step size is automatic."""
        shared, curvature = likelihood.initial_shared(self.rank, key, first, like, warm_start), None
        if self.step_size is None:
            # The mean of largest eigenvalues bounds that of the mean, which a pooled start knows.
            curvature = first.get("curvature")
            if curvature is None:
                curvature = moment_received(first["moment"]).largest_eigenvalue()
        return Server(shared, curvature)

    def downlink(self, server: Server) -> Rows:
        """Return the components."""
        return server.shared

    def client_init(self, key, downlink: Rows, data: LikelihoodMember, warm_start) -> None:
        """Return None: there are no local components."""

    def client_step(self, key, downlink: Rows, local: None, data: LikelihoodMember):
        """Return the gradient of the likelihood."""
        # Projected already, while the paper projects the mean of gradients (Section V). All clients
        # are at the same U, where projecting is linear, so the two are equal.
        gradient, objective = self._evaluated(downlink, data)
        return gradient, local, {"objective": objective}

    def server_step(self, key, server: Server, uplink: Rows) -> tuple[Server, Diagnostics]:
        """Step along the mean gradient."""
        moved = likelihood.stepped(server.shared, uplink, self.step_size, server.curvature)
        return server._replace(shared=moved), {}

    def shared_result(self, server: Server) -> Frame:
        """Return the components."""
        return server.shared.T

    def bases(self, server: Server, local: None) -> Bases:
        """Return the components."""
        return Bases(shared=(server.shared.T,))
