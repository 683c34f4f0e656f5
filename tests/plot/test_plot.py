import inspect
import sys
from io import BytesIO

import jax
import matplotlib.pyplot
import numpy as np
import pytest
from matplotlib.cbook import is_math_text
from matplotlib.figure import Figure

from jaxfed import Clients, Personalized, metrics, plot
from tests.plot.examples import confidence, ranks

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
    with pytest.raises(ValueError, match=r"groups: wanted a dictionary of components"):
        plot.components({"shared": None})


@pytest.mark.parametrize("missing", [0, 1])
def test_parts_that_do_not_exist_have_no_row(missing):
    parts = [np.full((2, 6), 0.5), np.full((2, 6), -0.5)]
    there = parts[1 - missing]
    parts[missing] = None
    figure = plot.separation(np.ones((2, 6)), *parts, (2, 3), mean=np.ones(6))
    assert len(pixels(figure)) == 6
    np.testing.assert_array_equal(pixels(figure)[-1], (there[0] + 1).reshape(2, 3))
    name = ("shared part", "local part")[missing]
    assert name not in texts(figure)
    with pytest.raises(ValueError, match=r"shared, local: wanted at least one"):
        plot.separation(np.ones((2, 6)), None, None, (2, 3))


def test_zero_is_white_on_one_scale_a_group():
    figure = plot.components({"both": np.array([[1.0, 0.1], [-0.5, 0.0]])}, (1, 2))
    limits = {image.get_clim() for image in images(figure)}
    assert limits == {(-1.0, 1.0)}


def test_components_without_pixels_are_rows_of_features():
    shared = np.arange(10.0).reshape(5, 2)
    (drawn,) = pixels(plot.components({"shared": shared}))
    np.testing.assert_array_equal(drawn, shared.T)


def test_components_of_a_model_are_its_shared_and_local_ones():
    shared, local = np.eye(6)[:, :2], np.stack([np.eye(6)[:, 2:3]] * 7)
    groups = pixels(plot.components(Personalized(shared, local)))
    assert len(groups) == 6  # of the first clients
    np.testing.assert_array_equal(groups[0], shared.T)
    np.testing.assert_array_equal(groups[5], local[4].T)
    assert len(pixels(plot.components(Personalized(shared, None)))) == 1
    with pytest.raises(ValueError, match=r"^groups: wanted what PCA learned"):
        plot.components(shared)
    network = Personalized(shared, {"weights": local})
    with pytest.raises(ValueError, match=r"^groups: wanted a model with components"):
        plot.components(network)


def test_features_have_their_names():
    names = ["age", "weight", "a $price$", "d", "e"]
    figure = plot.components({"shared": np.eye(5)[:, :2]}, feature_names=names)
    assert {"age", "weight", r"a \$price\$"} <= texts(figure)
    assert "weight" in texts(plot.bands(confidence(), feature_names=[*names, "f"]))
    assert "feature" in texts(plot.components({"many": np.eye(61)}, feature_names=["x"] * 61))
    with pytest.raises(ValueError, match=r"^feature_names: wanted 6, got 5"):
        plot.bands(confidence(), feature_names=names)
    with pytest.raises(ValueError, match=r"^feature_names: wanted 5, got 1"):
        plot.components({"shared": np.eye(5)[:, :2]}, feature_names=["age"])


def test_separation_shows_the_parts_and_their_sum():
    key = jax.random.key(0)
    original, shared, own = jax.random.normal(key, (3, 2, 6))
    mean = np.ones(6)
    figure = plot.separation(original, shared, own, (2, 3), mean=mean, names=("a", "b"))
    drawn = np.stack(pixels(figure)).reshape(4, 2, 6)
    together = np.asarray(shared) + np.asarray(own) + mean
    np.testing.assert_allclose(drawn, [original, shared, own, together], rtol=1e-6)
    assert {"original", "shared part", "local part", "together", "a", "b"} <= texts(figure)


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


def test_convergence_does_not_magnify_rounding():
    rounding = 1e-8 * np.random.default_rng(0).normal(size=50)
    low, high = plot.convergence({"objective": 0.5 + rounding}).axes[0].get_ylim()
    assert high - low == pytest.approx(5e-4, rel=0.01) and low < 0.5 < high
    falls = 0.5 + 0.1 * 0.5 ** np.arange(50)
    low, high = plot.convergence({"objective": falls}).axes[0].get_ylim()
    assert high - low == pytest.approx(0.1 * 1.1, rel=0.01)


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


