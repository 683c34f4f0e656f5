"""The documentation's build fails where it should."""

import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

DOCS = ROOT / "docs"
PAGE = """# A page

`jf.linalg.polar`, {py:obj}`jaxfed.linalg.polar`, $x^2$.

```{eval-rst}
.. autofunction:: jaxfed.linalg.polar
```
"""
BUILD = """
import sys
import jaxfed as jf
{planted}
from sphinx.cmd.build import main
from tests.helpers import ROOT
sys.exit(main(sys.argv[1:]))
"""


def build(folder, page, planted="", environment=None):
    """Build a page by the documentation's own settings."""
    source = folder / "source"
    source.mkdir(exist_ok=True)
    (source / "index.md").write_text(page)
    settings = ["-W", "-n", "-q", "-E", "-c", str(DOCS), "-D", "exclude_patterns=_generated"]
    return subprocess.run(
        [sys.executable, "-c", BUILD.format(planted=planted), *settings, source, folder / "out"],
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.mark.slow
def test_a_page_without_a_fault_is_built_to_the_same_content_twice(tmp_path, environment):
    built = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        done = build(folder, PAGE, environment=environment)
        assert done.returncode == 0, done.stderr
        files = sorted(p for p in (folder / "out").rglob("*") if p.suffix in (".html", ".js"))
        built.append({p.name: p.read_bytes() for p in files})
    assert built[0] == built[1]
    page = built[0]["index.html"].decode()
    assert "<math" in page and 'href="#jaxfed.linalg.polar"' in page
    assert not re.search(r'<(script|img|link)[^>]*(src|href)="http', page)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "planted", "said"),
    [
        ("[there](nowhere.md)", "", "nowhere.md"),
        ("{py:obj}`jaxfed.nowhere`", "", "jaxfed.nowhere"),
        ("`jf.nowhere`", "", "no such name: jf.nowhere"),
        ("", "jf.pca.PerPCA.__doc__ = None", "without a docstring: jaxfed.pca.PerPCA"),
    ],
)
def test_a_fault_fails_the_build(fault, planted, said, tmp_path, environment):
    done = build(tmp_path, f"{PAGE}\n{fault}\n", planted, environment)
    assert done.returncode != 0 and said in done.stderr


def test_a_block_that_fails_fails_the_gallery(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import gallery_pages

    pages = tmp_path / "gallery"
    pages.mkdir()
    draw = 'open("{0}.png", "w").close()\nprint("{0}")'
    for name in gallery_pages.PAGES:
        code = draw.format(name)
        (pages / f"{name}.md").write_text(f"# {name}\n\nSays it.\n\n```python\n{code}\n```\n")
    gallery_pages.make(pages, tmp_path / "made")
    assert (tmp_path / "made/digits.txt").read_text() == "digits\n"
    assert (tmp_path / "made/cards.md").read_text().count("Says it.") == len(gallery_pages.PAGES)

    (pages / "video.md").write_text(
        "# video\n\nFails.\n\n```python\nraise OSError('planted')\n```\n"
    )
    with pytest.raises(OSError, match="planted"):
        gallery_pages.make(pages, tmp_path / "made")
    (pages / "video.md").write_text("# video\n\nDraws nothing.\n\n```python\nx = 1\n```\n")
    with pytest.raises(FileNotFoundError, match=r"leaves no video\.png"):
        gallery_pages.make(pages, tmp_path / "other")
    (pages / "another.md").write_text("# Another\n\nIs not shown.\n")
    with pytest.raises(ValueError, match="wanted the pages"):
        gallery_pages.make(pages, tmp_path / "made")


def test_every_test_that_a_page_names_exists():
    named = re.findall(
        r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text("utf8")
    )
    assert len(named) > 10
    for path, name in named:
        assert re.search(rf"^(def |class )?{name}\b", (ROOT / path).read_text("utf8"), re.M), name
