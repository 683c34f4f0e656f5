"""The code in the README and the documentation runs, and does what the text says."""

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import jaxfed as jf
from tests.helpers import ROOT, blocks

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted(
    path for path in DOCS.rglob("*.md") if not {"_build", "_generated"} & set(path.parts)
)
SETUP = "{include} setup.md"  # shows the first fit; a page without it stands alone
# `.ci/tasks.py` runs these, with all their blocks.
TASKS = {
    DOCS / task["page"]
    for task in tomllib.loads((ROOT / ".ci" / "tasks.toml").read_text("utf8"))["task"]
}
GALLERY = DOCS / "gallery"  # run when the documentation is built, tests/project/test_docs.py


def executed(page, namespace, capsys):
    """Run a page's blocks one after the other; return what each printed, by its source."""
    printed = {}
    for source in blocks(page):
        exec(compile(source, str(page), "exec"), namespace)
        printed[source] = capsys.readouterr().out.splitlines()
    return printed


@pytest.fixture(scope="module")
def first_fit(tmp_path_factory):
    """The names that the README's first block leaves behind."""
    namespace = {}
    source = blocks(README)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("first"))
        exec(compile(source, str(README), "exec"), namespace)
        assert Path("components.png").stat().st_size > 0
    assert namespace["shared"].shape == (64, 10) and namespace["local"].shape == (40, 64, 2)
    return namespace


def assert_same_output(shown, printed):
    """The same words, and decimals that differ by one per cent or one in the last digit shown."""
    number = r"\d+\.\d+"
    # NumPy pads numbers to the number of digits of their neighbours.
    words, wanted = (re.sub(number, "", text).split() for text in (printed, shown))
    assert words == wanted
    for one, other in zip(re.findall(number, shown), re.findall(number, printed), strict=True):
        digit = 10.0 ** -len(one.partition(".")[2])
        assert float(one) == pytest.approx(float(other), rel=0.01, abs=digit)


@pytest.mark.slow
def test_the_first_page_shows_what_it_prints(first_fit):
    (shown,) = re.findall(r"```none\n(.*?)```", (DOCS / "start/first_fit.md").read_text(), re.S)
    summary = first_fit["solution"].summary()
    assert_same_output(shown, f"{summary}\nheld-out error {first_fit['error']}\n")


@pytest.fixture
def run_page(first_fit, tmp_path, monkeypatch, capsys):
    """Run a page; return its names and a function that finds what a block printed."""
    monkeypatch.chdir(tmp_path)

    def of(name):
        page = DOCS / f"{name}.md"
        namespace = dict(first_fit) if SETUP in page.read_text() else {}
        printed = executed(page, namespace, capsys)
        return namespace, lambda part: next(out for code, out in printed.items() if part in code)

    return of


# What the text says about some of them.
def models(names, lines):
    *energies, shape = lines("AdaptiveTraining")
    tuned, adapted = (float(line.split()[-1]) for line in energies)
    assert tuned == pytest.approx(0.77, abs=0.01) and adapted == pytest.approx(0.79, abs=0.01)
    assert shape == "(1797, 5)"


def fitted(names, lines):
    assert lines("explained_variance")[0] == "(10,) (40, 2) (40,)"
    assert names["newcomer"].local.shape == (1, 64, 2)


def data(names, lines):
    assert lines("from_samples") == ["Clients(3 clients: 8 to 35 samples of 5 features, float32)"]
    assert names["names"] == ["client0", "client1", "client2"]


def robust(names, lines):
    assert lines("far_clients")[0] == "[7]"
    assert "1 of 40 groups" in "".join(lines("far_clients"))
    assert lines("taken") == ["7"]
    assert lines("drawn") == ["5"]