def test_scree_draws_shares_of_the_variance_and_the_rank_that_was_chosen():
    own = np.array([[4.0, 1.0], [2.0, 0.0]])
    figure = plot.scree({"all": [6.0, 2.0], "own": own}, total=10, chosen={"shared": 1})
    (axes,) = figure.axes
    everybody, each, rank = axes.get_lines()
    np.testing.assert_allclose(everybody.get_xydata(), [[1, 60], [2, 20]])
    np.testing.assert_allclose(each.get_ydata(), [30, 5])
    assert set(rank.get_xdata()) == {1.5}
    (band,) = axes.collections
    edges = band.get_paths()[0].vertices
    assert edges[:, 1].max() == 40 and {(1, 20), (2, 10)} <= set(map(tuple, edges.round(9)))
    assert {"all", "own", "shared", "share of the variance (%)"} <= texts(figure)
    (axes,) = plot.scree({"all": [6.0, 2.0]}).axes
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), [6, 2])


def test_variance_is_split_by_client_the_most_shared_on_top():
    shares = metrics.EnergyShares(*np.array([[0.2, 0.7], [0.5, 0.2], [0.3, 0.1]]))
    figure = plot.variance_shares(shares, names=["a", "b"])
    bars = [
        [(bar.get_x(), bar.get_width()) for bar in group] for group in figure.axes[0].containers
    ]
    wanted = [[(0, 20), (0, 70)], [(20, 50), (70, 20)], [(70, 30), (90, 10)]]
    np.testing.assert_allclose(bars, wanted)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b"]
    many = plot.variance_shares(metrics.EnergyShares(*np.full((3, 50), 1 / 3)), names=["c"] * 50)
    assert "c" not in texts(many) and "50 clients" in texts(many)


def test_convergence_with_bits_on_a_second_axis():
    history = {"objective": np.array([3.0, 1.0]), "bits_up": np.array([8, 16])}
    first, second = plot.convergence(history, bits=True).axes
    np.testing.assert_array_equal(first.get_lines()[0].get_xydata(), [[1, 3], [2, 1]])
    np.testing.assert_array_equal(second.get_lines()[0].get_xydata(), [[1, 8], [2, 16]])
    assert second.get_ylabel().startswith("bits sent")
    assert first.yaxis.get_ticks_position() != second.yaxis.get_ticks_position()


def test_clients_are_placed_by_what_they_learned_and_coloured_by_what_is_known():
    local = np.eye(4)[[0, 0, 1, 1]][..., None]
    figure = plot.client_map(local, [0.5, 1.0, 2.0, 4.0], label="depth", names=["a", "b", "c", "d"])
    drawn = figure.axes[0].collections[0]
    places = np.asarray(drawn.get_offsets())
    np.testing.assert_allclose(places[0], places[1], atol=1e-3)
    assert np.linalg.norm(places[0] - places[2]) > 1
    np.testing.assert_array_equal(drawn.get_array(), [0.5, 1, 2, 4])
    assert figure.axes[1].get_ylabel() == "depth" and {"a", "d"} <= texts(figure)

    figure = plot.client_map(np.eye(2)[[0, 0, 1]], ["x", "y", "y"], label="kind")
    sizes = [len(group.get_offsets()) for group in figure.axes[0].collections]
    assert sizes == [1, 2] and {"x", "y", "kind"} <= texts(figure)
    assert figure.axes[0].get_legend().get_title().get_text() == "kind"
    assert plot.client_map(np.eye(2)).axes[0].get_legend() is None


def test_confusion_shows_which_components_are_partners():
    turned = np.sqrt([[1.0, 0.0], [0.0, 0.75], [0.0, 0.25]])
    figure = plot.confusion(np.eye(3)[:, ::-1], turned)
    np.testing.assert_allclose(pixels(figure)[0], [[0, 0.25], [0, 0.75], [1, 0]], atol=1e-12)
    assert images(figure)[0].get_clim() == (0, 1)
    assert {".75", ".25", ".00", "1", "components, second half"} <= texts(figure)


