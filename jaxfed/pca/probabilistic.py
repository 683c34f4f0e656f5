"""Maximum likelihood PCA by gradient descent, for each client alone or for all together.

Source: Ozkara, Huang & Diggavi (2023), Personalized PCA for federated heterogeneous data, where
they are called local and global training.
"""

from typing import Literal, NamedTuple, final

import equinox as eqx
from jaxtyping import Array, PyTree

from jaxfed.contract import Algorithm, Bases, Diagnostics, HasBases, check_name, hyperparameter
from jaxfed.core.clients.samples import Samples
from jaxfed.linalg import Moment
from jaxfed.pca import likelihood
from jaxfed.pca.components import Frame, Rows, check_start, moment_received
from jaxfed.pca.likelihood import Member, Number, Scalar, check_settings


class _Descent(Algorithm, HasBases):
    """Gradient descent of the negative log-likelihood of components."""

    noise_variance: Array
    step_size: Array | None
    rank: int = eqx.field(static=True)

    @final
    def _set(self, rank: int, noise_variance: Number, step_size: Number | None) -> None:
        check_settings(rank, noise_variance, step_size)
        self.rank, self.noise_variance = rank, hyperparameter(noise_variance)
        self.step_size = hyperparameter(step_size)

    @final
    def _evaluated(self, frame: Rows, data: Member) -> tuple[Rows, Scalar]:
        """The likelihood's gradient, and the objective."""
        noise = self.noise_variance.astype(frame.dtype)
        objective = likelihood.negative_log_likelihood(data.moment, frame, noise)
        return likelihood.likelihood_gradient(data.moment, frame, data.precision), objective


class LocalProbabilisticPCA(_Descent):
    """Each client's most likely components, by Stiefel gradient descent without any exchange.

    `result.local` are the components, `result.shared` is None. The optimum is that of `Local`.
    """

    def __init__(
        self, rank: int, noise_variance: float | Array, *, step_size: float | Array | None = None
    ):
        """Set up the algorithm.

        Args:
            rank: number of components of each client, less than the number of features.
            noise_variance: variance s of the noise in each feature; the latent variance is one.
            step_size: of the gradient steps; None for 1 / (c λ) with the client's precision
                c = n / (s (1 + s)) and largest eigenvalue λ, stable up to twice that. A client
                whose samples are all zero takes no step.

        Raises:
            ValueError: for a rank, variance or step size that is not positive.
        """
        self._set(rank, noise_variance, step_size)

    def check(self, clients, start) -> None:
        """Raise a `ValueError` for a rank or a warm start that does not fit."""
        likelihood.check_proper_rank(self.rank, clients)
        check_start(start, clients, None, self.rank)

    def prepare(self, data: Samples | Moment, client_id, rounds) -> Member:
        """The client's second moment, and its curvature where the step size comes from it."""
        automatic = self.step_size is None
        return likelihood.member(data, self.noise_variance, self.rank, rounds, curvature=automatic)

    def server_init(self, key, first: None, like, start) -> None:
        """Nothing is shared."""

    def downlink(self, server: None) -> None:
        """Nothing is sent."""

    def client_init(self, key, downlink: None, data: Member, start) -> Rows:
        """A warm start's components, or random ones."""
        return likelihood.first_local(self.rank, key, data, start)

    def client_step(self, key, downlink: None, local: Rows, data: Member):
        """A gradient step."""
        gradient, objective = self._evaluated(local, data)
        moved = likelihood.stepped(local, gradient, self.step_size, data.curvature)
        return None, moved, {"objective": objective}

    def server_step(self, key, server: None, uplink: None) -> tuple[None, Diagnostics]:
        """Nothing changes."""
        return server, {}

    def client_result(self, downlink: None, local: Rows, data: Member) -> Frame:
        """The client's components."""
        return local.T

    def bases(self, server: None, local: Rows) -> Bases:
        """Each client's components."""
        return Bases(own=(local.T,))


class Server(NamedTuple):
    """The server's state in global training."""

    shared: Rows
    curvature: Scalar | None  # where the step size comes from it


class GlobalProbabilisticPCA(_Descent):
    """The same most likely components for all clients, by Stiefel gradient descent.

    Clients send their likelihood's gradients; the server steps along the mean and retracts.
    `result.shared` are the components, `result.local` is None. The optimum is that of `Pooled`
    where each client weighs the same.
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
            step_size: of the gradient steps; None for one over the largest eigenvalue of the mean
                of c S, c = n / (s (1 + s)), or, without a pooled start, over a bound of it.
            start: `"pooled"`: at the top eigenvectors of that mean, the optimum. `"random"`.

        Raises:
            ValueError: for a rank, variance or step size that is not positive, and another start.
        """
        self._set(rank, noise_variance, step_size)
        check_name("start", start, ("pooled", "random"))
        self.start = start

    def check(self, clients, start) -> None:
        """Raise a `ValueError` for a rank or a warm start that does not fit."""
        likelihood.check_proper_rank(self.rank, clients)
        check_start(start, clients, self.rank, None)

    def prepare(self, data: Samples | Moment, client_id, rounds) -> Member:
        """The client's second moment."""
        return likelihood.member(data, self.noise_variance, self.rank, rounds)

    def first_message(self, key, data: Member, start) -> dict[str, PyTree]:
        """The second moment for the pooled start, or the curvature where the step size needs it."""
        first = likelihood.pooled_message(data, self.start, start)
        if self.step_size is None and not first:
            first["curvature"] = data.precision * data.moment.largest_eigenvalue()
        return first

    def server_init(self, key, first: dict[str, PyTree], like, start) -> Server:
        """The components, and the curvature where the step size comes from it."""
        shared, curvature = likelihood.first_shared(self.rank, key, first, like, start), None
        if self.step_size is None:
            # A mean of largest eigenvalues bounds that of the mean, which a pooled start knows.
            curvature = first.get("curvature")
            if curvature is None:
                curvature = moment_received(first["moment"]).largest_eigenvalue()
        return Server(shared, curvature)

    def downlink(self, server: Server) -> Rows:
        """The components."""
        return server.shared

    def client_init(self, key, downlink: Rows, data: Member, start) -> None:
        """No local components."""

    def client_step(self, key, downlink: Rows, local: None, data: Member):
        """The likelihood's gradient."""
        gradient, objective = self._evaluated(downlink, data)
        return gradient, local, {"objective": objective}

    def server_step(self, key, server: Server, uplink: Rows) -> tuple[Server, Diagnostics]:
        """A step along the mean gradient."""
        moved = likelihood.stepped(server.shared, uplink, self.step_size, server.curvature)
        return server._replace(shared=moved), {}

    def shared_result(self, server: Server) -> Frame:
        """The components."""
        return server.shared.T

    def bases(self, server: Server, local: None) -> Bases:
        """The components."""
        return Bases(shared=(server.shared.T,))
