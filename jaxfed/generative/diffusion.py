"""Samples of diffusion models that were trained with `DenoisingLoss`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from jaxfed._checks import check_count, check_instance
from jaxfed.generative._training import Training, parameters_of
from jaxfed.linalg.blocks import map_in_blocks
from jaxfed.models.diffusion import DenoisingLoss, denoiser, generate


def sample(
    algorithm: Training,
    arrays: PyTree,
    count: int,
    *,
    key: Key[Array, ""],
    features: int | None = None,
    steps: int = 500,
    clients_per_block: int | None = None,
) -> Float[Array, "*clients n d"]:
    """Draw samples from models that were trained to undo a corruption.

    Args:
        algorithm: the algorithm that trained the models with a `DenoisingLoss`:
            `AdaptiveTraining.diffusion`, or `FedAvg` as its baseline.
        key: random key of the initial noise.
        arrays: the arrays of one model, such as `solution.result.shared`, or of all clients' models
            with a leading axis, such as `solution.result.local`.
        count: samples per model.
        features: features of a sample; None if the model has an `image_shape`.
        steps: steps of the sampler; the authors' code takes 500.
        clients_per_block: number of clients to sample from at the same time; None for all.

    Returns:
        The samples, `(count, features)` for one model and `(clients, count, features)` for many.

    Raises:
        ValueError: if the algorithm has another loss, the arrays are not the model's, or a count is
            not positive.
    """
    check_instance("algorithm", algorithm, Training, "an algorithm that trains a model")
    loss = algorithm.loss
    if not isinstance(loss, DenoisingLoss):
        raise ValueError(f"algorithm: wanted one with a DenoisingLoss, got {loss!r}")
    check_count("count", count)
    check_count("clients_per_block", 1 if clients_per_block is None else clients_per_block)
    if features is None:
        shape = getattr(algorithm.model_of(algorithm.arrays), "image_shape", None)
        if shape is None:
            raise ValueError("features: wanted a number, because the model has no image_shape")
        features = int(np.prod(shape))
    wanted, given = (
        [leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (algorithm.arrays, arrays)
    )
    many = [shape[1:] for shape in given] == wanted
    if not many and given != wanted:
        raise ValueError(
            f"arrays: wanted those of the model, of shapes {wanted}, or one for each client with "
            f"a leading axis, got {given}"
        )
    dtype = jnp.result_type(*jax.tree.leaves(parameters_of(arrays)))

    def draw(key, arrays):
        denoise = denoiser(algorithm.model_of(arrays), conditional=loss.conditional)
        return generate(
            denoise, loss.corruption, (count, features), key=key, steps=steps, dtype=dtype
        )

    if not many:
        return draw(key, arrays)
    clients = given[0][0]
    # Fold in positions, so that a client's samples do not depend on the number of clients.
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(clients))
    together = clients if clients_per_block is None else min(clients_per_block, clients)
    return map_in_blocks(lambda pair: draw(*pair), (keys, arrays), together)
