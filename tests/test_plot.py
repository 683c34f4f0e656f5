import sys
from io import BytesIO

import jax
import matplotlib.pyplot
import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxfed import plot

WHITE = 0.9


def colours(figure):
    """The picture, (height, width, 3) from 0 to 1."""
    file = BytesIO()
    figure.savefig(file, dpi=60)
    return matplotlib.pyplot.imread(BytesIO(file.getvalue()), format="png")[..., :3]


def images(figure):
    """What is drawn as images."""
    return [image for axes in figure.axes for image in axes.get_images()]


def pixels(figure):
    return [image.get_array() for image in images(figure)]


def texts(figure):
    return {
        text.get_text()
        for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))
        if text.get_text()
    }


def test_components_are_images_under_their_names():
    shared, own = np.arange(24.0).reshape(6, 4), -np.ones((6, 2))
    figure = plot.components({"shared": shared, "client 3": own}, (2, 3), columns=3)
    drawn = pixels(figure)
    assert [image.shape for image in drawn] == [(2, 3)] * 6
    np.testing.assert_array_equal(drawn[1], shared[:, 1].reshape(2, 3))
    np.testing.assert_array_equal(drawn[5], own[:, 1].reshape(2, 3))
    assert {"shared", "client 3"} <= texts(figure)
    assert colours(figure).min() < WHITE


def test_components_that_do_not_exist_are_left_out():
    figure = plot.components({"shared": None, "client 3": -np.ones((6, 2))}, (2, 3))
    assert len(pixels(figure)) == 2 and "shared" not in texts(figure)
    with pytest.raises(ValueError, match=r"groups: wanted at least one group of components"):
        plot.components({"shared": None})


@pytest.mark.parametrize("missing", [0, 1])
def test_parts_that_do_not_exist_have_no_row(missing):
    parts = [np.full((2, 6), 0.5), np.full((2, 6), -0.5)]
    there = parts[1 - missing]
    parts[missing] = None
    figure = plot.separation(np.ones((2, 6)), *parts, (2, 3), mean=np.ones(6))
    assert len(pixels(figure)) == 6
    np.testing.assert_array_equal(pixels(figure)[-1], (there[0] + 1).reshape(2, 3))
    name = ("shared part", "own part")[missing]
    assert name not in texts(figure)
    with pytest.raises(ValueError, match=r"shared, own: wanted at least one"):
        plot.separation(np.ones((2, 6)), None, None, (2, 3))


def test_zero_is_white_on_one_scale_a_group():
    figure = plot.components({"both": np.array([[1.0, 0.1], [-0.5, 0.0]])}, (1, 2))
    limits = {image.get_clim() for image in images(figure)}
    assert limits == {(-1.0, 1.0)}


def test_components_without_pixels_are_rows_of_features():
    shared = np.arange(10.0).reshape(5, 2)
    (drawn,) = pixels(plot.components({"shared": shared}))
    np.testing.assert_array_equal(drawn, shared.T)


def test_separation_shows_the_parts_and_their_sum():
    key = jax.random.key(0)
    original, shared, own = jax.random.normal(key, (3, 2, 6))
    mean = np.ones(6)
    figure = plot.separation(original, shared, own, (2, 3), mean=mean, names=("a", "b"))
    drawn = np.stack(pixels(figure)).reshape(4, 2, 6)
    together = np.asarray(shared) + np.asarray(own) + mean
    np.testing.assert_allclose(drawn, [original, shared, own, together], rtol=1e-6)
    assert {"original", "shared part", "own part", "together", "a", "b"} <= texts(figure)


def test_samples_are_rows_of_images_after_their_names():
    shades = np.linspace(-0.5, 1.5, 5)
    groups = {"a": np.repeat(shades[:, None], 6, 1), "b": np.ones((2, 6))}
    figure = plot.samples(groups, (2, 3), columns=4, notes={"b": "noise 0.1"})
    assert {"a", "b", "noise 0.1"} <= texts(figure)
    drawn = pixels(figure)
    assert {image.shape for image in drawn} == {(2, 3)}
    # Five and two images, and what is beyond black and white is clipped.
    np.testing.assert_allclose([image[0, 0] for image in drawn], [0, 0, 0.5, 1, 1, 1, 1])
    assert {image.get_clim() for image in images(figure)} == {(0, 1)}
    rows = {axes.get_position().y0 for axes in figure.axes if axes.get_images()}
    assert len(rows) == 3
    before = np.linspace(0, 1, 12)[None]
    (image,) = pixels(plot.samples({"a": before}, (2, 2, 3)))
    np.testing.assert_allclose(image, before.reshape(2, 2, 3))


def test_reconstructions_stand_below_the_samples():
    original = np.eye(4)[:3]
    figure = plot.reconstructions(original, {"own": original / 2}, (2, 2), names=("x", "y", "z"))
    assert {"original", "own", "x", "y", "z"} <= texts(figure)
    drawn = np.array(pixels(figure)).reshape(2, 3, 4)
    np.testing.assert_allclose(drawn, [original, original / 2])
    (above, below), (other, _) = (
        [axes.get_position().x0 for axes in figure.axes if axes.get_images()][i::3] for i in (0, 1)
    )
    assert above == below < other


