"""Reports: what is on the page, and that a browser shows it without any network access."""

import html.parser
import io
import re
import shutil
import subprocess

import jax
import numpy as np
import pandas as pd
import pytest

import jaxfed as jf
from jaxfed.cli import main
from jaxfed.core.run.message_parts import message_parts
from tests.helpers import planted_samples
from tests.plot.examples import confidence

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NAMES = ["<script>alert(1)</script>", "a & b", "$\\nosuch$", "x\"y'"]
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def clients():
    return jf.Clients.from_samples(planted_samples((20, 21, 22, 23), 9, [3.0], [2.0]))


@pytest.fixture(scope="module")
def solution(clients):
    return jf.fit(jf.pca.PerPCA(1, 1, solver="gradient"), clients, rounds=8, key=KEY)


@pytest.fixture(scope="module")
def page(solution, clients):
    return jf.report.html(solution, clients, names=NAMES, image_shape=(3, 3), seconds=3.25)


class Parts(html.parser.HTMLParser):
    """A document's elements, its text by section, and whether all that opens is closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.links, self.section = [], [], [], ""
        self.text = {"": ""}
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.links += [
            attributes[name] for name in ("href", "src", "xlink:href") if name in attributes
        ]
        if tag == "section":
            self.section = attributes["id"]
            self.text[self.section] = ""
        if tag not in ("meta", "link", "path", "use", "image", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_data(self, data):
        self.text[self.section] += f" {data.strip()}"


def test_the_page_has_all_sections_and_says_what_ran(page, solution):
    parts = Parts(page)
    wanted = "data choice-of-ranks convergence components scores clients costs what-was-revealed"
    assert [name for name in parts.text if name] == wanted.split()
    assert "PerPCA(shared_rank=1, local_rank=1, solver='gradient')" in parts.text[""]
    assert "20 to 23, median 22" in parts.text["data"] and "a & b" in parts.text["data"]
    last = solution.history["objective"][-1]
    assert f"to {last:.6g} in 8 rounds" in parts.text["convergence"]
    assert "3.25" in parts.text["costs"]
    assert f"{solution.history['bits_up'][-1]:,.0f}" in parts.text["costs"]
    revealed = parts.text["what-was-revealed"]
    assert "the weighted mean over the clients" in revealed and "second moment" in revealed
    assert "lossless()" in revealed and "no guarantee" in revealed
    assert parts.tags.count("svg") == 6


def test_names_are_escaped_and_nothing_is_loaded(page):
    parts = Parts(page)
    assert "script" not in parts.tags and "<script" not in page
    assert "<script>alert(1)</script>" in parts.text["data"]
    assert parts.links and all(link.startswith(("#", "data:")) for link in parts.links)
    assert "http:" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert "url(" not in page.replace("url(#", "")
    assert "default-src 'none'" in page


def test_the_same_run_gives_the_same_page(page, solution, clients):
    again = jf.report.html(solution, clients, names=NAMES, image_shape=(3, 3), seconds=3.25)
    assert again == page
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:href="|url\()#([^")]*)', page))
    assert used <= set(ids)


def test_plots_have_the_colours_of_the_page(page):
    assert "#000000" not in page and "currentColor" in page and "var(--soft)" in page


@pytest.mark.slow
def test_what_was_chosen_and_what_is_known_is_shown(solution, clients):
    scores = np.array([9.0, 8.5, 0.25]), np.array([7.5, -0.5])
    ranks = jf.pca.SuggestedRanks(
        shared=2,
        local=1,
        suggested=(2, 1),
        support=0.94,
        shared_interval=(2, 2),
        local_interval=(1, 1),
        agreement=np.array([0.9, 0.8, 0.4]),
        chance=np.full(3, 0.4),
        shared_scores=scores[0],
        local_scores=scores[1],
        client_scores=np.zeros((4, 2)),
        threshold=3.1,
        noise_variance=np.ones(4),
    )
    table = [{"quantity": "<i>error</i>", "value": 0.125}]
    options = {"metadata": ["n", "n", "s", "s"], "label": "<b>region</b>", "title": "A & B"}
    page = jf.report.html(solution, clients, ranks=ranks, table=table, **options)
    parts = Parts(page)
    chosen = parts.text["choice-of-ranks"]
    assert "2 shared and 1 local components score above the threshold of 3.1" in chosen
    assert "the same in 94% of random subsets" in chosen and "too weak" not in chosen
    for cells in (["1", "9", "7.5"], ["2", "8.5", "-0.5"], ["3", "0.25", ""]):
        assert re.search("<tr[^>]*>" + "".join(f"<td[^>]*>{x}</td>" for x in cells), page)
    doubtful = jf.report.html(solution, clients, ranks=ranks._replace(suggested=None))
    assert "It is too weak to tell" in Parts(doubtful).text["choice-of-ranks"]
    assert "<i>" not in page and "<i>error</i>" in parts.text["results"]
    assert "0.125" in parts.text["results"] and "<title>A &amp; B</title>" in page


@pytest.mark.slow
def test_the_uncertainty_of_components_is_shown():
    samples = np.random.default_rng(0).normal(size=(2, 12, 6)).astype(np.float32)
    clients = jf.Clients.from_samples(samples)
    solution = jf.fit(jf.pca.OneShot(3, 1), clients, rounds=1, key=KEY)
    given = {"confidence": confidence(), "names": ["<a>", "b"]}
    page = jf.report.html(solution, clients, image_shape=(2, 3), **given)
    text = Parts(page).text["confidence"]
    assert "Too few samples." in text and "95%, from 10 fits" in text
    assert "angle of the span of axes 2 to 3 (degrees)" in text
    assert "energy of <a> outside the shared subspace (%)" in text
    (row,) = re.findall(r"<tr><td>energy in shared components.*?</tr>", page)
    assert re.findall(r">([\d.]+)<", row) == ["60", "50", "70"]
    assert "confidence" not in Parts(jf.report.html(solution, clients)).text
    with pytest.raises(ValueError, match="confidence: wanted that of this run, 1 clients and 6"):
        jf.report.html(
            jf.fit(jf.pca.OneShot(3, 1), clients.take([0]), rounds=1, key=KEY),
            clients.take([0]),
            confidence=confidence(),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        (
            jf.pca.PerPCA(1, 1, solver="gradient"),
            {("curvature", True, "Max"), ("moment", True, "Gram"), ("shared", False, "Mean")},
        ),
        (jf.pca.OneShot(1, 1), {("", True, "Gram")}),
        (jf.pca.Local(2), set()),
        (jf.pca.FAPS(1), {("product", False, "Sum"), ("captured", False, "Sum")}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_was_sent_is_what_the_algorithm_declares(clients, algorithm, wanted):
    solution = jf.fit(algorithm, clients, rounds=1, key=KEY)
    parts = message_parts(solution, clients)
    assert {(part.name, part.before, part.rule) for part in parts} == wanted
    for before, release in zip((True, False), solution.releases, strict=True):
        own = [part for part in parts if part.before == before]
        assert release.bits == 32 * sum(int(np.prod(part.shape)) for part in own)
    text = Parts(jf.report.html(solution, clients)).text["what-was-revealed"]
    assert ("No client sent anything" in text) == (not wanted)


@pytest.mark.slow
def test_what_was_sent_does_not_depend_on_units(clients):
    small = jf.Clients.from_samples(np.float32(1e-15) * clients.data.values)
    solution = jf.fit(jf.pca.PerPCA(1, 1), small, rounds=1, key=KEY)
    parts = message_parts(solution, small)
    assert [part.name for part in parts if part.before] == ["moment"]
    assert {part.dtype for part in parts} == {"float64"}


@pytest.mark.slow
def test_a_warm_start_sends_less_before_the_rounds(clients):
    start = jf.fit(jf.pca.OneShot(1, 1), clients, rounds=1, key=KEY)
    solution = jf.fit(
        jf.pca.PerPCA(1, 1, solver="gradient"), clients, rounds=1, key=KEY, warm_start=start
    )
    assert [part.name for part in message_parts(solution, clients)] == ["curvature", "shared"]
    assert "of an earlier run" in jf.report.html(solution, clients)


@pytest.mark.slow
def test_protection_of_messages_is_reported(clients):
    noise = jf.channel.gaussian(1.0, 2.0, clients=4)
    algorithm = jf.pca.PerPCA(1, 1, solver="gradient", start="random", step_size=0.1)

    def said(channel):
        ways = jf.Wire(channel, jf.channel.lossless())
        solution = jf.fit(algorithm, clients, rounds=2, key=KEY, channel=ways)
        text = Parts(jf.report.html(solution, clients)).text["what-was-revealed"]
        return solution, text

    _, text = said(jf.channel.secure_sum(4, bits=24, bound=4.0))
    assert "only their sum" in text and "no guarantee" in text
    solution, text = said(jf.channel.secure_sum(4, bits=24, bound=4.0, inner=noise))
    epsilon = jf.privacy.spent(solution, delta=1e-5)
    assert "only their sum" in text and f"({epsilon:.3g}, 1e-05)-differentially" in text
    assert "does not cover the diagnostics" in text
    _, text = said(noise)
    assert "only their sum" not in text


def test_views_and_networks_have_a_page_with_their_own_pictures(clients):
    rng = np.random.default_rng(0)
    views = jf.gcca.Views.from_arrays([rng.normal(size=(12, 4)), rng.normal(size=(12, 3))])
    solution = jf.fit(jf.gcca.MVLSA(2), views, rounds=1, key=KEY)
    figure = jf.plot.agreement(np.eye(2), ["a", "b"])
    parts = Parts(jf.report.html(solution, views, pictures={"Agreement <1>": figure}))
    assert "every client's message separately" in parts.text["what-was-revealed"]
    assert "entities 12" in parts.text["data"] and "Agreement <1>" in parts.text["results"]
    assert parts.tags.count("svg") == 1 and "components" not in parts.text


@pytest.mark.slow
def test_many_clients_are_shown_in_part():
    samples = np.random.default_rng(0).normal(size=(600, 3, 4)).astype(np.float32)
    clients = jf.Clients.from_samples(samples)
    solution = jf.fit(jf.pca.OneShot(1, 1), clients, rounds=1, key=KEY)
    parts = Parts(jf.report.html(solution, clients))
    assert "500 of 600 clients" in parts.text["clients"]
    assert "first 200" in parts.text["data"] and "client 200" not in parts.text["data"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["a"]}, "names: wanted the run's 4"),
        ({"feature_names": ["a"]}, "feature_names: wanted 9, one per feature, got 1"),
        ({"metadata": [1.0]}, "metadata: wanted the run's 4"),
        ({"metadata": np.array(1.0)}, "metadata: wanted the run's 4"),
        ({"table": [{"a": 1}, {"b": 1}]}, "table: wanted"),
        ({"seconds": -1}, "seconds: wanted"),
        ({"confidence": 0.95}, "confidence: wanted the result of"),
        ({"image_shape": (2, 3)}, "image_shape: 2 x 3 is 6 numbers"),
    ],
)
def test_bad_input_is_refused(solution, clients, options, message):
    with pytest.raises(ValueError, match=message):
        jf.report.html(solution, clients, **options)


def test_what_is_no_run_is_refused(solution, clients):
    with pytest.raises(ValueError, match="clients: wanted those of the run"):
        jf.report.html(solution, clients.take([0, 1]))


@pytest.mark.slow
def test_the_command_writes_a_page_beside_the_results(tmp_path, clients):
    data = tmp_path / "data & more"
    data.mkdir()
    for name, samples in zip(("<script>", "b", "c"), clients.data.values, strict=False):
        np.save(data / f"{name}.npy", samples[:20])
    command = ["fit", "oneshot", "--shared-rank", "1", "--local-rank", "1", "--data", str(data)]
    assert main([*command, "--out", str(tmp_path / "out"), "--report"]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    parts = Parts(page)
    assert "jaxfed fit oneshot, data & more" in parts.text[""] and "<script>" not in page
    assert "error on held-out samples" in parts.text["results"]
    assert "arrows are features" in parts.text["scores"] and "loadings" in parts.text
    assert main([*command, "--out", str(tmp_path / "without")]) == 0
    assert not (tmp_path / "without" / "report.html").exists()


def test_a_report_is_for_one_process(tmp_path, capsys):
    command = ["fit", "oneshot", "--shared-rank", "1", "--local-rank", "1", "--data", "nowhere"]
    assert main([*command, "--out", str(tmp_path / "out"), "--processes", "--report"]) == 2
    assert "--report: is for one process" in capsys.readouterr().err


# --- in a browser ----------------------------------------------------------------------------


def browsed(folder, page, *options, size=(900, 2000)):
    """The picture of a page, what its console said, and what was asked of the network."""
    image = pytest.importorskip("PIL.Image")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    (folder / "page.html").write_text(page, encoding="utf-8")
    quiet = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
        --disable-background-networking --disable-component-update --disable-sync
        --disable-default-apps --hide-scrollbars --enable-logging=stderr"""
    command = [
        CHROMIUM,
        *quiet.split(),
        f"--user-data-dir={folder / 'profile'}",
        f"--log-net-log={folder / 'net.json'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # the browser's own requests get no answer
        f"--window-size={size[0]},{size[1]}",
        f"--screenshot={folder / 'page.png'}",
        *options,
        (folder / "page.html").as_uri(),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in run.stderr.splitlines() if ":CONSOLE" in line]
    # Requests of the browser itself have no origin.
    question = r'"initiator":"(?!not an origin).*?"url":"([^"]*)"'
    asked = re.findall(question, (folder / "net.json").read_text())
    asked = [url for url in asked if not url.startswith("file:")]
    pixels = np.asarray(image.open(io.BytesIO((folder / "page.png").read_bytes())).convert("RGB"))
    return pixels, console, asked


