"""The one door from the library to the hand-written kernels of `jaxfed_kernels`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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
