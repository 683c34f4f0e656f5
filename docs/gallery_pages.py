"""The gallery's pictures, made when the pages are built, by the code that the pages show."""

import contextlib
import hashlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import jaxfed

HERE = Path(__file__).parent
PAGES = "digits video debates views unseen sensors autoencoders denoising".split()
"""In the order in which they are shown."""


def run(name: str, folder: Path) -> str:
    """Run a page's code in a folder, where it leaves its picture; return what it printed."""
    page = HERE / "gallery" / f"{name}.md"
    printed = io.StringIO()
    names: dict = {}
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for source in _blocks(page.read_text()):
            exec(compile(source, str(page), "exec"), names)
    if not (folder / f"{name}.png").exists():
        raise FileNotFoundError(f"{page}: leaves no {name}.png")
    return printed.getvalue()


def make(folder: Path) -> None:
    """Make what is not there yet, or was made by other code, and the cards that lead to the pages."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    package = b"".join(
        path.read_bytes() for path in sorted(Path(jaxfed.__file__).parent.rglob("*.py"))
    )
    for name in PAGES:
        code = "".join(_blocks((HERE / "gallery" / f"{name}.md").read_text())).encode()
        mark = hashlib.sha256(code + package).hexdigest()
        seal, text = folder / f"{name}.sha256", folder / f"{name}.txt"
        if seal.exists() and seal.read_text() == mark:
            continue
        with matplotlib.rc_context({"backend": "agg"}):
            text.write_text(run(name, folder))
        seal.write_text(mark)
    (folder / "cards.md").write_text("\n".join(_cards()))


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def _cards() -> Iterator[str]:
    yield ":::::{container} cards"
    for name in PAGES:
        text = (HERE / "gallery" / f"{name}.md").read_text()
        title, about = re.findall(r"\A# (.+?)\n\n(.+?)\n\n", text, re.S)[0]
        yield f"""::::{{container}} card
[![{title}](_generated/gallery/{name}.png)](gallery/{name}.md)

**[{title}](gallery/{name}.md)**

{" ".join(about.split())}
::::"""
    yield ":::::"
    yield ""
