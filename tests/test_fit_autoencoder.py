"""`jaxfed fit autoencoder`: what it trains and writes, what it refuses."""

import json
import re

import numpy as np
import pytest

from jaxfed.cli import main
from jaxfed.core.store.checkpoint import Checkpoint

SIDE, LATENT = 4, 2
COUNTS = (9, 10, 12)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for i, count in enumerate(COUNTS):
        codes = rng.uniform(size=(count, LATENT)).astype(np.float32)
        pixels = 0.3 + 0.6 * codes @ rng.dirichlet(np.ones(LATENT), SIDE**2).T.astype(np.float32)
        np.save(folder / f"client{i}.npy", pixels)
    return folder


QUICK = (
    "--latent", LATENT, "--rounds", "20", "--local-steps", "10", "--batch-size", "5",
    "--held-out", "0.25",
)  # fmt: skip


def fit(data, out, *options):
    folders = ("--data", str(data), "--out", str(out))
    return main(["fit", "autoencoder", *folders, *map(str, (*QUICK, *options))])


def loaded(folder):
    with np.load(folder / "result.npz") as arrays:
        summary = json.loads((folder / "result.json").read_text())
        return dict(arrays), {row["quantity"]: row["value"] for row in summary["table"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--report",),
        ("--published", "--hyper-prior", 1e-4, "--hidden", "linear", "--output", "linear"),
        ("--training", "local", "--participation", 2, "--momentum", 0),
        ("--training", "fedavg", "--held-out", 0),
    ],
    ids=["personalized", "published", "local", "fedavg"],
)
def test_models_are_trained_and_reconstruct(options, data, tmp_path, capsys):
    out = tmp_path / "out"
    assert fit(data, out, *options) == 0
    arrays, table = loaded(out)
    weights = 2 * SIDE**2 * LATENT + SIDE**2 + LATENT
    assert f"autoencoders of {weights:,} weights" in capsys.readouterr().out
    personal = "fedavg" not in options
    assert ("local.encoder.weight" in arrays) == personal
    if personal:
        assert arrays["local.encoder.weight"].shape == (3, LATENT, SIDE**2)
    assert arrays["shared.decoder.bias"].shape == (SIDE**2,)
    prior = options[0] in ("--report", "--published")
    assert ("spread.encoder.weight" in arrays) == ("mean spread" in table) == prior
    assert arrays["energies"].shape == (3,)
    which = "images" if 0 in options[2:4] and "fedavg" in options else "held-out images"
    np.testing.assert_allclose(table[f"captured energy of {which}"], arrays["energies"].mean())
    # In twenty rounds the error falls, and most of the energy is in the mean image.
    losses = arrays["history_loss" if personal else "history_objective"]
    # Which clients a round is of is drawn.
    assert losses[-5:].mean() < losses[:5].mean()
    assert arrays["energies"].min() > 0.8
    for picture in ("reconstructions.png", "convergence.png"):
        assert (out / picture).stat().st_size > 1000
    capsys.readouterr()
    assert main(["info", str(out)]) == 0
    kind = "AdaptiveAutoencoder" if personal else "FedAvg"
    assert kind in capsys.readouterr().out
    if options[0] == "--report":
        assert kind in (out / "report.html").read_text()


@pytest.mark.slow
def test_an_interrupted_run_is_taken_up_again(data, tmp_path, monkeypatch, capsys):
    """What is learned is, bit for bit, that of the uninterrupted run."""
    options = ("--checkpoint-every", 1, "--rounds", 4)
    save, done = Checkpoint.save, []

    def interrupting(self, *arguments):
        save(self, *arguments)
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", interrupting)
        assert fit(data, tmp_path / "stopped", *options) != 0
    assert len(done) == 2
    capsys.readouterr()
    assert fit(data, tmp_path / "stopped", *options) == 0
    assert "Taking up the run that was interrupted" in capsys.readouterr().out
    assert fit(data, tmp_path / "whole", *options) == 0
    stopped, whole = (loaded(tmp_path / name)[0] for name in ("stopped", "whole"))
    assert stopped.keys() == whole.keys()
    for name in whole:
        np.testing.assert_array_equal(stopped[name], whole[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--training", "local", "--initial-spread", 0.1), "--initial-spread: is for"),
        (("--training", "fedavg", "--published"), "--published: is for --training personalized"),
        (("--rounds", 0), "--rounds: wanted at least 1"),
        (("--momentum", 1), "--momentum: wanted from 0 to below 1"),
        (("--latent", 0), "latent: wanted a whole number of at least 1, got 0"),
        (("--local-steps", 0), "local_steps: wanted a whole number of at least 1"),
        (("--batch-size", 8), "batch_size: wanted at most the smallest client's"),
        (("--hyper-prior", 0), "hyper_prior: wanted a positive finite number"),
        (("--image-shape", "3x4"), "--image-shape: 3x4x1 has 12 values"),
        (("--chunk-size", 2), "--chunk-size: is for"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(
    options, message, data, tmp_path, capsys
):
    assert fit(data, tmp_path / "out", *options) != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert not (tmp_path / "out").exists()
