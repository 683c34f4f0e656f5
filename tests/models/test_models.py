"""Convolutional networks: their sizes, what they compute, what they refuse."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf
from jaxfed.generative import FedAvg
from jaxfed.models import ConvolutionalAutoencoder, UNet, reconstruction_loss
from jaxfed.models._convolution import Convolution, TransposedConvolution
from tests.references import networks

SMALL = (8, 4, 2)  # an image's height, width and channels


def count(model):
    return sum(leaf.size for leaf in jax.tree.leaves(model))


def arrays(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


# --- sizes ---------------------------------------------------------------------------------------


def test_sizes_of_the_published_unet():
    model = jax.eval_shape(lambda key: UNet(key=key), jax.random.key(0))
    layers = [(1, 32), (32, 64), (64, 64), (64, 64), (64, 32), (32, 1)]
    for layer, (inputs, outputs) in zip((*model.down, *model.up), layers, strict=True):
        assert layer.kernel.shape == (5, 5, inputs, outputs)
        assert count(layer) == 25 * inputs * outputs + outputs
    assert count(model) == 832 + 51264 + 102464 + 102464 + 51232 + 801 == 309_057


@pytest.mark.parametrize(("latent", "wanted"), [(10, 76_493), (50, 364_533)])
def test_sizes_of_the_published_autoencoder(latent, wanted):
    make = lambda key: ConvolutionalAutoencoder(latent, key=key)  # noqa: E731
    model = jax.eval_shape(make, jax.random.key(0))
    # 15 x 15 positions of the kernel times 16 channels.
    assert model.to_code.weight.shape == (latent, 3600)
    assert model.from_code.weight.shape == (3600, latent)
    layers = (9 * 3 * 16 + 16, 3600 * latent + latent, 3600 * latent + 3600, 9 * 16 * 3 + 3)
    assert count(model) == sum(layers) == wanted
    out = jax.eval_shape(lambda model, x: model(x), model, jnp.zeros(32 * 32 * 3))
    assert out.shape == (32 * 32 * 3,)


@pytest.mark.parametrize("shape", [SMALL, (4, 8, 1)])
def test_a_formula_counts_the_parameters(shape, key):
    g, (a, b, c), r, k = shape[-1], (2, 3, 5), 4, 5
    assert count(UNet(shape, widths=(a, b, c), key=key)) == (
        50 * (g * a + a * b + b * c) + 2 * a + 2 * b + c + g
    )
    hidden = 3 * k  # 3 x 1 or 1 x 3 positions of the kernel
    model = ConvolutionalAutoencoder(r, shape, channels=k, key=key)
    assert count(model) == (9 * g + 1) * k + 2 * hidden * r + hidden + r + 9 * k * g + g


# --- values --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("stride", "padding"), [(1, 2), (2, 0), (3, 1)])
def test_convolutions_are_sums_over_the_kernel(stride, padding, key, x64):
    layer = Convolution(2, 3, 5, stride=stride, padding=padding, key=key)
    image = jax.random.normal(key, (9, 7, 2))
    wanted = networks.convolution(image, *arrays(layer), stride, padding)
    np.testing.assert_allclose(layer(image), wanted, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("stride", "extra"), [(1, (0, 0)), (2, (1, 0)), (3, (0, 2))])
def test_transposed_convolutions_add_kernels(stride, extra, key, x64):
    layer = TransposedConvolution(2, 3, 3, stride=stride, extra=extra, key=key)
    image = jax.random.normal(key, (4, 5, 2))
    wanted = networks.transposed_convolution(image, *arrays(layer), stride, extra)
    np.testing.assert_allclose(layer(image), wanted, atol=1e-12)


@pytest.mark.slow
def test_the_unet(key, x64):
    model = UNet(SMALL, widths=(3, 4, 5), key=key)
    image = jax.random.normal(key, SMALL)
    leaves = arrays(model)
    layers = list(zip(leaves[::2], leaves[1::2], strict=True))
    wanted = networks.unet(layers, np.asarray(image))
    np.testing.assert_allclose(model(image.reshape(-1)), wanted.reshape(-1), atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["relu", "linear"])
@pytest.mark.parametrize("shape", [SMALL, (5, 6, 1)])
def test_the_convolutional_autoencoder(hidden, shape, key, x64):
    model = ConvolutionalAutoencoder(3, shape, channels=4, hidden=hidden, key=key)
    image = jax.random.uniform(key, shape)
    found = networks.convolution(image, *arrays(model.encoder), 2)
    inner = found.shape
    if hidden == "relu":
        assert (found < 0).any()
        found = np.maximum(found, 0)
    (first, b1), (second, b2) = arrays(model.to_code), arrays(model.from_code)
    code = first @ found.reshape(-1) + b1
    np.testing.assert_allclose(model.encode(image.reshape(-1)), code, atol=1e-12)
    extra = [(side - 3) % 2 for side in shape[:2]]
    out = networks.transposed_convolution(
        (second @ code + b2).reshape(inner), *arrays(model.decoder), 2, extra
    )
    assert out.shape == shape
    wanted = 1 / (1 + np.exp(-out))
    np.testing.assert_allclose(model(image.reshape(-1)), wanted.reshape(-1), atol=1e-12)


def test_first_parameters_are_within_the_usual_bounds(key):
    layer = Convolution(4, 64, 5, key=key)
    limit = 1 / 100**0.5
    for leaf in arrays(layer):
        assert np.abs(leaf).max() <= limit
        # Uniform: the standard deviation is the bound by the root of three.
        assert abs(leaf.std() * 3**0.5 / limit - 1) < 0.2
    decoder = TransposedConvolution(64, 4, 5, key=key)
    assert 0.9 * limit < np.abs(arrays(decoder)[0]).max() <= limit
    first, second = (UNet(SMALL, widths=(3, 3, 3), key=k) for k in jax.random.split(key))
    for a, b in zip(arrays(first), arrays(second), strict=True):
        assert (a != b).all()


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("make", ["unet", "autoencoder"])
def test_clients_nets_train_at_once(make, wide, key):
    with jax.enable_x64(wide):
        dtype = jnp.float64 if wide else jnp.float32
        if make == "unet":
            model = UNet((4, 4, 1), widths=(2, 3, 2), key=key)
        else:
            model = ConvolutionalAutoencoder(2, (4, 4, 1), channels=2, key=key)
        x = jax.random.uniform(key, (3, 5, 16), dtype)

        @jax.jit
        def slopes(x):
            """All at once, and of one client's net alone."""
            slope = jax.grad(lambda model, x: reconstruction_loss(model, x, key))
            models = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, -leaf]), model)
            return jax.vmap(slope)(models, x), slope(jax.tree.map(jnp.negative, model), x[2])

        found, wanted = slopes(x)
        chex.assert_trees_all_close(
            jax.tree.map(lambda leaf: leaf[2], found), wanted, atol=1e-10 if wide else 1e-4
        )
        chex.assert_trees_all_equal_dtypes(found, model)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda k: UNet((30, 28, 1), key=k), r"image_shape: .* halved twice, got \(30, 28, 1\)"),
        (lambda k: UNet((28, 28), key=k), r"image_shape: .* channels, got \(28, 28\)"),
        (lambda k: UNet((28, 28, 0), key=k), r"image_shape: .* got 0"),
        (lambda k: UNet(widths=(8, 8), key=k), r"widths: wanted three numbers, got \(8, 8\)"),
        (lambda k: UNet(widths=(8, 8.0, 8), key=k), r"widths: .* got 8.0"),
        (lambda k: ConvolutionalAutoencoder(0, key=k), r"latent: .* got 0"),
        (lambda k: ConvolutionalAutoencoder(2, channels=True, key=k), r"channels: .* got True"),
        (lambda k: ConvolutionalAutoencoder(2, (2, 9, 1), key=k), r"image_shape: .* \(2, 9, 1\)"),
        (lambda k: ConvolutionalAutoencoder(2, hidden="tanh", key=k), r"hidden: .* got 'tanh'"),
    ],
)
def test_bad_sizes_are_refused(make, message, key):
    with pytest.raises(ValueError, match=f"^{message}"):
        make(key)


@pytest.mark.parametrize("make", [UNet, lambda key: ConvolutionalAutoencoder(2, key=key)])
def test_other_images_are_refused(make, key):
    model = jax.eval_shape(lambda key: make(key=key), key)
    with pytest.raises(ValueError, match=r"^sample: wanted shape .*, got \(100,\)"):
        jax.eval_shape(lambda model: model(jnp.zeros(100)), model)


@pytest.mark.slow
def test_a_net_that_does_not_fit_the_clients_is_refused(key):
    clients = jf.Clients.from_samples(np.ones((2, 3, 100), np.float32))
    net = UNet((4, 4, 1), widths=(2, 2, 2), key=key)
    algorithm = FedAvg(net, reconstruction_loss, optax.sgd(0.1), local_steps=1)
    with pytest.raises(ValueError, match=r"^loss: it fails .* sample: wanted shape \(16,\)"):
        jf.fit(algorithm, clients, rounds=1, key=key)
