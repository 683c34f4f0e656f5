r"""Federated block Lanczos: the server combines the products of all rounds.

    client:  Y_i = A_i A_iᵀ B_k          server:  Rayleigh-Ritz in span [B_1 ... B_k], next block

A round sends as much as one of subspace iteration: one block down, and one block of products up, of
which the server needs only the sum. Subspace iteration uses only the last product. Here the answer
is the best one within the span of all blocks sent so far, a block Krylov space, and the next block
spans what all residuals

    A Aᵀ Q - Q T  =  W E_kᵀ,     T = Qᵀ A Aᵀ Q,     Q = [B_1 ... B_k]

have in common: the orthonormalized W. The scaled KKT violation of the current answer Q V, with V
the top eigenvectors of T, is |W E_kᵀ V|_F / |A|_F², which the server computes without a message.

Source: Golub & Underwood (1977), The block Lanczos method for computing eigenvalues; the restarts
are from Wu & Simon (2000), Thick-restart Lanczos method for large symmetric eigenvalue problems.
"""

from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxfed.contract import Diagnostics, check_count
from jaxfed.core.contract.reduction import Sum
from jaxfed.linalg import orthonormalize, top_eigenvectors
from jaxfed.linalg.division import ratio
from jaxfed.pca._consensus import ConsensusMember, Eigensolver, relative_change
from jaxfed.pca.components import Frame, RandomKey, frobenius_norm, positive
from jaxfed.pca.subspace_iteration import SubspaceIteration

# Columns that the server keeps by default. More save hardly any rounds on decaying spectra, and the
# eigenproblem of T must stay cheap beside the clients' products: LAPACK takes a millisecond for it,
# and many times that if other work keeps the CPU cores busy.
COLUMNS = 128
# In units of rounding error. Directions of W below NOISE are noise. The iteration has converged if
# the violation is below VIOLATION and the change of the captured energy is below CHANGE.
NOISE, VIOLATION, CHANGE = 32, 0.25, 4


class Totals(NamedTuple):
    """First uplink."""

    energy: Float[Array, ""]  # |A_i|_F²
    size: Float[Array, ""]  # number of samples


class LanczosServer(NamedTuple):
    """The server's state, in units in which |A|_F² is one."""

    basis: Float[Array, "features columns"]  # Q: the blocks sent, or Ritz vectors of earlier ones
    projected: Float[Array, "columns columns"]  # T; -1 on the diagonal of unused columns
    used: Int[Array, ""]  # number of leading columns of the basis in use
    rest: Frame  # W: the last block's product, minus its part in the span of the basis
    block: Frame  # B: the next block, orthonormal and orthogonal to the basis
    captured: Float[Array, ""]
    kkt: Float[Array, ""]
    converged: Int[Array, ""]  # 1 once only rounding errors would change
    totals: Totals  # |A|_F², and the total number of samples