def test_bands_reach_1_96_standard_errors_around_each_axis():
    given = confidence()
    figure = plot.bands(given)
    assert {"axis 1", "axis 2, in span 2–3"} <= texts(figure)
    for i, axes in enumerate(figure.axes):
        (line,) = [line for line in axes.lines if len(line.get_xdata()) == 6]
        np.testing.assert_array_equal(line.get_ydata(), given.axes[:, i])
        (band,) = axes.collections
        corners = band.get_paths()[0].vertices
        for j in range(6):
            ends = sorted(set(corners[np.isclose(corners[:, 0], j), 1]))
            reach = 1.96 * given.axes_std[j, i]
            wanted = given.axes[j, i] - reach, given.axes[j, i] + reach
            np.testing.assert_allclose((ends[0], ends[-1]), wanted, atol=1e-12)


def test_bands_of_pictures_are_images_above_their_standard_errors():
    given = confidence()
    drawn = pixels(plot.bands(given, (2, 3)))
    assert len(drawn) == 6
    for i in range(3):
        np.testing.assert_array_equal(drawn[i], given.axes[:, i].reshape(2, 3))
        np.testing.assert_array_equal(drawn[3 + i], given.axes_std[:, i].reshape(2, 3))


def test_angles_are_bars_up_to_their_bounds_in_degrees():
    (axes,) = plot.angles(confidence()).axes
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], [18, 9, 4.5])
    wanted = ["shared subspace", "axis 1", "span of axes 2–3"]
    assert [label.get_text() for label in axes.get_yticklabels()] == wanted
    assert np.all(np.diff([bar.get_y() for bar in axes.patches]) < 0)


def test_distances_are_intervals_the_closest_client_on_top():
    (axes,) = plot.distances(confidence(), names=["far", "near"]).axes
    ends = [segment[:, 0].tolist() for segment in axes.collections[0].get_segments()]
    np.testing.assert_allclose(ends, [[40, 60], [5, 30]])
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [50, 20])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["far", "near"]


def test_ranks_are_filled_dots_above_a_band_of_what_is_not_significant():
    figure = plot.ranks(ranks())
    shared, local = figure.axes
    filled, hollow = (each.get_offsets().tolist() for each in shared.collections)
    assert filled == [[1, 9], [2, 7]] and hollow == [[3, 2], [4, -1]]
    band, subsets = shared.patches
    assert band.get_y() + band.get_height() == pytest.approx(3) and band.get_y() < -1
    ends = subsets.get_x(), subsets.get_x() + subsets.get_width()
    assert ends == (1.75, 3.25)
    assert [axes.get_title("left") for axes in (shared, local)] == ["2 shared", "1 local"]
    assert local.get_xlim()[0] < local.patches[1].get_x() < 0
    assert figure.get_suptitle() == "the same in 80% of subsets\nno suggestion"
    sure = plot.ranks(ranks()._replace(suggested=(2, 1)))
    assert "suggestion" not in sure.get_suptitle()


def test_what_is_given_is_drawn_as_it_is_and_not_as_mathematics():
    name = "$\\nosuchcommand$"
    for figure in (
        plot.clusters(np.eye(2), [0, 1], names=[name, "b"]),
        plot.agreement(np.eye(2), [name, "b"]),
        plot.components({name: np.eye(4)}, (2, 2)),
        plot.samples({name: np.ones((1, 4))}, (2, 2)),
        plot.scree({name: [1.0]}, chosen={"b": 1}),
        plot.client_map(np.eye(2), [name, "b"]),
        plot.distances(confidence(), names=[name, "b"]),
        plot.scores(MODEL, CLIENTS, names=[name, "b"]),
        plot.biplot(MODEL, CLIENTS, feature_names=[name, *"bcd"]),
        plot.loadings(EYE4, feature_names=[name, *"bcd"]),
    ):
        drawn = {text.replace(r"\$", "$") for text in texts(figure) if not is_math_text(text)}
        assert name in drawn and colours(figure).min() < WHITE


EYE4 = {"shared": np.eye(4)}
MODEL = Personalized(np.eye(4)[:, :2], None)
CLIENTS = Clients.from_samples(np.ones((2, 3, 4)))


