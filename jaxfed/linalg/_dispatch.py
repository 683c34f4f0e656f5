"""The one door from the library to the hand-written kernels of `jaxfed_kernels`.

What a program is lowered for decides between a kernel and its plain version, and not where it is
traced: programs for accelerators can be made on machines that have none.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def second_moment_product(x: Float[Array, "n d"], w: Array, *, wide: bool) -> Array:
    """The product `Xᵀ (X W)`, on TPUs in one pass over the samples where that reads less.

    Differentiable in both modes and at every order; the derivative with respect to `w` is the same
    product. Mapped over clients it is one kernel for all; mapped over runs that share the samples
    it still reads them once.

    Args:
        x: the samples.
        w: a matrix `(d, r)`, or if `wide` its transpose `(r, d)`, as is then the product.
        wide: which of the two, because processors take half as long again for the other's product.
    """
    from jaxfed_kernels import second_moment_reads_less

    rank = w.shape[0 if wide else 1]
    if w.dtype != jnp.float32 or not second_moment_reads_less(*x.shape, rank, x.dtype):
        return _two_products(x, w, wide)
    return _product(x, w, wide)


def _two_products(x: Float[Array, "n d"], w: Array, wide: bool) -> Array:
    return _matmul(_matmul(w, x.T), x) if wide else _matmul(x.T, _matmul(x, w))


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _product(x, w, wide):
    return lax.platform_dependent(
        x, w,
        tpu=_one_pass if wide else lambda x, w: _one_pass(x, w.T).T,
        default=partial(_two_products, wide=wide),
    )  # fmt: skip


# X^T X is symmetric, so the derivative with respect to W is its own transpose. JAX is told by way
# of the linear equations Y - D Z = A, Z = B, which are symmetric: at A = 0 their solution is
# Y = D B, see `jaxfed.linalg.polar`.
@partial(_product.defjvp, symbolic_zeros=True)
def _(wide, primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    change = jnp.zeros_like(w)
    if not isinstance(dw, jax.custom_derivatives.SymbolicZero):
        change = lax.custom_linear_solve(
            lambda pair: jnp.stack([pair[1] - _two_products(x, pair[0], wide), pair[0]]),
            jnp.stack([change, dw]),
            lambda _, sides: jnp.stack([sides[1], sides[0] + _product(x, sides[1], wide)]),
            symmetric=True,
        )[1]
    if not isinstance(dx, jax.custom_derivatives.SymbolicZero):
        change += jax.jvp(lambda x: _two_products(x, w, wide), (x,), (dx,))[1]
    return _product(x, w, wide), change


@jax.custom_batching.custom_vmap
def _one_pass(x: Float[Array, "*batch n d"], w: Float[Array, "*batch r d"]):
    from jaxfed_kernels import second_moment, second_moment_reads_less

    *batch, n, d = x.shape
    r = w.shape[-2]
    if not second_moment_reads_less(n, d, r, x.dtype):  # more rows than before, of several runs
        return _matmul(_matmul(w, x.mT), x)
    return second_moment(x.reshape(-1, n, d), w.reshape(-1, r, d)).reshape(*batch, r, d)


@_one_pass.def_vmap
def _(axis_size, in_batched, x, w):
    samples, thin = in_batched
    if not thin:
        w = jnp.broadcast_to(w, (axis_size, *w.shape))
    if samples:
        return _one_pass(x, w), True
    # The rows of all runs together, for the same samples.
    r = w.shape[-2]
    joined = jnp.moveaxis(w, 0, -3).reshape(*w.shape[1:-2], axis_size * r, w.shape[-1])
    product = _one_pass(x, joined)
    return jnp.moveaxis(product.reshape(*w.shape[1:-2], axis_size, r, w.shape[-1]), -3, 0), True


@jax.custom_batching.custom_vmap
def inverse_sqrt_kernel(
    gram: Float[Array, "*batch r r"],
) -> tuple[Float[Array, "*batch r r"], Float[Array, "*batch"]]:
    """Inverse square roots of symmetric positive definite matrices by the kernel.

    Mapping it with `jax.vmap`, however often, makes one call of the kernel on one longer batch.

    Returns:
        The inverse square roots, and the error to expect of each, as `|Z G Z - I|_F`.
    """
    from jaxfed_kernels import inverse_sqrt

    *batch, r, _ = gram.shape
    interpret = jax.default_backend() == "cpu"
    inverse, defect = inverse_sqrt(gram.reshape(-1, r, r), interpret=interpret)
    squares = jnp.sum(inverse * inverse, axis=(1, 2))
    mean = jnp.trace(gram.reshape(-1, r, r), axis1=1, axis2=2)
    error = defect + jnp.finfo(gram.dtype).eps * squares * mean
    return inverse.reshape(gram.shape), error.reshape(tuple(batch))


@inverse_sqrt_kernel.def_vmap
def _(axis_size, in_batched, gram):
    del axis_size, in_batched
    return inverse_sqrt_kernel(gram), (True, True)