def test_convergence_draws_the_history_and_what_it_is_compared_with():
    history = {"objective": np.array([3.0, np.nan, 1.0]), "bits_up": np.array([8, 16, 24])}
    figure = plot.convergence(history, levels={"Local": 0.5})
    curve, level = figure.axes[0].get_lines()
    np.testing.assert_array_equal(curve.get_xydata(), [[1, 3], [3, 1]])
    assert set(level.get_ydata()) == {0.5}
    assert {"objective", "Local", "round"} <= texts(figure)
    (curve,) = plot.convergence(history, against="bits_up").axes[0].get_lines()
    np.testing.assert_array_equal(curve.get_xdata(), [8, 24])


def test_clusters_draw_every_client_in_the_colour_of_its_group():
    points = np.random.default_rng(0).normal(size=(12, 2))
    labels = np.arange(12) % 11
    figure = plot.clusters(points, labels, names=[f"n{i}" for i in range(12)])
    groups = figure.axes[0].collections
    assert sum(len(group.get_offsets()) for group in groups) == 12
    looks = {(*group.get_facecolor()[0], len(group.get_paths()[0].vertices)) for group in groups}
    assert len(looks) == 11
    assert {"n0", "n11", "10"} <= texts(figure)
    colours(figure)


@pytest.mark.parametrize(
    "draw",
    [
        lambda part: plot.components({"shared": np.eye(4)}, (2, 2), figure=part),
        lambda part: plot.components({"shared": np.eye(4)}, figure=part),
        lambda part: plot.separation(*np.ones((3, 1, 4)), (2, 2), figure=part),
        lambda part: plot.samples({"a": np.ones((1, 4))}, (2, 2), figure=part),
        lambda part: plot.reconstructions(np.eye(4), {"a": np.eye(4)}, (2, 2), figure=part),
        lambda part: plot.convergence({"objective": np.ones(3)}, figure=part),
        lambda part: plot.clusters(np.eye(2), [0, 1], figure=part),
    ],
)
def test_pictures_can_be_put_together_and_keep_no_state(draw):
    figure = Figure(layout="constrained")
    _, right = figure.subfigures(1, 2)
    assert draw(right) is right
    drawn = colours(figure)
    half = drawn.shape[1] // 2
    assert drawn[:, half:].min() < WHITE and drawn[:, : half - 5].min() > WHITE
    assert not matplotlib.pyplot.get_fignums()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot.components({}), "groups: wanted .* at least one"),
        (lambda: plot.components({"a": np.ones(3)}), r"groups\['a'\].*\(3,\)"),
        (lambda: plot.components({"a": np.ones((3, 0))}), r"groups\['a'\].*\(3, 0\)"),
        (lambda: plot.components({"a": np.ones((5, 1))}, (2, 3)), "image_shape.*6 pixels.*5"),
        (lambda: plot.separation(*np.ones((3, 4)), (2, 2)), "original.*shape"),
        (
            lambda: plot.separation(np.ones((1, 4)), np.ones((2, 4)), np.ones((1, 4)), (2, 2)),
            "shared",
        ),
        (lambda: plot.separation(*np.ones((3, 1, 4)), (2, 2), names=("a", "b")), "names.*1.*2"),
        (lambda: plot.samples({}, (2, 2)), "groups: wanted .* at least one"),
        (lambda: plot.samples({"a": np.ones((1, 5))}, (2, 2)), r"image_shape.*4 numbers.*5"),
        (lambda: plot.samples({"a": np.ones((1, 8))}, (2, 2, 2)), r"image_shape.*\(2, 2, 2\)"),
        (lambda: plot.samples({"a": np.ones((0, 4))}, (2, 2)), r"groups\['a'\].*\(0, 4\)"),
        (lambda: plot.samples({"a": np.eye(4)}, (2, 2), columns=0), "columns.*0"),
        (lambda: plot.samples({"a": np.eye(4)}, (2, 2), notes={"b": ""}), "notes.*b"),
        (lambda: plot.reconstructions(np.eye(4), {}, (2, 2)), "found: wanted .* at least one"),
        (
            lambda: plot.reconstructions(np.eye(4), {"a": np.ones((3, 4))}, (2, 2)),
            r"found\['a'\].*4.*3",
        ),
        (
            lambda: plot.reconstructions(np.eye(4), {"a": np.eye(4)}, (2, 2), names=["a"]),
            "names.*4.*1",
        ),
        (lambda: plot.convergence({"loss": np.ones(3)}), "loss.*objective"),
        (lambda: plot.clusters(np.ones((3, 3)), [0, 1, 2]), r"embedding.*\(3, 3\)"),
        (lambda: plot.clusters(np.ones((3, 2)), [0, 1]), "labels: wanted 3 labels"),
        (lambda: plot.clusters(np.ones((3, 2)), [0, 1, 2], names=["a"]), "names.*3.*1"),
    ],
)
def test_bad_input_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_without_matplotlib_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"jaxfed\[plot\]"):
        plot.convergence({"objective": np.ones(3)})
