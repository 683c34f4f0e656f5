"""The targets of personalized autoencoders: their data, their runs, their registration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import papers
from jaxfed.cli import main
from jaxfed.models import Autoencoder
from papers.adept import _autoencoders, table1, table2
from papers.intervals import Interval
from papers.runs import Seeds
from tests.bench.targets import write_mnist


@pytest.mark.slow
def test_synthetic_samples_are_of_their_decoders():
    draw = table1._synthetic(jax.random.key(0), 0.0, 4)
    shapes = [part.shape for part in draw.split]
    assert shapes == [(4, 10, 64), (4, 20, 64), (4, 100, 64)]
    np.testing.assert_allclose(jnp.std(draw.split.train, axis=(1, 2)), 1, rtol=1e-5)
    for samples in draw.split:
        rest = samples - draw.decoder.bias[:, None]
        basis = jnp.linalg.qr(draw.decoder.weight)[0]
        inside = rest @ basis @ basis.mT
        np.testing.assert_allclose(inside, rest, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [20.0, 0.0])
def test_noise_is_what_the_ratio_says(ratio):
    draw = table1._synthetic(jax.random.key(1), ratio, 50)
    weight = draw.decoder.weight / jnp.linalg.norm(draw.decoder.weight, axis=(1, 2), keepdims=True)
    mean = weight.mean(axis=0)
    found = 10 * jnp.log10(jnp.mean(mean**2) / jnp.mean((weight - mean) ** 2))
    np.testing.assert_allclose(found, ratio, atol=0.5)


@pytest.mark.slow
def test_methods_are_what_they_are_called(x64):
    """By steps of all samples, without a random draw, unclipped where they are small."""
    rng = np.random.default_rng(0)
    train = jnp.asarray(0.1 * rng.normal(size=(3, 6, 5)))
    model = Autoencoder(5, 2, key=jax.random.key(0))
    numbers = {"step_size": jnp.asarray(0.1)}

    def slope(model, x):
        def loss(model):
            return jnp.mean(jnp.sum((jax.vmap(model)(x) - x) ** 2, axis=1))

        return jax.grad(loss)(model)

    def descended(model, gradient):
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
        factor = 0.1 / jnp.maximum(norm, 1)
        return jax.tree.map(lambda w, g: w - factor * g, model, gradient)

    size = _autoencoders.Size(3, 1, None)
    found, none = _autoencoders.trained(
        _autoencoders.LOCAL, 0.0, size, numbers, model, train, jax.random.key(1)
    )
    assert none is None
    for i, x in enumerate(train):
        own = model
        for _ in range(3):
            own = descended(own, slope(own, x))
        np.testing.assert_allclose(found.decoder.weight[i], own.decoder.weight, atol=1e-12)

    found, _ = _autoencoders.trained(
        _autoencoders.AVERAGED, 0.0, size, numbers, model, train, jax.random.key(1)
    )
    shared = model
    for _ in range(3):
        moved = [descended(shared, slope(shared, x)) for x in train]
        shared = jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves), axis=0), *moved)
    for weight in found.encoder.weight:
        np.testing.assert_allclose(weight, shared.encoder.weight, atol=1e-12)

    for name in (_autoencoders.ADAPTIVE, _autoencoders.PUBLISHED):
        _, spread = _autoencoders.trained(name, 0.9, size, numbers, model, train, jax.random.key(1))
        assert (spread.encoder.weight < 1).all()


def test_samples_that_are_needed():
    energies = {120: 0.5, 240: 0.7, 360: 0.65, 480: 0.8}
    assert table2._needed(energies, 0.6) == 180
    assert table2._needed(energies, 0.75) == 420
    assert table2._needed(energies, 0.4) == 120
    assert table2._needed(energies, 0.81) == np.inf


def test_leads_are_compared_with_the_spread():
    energies = {
        "ADEPT": [0.9, 0.92, 0.94],
        "local": [0.85, 0.88, 0.9],
        "FedAvg": [0.89, 0.9, 0.91],
    }
    lead = _autoencoders.lead(energies, "local", beyond_spread=True)
    assert lead.verdict == "reproduced"
    assert isinstance(lead.paper, Interval) and lead.paper.low == pytest.approx(0.0252, abs=1e-4)
    near = {**energies, "local": [0.88, 0.91, 0.94]}
    assert _autoencoders.lead(near, "local").verdict == "reproduced"
    assert _autoencoders.lead(near, "local", beyond_spread=True).verdict.startswith("differs")
    assert _autoencoders.lead({**near, "ADEPT": [0.8] * 3}, "local").verdict.startswith("differs")


@pytest.mark.slow
def test_synthetic_clients():
    report = papers.find("adept/table1")(Seeds(2), scale=0.04, ratios=(20,), rounds=6)
    cells = {(row["method"], row["quantity"]): row["cell"] for row in report.rows}
    assert {method for method, _ in cells} == {
        "local",
        "FedAvg",
        "true decoder",
        "ADEPT",
        "ADEPT as published",
        "ADEPT, spread learned fast",
    }
    for (_, quantity), cell in cells.items():
        assert len(cell.measured) == 2
        if quantity == "energy":
            assert cell.mean < 1
    lead = cells["ADEPT", "above local"].measured
    pairs = (cells[name, "energy"].measured for name in ("ADEPT", "local"))
    np.testing.assert_allclose(lead, np.subtract(*pairs))
    assert report.notes[0] == "Reduced by --scale 0.04: 2 of 50 clients."
    assert len(report.arrays["20 dB | ADEPT | seed 1"]) == 2


def mnist(folder, each, side=28):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(10, dtype=np.uint8), each)
    images = rng.integers(0, 256, (10, side, side)).astype(np.float64)[labels]
    images = np.clip(images + rng.normal(scale=40, size=images.shape), 0, 255).astype(np.uint8)
    write_mnist(folder, images, labels)
    return images.reshape(len(images), -1) / np.float32(255), labels


def test_clients_have_one_class_and_share_no_image():
    labels = np.repeat(np.arange(10), 700)
    pixels = np.arange(7000.0)[:, None].repeat(2, axis=1)
    split = table2._one_class_clients(pixels, labels, 0)
    assert [part.shape for part in split] == [(50, 120, 2), (50, 60, 2), (50, 40, 2)]
    classes = np.asarray(split.train)[..., 0] // 700
    assert (classes == np.repeat(np.arange(10), 5)[:, None]).all()
    for digit in range(10):
        own = np.asarray(split.train)[5 * digit : 5 * digit + 5, :, 0].ravel()
        others = np.concatenate([np.asarray(part)[5 * digit, :, 0] for part in split[1:]])
        assert len(set(own) | set(others)) == 5 * 120 + 60 + 40
    few = table2._one_class_clients(pixels, labels, 0, 1, 600)
    assert few.train.shape == (10, 600, 2)
    np.testing.assert_array_equal(few.test, split.test[::5])


@pytest.mark.slow
def test_clients_of_digits(tmp_path, monkeypatch, capsys):
    mnist(tmp_path, 10)
    assert main(["reproduce", "adept/table2", "--data", str(tmp_path)]) == 2
    assert "of class 0 there are 10" in capsys.readouterr().err

    # Clients of a class in a small size.
    monkeypatch.setattr(table2, "TRAIN", 8)
    monkeypatch.setattr(table2, "PER_CLASS", 2)
    monkeypatch.setattr(table2, "VALIDATION", 2)
    monkeypatch.setattr(table2, "STEPS", 3)
    monkeypatch.setattr(table2, "MORE", (12, 16))
    folder = tmp_path / "larger"
    folder.mkdir()
    mnist(folder, 22)
    report = papers.find("adept/table2")(Seeds(1), data=folder, scale=0.03, latents=(2,))
    cells = {(row["method"], row["quantity"]): row["cell"] for row in report.rows}
    assert cells["local, 16 samples", "energy"].mean < 1
    for layer in ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"):
        assert 0 < cells["ADEPT", f"mean spread, {layer}"].mean <= 0.51
    needed = cells["ADEPT", "samples that local training needs"].mean
    assert needed >= 8
    assert report.notes[0] == "Reduced by --scale 0.03: 4 of 150 rounds."
    figure = report.figures["latent2"]()
    assert sum(bool(axes.images) for axes in figure.axes) == 5 * 10


def test_settings_are_chosen_by_draws_that_are_not_measured():
    assert _autoencoders.tuning(Seeds(3)) == [1000, 1001]
    assert not set(_autoencoders.tuning(Seeds(3, 5))) & {1000, 1001, *Seeds(999, 5)}
