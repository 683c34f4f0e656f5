"""Scores, biplots and bars of loadings, against NumPy and scikit-learn."""

import jax
import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from sklearn.decomposition import PCA

import jaxfed as jf
from jaxfed import Personalized, plot
from jaxfed.estimators import FederatedGCCA, FederatedPCA, PersonalizedPCA
from jaxfed.plot import drawing

KEY = jax.random.key(0)
NAMES, FEATURES = ["Rome", "Oslo", "a $b$"], ["u", "v", "w", "x", "y"]
RNG = np.random.default_rng(0)
TABLES = [RNG.normal(size=(n, 5)) * [5, 3, 2, 1, 0.5] for n in (30, 40, 50)]
TABLES = [table - table.mean(axis=0) for table in TABLES]
SHARED = np.eye(5)[:, :3] @ np.linalg.qr(RNG.normal(size=(3, 3)))[0]  # the first three features
LOCAL = np.stack([np.eye(5)[:, 3:]] * 3)
MODEL = Personalized(SHARED, LOCAL)


def clients_of(tables=TABLES, dtype=np.float32, **names):
    return jf.Clients.from_samples([table.astype(dtype) for table in tables], **names)


CLIENTS = clients_of(names=NAMES, features=FEATURES)


def places(axes):
    """The points of the samples, in the order in which they are drawn."""
    return np.asarray(dots(axes).get_offsets())


def dots(axes):
    found = [x for x in axes.collections if isinstance(x, PathCollection)]
    return max(found, key=lambda x: len(x.get_offsets()))


def arrows(axes):
    """The ends of the arrows by the name beside them."""
    tips = [x for x in axes.texts if isinstance(x, Annotation)]
    return {x.get_text(): np.asarray(x.xy) for x in tips if x.get_text()}


def test_points_are_scores_on_principal_axes_in_the_colour_of_their_client():
    (axes,) = plot.scores(MODEL, CLIENTS).axes
    found, colours = places(axes), dots(axes).get_facecolor()
    # Every client counts equally.
    moment = sum(table.T @ table / len(table) for table in TABLES) / 3
    inside = SHARED @ SHARED.T @ moment @ SHARED @ SHARED.T
    values, vectors = np.linalg.eigh(inside)
    wanted = vectors[:, ::-1][:, :2]
    wanted = wanted * np.sign(wanted[np.abs(wanted).argmax(axis=0), [0, 1]])
    assert len(found) == 120
    for i, table in enumerate(TABLES):
        own = np.all(colours[:, :3] == matplotlib.colors.to_rgb(drawing.colour(i)), axis=1)
        np.testing.assert_allclose(found[own], table @ wanted, atol=1e-5)
    shares = values[::-1][:2] / np.trace(moment)
    assert axes.get_xlabel() == f"shared axis 1 ({shares[0]:.1%})"
    assert axes.get_ylabel() == f"shared axis 2 ({shares[1]:.1%})"
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["Rome", "Oslo", r"a \$b\$"]


def test_axes_can_be_chosen_in_any_order():
    (axes,) = plot.scores(MODEL, CLIENTS, [3, 1]).axes
    (first,) = plot.scores(MODEL, CLIENTS, [1, 3]).axes
    np.testing.assert_array_equal(places(axes), places(first)[:, ::-1])
    assert axes.get_xlabel().startswith("shared axis 3 (")


def test_an_estimator_keeps_its_axes_and_shares():
    X, groups = np.concatenate(TABLES) + 7, np.repeat(NAMES, (30, 40, 50))
    model = FederatedPCA(2, tol=1e-12).fit(X, groups=groups)
    (axes,) = plot.scores(model, X, groups=groups).axes
    scores = model.transform(X, groups=groups)
    for one, other in zip(sorted(places(axes).tolist()), sorted(scores.tolist()), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)
    shares = PCA(2).fit(X).explained_variance_ratio_
    assert axes.get_xlabel() == f"shared axis 1 ({shares[0]:.1%})"
    clients = jf.Clients.from_samples([x - X.mean(axis=0) for x in np.split(X, (30, 70))])
    (same,) = plot.scores(model, clients).axes
    np.testing.assert_allclose(places(same), _by_label(places(axes), groups), atol=1e-4)


def _by_label(points, groups):
    """What clients in the order of the samples draw, from what those in the labels' order do."""
    counts = {name: int(np.sum(groups == name)) for name in NAMES}
    turns = {n: (np.arange(c) + 0.5) / c for n, c in counts.items()}

    def order(names):
        owners = np.concatenate([[n] * counts[n] for n in names])
        numbers = np.concatenate([np.arange(counts[n]) for n in names])
        drawn = np.argsort(np.concatenate([turns[n] for n in names]), kind="stable")
        return list(zip(owners[drawn], numbers[drawn], strict=True))

    by = dict(zip(order(sorted(NAMES)), points, strict=True))
    return [by[key] for key in order(NAMES)]


