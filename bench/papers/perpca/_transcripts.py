"""Cleans transcripts of debates: encoding, speakers, stage directions; counts their words."""

import re
from collections.abc import Collection, Sequence

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer

_FILLERS = """
    going gonna think thought know known say says said saying tell told talk talked talking want
    wants wanted like just really actually basically well yes yeah okay oh uh um right sure look
    looking let come came go goes went get gets getting got give make made thing things way lot
    kind sort mean thank thanks sir mr mrs don doesn didn isn wasn aren weren haven hasn hadn won
    wouldn couldn shouldn ve ll
"""

#: Words that speakers use on any topic, and the stumps of contractions ("don't", "we've"), which
#: published lists of stop words lack.
SPOKEN_FILLERS: frozenset[str] = frozenset(_FILLERS.split())


def paragraphs(text: str) -> list[str]:
    """Split a text at blank lines, without empty parts."""
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


# A UTF-8 sequence read as Windows-1252: the lead byte and the continuation bytes.
_CONTINUATION = "".join(
    bytes([byte]).decode("cp1252", errors="ignore") or chr(byte) for byte in range(0x80, 0xC0)
)
_MOJIBAKE = re.compile(f"[\u00c2-\u00f4][{re.escape(_CONTINUATION)}]{{1,3}}")


def repair_mojibake(text: str) -> str:
    """Restore UTF-8 text that was decoded as Windows-1252, once or repeatedly.

    Use it only on damaged text: an accented capital before a closing quotation mark can look like
    such a sequence.
    """
    while (repaired := _MOJIBAKE.sub(_redecode, text)) != text:
        text = repaired
    return text


def _redecode(match: re.Match[str]) -> str:
    # Windows-1252 has no character for five bytes, which appear as control characters.
    raw = b"".join(
        char.encode("latin-1") if "\x80" <= char <= "\x9f" else char.encode("cp1252")
        for char in match[0]
    )
    # The match may be longer than the sequence: try the longest prefix first.
    for end in range(len(raw), 1, -1):
        try:
            return raw[:end].decode("utf-8") + match[0][end:]
        except UnicodeDecodeError:
            continue
    return match[0]


# Up to five capitalized words and one in lower case at the start of a line, then a colon.
_SPEAKER = re.compile(r"^[A-Z][\w.'’-]*(?: [A-Z][\w.'’-]*){0,4}(?: [a-z]+)?: *", re.MULTILINE)
_MARK = re.compile(r"\[[^\[\]\n]{1,40}\]|\((?:inaudible|laughter|applause|crosstalk|sic)\)", re.I)


def strip_transcript(text: str) -> str:
    """Remove speakers' names, `Speaker Name:`, and stage directions, `[crosstalk]`."""
    return _MARK.sub(" ", _SPEAKER.sub("", text))


def word_counts(
    groups: Sequence[Sequence[str]],
    stop_words: Collection[str],
    *,
    min_count: int = 6,
    drop_empty: bool = True,
) -> tuple[list[np.ndarray], list[str]]:
    """Count words of at least two letters that occur `min_count` times in all groups together.

    Args:
        groups: the documents of each group.
        stop_words: words to drop.
        min_count: words with fewer occurrences are dropped.
        drop_empty: whether to drop documents without any counted word.

    Returns:
        Counts `(documents, words)` of each group, and the words in alphabetical order.
    """
    counter = CountVectorizer().fit([text for group in groups for text in group])
    words = counter.get_feature_names_out()
    counts = [counter.transform(group).toarray().astype(np.float32) for group in groups]
    kept = sum(rows.sum(axis=0) for rows in counts) >= min_count
    kept &= ~np.isin(words, list(stop_words))
    counts = [rows[:, kept] for rows in counts]
    if drop_empty:
        counts = [rows[rows.any(axis=1)] for rows in counts]
    return counts, words[kept].tolist()
