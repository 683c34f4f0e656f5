"""Table 7: topics of the U.S. presidential debates, year by year and common to all."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from jaxfed import metrics
from jaxfed.pca import PerPCA
from jaxfed.pca.applications import topic_words
from papers._files import data_folder
from papers.perpca._transcripts import (
    SPOKEN_FILLERS,
    paragraphs,
    repair_mojibake,
    strip_transcript,
    word_counts,
)
from papers.report import Cell, Found, Labels
from papers.runs import Seeds

_DEBATES = (
    "transcripts YYYY-MM-DD.txt, one turn per paragraph, each beginning with the speaker's name "
    "and a colon",
    "the Commission on Presidential Debates, as collected in "
    "github.com/mytakedotorg/us-presidential-debates (35 debates from 1960 to 2020)",
)

_WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_TOP = 20


def run(seeds: Seeds, *, data: Path | None = None) -> Found:
    """Learn the topics; nothing is random, so seeds are not used."""
    del seeds
    folder = data_folder(data, "debates", *_DEBATES)
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"--data: no transcripts YYYY-MM-DD.txt in {folder}")
    years = sorted({path.stem[:4] for path in files})
    groups = [
        [
            strip_transcript(repair_mojibake(turn))
            for path in files
            if path.stem[:4] == year
            for turn in paragraphs(path.read_text(encoding="utf-8-sig"))
        ]
        for year in years
    ]
    # As in the reference: published stop words only, and turns without any counted word stay.
    counts, vocabulary = word_counts(groups, ENGLISH_STOP_WORDS, drop_empty=False)
    paper = PerPCA(2, 2, solver="gradient", variant="polar", step_size=2.0)
    result = topic_words(counts, vocabulary, rounds=20, algorithm=paper).solution.result
    samples = [jnp.asarray(group) for group in counts]
    error = float(metrics.reconstruction_error(result, samples))
    misalignment = float(metrics.misalignment(result.local))

    counts, vocabulary = word_counts(groups, ENGLISH_STOP_WORDS | SPOKEN_FILLERS)
    topics = topic_words(counts, vocabulary, rounds=20, algorithm=paper, words=_TOP)
    found = dict(zip(years, topics.own, strict=True)) | {"common": topics.common}
    measured: dict[Labels, Any] = {}
    for year, words in found.items():
        lists = (
            _overlap(words, listed.get(year, ""))
            for listed in (_WORDS["reference"], _WORDS["printed"])
        )
        measured[year, " ".join(words[:10]), *lists, ""] = None
    for quantity, value, reason in (
        ("error", error, None),
        ("misalignment", misalignment, None),
        ("words of the reference found", _share(found, _WORDS["reference"]), None),
        ("words of Table 7 found", _share(found, _WORDS["printed"]), "other transcripts"),
    ):
        measured["", "", "", "", quantity] = Cell([value], incomparable=reason)
    return Found(
        measured, arrays={"years": np.array(list(found)), "words": np.array(list(found.values()))}
    )


def _overlap(words: Sequence[str], listed: str) -> str:
    """How many of the listed words are among the words."""
    wanted = listed.split()
    return f"{sum(word in words for word in wanted)} of {len(wanted)}" if wanted else ""


def _share(found: Mapping[str, Sequence[str]], lists: Mapping[str, str]) -> float:
    """Which share of all listed words was found."""
    hits = [word in found[year] for year in found for word in lists.get(year, "").split()]
    return float(np.mean(hits)) if hits else float("nan")
