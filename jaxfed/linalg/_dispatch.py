"""The one door from the library to the hand-written kernels of `jaxfed_kernels`.

What a program is lowered for decides between a kernel and its plain version, and not where it is
traced: programs for accelerators can be made on machines that have none.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxfed_kernels import LARGEST_RANK, inverse_sqrt, second_moment, second_moment_reads_less
from jaxtyping import Array, Float

from jaxfed.linalg._platform import Choice
from jaxfed.linalg._precision import chosen_precision, data_cross, data_matmul

# Features from which a processor takes a third of the time for `(X W)ᵀ X` that it takes for
# `Xᵀ (X W)`, whose left side it copies (bench/larger_than_memory.py).
_MANY = 64


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
    (n, d), rank = x.shape, w.shape[0 if wide else 1]
    if w.dtype != jnp.float32 or not second_moment_reads_less(n, d, rank, x.dtype):
        return _two_products(x, w, wide)
    return _product(x, w, wide)


def _two_products(x: Float[Array, "n d"], w: Array, wide: bool) -> Array:
    if x.shape[1] < _MANY:
        return data_matmul(data_matmul(w, x.T), x) if wide else data_matmul(x.T, data_matmul(x, w))
    scores = data_matmul(x, w.T if wide else w)
    # Behind the barrier, or the compiler would turn the product around again.
    product = lax.optimization_barrier(data_cross(scores, x))
    return product if wide else product.T


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
    *batch, n, d = x.shape
    r = w.shape[-2]
    if not second_moment_reads_less(n, d, r, x.dtype):  # more rows than before, of several runs
        return data_matmul(data_matmul(w, x.mT), x)
    clients = x.reshape(-1, n, d), w.reshape(-1, r, d)
    return _of_clients.bind(*clients, precision=chosen_precision()).reshape(*batch, r, d)


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


# A primitive, because what a kernel may be part of is known when a program is lowered.
_of_clients = Primitive("second_moment")


@_of_clients.def_impl
def _(x, w, *, precision):
    return jax.jit(partial(_of_clients.bind, precision=precision))(x, w)


@_of_clients.def_abstract_eval
def _(x, w, *, precision):
    del x, precision
    return w


def _kernel_of_clients(x, w, *, precision):
    return second_moment(x, w, precision=precision)


def _plain_of_clients(x, w, *, precision):
    del precision
    return data_matmul(data_matmul(w, x.mT), x)


InverseSqrt = Callable[[Array], tuple[Array, Array]]


def inverse_sqrt_of_many(plain: InverseSqrt, *, cuda: bool = False) -> InverseSqrt:
    """The inverse square root of a symmetric positive definite matrix, of many by a kernel.

    On TPUs, for matrices of single precision that fit: as operations of their own the few products
    read and write hundreds of times what the kernel does, by the compiler's count. Mapping it with
    `jax.vmap`, however often, makes one call of the kernel on one longer batch.

    Args:
        plain: what finds it elsewhere, and the error to expect, as `|Z G Z - I|_F`.
        cuda: on CUDA devices too.

    Returns:
        A function like `plain`, without a derivative.
    """
    return lambda gram: tuple(_inverse_sqrt.bind(gram, plain=plain, cuda=cuda))


def _plain(gram: Float[Array, "*batch r r"], *, plain: InverseSqrt, cuda: bool):
    del cuda
    for _ in gram.shape[:-2]:
        plain = jax.vmap(plain)
    return plain(gram)


# A primitive, because `lax.platform_dependent` would trace the kernel also where none will run,
# which takes twice as long as all else of a polar factor.
_inverse_sqrt = Choice("inverse_sqrt", _plain)


@_inverse_sqrt.def_impl
def _(gram, **how):
    return jax.jit(partial(_inverse_sqrt.bind, **how))(gram)


@_inverse_sqrt.def_abstract_eval
def _(gram, **_):
    return gram, gram.update(shape=gram.shape[:-2])


def _batched(arguments, axes, **how):
    return _inverse_sqrt.bind(jnp.moveaxis(arguments[0], axes[0], 0), **how), (0, 0)


def _by_kernel(platform: str, gram: Float[Array, "*batch r r"], *, plain, cuda):
    *batch, r, _ = gram.shape
    kernel = _kernel(platform, cuda)
    if not batch or r > LARGEST_RANK or gram.dtype != jnp.float32 or kernel is None:
        return _plain(gram, plain=plain, cuda=cuda)
    inverse, defect = kernel(gram.reshape(-1, r, r))
    inverse, defect = inverse.reshape(gram.shape), defect.reshape(tuple(batch))
    mean = jnp.trace(gram, axis1=-2, axis2=-1)
    squares = jnp.sum(inverse * inverse, axis=(-2, -1))
    return inverse, defect + jnp.finfo(gram.dtype).eps * squares * mean


def _kernel(platform: str, cuda: bool) -> Callable | None:
    if platform == "tpu":
        return inverse_sqrt
    if cuda:
        with contextlib.suppress(ImportError):  # of a way through Triton that JAX deprecates
            from jaxfed_kernels.inverse_sqrt_cuda import inverse_sqrt_cuda

            return inverse_sqrt_cuda
    return None


def _derivative(primals, tangents, **how):
    # Of derivatives of higher order; forward, as it is a loop.
    (gram,), (change,) = primals, tangents
    change = ad.instantiate_zeros(change)
    return jax.jvp(lambda gram: list(_plain(gram, **how)), (gram,), (change,))


def _unless_partitioned(kernel: Callable, plain: Callable) -> Callable:
    """The lowering rule by a kernel, or the plain one where the compiler parts the program.

    It cannot part a kernel among devices, as it does what is given it in arrays that lie on several
    of them, outside of `jax.shard_map`.
    """
    rules = mlir.lower_fun(kernel), mlir.lower_fun(plain)

    def rule(context: mlir.LoweringRuleContext, *arguments: Any, **how: Any) -> Any:
        devices: Any = context.module_context.axis_context
        manual = getattr(devices, "manual_axes", None)
        if manual is None:
            parted = getattr(devices, "num_devices", 1) != 1
        else:
            parted = frozenset(manual) != frozenset(devices.mesh.axis_names)
        return rules[parted](context, *arguments, **how)

    return rule


batching.primitive_batchers[_inverse_sqrt] = _batched
ad.primitive_jvps[_inverse_sqrt] = _derivative
mlir.register_lowering(_inverse_sqrt, mlir.lower_fun(_plain))
for _platform in ("tpu", "cuda"):
    _rule = _unless_partitioned(partial(_by_kernel, _platform), _plain)
    mlir.register_lowering(_inverse_sqrt, _rule, platform=_platform)

mlir.register_lowering(_of_clients, mlir.lower_fun(_kernel_of_clients, multiple_results=False))
mlir.register_lowering(
    _of_clients,
    _unless_partitioned(
        lambda *given, **how: (_kernel_of_clients(*given, **how),),
        lambda *given, **how: (_plain_of_clients(*given, **how),),
    ),
    platform="tpu",
)
