"""What tests of several packages share."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the project


def blocks(page: Path, language: str = "python") -> list[str]:
    """The source of a page's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)
