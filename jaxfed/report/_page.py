"""The HTML of a report. Everything that is not markup passes through `escape`."""

import html
import io
import re
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any, NamedTuple

import numpy as np

from jaxfed._optional import require
from jaxfed.plot._figure import COLOURS, GREY

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header><h1>$title</h1>
$summary
<nav aria-label="Sections">$links</nav></header>
<main>
$sections
</main>
</body>
</html>
""")

_STYLE = """
:root { --ink: #1d232b; --soft: #5c6570; --line: #dde1e6; --paper: #ffffff; --tint: #f5f7f9;
  --link: #0b5fa5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #9aa4b0; --line: #343b44; --paper: #15191e; --tint: #1d2229;
    --link: #6cb2ee; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 60rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 0.75rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.5rem; padding-top: 0.75rem;
  border-top: 1px solid var(--line); }
p { max-width: 44rem; margin: 0.5rem 0; }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: 0.25rem 1.1rem; margin-top: 1rem; font-size: 0.9rem; }
.scroll { overflow-x: auto; margin: 0.75rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.25rem 1.2rem 0.25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; }
tbody th { font-weight: 400; color: var(--soft); }
td { overflow-wrap: break-word; font-variant-numeric: tabular-nums; }
td.number, th.number { text-align: right; }
tr.marked { background: var(--tint); font-weight: 600; }
figure { margin: 1rem 0; }
figure svg { display: block; max-width: 100%; height: auto; color: var(--ink);
  fill: currentColor; }
figcaption, .note { color: var(--soft); font-size: 0.9rem; }
details { margin: 0.75rem 0; } summary { cursor: pointer; color: var(--link); }
@media print { nav { display: none; } }
"""


# The colours of pictures that are replaced by the page's, to be legible on light and dark paper.
_COLOURS = {"#000000": "currentColor", GREY: "var(--soft)", COLOURS[0]: "var(--link)"}


class Section(NamedTuple):
    """A section of the page: its heading, and the HTML below it."""

    heading: str
    parts: Sequence[str]


def page(title: str, summary: str, sections: Sequence[Section]) -> str:
    """The complete document."""
    names = [re.sub(r"[^a-z]+", "-", section.heading.lower()).strip("-") for section in sections]
    links = "".join(
        f'<a href="#{name}">{escape(section.heading)}</a>'
        for name, section in zip(names, sections, strict=True)
    )
    bodies = (
        f'<section id="{name}"><h2>{escape(section.heading)}</h2>\n'
        + "\n".join(section.parts)
        + "</section>"
        for name, section in zip(names, sections, strict=True)
    )
    return _PAGE.substitute(
        title=escape(title),
        style=_STYLE,
        summary=summary,
        links=links,
        sections="\n".join(bodies),
    )


def escape(value: Any) -> str:
    """Any value as text without markup."""
    return html.escape(str(value))


def paragraph(text: str, *, note: bool = False) -> str:
    """A paragraph of plain text."""
    look = ' class="note"' if note else ""
    return f"<p{look}>{escape(text)}</p>"


def facts(rows: Mapping[str, Any]) -> str:
    """A table of names and values."""
    cells = (
        f'<tr><th scope="row">{escape(k)}</th><td>{escape(shown(v))}</td></tr>'
        for k, v in rows.items()
    )
    return f'<div class="scroll"><table><tbody>{"".join(cells)}</tbody></table></div>'


def table(rows: Sequence[Mapping[str, Any]], *, marked: int | None = None) -> str:
    """A table with a header; numbers are aligned to the right, one row may be marked."""
    names = list(rows[0])
    right = {name for name in names if all(_is_number(row[name]) for row in rows)}

    def cell(kind: str, name: str, text: str) -> str:
        look = ' class="number"' if name in right else ""
        scope = ' scope="col"' if kind == "th" else ""
        return f"<{kind}{scope}{look}>{escape(text)}</{kind}>"

    head = "".join(cell("th", name, name) for name in names)
    body = ""
    for place, row in enumerate(rows):
        cells = "".join(cell("td", name, shown(row[name])) for name in names)
        body += f'<tr class="marked">{cells}</tr>' if place == marked else f"<tr>{cells}</tr>"
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def folded(heading: str, inner: str) -> str:
    """HTML that is hidden until the reader opens it."""
    return f"<details><summary>{escape(heading)}</summary>{inner}</details>"


def figure(drawn: Any, caption: str, number: int) -> str:
    """A Matplotlib figure as SVG with a caption.

    Args:
        drawn: the figure; black in it becomes the colour of the page's text.
        caption: what it shows.
        number: a different number for each figure of a page, which makes ids unique.
    """
    matplotlib = require("matplotlib", extra="plot")
    file = io.StringIO()
    # Letters become outlines, which need no font and cannot contain markup. The fixed salt makes
    # ids, and thus pages, reproducible.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": f"picture{number}"}):
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        drawn.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = re.sub(r"<!--.*?-->", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # Some ids, such as those of letters, are the same in every figure.
    text = re.sub(r'((?:\bid="|href="#|url\(#))', rf"\1p{number}-", text)
    for fixed, themed in _COLOURS.items():
        text = text.replace(fixed, themed)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
    return f"<figure>{text}<figcaption>{escape(caption)}</figcaption></figure>"


def shown(value: Any) -> str:
    """A value as text in a table."""
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    return str(value)


def _is_number(value: Any) -> bool:
    real = isinstance(value, int | float | np.integer | np.floating)
    return value is None or (real and not isinstance(value, bool))
