"""Mathematics as MathML, converted when the pages are built."""

from docutils import nodes
from latex2mathml.converter import convert


def inline(translator, node) -> None:
    """Write a formula within a line."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block(translator, node) -> None:
    """Write a formula of its own."""
    text = node.astext().strip()
    if "\\\\" in text or "&" in text:
        text = rf"\begin{{aligned}}{text}\end{{aligned}}"
    translator.body.append(f'<div class="math">{convert(text, display="block")}</div>')
    raise nodes.SkipNode


def setup(app) -> dict[str, bool]:
    """Say who writes formulas."""
    app.add_html_math_renderer(
        "mathml", inline_renderers=(inline, None), block_renderers=(block, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
