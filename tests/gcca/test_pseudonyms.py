"""Pseudonyms of entities, and ids that match badly."""

import hashlib
import secrets
import warnings

import numpy as np
import pytest

import jaxfed as jf

SECRET = bytes(range(32))
PATIENTS = ["Ann", "bob", "Zoë", "p 4"]


def hmac_by_hand(key, text):
    """RFC 2104, from its definition."""
    block = (key if len(key) <= 64 else hashlib.sha256(key).digest()).ljust(64, b"\0")
    inner = hashlib.sha256(bytes(x ^ 0x36 for x in block) + text.encode()).digest()
    return hashlib.sha256(bytes(x ^ 0x5C for x in block) + inner).hexdigest()


@pytest.mark.parametrize(
    "secret", [SECRET, "0a" * 32, bytes(range(200))], ids=["bytes", "text", "long"]
)
def test_pseudonyms_are_those_of_the_standard(secret):
    key = secret.encode() if isinstance(secret, str) else secret
    found = jf.gcca.pseudonyms(PATIENTS, secret)
    assert found.tolist() == [hmac_by_hand(key, name) for name in PATIENTS]
    assert found.dtype.kind == "U" and found.shape == (4,)


def test_a_test_vector_of_rfc_4231():
    # Case 6: a key of 131 bytes.
    found = jf.gcca.pseudonyms(
        ["Test Using Larger Than Block-Size Key - Hash Key First"], b"\xaa" * 131
    )
    assert found[0] == "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"


def test_they_match_as_the_ids_do_and_only_with_one_secret():
    ids = [np.arange(3, 40), np.arange(30)[::-1], np.arange(20, 60)]
    plain = jf.gcca.align(ids)
    hidden = jf.gcca.align([jf.gcca.pseudonyms(own, SECRET) for own in ids])
    for first, second in ((0, 1), (1, 2), (0, 2)):
        for alignment in (plain, hidden):
            common = np.intersect1d(alignment.places[first], alignment.places[second])
            assert len(common) == len(np.intersect1d(ids[first], ids[second]))
    assert hidden.positions(jf.gcca.pseudonyms([7], SECRET)) in hidden.places[1]
    other = jf.gcca.pseudonyms(ids[0], secrets.token_bytes(32))
    with pytest.raises(ValueError, match=r"^ids\[0\]: wanted some entity that another client"):
        jf.gcca.align([other, jf.gcca.pseudonyms(ids[1], SECRET)])


def test_numbers_are_their_digits_and_texts_exact_unless_folded():
    numbers = jf.gcca.pseudonyms(np.asarray([7, 12], np.uint8), SECRET)
    assert numbers.tolist() == jf.gcca.pseudonyms(["7", "12"], SECRET).tolist()
    one, two = (jf.gcca.pseudonyms(x, SECRET) for x in (["p1", "é"], [" P1", "e\u0301"]))
    assert not set(one) & set(two)
    one, two = (jf.gcca.pseudonyms(x, SECRET, fold=True) for x in (["p1", "é"], [" P1", "E\u0301"]))
    assert one.tolist() == two.tolist()


@pytest.mark.parametrize(
    ("ids", "options", "refused"),
    [
        (["p1", "p1"], {}, r"^ids: wanted every id once, got 'p1' twice$"),
        (["p1", "P1 "], {"fold": True}, r"^ids: wanted every id once, got 'p1' and 'P1 '$"),
        (["p1", " "], {}, r"^ids: wanted ids that are not empty"),
        (["p1", ""], {}, r"^ids: wanted ids that are not empty"),
        ([], {}, r"^ids: wanted a list of ids"),
        ("p1", {}, r"^ids: wanted a list of ids"),
        ([1.0, 2.0], {}, r"^ids: wanted a list of ids"),
        (["p1", None], {}, r"^ids: wanted a list of ids"),
        (["\ud800"], {}, r"^ids: wanted texts that UTF-8 can encode"),
        (["p1"], {"fold": 1}, r"^fold: wanted True or False"),
    ],
)
def test_unsuitable_ids_are_refused(ids, options, refused):
    with pytest.raises(ValueError, match=refused):
        jf.gcca.pseudonyms(ids, SECRET, **options)


@pytest.mark.parametrize(
    ("secret", "got"),
    [(b"s3cret" * 5, "30 bytes"), ("", "0 bytes"), (None, "NoneType"), ("é\ud800" * 40, "str")],
)
def test_short_secrets_are_refused_and_never_printed(secret, got):
    with pytest.raises(ValueError, match=rf"^secret: .*at least 32 bytes.*got {got}$") as caught:
        jf.gcca.pseudonyms(PATIENTS, secret)
    assert "s3cret" not in str(caught.value)


# --- ids that match badly ------------------------------------------------------------------------


def numbered(letter, numbers):
    return [f"{letter}{i}" for i in numbers]


def test_groups_of_clients_that_share_nothing_are_refused():
    ids = [numbered("p", range(9)), numbered("P", range(9))] * 2
    with (
        pytest.warns(UserWarning, match=r"one way to write"),
        pytest.raises(ValueError, match=r"^ids\[1\]: .*got a group with 'P0'.*client has 'p0'$"),
    ):
        jf.gcca.align(ids)
    chain = jf.gcca.align([range(0, 6), range(4, 10), range(8, 14)])
    assert len(chain.ids) == 14


def test_ids_in_two_spellings_and_hardly_any_in_common_are_warned_of():
    half = [numbered("p", range(20)), numbered("p", range(10)) + numbered("P", range(10, 20))]
    with pytest.warns(UserWarning, match=r"^ids\[1\]: .*got 'P10', where ids\[0\] has 'p10'"):
        jf.gcca.align(half)
    few = [numbered("p", range(30)), [*numbered("q", range(29)), "p7"]]
    with pytest.warns(UserWarning, match=r"^ids\[0\]: wanted at least a tenth .*got 1 of 30 ids"):
        found = jf.gcca.align(few)
    assert len(found.ids) == 59


def test_good_matches_are_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A small site beside a large register, and ids that differ in case at both.
        jf.gcca.align([range(10_000), range(50)])
        both = jf.gcca.align([["a", "A", "b"], ["A", "a"], ["A"]])
    assert len(both.ids) == 3
