"""`jaxfed fit autoencoder --epsilon`: noise in gradients protects each image."""

import json

import numpy as np
import pytest

import jaxfed as jf
from jaxfed import privacy
from jaxfed.cli import main
from tests.cli.command_line import refused

TRAINED = ["fit", "autoencoder", "--latent", "2", "--rounds", "3", "--local-steps", "2"]
TRAINED += ["--batch-size", "5", "--held-out", "0"]


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for i, n in enumerate((20, 30)):
        np.save(tmp_path / f"s{i}.npy", rng.random((n, 16), np.float32))
    return tmp_path


def trained(folder, *more):
    out = folder / "out"
    command = [
        *TRAINED,
        "--data",
        str(folder),
        "--out",
        str(out),
        "--image-shape",
        "4x4",
        "--force",
    ]
    return main([*command, *more])


@pytest.mark.parametrize(
    "training", ["fedavg", pytest.param("personalized", marks=pytest.mark.slow)]
)
def test_the_guarantee_is_printed_and_saved(folder, capsys, training):
    assert trained(folder, "--training", training, "--epsilon", "2", "--clip", "0.5") == 0
    assert "2 for epsilon" in capsys.readouterr().out.replace("1.999 for", "2 for")
    saved = jf.load(folder / "out" / "result.npz", like=None)
    (guarantee,) = saved.guarantees
    clients = jf.Clients.from_samples([np.zeros((n, 16), np.float32) for n in (20, 30)])
    options = {"rounds": 3, "local_steps": 2, "batch_size": 5, "delta": 1e-5}
    wanted = privacy.training_noise(2.0, clients, **options)
    assert guarantee.noise_multiplier == pytest.approx(wanted, rel=1e-5)
    assert guarantee.rows == "gradients" and guarantee.bound == 0.5
    assert 1.99 < guarantee.epsilon <= 2.0001
    said = json.loads((folder / "out" / "result.json").read_text())["privacy"]
    assert any("gradients of few rows" in line for line in said)
    # Nobody knows the key, so that two runs with one seed have other noise.
    before = jf.load(folder / "out" / "result.npz", like=None).history["objective"]
    assert trained(folder, "--training", training, "--epsilon", "2", "--clip", "0.5") == 0
    after = jf.load(folder / "out" / "result.npz", like=None).history["objective"]
    assert (before[1:] != after[1:]).all()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--clip", "1"], "--clip: is for --epsilon"),
        (["--epsilon", "-1"], "--epsilon: wanted a positive"),
        (["--epsilon", "1", "--clip", "0"], "--clip: wanted a positive"),
        (["--epsilon", "1", "--delta", "1"], "--delta: wanted a number between 0 and 1"),
        (["--epsilon", "1", "--batch-size", "21"], "batch_size: wanted at most the smallest"),
    ],
)
def test_wrong_options(folder, capsys, more, said):
    assert said in refused(capsys, trained(folder, *more))
    assert not (folder / "out").exists()
