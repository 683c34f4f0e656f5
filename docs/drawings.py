"""Draw the guides' figures as inline SVG, in the colours of a light or dark page."""

from pathlib import Path

SHARED, OWN = "#4c8dd6", ("#e08a3c", "#57a773", "#b56bc2", "#d65c5c")
LINE = 'stroke="currentColor" stroke-width="1.2" fill="none"'


def text(x, y, words, size=13, anchor="middle") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="currentColor">'
        f"{words}</text>"
    )


def box(x, y, width, height, colour, opacity=1.0, corner=3) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{corner}" fill="{colour}" '
        f'fill-opacity="{opacity:.2f}" stroke="currentColor" stroke-width="0.8"/>'
    )


def dot(x, y, radius, colour) -> str:
    return f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour}"/>'


def arrow(x1, y1, x2, y2) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {LINE} marker-end="url(#tip)"/>'


def table(x, y, rows, columns, colour, cell=9) -> str:
    """Rows are samples, columns features."""
    cells = (
        box(
            x + cell * j,
            y + cell * i,
            cell,
            cell,
            colour,
            0.35 + 0.5 * ((i * 3 + j * 5) % 4) / 3,
            0,
        )
        for i in range(rows)
        for j in range(columns)
    )
    return "".join(cells)


def svg(width, height, about, *parts) -> str:
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="currentColor"/>'
        "</marker></defs>"
    )
    return (
        f'<svg class="drawing" viewBox="0 0 {width} {height}" role="img" aria-label="{about}" '
        f'style="max-width: {width}px">{tip}{"".join(parts)}</svg>\n'
    )


def federation() -> str:
    """Messages go up, shared components come down, data stay with the clients."""
    parts = [box(190, 10, 180, 34, SHARED, 0.35), text(280, 32, "server: shared components U")]
    for i, x in enumerate((80, 280, 480)):
        parts += [
            table(x - 36, 130, 4, 8, OWN[i]),
            text(x, 185, f"client {i + 1}: data, local V{'₁₂₃'[i]}"),
            arrow(x - 10, 122, 280 + (x - 280) * 0.25 - 10, 50),
            arrow(280 + (x - 280) * 0.25 + 10, 50, x + 10, 122),
        ]
    parts += [
        text(92, 80, "messages", anchor="end"),
        text(470, 80, "components U", anchor="start"),
    ]
    about = "Three clients send messages; the server returns shared components; data stay"
    return svg(560, 195, about, *parts)


def beside() -> str:
    """Components side by side."""
    parts = []
    for i, x in enumerate((20, 205, 390)):
        parts += [
            *(box(x + 14 * j, 10, 12, 80, SHARED, 0.75) for j in range(3)),
            *(box(x + 52 + 14 * j, 10, 12, 80, OWN[i], 0.75) for j in range(2)),
            text(x + 20, 108, "U"),
            text(x + 65, 108, f"V{'₁₂₃'[i]}"),
            text(x + 40, 128, f"model of client {i + 1}"),
        ]
    about = "Each client's model: the shared components, and local components beside them"
    return svg(500, 135, about, *parts)


def around() -> str:
    """Clients' components around a common centre."""
    parts = [
        f'<circle cx="110" cy="70" r="52" {LINE} stroke-dasharray="4 4"/>',
        dot(110, 70, 8, SHARED),
        text(112, 94, "centre V"),
    ]
    for i, (x, y) in enumerate(((66, 42), (150, 50), (128, 22), (70, 104))):
        side = 1 if x > 110 else -1
        parts += [dot(x, y, 6, OWN[i]), text(x + 16 * side, y, f"U{'₁₂₃₄'[i]}")]
    parts += [
        text(200, 60, "each client has its own components;", anchor="start"),
        text(200, 80, "a prior, given or learned, sets how", anchor="start"),
        text(200, 100, "strongly they are drawn to the centre", anchor="start"),
    ]
    return svg(460, 135, "Four clients' components around a common centre", *parts)


def have() -> str:
    """What clients have in common."""
    names = ("shared and local parts", "one subspace for all")
    parts = []
    for i, x in enumerate((45, 205)):
        for j in range(3):
            parts.append(table(x, 10 + 32 * j, 3, 9, OWN[j] if i == 0 else SHARED))
        parts.append(text(x + 41, 122, names[i], 12))
    for j in range(3):
        parts.append(table(355 + 32 * j, 10, 10, 3, OWN[j]))
    parts.append(text(400, 122, "many views of the same entities", 12))
    for j, (x, wide) in enumerate(((500, 80), (520, 44), (540, 20), (560, 44), (580, 80))):
        parts.append(box(x, 55 - wide / 2, 10, wide, OWN[j % 3], 0.6))
    parts.append(text(545, 122, "a network", 12))
    about = "Shared and local parts; one subspace; many views of the same entities; a network"
    return svg(610, 130, about, *parts)


def tell() -> str:
    """What a server sees."""
    parts = []
    for i, name in enumerate(("single messages", "only their sum", "a sum with noise")):
        x = 20 + 180 * i
        if i == 0:
            parts += [box(x + 44 * j, 12, 36, 30, OWN[j], 0.7) for j in range(3)]
        else:
            parts += [box(x + 22, 12, 80, 30, SHARED, 0.7)]
        if i == 2:
            parts += [
                dot(x + 27 + (j * j * 31) % 71, 16 + (j * 29 + j * j) % 23, 2, "currentColor")
                for j in range(24)
            ]
        parts.append(text(x + 62, 64, name))
        parts.append(text(x + 62, 82, ("lossless, quantize", "secure_sum", "gaussian")[i]))
    about = "The server sees single messages, only their sum, or a sum with noise"
    return svg(520, 90, about, *parts)


def cost() -> str:
    """Bits per number."""
    parts = []
    for i, (name, bits) in enumerate((("lossless", 32), ("quantize(3)", 3), ("sign", 1))):
        y = 8 + 26 * i
        parts += [
            text(95, y + 13, name, anchor="end"),
            *(box(105 + 11 * j, y, 9, 17, SHARED, 0.7) for j in range(bits)),
            text(114 + 11 * bits, y + 13, f"{bits} bit{'s' * (bits > 1)} per number", 12, "start"),
        ]
    return svg(575, 84, "Bits per number: 32, 3 or 1", *parts)


ALL = (federation, beside, around, have, tell, cost)


def make(folder: Path) -> None:
    """Write each drawing into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for drawing in ALL:
        (folder / f"{drawing.__name__}.svg").write_text(drawing(), encoding="utf-8")
