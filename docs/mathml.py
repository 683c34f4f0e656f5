"""Mathematics as MathML, converted when the pages are built."""

import re

from docutils import nodes
from latex2mathml.converter import convert


def formula(text: str, **options: str) -> str:
    """A formula as MathML; names such as tr stand as they do in TeX, limits under min and max."""
    found = re.sub(r"<mo>([a-z]{2,})</mo>", r"<mi>\1</mi>", convert(text, **options))
    if options.get("display") == "block":
        limits = r"<msub>(<mi>(?:min|max)</mi>.*?)</msub>(?=<mtext>&#x000A0;</mtext>)"
        found = re.sub(limits, r"<munder>\1</munder>", found)
    return found


def inline(translator, node) -> None:
    """Write a formula within a line."""
    translator.body.append(formula(node.astext()))
    raise nodes.SkipNode


def block(translator, node) -> None:
    """Write a formula of its own."""
    text = node.astext().strip()
    if "\\\\" in text or "&" in text:
        text = rf"\begin{{aligned}}{text}\end{{aligned}}"
    translator.body.append(f'<div class="math">{formula(text, display="block")}</div>')
    raise nodes.SkipNode


def setup(app) -> dict[str, bool]:
    """Say who writes formulas."""
    app.add_html_math_renderer(
        "mathml", inline_renderers=(inline, None), block_renderers=(block, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
