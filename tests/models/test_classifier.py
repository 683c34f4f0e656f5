"""The classifier whose features generated samples are compared by, and those of Inception."""

import hashlib
import sys
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

import jaxfed as jf
from jaxfed.models import inception_features
from papers.adept._classifier import Classifier, train_classifier


@pytest.fixture(scope="module")
def digits():
    """Real digits of 8 x 8 pixels, every pixel twice: 1200 to train with and 597 others."""
    found = load_digits()
    images = np.kron(found.images, np.ones((2, 2))).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    return [(images[rows], found.target[rows]) for rows in np.split(order, [1200])]


@pytest.fixture(scope="module")
def trained(digits):
    return train_classifier(jax.random.key(0), *digits[0], classes=10, epochs=8)


def small(key, images, labels):
    return train_classifier(key, images, labels, classes=3, epochs=2, batch_size=3, features=4)


@pytest.mark.slow
def test_it_learns(trained, digits):
    assert trained.losses.shape == (8,)
    assert trained.losses[-1] < 0.1 < 0.5 < trained.losses[0]
    assert trained.accuracy(*digits[1]) > 0.96


@pytest.mark.slow
def test_features_tell_samples_from_worse_ones(trained, digits):
    # Of none that it was trained with: of those the features are better than of any others.
    images, labels = digits[1]
    images, others = images[:300], images[300:]
    features = trained.features(others)
    chex.assert_shape(features, (len(others), 64))
    assert (features >= 0).all()
    last = trained.model.last
    found, wanted = features @ last.weight.T, jax.vmap(trained.model)(others)
    np.testing.assert_allclose(trained.size * found + last.bias, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jnp.mean(trained.features(digits[0][0]) ** 2), 1, rtol=1e-4)
    noise = 8 * jax.random.normal(jax.random.key(1), others.shape)
    for distance in (jf.metrics.frechet_distance, jf.metrics.kernel_distance):
        close, noisy, one_class = (
            distance(trained.features(x), features)
            for x in (images, others + noise, images[labels[:300] == 3])
        )
        assert 2 * abs(close) < noisy and 2 * abs(close) < one_class


@pytest.mark.slow
def test_a_convolution_is_one(key):
    """Against JAX's own, with sides of which some pixels are left over."""
    model = Classifier((14, 17), 4, 5, jnp.zeros(()), jnp.ones(()), key=key)
    sample = jax.random.normal(key, (14, 17))
    image = sample[None, ..., None]
    for layer in (model.first, model.second):
        kernel = layer.weight.T.reshape(5, 5, image.shape[-1], -1)
        image = jax.lax.conv_general_dilated(
            image, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        image = jax.nn.relu(image + layer.bias)
    wanted = jax.nn.relu(model.hidden(image.ravel()))
    np.testing.assert_allclose(model.features(sample), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_training_is_a_pure_function(key):
    images = jax.random.normal(key, (12, 13, 13))
    labels, keys = jnp.arange(12) % 3, jax.random.split(key)
    several = jax.vmap(lambda key: small(key, images, labels))(keys)
    second = jax.tree.map(lambda leaf: leaf[1], several)
    chex.assert_trees_all_close(second, small(keys[1], images, labels), rtol=1e-4, atol=1e-5)
    assert (several.losses[0] != several.losses[1]).all()


def test_the_data_decide_the_type(key, x64):
    for dtype in (jnp.float32, jnp.float64):
        images = jax.random.normal(key, (6, 13, 13), dtype)
        found = jax.eval_shape(lambda x: small(key, x, jnp.arange(6) % 3), images)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(dtype)}


# --- Inception -----------------------------------------------------------------------------------


@pytest.fixture
def network(tmp_path):
    """A file that is called as that of Inception is: mean colours, or the whole image."""
    torch = pytest.importorskip("torch")

    class Means(torch.nn.Module):
        def forward(self, images: torch.Tensor, return_features: bool = False) -> torch.Tensor:
            assert images.dtype == torch.uint8
            images = images.to(torch.float32)
            return images.mean(dim=[2, 3]) if return_features else images

    torch.jit.script(Means()).save(str(tmp_path / "network.pt"))
    return tmp_path / "network.pt"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_features_of_a_network_from_a_file(network):
    features = inception_features(network, batch_size=3, sha256=digest(network))
    images = np.random.default_rng(0).uniform(size=(5, 4, 6, 3))
    found = features(images)
    np.testing.assert_allclose(found, np.rint(255 * images).mean(axis=(1, 2)), rtol=1e-6)
    np.testing.assert_allclose(features(np.rint(255 * images).astype(np.uint8)), found)
    gray = features(images[..., 0])
    np.testing.assert_allclose(gray, np.repeat(found[:, :1], 3, axis=1))
    np.testing.assert_allclose(features(images[..., :1]), gray)
    assert features(np.full((1, 4, 4), 1.5)).max() == 255
    assert jf.metrics.kernel_distance(found, gray) != 0
    for bad in (images[0, 0], images[..., :2], images[:0]):
        with pytest.raises(ValueError, match=r"^images: wanted shape .* got"):
            features(bad)
    with pytest.raises(ValueError, match=r"^images: .* got NaN"):
        features(np.nan * images)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_files_that_are_no_network_are_refused(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "bad.pt").write_bytes(b"no network")
    with pytest.raises(ValueError, match=r"bad\.pt: not a TorchScript file"):
        inception_features(tmp_path / "bad.pt", sha256=digest(tmp_path / "bad.pt"))


def test_only_the_file_that_was_meant_is_opened(tmp_path, monkeypatch):
    opened = types.SimpleNamespace(jit=None)  # PyTorch, of which nothing may be used
    monkeypatch.setitem(sys.modules, "torch", opened)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pt: no such file"):
        inception_features(tmp_path / "nowhere.pt")
    (tmp_path / "other.pt").write_bytes(b"a program")
    for given in ({}, {"sha256": "AB" * 32}):
        wanted = given.get("sha256", "f58cb9b6").lower()
        with pytest.raises(ValueError, match=rf"other\.pt: wanted a file of SHA-256 {wanted}"):
            inception_features(tmp_path / "other.pt", **given)
    for wrong in ("", "ab", None, "g" * 64):
        with pytest.raises(ValueError, match=r"^sha256: wanted 64 hexadecimal digits, got"):
            inception_features(tmp_path / "other.pt", sha256=wrong)


def test_without_torch_one_is_told(tmp_path, monkeypatch):
    (tmp_path / "network.pt").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"torch is needed .* 'jaxfed\[inception\]'"):
        inception_features(tmp_path / "network.pt", sha256=digest(tmp_path / "network.pt"))
