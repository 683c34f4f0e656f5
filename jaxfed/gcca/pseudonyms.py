"""Replace ids of entities by keyed pseudonyms, so that a server can match them without the ids."""

import hmac
import unicodedata

import numpy as np
from jaxtyping import Shaped

from jaxfed._checks import check_flag, refuse
from jaxfed.gcca.alignment import Ids, checked_ids

LEAST = 32  # bytes: the length of SHA-256's values, below which RFC 2104 discourages keys


def pseudonyms(
    ids: Ids, secret: bytes | str, *, fold: bool = False
) -> Shaped[np.ndarray, " entities"]:
    """Replace each id by a text that only those who have the secret can compute from it.

    Equal ids have equal pseudonyms at all sites with the same secret, so that
    `jf.gcca.align(pseudonyms)` matches entities. Without the secret, nobody can compute the
    pseudonym of a guessed id. Whoever has it can, so give it to the sites alone, never to the
    server, and draw a new one for each project: `secrets.token_hex(32)`.

    Source: HMAC (Krawczyk, Bellare & Canetti 1997, RFC 2104) with SHA-256, from Python's standard
    library, of the id as UTF-8.

    Args:
        ids: one site's ids, distinct, whole numbers or texts. A number is its decimal digits: 7 and
            "7" have one pseudonym, "07" has another.
        secret: at least 32 bytes, or a text of as many in UTF-8.
        fold: whether ids that differ only in case, in blanks around them, or in how an accented
            letter is coded (Unicode's form NFC) count as equal, as `str.strip` and `str.casefold`
            see it; by default every difference counts.

    Returns:
        Pseudonyms in the order of the ids, 64 hexadecimal digits each.

    Raises:
        ValueError: if ids are not all whole numbers or all texts, one is empty or given twice, also
            after folding, or the secret is shorter. Errors name ids, but never the secret.
    """
    check_flag("fold", fold)
    key = _key(secret)
    given = [str(own) for own in checked_ids(ids, "ids").tolist()]
    texts = [_folded(own) for own in given] if fold else given
    first: dict[str, str] = {}
    for own, text in zip(given, texts, strict=True):
        if not text.strip():
            raise refuse("ids", "ids that are not empty", own)
        if text in first:
            twice = f"{own!r} twice" if own == first[text] else f"{first[text]!r} and {own!r}"
            raise ValueError(f"ids: wanted every id once, got {twice}")
        first[text] = own
    return np.asarray([_pseudonym(key, text) for text in texts])


def _key(secret: object) -> bytes:
    try:
        key = secret.encode() if isinstance(secret, str) else secret
    except UnicodeEncodeError:
        key = None
    if not isinstance(key, bytes) or len(key) < LEAST:
        got = f"{len(key)} bytes" if isinstance(key, bytes) else type(secret).__name__
        raise ValueError(
            f"secret: wanted at least {LEAST} bytes, such as secrets.token_hex(32), got {got}"
        )
    return key


def _folded(text: str) -> str:
    text = text.strip().strip("\ufeff").strip()  # also the mark that may begin a file
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def _pseudonym(key: bytes, text: str) -> str:
    try:
        return hmac.digest(key, text.encode(), "sha256").hex()
    except UnicodeEncodeError as error:
        raise refuse("ids", "texts that UTF-8 can encode", text) from error