def test_local_axes_are_those_of_one_client():
    (axes,) = plot.scores(MODEL, CLIENTS, client=1).axes
    turned = jf.pca.principal_axes(LOCAL[1], [TABLES[1]])
    np.testing.assert_allclose(places(axes), TABLES[1] @ turned, atol=1e-5)
    share = np.sum((TABLES[1] @ turned[:, 0]) ** 2) / np.sum(TABLES[1] ** 2)
    assert axes.get_xlabel() == f"local axis 1 of Oslo ({share:.1%})"
    assert axes.get_legend() is None
    solution = jf.fit(jf.pca.OneShot(2, 1), CLIENTS, rounds=1, key=KEY)
    (named,) = plot.scores(solution, CLIENTS, client="Oslo").axes
    assert named.get_xlabel().startswith("local axis 1 of Oslo (")


def test_components_that_are_not_orthonormal_stay_and_have_no_share():
    factors = np.abs(SHARED[:, :2]) * 3
    (axes,) = plot.scores(Personalized(factors, None), CLIENTS).axes
    assert axes.get_xlabel() == "shared axis 1"
    found = np.concatenate(TABLES) @ factors
    np.testing.assert_allclose(np.sort(places(axes), 0), np.sort(found, 0), atol=1e-5)


@pytest.mark.parametrize("draw", [plot.scores, plot.biplot])
@pytest.mark.parametrize("features", [1, 2])
def test_a_single_axis_has_a_row_for_each_client(draw, features):
    tables = [table[:, :features] for table in TABLES]
    (axes,) = draw(Personalized(np.eye(features, 1), None), clients_of(tables, names=NAMES)).axes
    rows = np.rint(places(axes)[:, 1]).astype(int)
    for i, table in enumerate(tables):
        np.testing.assert_allclose(np.sort(places(axes)[rows == i, 0]), np.sort(table[:, 0]), 1e-5)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["Rome", "Oslo", r"a \$b\$"]
    low, high = sorted(axes.get_ylim())
    assert low < places(axes)[:, 1].min() and places(axes)[:, 1].max() < high
    assert set(arrows(axes)) == ({"feature 0"} if draw is plot.biplot else set())


def test_more_clients_than_colours_are_on_a_scale_in_their_order():
    tables = [i + 0.01 * RNG.normal(size=(4, 3)) for i in range(20)]
    names = [f"site{i}" for i in range(20)]
    figure = plot.scores(Personalized(np.eye(3)[:, :2], None), clients_of(tables, names=names))
    axes, bar = figure.axes
    owners = np.asarray(dots(axes).get_array())
    # Along the diagonal, where a client's number is its place.
    found = np.rint(np.linalg.norm(places(axes), axis=1) / np.sqrt(2) * 2) / 2
    assert axes.get_legend() is None and len(set(owners)) == 20
    assert np.corrcoef(owners, found)[0, 1] > 0.999
    assert [text.get_text() for text in bar.get_yticklabels()][::4] == ["site0", "site19"]
    lightest = dots(axes).cmap(dots(axes).norm(19))[:3]
    assert np.mean(lightest) < 0.7  # is seen on white
    rows = plot.scores(Personalized(np.eye(3)[:, :1], None), clients_of(tables)).axes[0]
    assert rows.get_ylabel() == "20 clients" and rows.get_yticks().size == 0


def test_of_many_samples_an_even_selection_is_drawn_and_the_outlier_of_few_is_there():
    rng = np.random.default_rng(1)
    tables = [rng.normal(size=(3000, 2)), rng.normal(size=(1000, 2))]
    tables[1][77] = 50
    model, clients = Personalized(np.eye(2), None), clients_of(tables)
    (every,) = plot.scores(model, clients).axes
    assert len(places(every)) == 4000 and dots(every).get_rasterized()
    assert places(every).max() > 49
    (some,) = plot.scores(model, clients, most=400).axes
    colours = [tuple(x) for x in dots(some).get_facecolor()]
    counts = sorted(colours.count(x) for x in set(colours))
    assert len(places(some)) == 400 and counts == [100, 300] and not dots(some).get_rasterized()
    # Neither client lies on top of the other.
    assert len(set(colours[:8])) == len(set(colours[-8:])) == 2


