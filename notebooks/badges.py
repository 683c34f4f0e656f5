"""Open every notebook in Colab by a badge; the address of the repository is here and nowhere else.

python notebooks/badges.py     # writes it into the notebooks
"""

import json
from pathlib import Path

REPOSITORY = "OWNER/jaxfed"
"""On GitHub: a placeholder until the project has an address."""

_IMAGE = "https://colab.research.google.com/assets/colab-badge.svg"


def badge(name: str) -> str:
    """The badge of a notebook of this name, in Markdown."""
    page = f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/notebooks/{name}"
    return f"[![Open in Colab]({_IMAGE})]({page})"


def with_badge(notebook: dict, name: str) -> dict:
    """The notebook with the badge as the first line of its first cell, in place of an older one."""
    first = notebook["cells"][0]
    lines = "".join(first["source"]).splitlines(keepends=True)
    if lines[0].startswith("[![Open in Colab]"):
        lines = lines[2:]
    first["source"] = [f"{badge(name)}\n", "\n", *lines]
    return notebook


if __name__ == "__main__":
    for path in sorted(Path(__file__).parent.glob("*.ipynb")):
        notebook = with_badge(json.loads(path.read_text(encoding="utf-8")), path.name)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
