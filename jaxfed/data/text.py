"""Reads text files and counts their words."""

import re
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float

from jaxfed._checks import check_list, check_texts, check_whole, checked_path, refuse
from jaxfed._optional import require
from jaxfed.data._files import StrPath, existing, files_in, reading


def read_text(folder: StrPath, *, suffix: str = ".txt") -> tuple[list[str], list[str]]:
    """Read the text files of a folder, one document each, in natural order of their names.

    Args:
        folder: the folder.
        suffix: the suffix of the files to read.

    Returns:
        The documents, and their names without the suffix.

    Raises:
        FileNotFoundError: if the folder does not exist.
        ValueError: if the folder holds no such file, or one is empty or not UTF-8.
    """
    documents, names = [], []
    for path in files_in(checked_path("folder", folder), (suffix,)):
        existing(path)
        with reading(path, "not UTF-8 text"):
            document = path.read_text(encoding="utf-8-sig")
        if not document.strip():
            raise ValueError(f"{path}: is empty")
        documents.append(document)
        names.append(path.stem)
    return documents, names


def english_stop_words() -> frozenset[str]:
    """English stop words of scikit-learn.

    Returns:
        The words.

    Raises:
        ImportError: if scikit-learn is not installed.
    """
    return require("sklearn.feature_extraction.text", extra="data").ENGLISH_STOP_WORDS


_WORD = re.compile(r"\w\w+")


def bag_of_words(
    groups: Sequence[Sequence[str]],
    *,
    min_count: int = 6,
    stop_words: Collection[str] = (),
    vocabulary: Sequence[str] | None = None,
    drop_empty: bool = True,
) -> tuple[list[Float[np.ndarray, "n_i words"]], list[str]]:
    """Count the words of documents in groups, one group per client.

    Words are runs of at least two letters, digits or underscores, converted to lower case.

    Args:
        groups: the documents of each group.
        min_count: words with fewer occurrences over all groups are dropped.
        stop_words: words to drop, such as `english_stop_words()`.
        vocabulary: count exactly these words, regardless of `min_count` and `stop_words`; use it to
            count held-out documents like the others.
        drop_empty: whether to drop documents without any counted word.

    Returns:
        Counts (float32) of each group, and the vocabulary in alphabetical order, or as given.

    Raises:
        ValueError: if a single text is given instead of a list of texts, or nothing is left of a
            group or of the vocabulary.
    """
    check_whole("min_count", min_count)
    # To Python, a text is a sequence of texts: its letters would be counted.
    for name, given in (("stop_words", stop_words), ("vocabulary", vocabulary)):
        if isinstance(given, str):
            raise refuse(name, "a collection of words", given)
    check_list("groups", groups, "lists of texts")
    for i, group in enumerate(groups):
        check_texts(f"groups[{i}]", group)
    unwanted = frozenset(stop_words)
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
    # A counter holds few words of a long vocabulary, so fill in only those.
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