def test_arrows_are_rows_of_the_axes_on_one_scale():
    (axes,) = plot.biplot(MODEL, CLIENTS, named=3).axes
    found = arrows(axes)
    turned = jf.pca.principal_axes(SHARED, TABLES)[:, :2]
    lengths = np.linalg.norm(turned, axis=1)
    farthest = np.linalg.norm(places(axes), axis=1).max()
    assert set(found) == {FEATURES[i] for i in np.argsort(-lengths)[:3] if lengths[i] > 0.1}
    for name, tip in found.items():
        row = turned[FEATURES.index(name)]
        np.testing.assert_allclose(tip, 0.8 * farthest * row / lengths.max(), rtol=1e-4, atol=1e-4)
    (hairlines,) = [x for x in axes.collections if isinstance(x, LineCollection)]
    assert len(hairlines.get_segments()) == 5 - len(found)


def test_only_the_longest_arrows_have_names_which_are_apart_and_within():
    rng = np.random.default_rng(2)
    scores = np.abs(rng.normal(size=(3, 40, 1))) * 3
    tables = scores + 0.3 * rng.normal(size=(3, 40, 300))
    clients = clients_of(list(tables))
    solution = jf.fit(jf.pca.Pooled(2), clients, rounds=1, key=KEY)
    names = [f"a long name of item {i}, which nobody reads" for i in range(300)]
    figure = plot.biplot(solution, clients, feature_names=names, named=12)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    written = [x for x in axes.texts if x.get_text()]
    assert len(written) == 12 and all("…" in x.get_text() for x in written)
    boxes = [matplotlib.text.Text.get_window_extent(x) for x in written]
    inside = axes.get_window_extent()
    for i, box in enumerate(boxes):
        assert inside.x0 - 2 < box.x0 and box.x1 < inside.x1 + 2
        assert inside.y0 - 2 < box.y0 and box.y1 < inside.y1 + 2
        for other in boxes[:i]:
            across = min(box.x1, other.x1) - max(box.x0, other.x0)
            upward = min(box.y1, other.y1) - max(box.y0, other.y0)
            assert across <= 0 or upward <= 1


@pytest.mark.parametrize("unit", [1e-12, 1e12])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pictures_do_not_depend_on_units(unit, dtype):
    with jax.enable_x64(dtype == np.float64):
        clients = clients_of(dtype=dtype, features=FEATURES)
        other = clients_of([unit * table for table in TABLES], dtype, features=FEATURES)
        (first,), (second,) = (plot.biplot(MODEL, x).axes for x in (clients, other))
        np.testing.assert_allclose(places(second) / unit, places(first), rtol=1e-3, atol=1e-5)
        assert first.get_xlabel() == second.get_xlabel()
        for name, tip in arrows(first).items():
            np.testing.assert_allclose(arrows(second)[name] / unit, tip, rtol=1e-3, atol=1e-4)


def test_zeros_are_drawn():
    clients = clients_of([np.zeros((3, 5))] * 2)
    (axes,) = plot.biplot(MODEL, clients).axes
    assert axes.get_xlabel() == "shared axis 1 (0.0%)" and not places(axes).any()


def bars(axes):
    return np.array([bar.get_width() for bar in axes.patches])


def test_loadings_are_bars_of_all_groups_over_the_same_features():
    figure = plot.loadings(MODEL, CLIENTS)
    shown = [axes for axes in figure.axes if axes.patches]
    assert len(shown) == 3 + 3 * 2
    np.testing.assert_allclose(bars(shown[1]), jf.pca.principal_axes(SHARED, TABLES)[:, 1], 1e-4)
    own = jf.pca.principal_axes(LOCAL[2], [TABLES[2]])
    np.testing.assert_allclose(bars(shown[8]), own[:, 1], 1e-4, atol=1e-6)
    assert [axes.get_title() for axes in shown[2:5]] == [
        "shared\naxis 3",
        "client 0\naxis 1",
        "client 0\naxis 2",
    ]
    assert [text.get_text() for text in shown[0].get_yticklabels()] == FEATURES
    assert shown[0].get_ylim() == (4.5, -0.5)  # the first on top
    red, blue = (matplotlib.colors.to_rgba(drawing.colour(i)) for i in (1, 0))
    for bar in shown[0].patches:
        assert bar.get_facecolor() == (red if bar.get_width() > 0 else blue)


def test_of_many_features_the_largest_of_each_group_are_drawn():
    rng = np.random.default_rng(3)
    groups = {"first": rng.normal(size=(40, 2)), "second": rng.normal(size=(40, 1))}
    figure = plot.loadings(groups, most=7)
    assert {"first: 7 of 40 features", "second: 7 of 40 features"} == {
        part.get_suptitle() for part in figure.subfigs
    }
    sizes = np.linalg.norm(groups["first"], axis=1)
    largest = np.argsort(-sizes)[:7]
    first = figure.subfigs[0].axes[0]
    np.testing.assert_array_equal(bars(first), groups["first"][largest, 0])
    assert [x.get_text() for x in first.get_yticklabels()] == [f"feature {j}" for j in largest]
    wide = plot.loadings({"many": rng.normal(size=(4, 9))})
    assert sum(bool(axes.patches) for axes in wide.axes) == 6


