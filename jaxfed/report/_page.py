"""Writes a report as HTML, from `page.html`. Everything but markup passes through `escape`."""

import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np

from jaxfed._optional import require
from jaxfed.plot.drawing import COLOURS, GREY

# Colours of pictures, and the page's colours that replace them in light and dark mode.
_COLOURS = {"#000000": "currentColor", GREY: "var(--soft)", COLOURS[0]: "var(--link)"}


class Section(NamedTuple):
    """A section of the page: its heading, and the HTML below it."""

    heading: str
    parts: Sequence[str]


def page(title: str, summary: str, sections: Sequence[Section]) -> str:
    """The complete document."""
    links, bodies = [], []
    for heading, parts in sections:
        name = re.sub(r"[^a-z]+", "-", heading.lower()).strip("-")
        links.append(f'<a href="#{name}">{escape(heading)}</a>')
        inner = "\n".join(parts)
        bodies.append(f'<section id="{name}"><h2>{escape(heading)}</h2>\n{inner}</section>')
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title), summary=summary, links="".join(links), sections="\n".join(bodies)
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
        f'<tr><th scope="row">{escape(k)}</th><td>{escape(cell_text(v))}</td></tr>'
        for k, v in rows.items()
    )
    return _scrolled(f"<tbody>{''.join(cells)}</tbody>")


def table(rows: Sequence[Mapping[str, Any]], *, marked: int | None = None) -> str:
    """A table with a header; numbers are right-aligned, and one row may be marked."""
    names = list(rows[0])
    right = {name for name in names if all(_is_number(row[name]) for row in rows)}
    looks = {name: ' class="number"' if name in right else "" for name in names}
    head = "".join(f'<th scope="col"{looks[name]}>{escape(name)}</th>' for name in names)
    body = ""
    for place, row in enumerate(rows):
        cells = "".join(f"<td{looks[name]}>{escape(cell_text(row[name]))}</td>" for name in names)
        body += f'<tr class="marked">{cells}</tr>' if place == marked else f"<tr>{cells}</tr>"
    return _scrolled(f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>")


def _scrolled(rows: str) -> str:
    return f'<div class="scroll"><table>{rows}</table></div>'


def folded(heading: str, inner: str) -> str:
    """HTML that is hidden until the reader opens it."""
    return f"<details><summary>{escape(heading)}</summary>{inner}</details>"


def figure(drawn: Any, caption: str, number: int) -> str:
    """A Matplotlib figure as SVG with a caption.

    Args:
        drawn: the figure; black in it becomes the page's text colour.
        caption: the caption.
        number: a unique number of the figure on its page, which makes ids unique.
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


def cell_text(value: Any) -> str:
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
