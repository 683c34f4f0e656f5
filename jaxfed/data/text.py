"""Text files as bags of words."""

import re
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float

from jaxfed._checks import (
    check_flag,
    check_list,
    check_text,
    check_texts,
    check_whole,
    checked_path,
    refuse,
)
from jaxfed._optional import require
from jaxfed.data._files import StrPath, existing, files_in

_FILLERS = """
    going gonna think thought know known say says said saying tell told talk talked talking want
    wants wanted like just really actually basically well yes yeah okay oh uh um right sure look
    looking let come came go goes went get gets getting got give make made thing things way lot
    kind sort mean thank thanks sir mr mrs don doesn didn isn wasn aren weren haven hasn hadn won
    wouldn couldn shouldn ve ll
"""

#: Words that speakers use whatever the topic, and the stumps that contractions leave ("don't",
#: "we've"). Published lists of stop words do not hold them.
SPOKEN_FILLERS: frozenset[str] = frozenset(_FILLERS.split())


def read_text(folder: StrPath, *, suffix: str = ".txt") -> tuple[list[str], list[str]]:
    """Read the text files of a folder, one document each, in natural order of their names.

    Args:
        folder: the folder.
        suffix: suffix of the files to read.

    Returns:
        The documents, and their names without the suffix.

    Raises:
        FileNotFoundError: if the folder does not exist.
        ValueError: if it holds no such file, or one is empty or not UTF-8.
    """
    check_text("suffix", suffix)
    documents, names = [], []
    for path in files_in(checked_path("folder", folder), (suffix,)):
        try:
            document = existing(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text ({error})") from error
        if not document.strip():
            raise ValueError(f"{path}: is empty")
        documents.append(document)
        names.append(path.stem)
    return documents, names


def paragraphs(text: str) -> list[str]:
    """Split a text at blank lines.

    Args:
        text: the text.

    Returns:
        The paragraphs that are not empty.

    Raises:
        ValueError: if `text` is no text.
    """
    check_text("text", text)
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


# What the lead byte of a UTF-8 sequence and its continuation bytes look like as Windows-1252.
_CONTINUATION = "".join(
    bytes([byte]).decode("cp1252", errors="ignore") or chr(byte) for byte in range(0x80, 0xC0)
)
_MOJIBAKE = re.compile(f"[\u00c2-\u00f4][{re.escape(_CONTINUATION)}]{{1,3}}")


def repair_mojibake(text: str) -> str:
    """Restore characters of UTF-8 text that was decoded as Windows-1252, once or repeatedly.

    For text known to be damaged: an accented capital before a closing quotation mark can be
    mistaken for such a sequence.

    Args:
        text: text in which, say, an apostrophe reads as three odd characters.

    Returns:
        The text with every sequence restored that is valid UTF-8; all else is unchanged.

    Raises:
        ValueError: if `text` is no text.
    """
    check_text("text", text)
    while (repaired := _MOJIBAKE.sub(_redecode, text)) != text:
        text = repaired
    return text


def _redecode(match: re.Match[str]) -> str:
    # Five bytes have no character in Windows-1252 and appear as control characters.
    raw = b"".join(
        char.encode("latin-1") if "\x80" <= char <= "\x9f" else char.encode("cp1252")
        for char in match[0]
    )
    for end in range(len(raw), 1, -1):
        try:
            return raw[:end].decode("utf-8") + match[0][end:]
        except UnicodeDecodeError:
            continue
    return match[0]


_SPEAKER = re.compile(r"^[A-Z][\w.'’-]*(?: [A-Z][\w.'’-]*){0,4}(?: [a-z]+)?: *", re.MULTILINE)
_MARK = re.compile(r"\[[^\[\]\n]{1,40}\]|\((?:inaudible|laughter|applause|crosstalk|sic)\)", re.I)


def strip_transcript(text: str) -> str:
    """Remove what was not said from a transcript.

    Args:
        text: lines that may begin with `Speaker Name:` and hold marks such as `[crosstalk]`.

    Returns:
        The spoken words.

    Raises:
        ValueError: if `text` is no text.
    """
    check_text("text", text)
    return _MARK.sub(" ", _SPEAKER.sub("", text))


def english_stop_words() -> frozenset[str]:
    """English stop words of scikit-learn.

    Returns:
        The words; join `SPOKEN_FILLERS` to them for speech.

    Raises:
        ImportError: if scikit-learn is not installed.
    """
    return require("sklearn.feature_extraction.text", extra="data").ENGLISH_STOP_WORDS


_WORD = re.compile(r"\w\w+")


def _words(argument: str, given: Collection[str]) -> frozenset[str]:
    """Words without order.

    Raises:
        ValueError: if they are no collection of words.
    """
    several = isinstance(given, Collection) and not isinstance(given, str | bytes)
    try:
        words = frozenset(given) if several else None
    except TypeError:  # an array without axes, or what is in it has no hash
        words = None
    if words is None or not all(isinstance(word, str) for word in words):
        raise refuse(argument, "a collection of words", given)
    return words


def bag_of_words(
    groups: Sequence[Sequence[str]],
    *,
    min_count: int = 6,
    stop_words: Collection[str] = (),
    vocabulary: Sequence[str] | None = None,
    drop_empty: bool = True,
) -> tuple[list[Float[np.ndarray, "n_i words"]], list[str]]:
    """Count the words of documents that come in groups, one group for each client.

    Words are runs of at least two letters, digits or underscores, in lower case.

    Args:
        groups: the documents of each group.
        min_count: fewest occurrences, over all groups, of a word that is kept.
        stop_words: words left out, e.g. `english_stop_words() | SPOKEN_FILLERS`.
        vocabulary: count these words, whatever `min_count` and `stop_words` say; the way to count
            held-out documents as the others were.
        drop_empty: whether to leave out documents without any counted word.

    Returns:
        Counts (float32) of each group, and the vocabulary in alphabetical order, or as given.

    Raises:
        ValueError: if `groups` is not a list of lists of texts, or nothing is left of a group or
            of the vocabulary.
    """
    unwanted = _words("stop_words", stop_words)
    check_whole("min_count", min_count)
    check_flag("drop_empty", drop_empty)
    if vocabulary is not None:
        check_texts("vocabulary", vocabulary)
    check_list("groups", groups, "groups of documents")
    for i, group in enumerate(groups):
        check_texts(f"groups[{i}]", group)
    counted = [[Counter(_WORD.findall(text.lower())) for text in group] for group in groups]
    if vocabulary is None:
        total: Counter[str] = Counter()
        for words in (words for group in counted for words in group):
            total.update(words)
        vocabulary = sorted(w for w, n in total.items() if n >= min_count and w not in unwanted)
    if not vocabulary:
        raise ValueError(
            f"min_count, vocabulary: no word occurs {min_count} times besides the stop words"
        )
    place = {word: k for k, word in enumerate(vocabulary)}

    arrays = []
    for i, group in enumerate(counted):
        array = np.zeros((len(group), len(place)), np.float32)
        for row, words in zip(array, group, strict=True):
            for word, number in words.items():
                if word in place:
                    row[place[word]] = number
        if drop_empty:
            array = array[array.any(axis=1)]
        if not len(array):
            raise ValueError(f"groups[{i}]: has no document with a counted word")
        arrays.append(array)
    return arrays, list(vocabulary)
