"""How a run is differentiated: `rollout(..., adjoint=...)`.

* `unrolled()`, the default, goes back through every round, whatever ended the run or how far from a
  solution it is. That is what one wants for few rounds, for derivatives by the start or a step size
  that matters, and for algorithms that never settle. Memory grows with the rounds.
* `checkpointed()` gives the same numbers in less memory, for more rounds computed again; a run that
  ends by `tol` has a reverse derivative too.
* `implicit()` differentiates the equation that a solution solves, z = T(z, θ) with T a round, and
  knows nothing of the rounds that led there. Memory is that of a round, time that of a few dozen
  rounds, and what does not influence a solution, as the start or a step size at a stationary point,
  has a derivative of exactly zero.

The gradient of a held-out error by the prior variance, at a converged solution:

    >>> import jax, jaxfed as jf
    >>> data = jf.data.hierarchical_synthetic(
    ...     jax.random.key(0), clients=4, features=6, rank=2, samples=12, prior_variance=0.05
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
from jaxfed.core.contract.fixed_point import DifferentiatedThrough as DifferentiatedThrough
from jaxfed.core.contract.fixed_point import HasBases as HasBases
from jaxfed.core.derivatives.adjoint import implicit as implicit
from jaxfed.core.derivatives.implicit import Report as Report
from jaxfed.core.run.adjoint import Adjoint as Adjoint
from jaxfed.core.run.adjoint import checkpointed as checkpointed
from jaxfed.core.run.adjoint import unrolled as unrolled