def test_loadings_of_an_estimator_are_its_components_under_its_names():
    frame = pd.DataFrame(np.concatenate(TABLES), columns=FEATURES)
    groups = np.repeat(NAMES, (30, 40, 50))
    model = PersonalizedPCA(2, 1, n_init=1, rounds=20, random_state=0).fit(frame, groups=groups)
    shown = [axes for axes in plot.loadings(model).axes if axes.patches]
    np.testing.assert_allclose(bars(shown[1]), model.components_[1])
    np.testing.assert_allclose(bars(shown[2]), model.local_components_[0, 0])
    assert shown[2].get_title() == "client Oslo\naxis 1"
    assert [text.get_text() for text in shown[0].get_yticklabels()] == FEATURES
    (axes,) = plot.biplot(model, frame, groups=groups).axes
    assert set(arrows(axes)) <= set(FEATURES)


GAPS = [np.where(table > 3, np.nan, table) for table in TABLES]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot.scores(MODEL, CLIENTS, [0, 1]), r"axes: wanted a whole number of at least"),
        (lambda: plot.scores(MODEL, CLIENTS, [1, 4]), r"axes: wanted a whole number from 1 to 3"),
        (lambda: plot.scores(MODEL, CLIENTS, [1, 1]), r"axes: wanted one or two different axes"),
        (lambda: plot.scores(MODEL, CLIENTS, [1, 2, 3]), r"axes: wanted one or two"),
        (lambda: plot.scores(MODEL, CLIENTS, client=3), r"client: wanted a position from 0 to 2"),
        (
            lambda: plot.scores(MODEL, jf.Clients.from_samples(GAPS, missing="mask")),
            r"clients: wanted complete samples, got some with missing entries; .*Impute",
        ),
        (
            lambda: plot.biplot(MODEL, jf.Clients.from_moments([np.eye(5)] * 3)),
            r"clients: wanted samples, which have scores, got clients that hold Moment",
        ),
        (
            lambda: plot.loadings(MODEL, jf.Clients.from_moments([np.eye(5)] * 3)),
            r"clients: wanted samples",
        ),
        (
            lambda: plot.scores(MODEL, jf.Clients.from_source(TABLES)),
            r"clients: wanted data in memory",
        ),
        (lambda: plot.scores(MODEL, TABLES[0]), r"clients: wanted the jaxfed.Clients"),
        (lambda: plot.scores(SHARED, CLIENTS), r"fitted: wanted what PCA learned"),
        (
            lambda: plot.scores(Personalized(None, LOCAL), CLIENTS),
            r"fitted: wanted shared components of 5 features",
        ),
        (
            lambda: plot.scores(Personalized(SHARED, None), CLIENTS, client=0),
            r"client: wanted None where nothing is local, got 0",
        ),
        (
            lambda: plot.scores(Personalized(SHARED, LOCAL[:2]), CLIENTS, client=0),
            r"fitted: wanted local components .* of each of 3 clients",
        ),
        (lambda: plot.scores(Personalized(SHARED[:4], None), CLIENTS), r"fitted: .*5 features"),
        (lambda: plot.scores(Personalized(0 * SHARED, None), CLIENTS), r"fitted: .* got zeros"),
        (lambda: plot.scores(MODEL, CLIENTS, groups=[0]), r"groups: wanted None but for"),
        (lambda: plot.scores(MODEL, CLIENTS, most=0), r"most: wanted"),
        (lambda: plot.scores(MODEL, CLIENTS, names=["a"]), r"names: wanted 3, got 1"),
        (lambda: plot.biplot(MODEL, CLIENTS, named=0), r"named: wanted"),
        (lambda: plot.biplot(MODEL, CLIENTS, feature_names=["a"]), r"feature_names: wanted 5"),
        (lambda: plot.scores(PersonalizedPCA(), TABLES[0]), r"fitted: wanted a fitted estimator"),
        (lambda: plot.scores(FederatedGCCA(), TABLES), r"got FederatedGCCA before fit"),
        (lambda: plot.loadings({}), r"groups: wanted a dictionary"),
        (lambda: plot.loadings({"a": SHARED}, CLIENTS), r"clients: wanted None with components"),
        (lambda: plot.loadings({"a": SHARED}, most=0), r"most: wanted"),
        (lambda: plot.loadings({"a": SHARED}, feature_names=["b"]), r"feature_names: wanted 5"),
        (lambda: plot.loadings({"a": SHARED}, ax=Figure().add_axes((0, 0, 1, 1))), r"ax: wanted"),
    ],
)
def test_bad_input_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