DARK = "--blink-settings=preferredColorScheme=0"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_browser_shows_it_in_light_and_dark_and_asks_for_nothing(page, tmp_path):
    shades = []
    for name, size, options in (
        ("light", (900, 2000), ()),
        ("dark", (900, 2000), (DARK,)),
        ("narrow", (500, 2000), ()),
    ):
        (tmp_path / name).mkdir()
        pixels, console, asked = browsed(tmp_path / name, page, *options, size=size)
        assert console == [] and asked == []
        assert pixels.shape[:2] == size[::-1]
        shades.append(pixels.mean())
        # There are text and plots to the end, and nothing overflows.
        paper = pixels[2, 2]
        ink = np.abs(pixels.astype(int) - paper).max(axis=2) > 40
        assert ink[:, 10:].any(axis=1)[: size[1] // 2].mean() > 0.3
        assert not ink[:, -8:].any()
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100
    assert shades[1] < 60 < 200 < min(shades[0], shades[2])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_browser_test_can_fail(page, tmp_path):
    """What the test above looks for is found where it is planted."""
    (tmp_path / "image").mkdir()
    picture = '<img src="http://127.0.0.1:9/picture.png">'
    planted = page.replace("<main>", f"<main>{picture}")
    _, console, asked = browsed(tmp_path / "image", planted)
    assert "Content Security Policy" in " ".join(console) and asked == []
    (tmp_path / "open").mkdir()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy".*?>', page, re.S)[0]
    _, _, asked = browsed(tmp_path / "open", planted.replace(policy, ""))
    assert asked and set(asked) == {"http://127.0.0.1:9/picture.png"}


def test_a_saved_result_has_a_page_of_what_it_knows(solution, clients, tmp_path):
    solution.save(tmp_path / "result.npz")
    known = {"data", "choice-of-ranks", "convergence", "components", "loadings", "scores"}
    known |= {"clients", "costs"}
    whole = Parts(jf.report.html(solution, clients)).text
    saved = Parts(jf.report.html(jf.load(tmp_path / "result.npz"), clients)).text
    alone = Parts(jf.report.html(solution.result, clients)).text
    assert whole.keys() - saved.keys() == {"what-was-revealed"} and known <= saved.keys()
    assert saved.keys() - alone.keys() == {"convergence", "costs"}
    for name in known:
        assert saved[name].split() == whole[name].split()
    assert "rounds" not in alone[""]


def drawn(page, section):
    """The pictures of a section, without what numbers them."""
    inner = re.search(rf'<section id="{section}">(.*?)</section>', page, re.S)[1]
    return re.sub(r"p\d+-", "", inner)


def test_an_estimator_and_its_table_have_the_page_of_its_run():
    from jaxfed.estimators import PersonalizedPCA

    tables = planted_samples((20, 21, 22), 5, [3.0], [2.0])
    X, groups = np.concatenate(tables) + 5, np.repeat(["b", "a", "c"], (20, 21, 22))
    frame = pd.DataFrame(X, columns=list("uvwxy"))
    model = PersonalizedPCA(2, 1, n_init=1, rounds=20, random_state=0).fit(frame, groups=groups)
    page = jf.report.html(model, frame, groups=groups)
    parts = Parts(page)
    wanted = "data choice-of-ranks convergence components loadings scores clients costs"
    assert [name for name in parts.text if name] == wanted.split()
    assert re.search(r"a 21.*b 20.*c 22", " ".join(parts.text["data"].split()))
    assert "u, v, w, x, y" in parts.text[""]
    centred = [np.float64(X[groups == name] - model.mean_) for name in "abc"]
    with jax.enable_x64(True):
        clients = jf.Clients.from_samples(centred, names=list("abc"), features=list("uvwxy"))
        same = jf.report.html(model, clients)
    for section in wanted.split():
        assert drawn(page, section) == drawn(same, section)


@pytest.mark.slow
def test_an_estimator_with_gaps_has_the_page_of_completed_samples():
    from jaxfed.estimators import FederatedPCA

    X = np.concatenate(planted_samples((20, 21), 5, [3.0], [2.0]))
    X = np.where(np.random.default_rng(0).random(X.shape) < 0.1, np.nan, X)
    X[:, 0] = 1 + np.arange(len(X)) % 3
    model = FederatedPCA(2, impute=(1, 1), random_state=0).fit(X, groups=np.arange(41) % 2)
    parts = Parts(jf.report.html(model, X, groups=np.arange(41) % 2))
    assert "20 to 21" in parts.text["data"] and "scores" in parts.text


@pytest.mark.slow
def test_an_estimator_of_views_takes_a_list_of_them(tmp_path):
    from jaxfed.estimators import FederatedGCCA

    rng = np.random.default_rng(0)
    views = [rng.normal(size=(20, 4)) + 3, rng.normal(size=(20, 3))]
    model = FederatedGCCA(1, random_state=0, tol=1e-3).fit(views)
    jf.report.write(tmp_path / "page.html", model, views)
    parts = Parts((tmp_path / "page.html").read_text())
    assert "views 2" in parts.text["data"] and "entities 20" in parts.text["data"]
    with pytest.raises(ValueError, match=r"groups: wanted None, since each view is a client"):
        jf.report.html(model, views, groups=[0, 1])


def test_a_table_that_does_not_fit_the_estimator_is_refused(tmp_path):
    from jaxfed.estimators import FederatedPCA

    X, groups = np.concatenate(planted_samples((20, 21), 5, [3.0], [2.0])), np.arange(41) % 2
    model = FederatedPCA(1, random_state=0)
    place = tmp_path / "page.html"
    with pytest.raises(ValueError, match=r"^fitted: wanted a fitted estimator, got FederatedPCA"):
        jf.report.write(place, model, X, groups=groups)
    with pytest.raises(ValueError, match=r"^fitted: wanted a fitted estimator, got FederatedPCA"):
        jf.report.write(place, model, jf.Clients.from_samples([X]))
    model.fit(X, groups=groups)
    for options, message in (
        ({}, r"^groups: wanted the label of each row's client, got None"),
        ({"groups": groups[:4]}, r"inconsistent numbers of samples"),
        ({"groups": 0 * groups}, r"^groups: wanted those of fit, 0, 1, got 0"),
        ({"groups": groups + 1}, r"^groups: wanted those of fit, 0, 1, got 1, 2"),
    ):
        with pytest.raises(ValueError, match=message):
            jf.report.write(place, model, X, **options)
    with pytest.raises(ValueError, match=r"5 features"):
        jf.report.write(place, model, X[:, :3], groups=groups)
    assert not place.exists()


@pytest.mark.slow
def test_scores_show_a_selection_of_many_samples():
    tables = planted_samples((700, 500), 4, [3.0], [2.0])
    clients = jf.Clients.from_samples(tables)
    solution = jf.fit(jf.pca.OneShot(1, 1), clients, rounds=1, key=KEY)
    page = jf.report.html(solution, clients)
    assert "1,000 of 1,200 samples, selected evenly" in Parts(page).text["scores"]
    assert 1000 <= drawn(page, "scores").count("<use") < 1100


def test_a_run_that_protects_persons_shows_none():
    clients = jf.Clients.from_samples(planted_samples((60, 50), 4, [3.0], [2.0]))
    released = jf.privacy.release_moments(clients, epsilon=1.0, delta=1e-5)
    solution = jf.fit(jf.pca.Pooled(2), released, rounds=1, key=KEY)
    found = Parts(jf.report.html(solution, clients)).text
    assert "scores" not in found and "loadings" in found
