"""The targets of ADEPT's diffusion models: sizes, how images are dealt, a small run."""

from itertools import combinations, pairwise, product

import jax
import numpy as np
import pytest

import papers
from jaxfed.cli import main
from jaxfed.models import UNet
from papers.adept import _clients, diffusion
from papers.adept import _diffusion as target
from papers.report import text, write
from papers.runs import Seeds
from tests.bench.targets import cells, write_mnist

AVAILABLE = 892  # images of the rarest digit in the test set of MNIST
SMALL = target.Size(
    side=8,
    clients_per_digit=2,
    samples=20,
    batch=2,
    rounds=2,
    widths=(2, 2, 2),
    drawn=5,
    steps=3,
    validation=4,
    reference=6,
)
PIXELS = SMALL.side**2


def test_full_size_is_the_published_one():
    full = target.size_at(1.0, 7000)
    assert full.clients_per_digit * target.DIGITS == 50
    assert (full.side, full.samples, full.rounds, full.batch) == (28, 1200, 100, 60)
    assert (full.widths, full.drawn, full.steps) == ((32, 64, 64), 200, 500)


@pytest.mark.parametrize("scale", [1e-4, 1e-3, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("available", [AVAILABLE, 6313])
def test_sizes_fit_the_images(scale, available):
    size = target.size_at(scale, available)
    used = size.clients_per_digit * (size.samples + size.validation) + size.reference
    assert used + 200 <= available  # for the classifier
    assert min(size.samples, size.validation, size.reference) >= 10
    assert 2 <= size.batch <= size.samples


def test_the_scale_is_the_share_of_the_arithmetic():
    def arithmetic(size):
        a, b, c = size.widths
        per_pixel = 2 * a + 2 * a * b / 4 + 2 * b * c / 16
        images = size.clients_per_digit * size.batch * size.rounds
        return images * size.side**2 * per_pixel

    full = arithmetic(target.size_at(1.0, 7000))
    for scale in (3e-4, 1e-3, 1e-2, 0.5):
        share = arithmetic(target.size_at(scale, 7000)) / full
        assert 0.5 < share / scale < 2


def test_too_few_images_are_refused():
    with pytest.raises(ValueError, match=r"^--data: wanted more images of each digit than 40"):
        target.size_at(1e-3, 40)


@pytest.fixture(scope="module")
def digits():
    """Blots at a place for each digit, 80 of each."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 80)
    rows, columns = np.mgrid[:28, :28]
    down, right = 6 + 16 * (labels % 2), 4 + 5 * (labels // 2)
    down, right = (place + rng.normal(size=800) for place in (down, right))
    distance = (rows - down[:, None, None]) ** 2 + (columns - right[:, None, None]) ** 2
    return np.exp(-distance / 12).astype(np.float32), labels


def test_no_image_is_dealt_twice(digits):
    images, labels = digits
    dealt = target.dealt(images, labels, SMALL, seed=3)
    assert dealt.train.shape == (20, 20, PIXELS)
    assert dealt.validation.shape == (20, 4, PIXELS)
    assert dealt.reference.shape == (10, 6, PIXELS)
    together = np.concatenate([part.reshape(-1, PIXELS) for part in dealt[:4]])
    assert len(np.unique(together, axis=0)) == len(together) == 800
    pixels = _clients.resized(images, SMALL.side)
    digit = {image.tobytes(): label for image, label in zip(pixels, labels, strict=True)}
    for client, part in enumerate(np.concatenate([dealt.train, dealt.validation], axis=1)):
        assert {digit[image.tobytes()] for image in part} == {client // 2}
    for label, part in enumerate(dealt.reference):
        assert {digit[image.tobytes()] for image in part} == {label}
    assert [digit[image.tobytes()] for image in dealt.others] == dealt.labels.tolist()
    other = target.dealt(images, labels, SMALL, seed=4)
    assert (other.train != dealt.train).any()


def test_a_third_of_the_size_is_means_without_the_margin(digits):
    images = digits[0][:3]
    small = _clients.resized(images, 8).reshape(3, 8, 8)
    np.testing.assert_allclose(small[2, 1, 7], images[2, 5:8, 23:26].mean(), rtol=1e-6)
    inner = images[:, 2:-2, 2:-2].sum(axis=(1, 2))
    np.testing.assert_allclose(small.sum(axis=(1, 2)), inner / 9, rtol=1e-5)


def test_half_the_size_is_means_within_a_margin(digits):
    images = digits[0][:3]
    small = _clients.resized(images, 16).reshape(3, 16, 16)
    np.testing.assert_allclose(small[:, 1:-1, 1:-1].sum(axis=(1, 2)), images.sum(axis=(1, 2)) / 4)
    np.testing.assert_allclose(small[1, 4, 6], images[1, 6:8, 10:12].mean(), rtol=1e-6)
    assert not small[:, [0, -1]].any() and not small[:, :, [0, -1]].any()
    np.testing.assert_array_equal(_clients.resized(images, 28), images.reshape(3, -1))


@pytest.fixture(scope="module")
def measuring(digits):
    dealt = target.dealt(*digits, SMALL, seed=0)
    return dealt, target.features_of(dealt, SMALL.side, 0)


@pytest.mark.slow
def test_samples_of_the_right_digit_are_nearer(measuring):
    dealt, features = measuring
    right = target.measured(dealt.train, dealt, SMALL, features)
    wrong = target.measured(dealt.train[::-1], dealt, SMALL, features)
    noisy = target.measured(
        dealt.train + 0.1 * np.random.default_rng(0).normal(size=dealt.train.shape),
        dealt,
        SMALL,
        features,
    )
    for values in (right.kernel, right.frechet):
        assert values.shape == (20,)
    assert (right.kernel < wrong.kernel).all()
    assert (right.frechet < wrong.frechet).all()
    assert abs(noisy.noise.mean() - right.noise.mean() - 0.1) < 0.02
    assert abs(float((features(dealt.others) ** 2).mean()) - 1) < 1e-3


@pytest.fixture(scope="module")
def found(digits, tmp_path_factory):
    """What a small run of the command writes, and its report."""
    folder = tmp_path_factory.mktemp("data")
    images, labels = digits
    write_mnist(folder, np.round(255 * images), labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "size_at", lambda scale, available: SMALL)
        return target.measure(Seeds(1), data=folder, scale=0.5)


@pytest.mark.slow
def test_every_method_is_measured(found):
    methods = target.methods(SMALL)
    assert {target.PRINTED, target.PROGRAM} < set(methods)
    assert list(found.outcomes) == [target.REAL, *methods]
    for method in methods:
        (outcome,) = found.outcomes[method]
        assert outcome.samples.shape == (20, 5, PIXELS)
        assert outcome.samples.min() >= 0 and outcome.samples.max() <= 1
        assert np.isfinite(outcome.kernel).all() and np.isfinite(outcome.noise).all()
        assert np.isfinite(outcome.validation).any()
        for others in (outcome.last, outcome.averaged, outcome.averaged_frechet):
            assert others.shape == outcome.kernel.shape and np.isfinite(others).all()
    kept = [outcomes[0].samples for outcomes in found.outcomes.values()][1:]
    assert not any((a == b).all() for a, b in combinations(kept, 2))
    assert "0.003 for ADEPT-DGM" in found.notes[2] and "50% on fine-tuning" in found.notes[2]
    assert "20 clients" in found.notes[0] and "scale 0.5" in found.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adept/table3", "adept/figure3", "adept/figure4"])
def test_reports_hold_what_was_measured(name, found, tmp_path):
    report = papers.find(name)(Seeds(1), made={target.measure: found})
    rows = cells(report)
    quantity = {"adept/figure3": "noise"}.get(name, "mean KID")
    values = {}
    for method, (outcome,) in found.outcomes.items():
        field = outcome.noise if quantity == "noise" else outcome.kernel
        values[method] = field.mean()
        assert rows[quantity, method].measured == pytest.approx([field.mean()])
    claimed = {"adept/figure4": "worst client's KID"}.get(name, quantity)
    worst = {m: o[0].kernel.max() for m, o in found.outcomes.items()}
    values = worst if claimed.startswith("worst") else values
    adept = (target.ADEPT, target.PRINTED, target.PROGRAM)
    for own, other in product(adept, (target.LOCAL, target.AVERAGED)):
        cell = rows[f"{claimed}, {other} by {own}", ""]
        assert cell.measured == pytest.approx([values[other] / values[own]])
        assert cell.verdict.startswith("reproduced" if cell.mean >= 1 else "differs")
        if name == "adept/table3":  # of models, too, that nothing was chosen by
            for models, field in {
                "KID of the last round": "last",
                "KID of the moving average": "averaged",
                "FID of the moving average": "averaged_frechet",
            }.items():
                means = [getattr(found.outcomes[m][0], field).mean() for m in (other, own)]
                cell = rows[f"mean {models}, {other} by {own}", ""]
                assert cell.measured == pytest.approx([means[0] / means[1]])
                assert cell.verdict.startswith("reproduced" if cell.mean >= 1 else "differs")
    paths = {path.name for path in write(report, tmp_path / "out")}
    pictures = {
        "adept/table3": {"samples.png", "clients.png"},
        "adept/figure3": {"samples.png"},
        "adept/figure4": {"clients.png"},
    }[name]
    assert pictures <= paths
    assert "not comparable" in text(report)


def test_full_images_are_trained_on_as_published():
    full = target.size_at(1.0, 7000)
    model = UNet((28, 28, 1), widths=(2, 2, 2), key=jax.random.key(0))
    algorithm = target.adaptive(model, full, full.rounds)
    assert algorithm.preset == "published"
    assert target.methods(full) == (target.LOCAL, target.AVERAGED, target.ADEPT)
    assert (float(algorithm.initial_spread), algorithm.prior_weight) == (pytest.approx(0.8), None)
    assert float(algorithm.step_size) == pytest.approx(1e-3)
    assert float(target._averaging(model, full, target.AVERAGED).step_size) == pytest.approx(1e-3)
    assert target._averaged_rounds(target.ADEPT, full) == 0
    assert target._averaged_rounds(target.AVERAGED, full) == full.rounds // 2
    net = UNet((8, 8, 1), widths=(2, 2, 2), key=jax.random.key(0))
    small = target.adaptive(net, SMALL, 3)
    assert small.prior_step == "proximal"
    for method, preset in ((target.PRINTED, "text"), (target.PROGRAM, "published")):
        own = target.adaptive(net, SMALL, 3, method)
        assert (own.preset, own.prior_step, own.prior_weight) == (preset, "gradient", None)
        assert float(own.step_size) == pytest.approx(target._step_size(method, SMALL))
        assert target._averaged_rounds(method, SMALL) == 0
    assert float(small.prior_weight) == pytest.approx(2 * target.MISSED / SMALL.samples)


@pytest.mark.slow
def test_the_best_round_is_drawn_from(digits):
    """Of a run that gets worse, the first models are kept."""
    dealt = target.dealt(*digits, SMALL, seed=0)
    size = SMALL._replace(rounds=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "OTHERS_STEP_SIZE", 5.0)
        _, fitted = target.trained(target.LOCAL, dealt, size, 0)
    solution = fitted.best
    losses = solution.history["validation"]
    assert solution.rounds == np.nanargmin(losses) + 1
    assert solution.rounds < size.rounds
    best = jax.tree.leaves(solution.result.local)
    assert all(np.isfinite(leaf).all() for leaf in best)
    pairs = zip(best, jax.tree.leaves(fitted.last), strict=True)
    assert any((a != b).any() for a, b in pairs)


@pytest.mark.slow
def test_the_moving_average_is_of_every_personal_round(digits):
    dealt = target.dealt(*digits, SMALL, seed=0)
    steps = []

    def moved(old, new):
        steps.append((old, new))
        return target.DECAY * old + (1 - target.DECAY) * new

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "_moved", moved)
        _, fitted = target.trained(target.LOCAL, dealt, SMALL._replace(rounds=4), 0)
    found, final = (jax.tree.leaves(tree)[0] for tree in (fitted.average, fitted.last))
    of_one = steps[:: len(jax.tree.leaves(fitted.average))]
    models = [of_one[0][0], *(new for _, new in of_one)]
    assert len(models) == 4 and all((a != b).any() for a, b in pairwise(models))
    np.testing.assert_array_equal(models[-1], final)
    weights = [0.9**3, 0.1 * 0.9**2, 0.1 * 0.9, 0.1]
    wanted = sum(w * np.asarray(model) for w, model in zip(weights, models, strict=True))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_files_that_are_no_images_are_refused(capsys, tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "readme.txt").touch()
    assert main(["reproduce", "adept/figure3", "--data", str(tmp_path)]) != 0
    assert "--data: no images in" in capsys.readouterr().err


def test_losses_of_seeds_that_chose_different_rounds_are_kept_together():
    one = np.ones(3)
    outcomes = [
        target.Outcome(one, one, one, one, np.arange(rounds, dtype=float), one, one, one)
        for rounds in (2, 4)
    ]
    arrays = diffusion.outcome_arrays(target.Run(SMALL, {target.LOCAL: outcomes}, []))
    losses = arrays[f"validation loss | {target.LOCAL}"]
    np.testing.assert_array_equal(losses, [[0, 1, np.nan, np.nan], [0, 1, 2, 3]])
    assert arrays[f"KID | {target.LOCAL}"].shape == (2, 3)
