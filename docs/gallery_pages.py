"""Make the gallery's pictures by running the code that its pages show."""

import contextlib
import hashlib
import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jaxfed

PAGES = [
    *(
        "digits",
        "confidence",
        "speakers",
        "schools",
        "video",
        "debates",
        "views",
        "unseen",
    ),
    *("sensors", "autoencoders", "denoising"),
]
"""In the order of the gallery."""


def run(page: Path, folder: Path) -> str:
    """Run a page's code in a folder, where it saves its picture; return what it printed.

    A table under the page's name is copied to the folder first.
    """
    sources, printed = _blocks(page.read_text()), io.StringIO()
    names: dict = {}
    if (table := page.with_suffix(".csv")).exists():
        shutil.copy(table, folder)
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for source in sources:
            exec(compile(source, str(page), "exec"), names)
    if not (folder / f"{page.stem}.png").exists():
        raise FileNotFoundError(f"{page}: leaves no {page.stem}.png")
    return printed.getvalue()


def make(pages: Path, folder: Path) -> None:
    """Run the pages that are new or changed, and write the cards that link to all pages."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    package = b"".join(
        path.read_bytes()
        for path in sorted(Path(jaxfed.__file__).parent.rglob("*.py"))
    )
    shown = [pages / f"{name}.md" for name in PAGES]
    if {page.stem for page in pages.glob("*.md")} != set(PAGES):
        raise ValueError(f"{pages}: wanted the pages {', '.join(PAGES)}")
    for page in shown:
        name, code = page.stem, "".join(_blocks(page.read_text())).encode()
        mark = hashlib.sha256(code + package).hexdigest()
        seal, text = folder / f"{name}.sha256", folder / f"{name}.txt"
        if seal.exists() and seal.read_text() == mark:
            continue
        with matplotlib.rc_context({"backend": "agg"}):
            text.write_text(run(page, folder))
        seal.write_text(mark)
    (folder / "cards.md").write_text("\n".join(_cards(shown)))


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def _cards(pages: list[Path]) -> Iterator[str]:
    yield ":::::{container} cards"
    for page in pages:
        name = page.stem
        title, about = re.findall(
            r"\A# (.+?)\n\n(.+?)\n\n", page.read_text(), re.S
        )[0]
        yield f"""::::{{container}} card
[![{title}](_generated/gallery/{name}.png)](gallery/{name}.md)

**[{title}](gallery/{name}.md)**

{" ".join(about.split())}
::::"""
    yield ":::::"
    yield ""