class BlockLanczos(Eigensolver):
    r"""Principal components of all samples together by block Lanczos iteration.

    This is the default for federated PCA. A round costs as much as one of `SubspaceIteration`, but
    the number of rounds grows only like the square root of its number. There is nothing to tune.
    For singular values \(\xi^{1-i}\) with \(\xi = 1.01\) and ten components, 14 rounds are as
    accurate as about 340 rounds of subspace iteration.

    The server keeps `memory` blocks. When they are full, it continues from the best half of their
    span (a thick restart: eigenvectors of \(T\), recombined exactly and without a message). New
    blocks are orthogonalized against all kept blocks, so no component is computed twice. A
    direction of the next block that would be rounding noise is replaced by a random one, which also
    finds components orthogonal to a warm start.

    Every client must take part in each round, because products of different rounds are combined.
    For the same reason a lossy channel leaves an error as large as its own, and the violation,
    which the server computes from the products as received, is then far too small. The history
    describes the best components within the memory after each round; their objective is the mean
    squared reconstruction error per sample, over all samples. The result includes one more product
    with \(A A^\top\), which costs no message and only improves the components.

    From a random start, derivatives of unrolled rounds are as accurate as the components. After a
    converged warm start there are no rounds to unroll: use `adjoint=jf.adjoint.implicit()`.
    """

    needs_everybody = True  # products of different rounds are combined
    calls_libraries = True

    memory: int | None = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        *,
        memory: int | None = None,
        stop: Literal["kkt", "objective"] = "kkt",
    ):
        r"""Set up the algorithm.

        Args:
            rank: number of components p.
            memory: blocks of `rank` columns that the server keeps, at least three; by default 128
                columns or six blocks, whichever is more. At most as many columns as features.
            stop: what `tol` applies to. `"kkt"`: the larger of the scaled KKT violation
                \(|(I - ZZ^\top) A A^\top Z|_F / |A|_F^2\) and the relative change of the
                captured energy \(f(Z) = \sum_i |A_i^\top Z|_F^2\). `"objective"`: only that change,
                rule (27) of Wang, Liu & Zhang (2022).

        Raises:
            ValueError: if `rank` is not a positive whole number, `memory` is not a whole number of
                at least three, or `stop` is unknown.
        """
        self._set(rank, stop)
        if memory is not None:
            check_count("memory", memory, least=3)
        self.memory = memory

    def through(self) -> SubspaceIteration:
        """Return subspace iteration, which has the same solution."""
        return SubspaceIteration(self.rank, retraction="polar")

    def _products(self, rounds: int) -> int:
        return min(rounds, 16)  # it converges in far fewer rounds than a run allows

    def _blocks(self, features: int) -> int:
        wanted = max(6, COLUMNS // self.rank) if self.memory is None else self.memory
        return min(wanted, -(-features // self.rank))

    def first_message(self, key, data: ConsensusMember, warm_start) -> Sum:
        """Return the energy and the number of the samples."""
        # The energy is the unit of all that the server keeps, and the count turns it into an error
        # per sample.
        return Sum(Totals(data.moment.trace, data.size))

    def server_init(self, key, first: Totals, like, warm_start) -> LanczosServer:
        """Return an empty memory and a first block: the warm start's, or random."""
        features, dtype = like.moment.dim, like.moment.trace.dtype
        if warm_start is None:
            block = jax.random.normal(key, (features, self.rank), dtype)
        else:
            block = warm_start.shared.astype(dtype)
        columns = self._blocks(features) * self.rank
        unknown = jnp.full((), jnp.nan, dtype)
        return LanczosServer(
            basis=jnp.zeros((features, columns), dtype),
            # A Aᵀ has no negative eigenvalue, so -1 puts unused columns behind all Ritz vectors.
            projected=-jnp.eye(columns, dtype=dtype),
            used=jnp.zeros((), jnp.int32),
            rest=jnp.zeros((features, self.rank), dtype),
            block=orthonormalize(block),
            captured=unknown,
            kkt=unknown,
            converged=jnp.zeros((), jnp.int32),
            totals=first,
        )

    def client_init(self, key, downlink: Frame, data: ConsensusMember, warm_start) -> None:
        """Return None: clients keep no state."""

    def downlink(self, server: LanczosServer) -> Frame:
        """Return the next block."""
        return server.block

    def client_step(self, key, downlink: Frame, local: None, data: ConsensusMember):
        """Multiply the block by the client's matrix."""
        product = data.moment.mv(downlink)
        # Only the server knows the components, and its objective replaces this one in the history.
        # The energy in the block costs nothing; the error would take another pass over the samples.
        return Sum(product), local, {"objective": jnp.sum(downlink * product)}

    def server_step(
        self, key, server: LanczosServer, uplink: Frame
    ) -> tuple[LanczosServer, Diagnostics]:
        """Add a block to the memory, and compute the next one."""
        # After convergence, more rounds would only add rounding errors, also to derivatives.
        new = lax.cond(
            server.converged > 0, lambda: server, lambda: self._extended(key, server, uplink)
        )
        (energy, size), measure = server.totals, relative_change(server.captured, new.captured)
        if self.stop == "kkt":
            measure = jnp.maximum(measure, new.kkt)
        return new, {
            "objective": jnp.maximum(energy * (1 - new.captured) / jnp.maximum(size, 1), 0),
            "captured": energy * new.captured,
            "kkt_violation": new.kkt,
            "stopping_measure": measure,
        }

    def _extended(self, key: RandomKey, server: LanczosServer, uplink: Frame) -> LanczosServer:
        basis, projected, used, _, block, before = server[:6]
        features, columns = basis.shape
        # In these units eigenvalues add up to at most one, whatever the scale of the data.
        product = ratio(uplink, server.totals.energy)
        # With a column for every feature, a full memory spans everything, and no restart follows.
        if columns < features:
            memory = basis, projected, used
            full = used + self.rank > columns
            basis, projected, used = lax.cond(full, self._restarted, lambda *kept: kept, *memory)

        basis = lax.dynamic_update_slice_in_dim(basis, block, used, axis=1)
        # Against all of Q, not only the last two blocks: after a restart T has an arrow's shape,
        # and with rounding the blocks would lose their orthogonality.
        strip = basis.T @ product  # Qᵀ A Aᵀ B
        rest = product - basis @ strip  # W
        # Zero columns, where the last block has no more dimensions to fill, count as unused.
        unused = jnp.diag((jnp.sum(block**2, axis=0) < 0.5).astype(block.dtype))
        corner = lax.dynamic_slice_in_dim(strip, used, self.rank) - unused
        strip = lax.dynamic_update_slice_in_dim(strip, corner, used, axis=0)
        projected = lax.dynamic_update_slice_in_dim(projected, strip, used, axis=1)
        projected = lax.dynamic_update_slice_in_dim(projected, strip.T, used, axis=0)

        values, vectors = self._ritz(projected, used)
        kkt = frobenius_norm(rest @ lax.dynamic_slice_in_dim(vectors, used, self.rank))
        captured = jnp.sum(values)
        used = used + self.rank
        unit = jnp.finfo(basis.dtype).eps * captured
        still = jnp.abs(captured - before) <= CHANGE * unit  # False in the first round: NaN
        converged = (still & (kkt <= VIOLATION * unit)) | (used >= features)
        return LanczosServer(
            basis=basis,
            projected=projected,
            used=used,
            rest=rest,
            block=self._next(key, basis, rest, values[0], features - used),
            captured=captured,
            kkt=kkt,
            converged=converged.astype(jnp.int32),
            totals=server.totals,
        )

    def _ritz(
        self, projected: Float[Array, "columns columns"], used: Int[Array, ""]
    ) -> tuple[Float[Array, " rank"], Float[Array, "columns rank"]]:
        """Return the top eigenvalues and eigenvectors of T, or of its first half if that is all."""
        columns = len(projected)
        half = (columns // self.rank + 1) // 2 * self.rank

        def of_half():
            values, vectors = top_eigenvectors(projected[:half, :half], self.rank)
            return values, jnp.pad(vectors, ((0, columns - half), (0, 0)))

        # LAPACK takes a fifth of the time for half the columns.
        return lax.cond(
            used + self.rank <= half, of_half, lambda: top_eigenvectors(projected, self.rank)
        )

    def _restarted(
        self, basis: Array, projected: Array, used: Int[Array, ""]
    ) -> tuple[Array, Array, Array]:
        """Return a half-empty memory with the best half of its span, recombined exactly."""
        kept = (len(projected) // self.rank + 1) // 2 * self.rank
        empty = len(projected) - kept
        # All residuals lie in the span of the next block, so T is still the projection of A Aᵀ.
        _, vectors = top_eigenvectors(projected, kept)
        turned = vectors.T @ projected @ vectors
        return (
            jnp.pad(basis @ vectors, ((0, 0), (0, empty))),
            jnp.pad(turned + jnp.eye(kept, dtype=turned.dtype), ((0, empty), (0, empty)))
            - jnp.eye(len(projected), dtype=turned.dtype),
            jnp.full_like(used, kept),
        )

    def _next(
        self, key: RandomKey, basis: Array, rest: Frame, scale: Array, left: Int[Array, ""]
    ) -> Frame:
        """Return the next block: an orthonormal basis of the residuals W, orthogonal to Q.

        `scale` is the largest known eigenvalue, which noise is compared with. Only `left`
        dimensions remain outside the basis; columns beyond them are zero.
        """
        eps = jnp.finfo(rest.dtype).eps
        # Rotated so that noise comes last, since the first columns of a QR factor do not depend on
        # the others. The rotation does not change the span, so it needs no derivative.
        gram = lax.stop_gradient(rest.T @ rest)
        rest = rest @ top_eigenvectors(gram, self.rank)[1]
        size = jnp.linalg.norm(lax.stop_gradient(rest), axis=0)
        clear = size > NOISE * eps * jnp.where(scale > 0, scale, 1)
        random = lax.cond(  # drawing takes as long as a product with the basis
            jnp.all(clear),
            lambda: jnp.zeros_like(rest),
            lambda: jax.random.normal(key, rest.shape, rest.dtype) / len(rest) ** 0.5,
        )
        block = jnp.where(clear, rest / jnp.where(clear, size, 1), random)
        some = (jnp.arange(self.rank) < left).astype(block.dtype)

        def outside(_, block):
            return orthonormalize((block - basis @ (basis.T @ block)) * some) * some

        # One pass leaves rounding errors as large as the part projected out. A loop, since two
        # copies take longer to compile.
        return lax.fori_loop(0, 2, outside, block)

    def shared_result(self, server: LanczosServer) -> Frame:
        """Return the best components within the memory, Q V, improved by one more product."""
        values, vectors = top_eigenvectors(server.projected, self.rank)
        last = lax.dynamic_slice_in_dim(vectors, server.used - self.rank, self.rank)
        # A Aᵀ Q V = Q V (VᵀT V) + W E_kᵀ V needs no message. The small multiple of the identity
        # prevents zero columns if A Aᵀ has a null space.
        more = jnp.finfo(values.dtype).eps ** 0.5 * positive(values[0])
        within = server.projected @ vectors
        within = vectors @ (vectors.T @ within) + more * vectors
        return orthonormalize(server.basis @ within + server.rest @ last)
