"""The only module that calls the hand-written kernels of `jaxfed_kernels`.

A kernel is one implementation of a function among others; `jaxfed.linalg.platforms` chooses.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxfed_kernels import LARGEST_RANK, inverse_sqrt, second_moment, second_moment_reads_less
from jaxtyping import Array, Float

from jaxfed.linalg.platforms import Maps, in_one_row, mapped_sizes, per_platform, with_all_axes
from jaxfed.linalg.precision import chosen_precision, client_matmul

# With at least this many features, `(X W)ᵀ X` takes a CPU a third of the time of `Xᵀ (X W)`, whose
# left factor it copies (bench/speed/larger_than_memory.py).
_MANY_FEATURES = 64


def second_moment_product(x: Float[Array, "n d"], w: Array, *, wide: bool) -> Array:
    """The product `Xᵀ (X W)`; on TPUs in one pass over the samples if that reads less.

    Differentiable in both modes and at every order; the derivative with respect to `w` is the same
    product. Mapped over clients, it is one kernel for all; mapped over runs that share the samples,
    it still reads them once.

    Args:
        x: the samples. If bfloat16, they are read as such and converted to the type of `w`.
        w: a matrix `(d, r)`, or if `wide` its transpose `(r, d)`; the product has the same shape.
        wide: which of the two. On a CPU, transposing takes 1.5 times as long as the product.
    """
    (n, d), rank = x.shape, w.shape[0 if wide else 1]
    if w.dtype == jnp.float32 and second_moment_reads_less(n, d, rank, x.dtype):
        return _product(x, w, wide)
    return _two_products(x, w, wide=wide, precision=chosen_precision())


def _two_products(
    x: Float[Array, "n d"], w: Array, *, wide: bool, precision: lax.Precision
) -> Array:
    x = x.astype(jnp.promote_types(x.dtype, w.dtype))
    dot = partial(client_matmul, precision=precision)
    if x.shape[1] < _MANY_FEATURES:
        return dot(dot(w, x.T), x) if wide else dot(x.T, dot(x, w))
    scores = dot(x, w.T if wide else w)
    # Without the barrier the compiler would transpose the product back.
    rows = ((0,), (0,)), ((), ())
    product = lax.optimization_barrier(lax.dot_general(scores, x, rows, precision=precision))
    return product if wide else product.T


def _in_one_pass(
    maps: Maps, x: Float[Array, "*clients n d"], w: Array, *, wide: bool, precision: lax.Precision
) -> Array | None:
    sizes = mapped_sizes(maps, (x, w))
    # Axes lie outermost first, `maps` innermost first.
    mapped = [which[0] for which in reversed(maps)]
    clients = [place for place, has in enumerate(mapped) if has]
    runs = [place for place, has in enumerate(mapped) if not has]
    w = with_all_axes(maps, (x, w if wide else w.mT))[1]
    (n, d), r = x.shape[-2:], w.shape[-2]
    # Treat runs that share the samples as more rows of one product.
    rows = math.prod(sizes[place] for place in runs) * r
    if not second_moment_reads_less(n, d, rows, x.dtype):
        return None
    clients_first, in_front = (*clients, *runs), tuple(range(len(sizes)))
    w = jnp.moveaxis(jnp.broadcast_to(w, (*sizes, r, d)), clients_first, in_front)
    many = math.prod(sizes[place] for place in clients)
    product = second_moment(x.reshape(many, n, d), w.reshape(many, rows, d), precision=precision)
    product = jnp.moveaxis(product.reshape(w.shape), in_front, clients_first)
    return product if wide else product.mT


_chosen_product = per_platform(_two_products, kernels={"tpu": _in_one_pass})


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _product(x, w, wide):
    return _chosen_product(x, w, wide=wide, precision=chosen_precision())


# XᵀX is symmetric, so the derivative D with respect to W is its own transpose. To tell JAX, we
# solve the symmetric linear equations Y - D Z = A, Z = B, whose solution at A = 0 is Y = D B; see
# `jaxfed.linalg.polar`.
@partial(_product.defjvp, symbolic_zeros=True)
def _(wide, primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    plain = partial(_two_products, wide=wide, precision=chosen_precision())
    # Symbolic zeros are skipped, since what comes from a change of the samples takes further passes
    # over them.
    change = jnp.zeros_like(w)
    if not isinstance(dw, jax.custom_derivatives.SymbolicZero):
        change = lax.custom_linear_solve(
            lambda pair: jnp.stack([pair[1] - plain(x, pair[0]), pair[0]]),
            jnp.stack([change, dw]),
            lambda _, sides: jnp.stack([sides[1], sides[0] + _product(x, sides[1], wide)]),
            symmetric=True,
        )[1]
    if not isinstance(dx, jax.custom_derivatives.SymbolicZero):
        change += jax.jvp(lambda x: plain(x, w), (x,), (dx,))[1]
    return _product(x, w, wide), change


InverseSqrt = Callable[[Array], tuple[Array, Array]]


def inverse_sqrt_of_many(plain: InverseSqrt, *, cuda: bool = False) -> InverseSqrt:
    """The inverse square root of a symmetric positive definite matrix, by a kernel for many.

    TPUs use the kernel for matrices in single precision that fit: by the compiler's count, the few
    products as single operations read and write hundreds of times as much. However often `jax.vmap`
    maps it, the kernel is called once, on one longer batch.

    `plain` is the default implementation. Like the result, it has no derivative and returns the
    inverse square root Z and the expected error, `|Z G Z - I|_F`. With `cuda`, CUDA devices use a
    kernel too.
    """
    kernels = {"tpu": partial(_inverse_sqrts, inverse_sqrt)}
    return per_platform(plain, kernels=kernels | ({"cuda": _inverse_sqrts_on_cuda} if cuda else {}))


def _inverse_sqrts(
    kernel: InverseSqrt, maps: Maps, gram: Float[Array, "*batch r r"]
) -> tuple[Array, Array] | None:
    if not maps or gram.shape[-1] > LARGEST_RANK or gram.dtype != jnp.float32:
        return None
    inverse, defect = kernel(*in_one_row(maps, [gram]))
    inverse, defect = inverse.reshape(gram.shape), defect.reshape(gram.shape[:-2])
    # The kernel measures the products with its own iterates; add the rounding of the Gram matrix
    # itself, as `_newton_schulz._inverse_sqrt` does.
    trace = jnp.trace(gram, axis1=-2, axis2=-1)
    squares = jnp.sum(inverse * inverse, axis=(-2, -1))
    return inverse, defect + jnp.finfo(gram.dtype).eps * squares * trace


def _inverse_sqrts_on_cuda(
    maps: Maps, gram: Float[Array, "*batch r r"]
) -> tuple[Array, Array] | None:
    try:  # Pallas changes from one version of JAX to the next
        from jaxfed_kernels.inverse_sqrt_cuda import compiles_here, inverse_sqrt_cuda

        return _inverse_sqrts(inverse_sqrt_cuda, maps, gram) if compiles_here() else None
    except (AttributeError, ImportError, TypeError):
        return None
