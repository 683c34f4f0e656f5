"""Ways to differentiate a run: `rollout(..., adjoint=...)`.

* `unrolled()`, the default, differentiates through every round, however the run ended and however
  far it is from a solution. Use it for few rounds, for derivatives with respect to the start or a
  step size that matters, and for algorithms that never converge. Memory grows with the rounds.
* `checkpointed()` gives the same numbers in less memory by recomputing rounds. It also supports
  reverse derivatives of runs that end by `tol`.
* `implicit()` differentiates the equation that a solution satisfies, z = T(z, θ) with T a round,
  whatever rounds led there. It takes the memory of one round and the time of a few dozen. The
  derivative with respect to anything that does not influence a solution, such as the start or a
  step size at a stationary point, is exactly zero.

The gradient of a held-out error with respect to the prior variance, at a converged solution:

    >>> import jax, jaxfed as jf
    >>> data = jf.data.hierarchical_synthetic(
    ...     key=jax.random.key(0), clients=4, features=6, rank=2, samples=12, prior_variance=0.05
    ... )
    >>> clients = jf.Clients.from_samples(data.samples)
    >>> def error(prior_variance, report):
    ...     algorithm = jf.pca.HierarchicalPCA(2, 0.5, prior_variance, solver="eigenvectors")
    ...     adjoint = jf.adjoint.implicit(report=report)
    ...     run = jf.rollout(
    ...         algorithm, clients, rounds=300, key=jax.random.key(0), adjoint=adjoint
    ...     )
    ...     return jf.metrics.expected_reconstruction_error(run.result.local, data.local, 0.5)
    >>> gradient = jax.jit(jax.grad(error, argnums=(0, 1)))
    >>> slope, report = gradient(0.05, jf.adjoint.Report())
    >>> bool(report.residual < 1e-3)
    True
"""

from jaxfed.core.contract.bases import Bases as Bases
from jaxfed.core.derivatives.adjoint import implicit as implicit
from jaxfed.core.derivatives.implicit import Report as Report
from jaxfed.core.run.adjoint import Adjoint as Adjoint
from jaxfed.core.run.adjoint import checkpointed as checkpointed
from jaxfed.core.run.adjoint import unrolled as unrolled