@pytest.mark.parametrize(
    "draw",
    [
        lambda ax: plot.agreement(np.eye(2), ["a", "b"], ax=ax),
        lambda ax: plot.angles(confidence(), ax=ax),
        lambda ax: plot.bands(confidence(), ax=ax),
        lambda ax: plot.biplot(MODEL, CLIENTS, ax=ax),
        lambda ax: plot.bands(confidence(), (2, 3), ax=ax),
        lambda ax: plot.client_map(np.eye(2), [0.0, 1.0], ax=ax),
        lambda ax: plot.clusters(np.eye(2), [0, 1], ax=ax),
        lambda ax: plot.components(EYE4, (2, 2), ax=ax),
        lambda ax: plot.components(EYE4, ax=ax),
        lambda ax: plot.confusion(np.eye(2), np.eye(2), ax=ax),
        lambda ax: plot.convergence({"objective": np.ones(3)}, ax=ax),
        lambda ax: plot.distances(confidence(), ax=ax),
        lambda ax: plot.loadings(EYE4, ax=ax),
        lambda ax: plot.ranks(ranks(), ax=ax),
        lambda ax: plot.reconstructions(np.eye(4), {"a": np.eye(4)}, (2, 2), ax=ax),
        lambda ax: plot.samples({"a": np.ones((1, 4))}, (2, 2), ax=ax),
        lambda ax: plot.scores(MODEL, CLIENTS, ax=ax),
        lambda ax: plot.scree({"a": np.ones(3)}, ax=ax),
        lambda ax: plot.separation(*np.ones((3, 1, 4)), (2, 2), ax=ax),
        lambda ax: plot.variance_shares(metrics.EnergyShares(*np.full((3, 2), 1 / 3)), ax=ax),
        lambda ax: plot.grid(found(), "x", ax=ax),
    ],
)
def test_every_picture_goes_into_axes_that_are_given_and_returns_them(draw):
    figure = Figure(figsize=(6, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_axis_off()
    assert draw(right) is right
    drawn = colours(figure)
    end = int(drawn.shape[1] * left.get_position().x1)
    assert drawn[:, end:].min() < WHITE and drawn[:, :end].min() > WHITE


def found():
    return pytest.importorskip("xarray").Dataset({"y": ("x", [1.0, 2.0])}, {"x": [1.0, 2.0]})


def test_every_function_takes_axes():
    for name in dir(plot):
        assert "ax" in inspect.signature(getattr(plot, name)).parameters


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
        lambda part: plot.biplot(MODEL, CLIENTS, figure=part),
        lambda part: plot.loadings(EYE4, figure=part),
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
        (lambda: plot.components({"a": np.ones((5, 1))}, (2, 3)), "image_shape.*6 numbers.*5"),
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
        (
            lambda: plot.convergence({"objective": np.ones(3)}, figure=Figure(), ax=Figure().gca()),
            "figure, ax: wanted at most one",
        ),
        (lambda: plot.bands(np.eye(3)), "confidence: wanted the result of"),
        (lambda: plot.bands(confidence(), (2, 2)), "image_shape.*4 numbers.*6 features"),
        (lambda: plot.ranks((2, 2)), "ranks: wanted the result of"),
        (lambda: plot.distances(confidence(), names=["a"]), "names: wanted 2, got 1"),
        (lambda: plot.scree({"a": np.ones(3)}, ax=Figure()), "ax: wanted Matplotlib axes"),
        (lambda: plot.components(EYE4, ax=Figure().add_axes((0, 0, 1, 1))), "ax: wanted axes of"),
        (lambda: plot.convergence({"objective": np.ones(3)}, bits=True), "history has.*bits_up"),
        (lambda: plot.scree({"a": -np.ones(3)}), r"variances\['a'\]: wanted none below 0"),
        (lambda: plot.scree({"a": np.ones(3)}, total=0), "total: wanted a positive"),
        (lambda: plot.scree({"a": np.ones(3)}, chosen={"b": 0}), r"chosen\['b'\].*0"),
        (lambda: plot.variance_shares(metrics.EnergyShares(*np.ones(3))), "shares.shared: wanted"),
        (lambda: plot.client_map(np.ones((3, 3))), r"clients.*\(3, 3\)"),
        (lambda: plot.client_map(np.eye(2), [1.0]), "metadata: wanted 2 numbers"),
        (lambda: plot.client_map(np.eye(2), ["a"]), "metadata: wanted 2"),
        (lambda: plot.client_map(np.eye(2), [1.0, np.nan]), "metadata: wanted finite"),
        (lambda: plot.confusion(np.eye(2), np.eye(3)), "second: wanted components of 2"),
        (lambda: plot.confusion(np.eye(2), np.eye(2), names=["a"]), "names: wanted 2"),
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