FUNCTIONS = (
    data,
    fitted,
    models,
    robust,
)
SAID = {f.__name__: f for f in FUNCTIONS}
SHOWN = [
    page.relative_to(DOCS).with_suffix("").as_posix()
    for page in PAGES
    if blocks(page) and page.parent != GALLERY and page not in TASKS
]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a page has many programs to compile
@pytest.mark.parametrize("page", SHOWN)
def test_every_python_block_of_the_documentation_runs(page, run_page):
    names, lines = run_page(page)
    shown = r"^```python\n((?:(?!^```).)*)^```\n\n```none\n(.*?)^```$"
    for source, output in re.findall(shown, (DOCS / f"{page}.md").read_text(), re.M | re.S):
        assert_same_output(output, "".join(f"{line}\n" for line in lines(source)))
    SAID.get(Path(page).name, lambda names, lines: None)(names, lines)


@pytest.mark.slow
def test_every_python_block_of_the_readme_runs(first_fit, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = dict(first_fit)
    for source in blocks(README)[1:]:
        exec(compile(source, str(README), "exec"), namespace)
    assert capsys.readouterr().out.splitlines()[-1] == "(1797, 6)"


def test_the_readme_fits_on_a_few_screens():
    assert len(README.read_text().splitlines()) <= 110


def test_the_setup_of_pages_is_the_first_fit_up_to_what_it_prints():
    shown = (DOCS / "guides/setup.md").read_text()
    (start,) = re.findall(r'^:start-after: "(.*)"$', shown, re.M)
    (end,) = re.findall(r"^:end-before: (.*)$", shown, re.M)
    setup, _ = README.read_text().split(start, 1)[1].split(end, 1)
    assert blocks(README)[0].startswith(setup.lstrip("\n"))
    assert "\nshared, local = solution.result" in setup


PARTS = [page for page in (README, *PAGES) if blocks(page)]


@pytest.mark.parametrize("page", PARTS, ids=lambda page: page.name)
def test_code_fits_the_width_of_a_page(page):
    for source in blocks(page):
        assert max(map(len, source.splitlines())) <= 79


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_links_resolve(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        # The documentation's build checks links to pages that it writes.
        assert "/_generated/" in link or (page.parent / link).exists(), link


def test_every_extra_has_its_line():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    page = (DOCS / "start/install.md").read_text()
    assert set(re.findall(r"^\| `pip install 'jaxfed\[(\w+)\]'` \|", page, re.M)) == set(extras)


def test_every_algorithm_is_described_completely():

    text = (DOCS / "reference/by_algorithm.md").read_text()
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    named = {}
    for section in sections:
        title, rest = section.split("\n", 1)
        rows = set(re.findall(r"^\| ([a-z ]+) \|", rest, re.M))
        wanted = {"sent", "work", "rounds", "step size", "differentiable in", "pitfalls"}
        assert rows == wanted, title
        named |= dict.fromkeys(title.split(", ")) | dict.fromkeys(re.findall(r"`(\w+)`", rest))
    families = (jf.pca, jf.gcca, jf.generative, jf.preprocess, jf.aggregation)
    algorithms = {
        name
        for family in families
        for name in dir(family)
        if isinstance(getattr(family, name), type)
        and issubclass(getattr(family, name), jf.Algorithm)
    }
    assert len(algorithms) >= 21 and algorithms <= set(named)


def test_every_public_name_is_documented(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "public", raising=False)
    import public

    assert public.undocumented() == []
    pages = (DOCS / "reference/index.md").read_text()
    assert all(f"_generated/{module}\n" in pages for module in public.MODULES)
    # Namespaces show these alone, and not what they import.
    for name in public.MODULES:
        module = public.module_named(name)
        assert all(
            getattr(module, each).__name__.startswith("jaxfed")
            for each in dir(module)
            if isinstance(getattr(module, each), ModuleType) and each != "jaxtyping"  # by its hook
        )
        foreign = {"Array", "Any", "Callable", "require"}
        if name != "jaxfed.contract":  # whose checks are for authors of algorithms
            foreign |= {"check_count", "refuse"}
        assert not {*dir(module)} & foreign
    # An undocumented name would be noticed.
    monkeypatch.setattr(sys.modules["jaxfed.pca"].PerPCA, "__doc__", None)
    assert public.undocumented() == ["jaxfed.pca.PerPCA"]
