"""Make the pictures of the first page and of the gallery by running the code that they show."""

import contextlib
import hashlib
import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jaxfed

PAGES = [
    *("digits", "confidence", "speakers", "schools", "wines", "video", "debates", "views"),
    *("unseen", "sensors", "autoencoders", "denoising"),
]
"""In the order of the gallery."""


def run(page: Path, folder: Path, picture: str) -> str:
    """Run a page's code in a folder, where it saves a picture; return what it printed.

    A table under the page's name is copied to the folder first.
    """
    sources, printed = _blocks(page.read_text()), io.StringIO()
    names: dict = {}
    if (table := page.with_suffix(".csv")).exists():
        shutil.copy(table, folder)
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for source in sources:
            exec(compile(source, str(page), "exec"), names)
    if not (folder / picture).exists():
        raise FileNotFoundError(f"{page}: leaves no {picture}")
    return printed.getvalue()


def make(pages: Path, folder: Path) -> None:
    """Run the gallery's pages, and write the cards that link to them."""
    shown = [pages / f"{name}.md" for name in PAGES]
    if {page.stem for page in pages.glob("*.md")} != set(PAGES):
        raise ValueError(f"{pages}: wanted the pages {', '.join(PAGES)}")
    for page in shown:
        make_picture(page, folder, f"{page.stem}.png")
    (folder / "cards.md").write_text("\n".join(_cards(shown)))


def make_picture(page: Path, folder: Path, picture: str) -> None:
    """Run a page in a folder unless neither it nor the package has changed since the last time."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    code = "".join(_blocks(page.read_text())).encode()
    sources = sorted(Path(jaxfed.__file__).parent.rglob("*.py"))
    mark = hashlib.sha256(code + b"".join(path.read_bytes() for path in sources)).hexdigest()
    seal, text = folder / f"{page.stem}.sha256", folder / f"{page.stem}.txt"
    if seal.exists() and seal.read_text() == mark:
        return
    with matplotlib.rc_context({"backend": "agg"}):
        text.write_text(run(page, folder, picture))
    seal.write_text(mark)


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def _cards(pages: list[Path]) -> Iterator[str]:
    yield ":::::{container} cards"
    for page in pages:
        name = page.stem
        title, about = re.findall(r"\A# (.+?)\n\n(.+?)\n\n", page.read_text(), re.S)[0]
        yield f"""::::{{container}} card
[![{title}](_generated/gallery/{name}.png)](gallery/{name}.md)

**[{title}](gallery/{name}.md)**

{" ".join(about.split())}
::::"""
    yield ":::::"
    yield ""
