"""Masks that cancel in a sum over whoever answers: keys, agreement, streams and shares.

Every two clients agree on a seed (X25519, HKDF with SHA-256), of which one adds and the other
subtracts a stream (ChaCha20); each adds one of its own besides. Of what both come from, every
client gives shares to all (Shamir), encrypted for each (Fernet, as in Flower's SecAgg+). In the end
those who answer tell, of each client, one of two: a share of its own seed if the server has its
message, so that the own mask can be taken off; or a share of its key if it dropped out, so that its
masks with the others can. Any `threshold` shares are enough, fewer tell nothing.

The server passes public keys on, and is trusted to pass on the right ones: it may be curious, but
follows the rules. So may clients, below the threshold.

Source: Bonawitz et al. (2017), Practical secure aggregation for privacy-preserving machine
learning, Figure 4 without the signatures.
"""

import base64
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxfed._optional import require

EXTRA = "flower"
KEY = 32  # bytes of keys and seeds


class Keys(NamedTuple):
    """ONE client's secrets of one round: private keys for shares and for masks, and a seed."""

    sealing: bytes
    masking: bytes
    seed: bytes

    @classmethod
    def drawn(cls) -> "Keys":
        """New ones, from the operating system's generator."""
        return cls(*(secrets.token_bytes(KEY) for _ in range(3)))

    @property
    def public(self) -> tuple[bytes, bytes]:
        """The public keys, for shares and for masks."""
        return _public(self.sealing), _public(self.masking)


def _private(key: bytes):
    curve = require("cryptography.hazmat.primitives.asymmetric.x25519", extra=EXTRA)
    return curve.X25519PrivateKey.from_private_bytes(key)


def _public(key: bytes) -> bytes:
    return _private(key).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes, purpose: str) -> bytes:
    """What two clients share, each from its own private key and the other's public one.

    Raises:
        ValueError: for a public key with which there is no secret.
    """
    curve = require("cryptography.hazmat.primitives.asymmetric.x25519", extra=EXTRA)
    secret = _private(private).exchange(curve.X25519PublicKey.from_public_bytes(public))
    return derived(secret, purpose)


def derived(secret: bytes, purpose: str) -> bytes:
    """A key for one purpose."""
    hashes = require("cryptography.hazmat.primitives.hashes", extra=EXTRA)
    hkdf = require("cryptography.hazmat.primitives.kdf.hkdf", extra=EXTRA)
    kind = hkdf.HKDF(algorithm=hashes.SHA256(), length=KEY, salt=None, info=purpose.encode())
    return kind.derive(secret)


def stream(key: bytes, count: int) -> np.ndarray:
    """So many whole numbers of 32 bits; a key is for one stream."""
    ciphers = require("cryptography.hazmat.primitives.ciphers", extra=EXTRA)
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None)
    return np.frombuffer(cipher.encryptor().update(bytes(4 * count)), "<u4").astype(np.uint32)


def own_mask(seed: bytes, purpose: str, count: int) -> np.ndarray:
    """What a client adds for itself."""
    return stream(derived(seed, f"own {purpose}"), count)


def pair_masks(
    client: int, private: bytes, publics: Mapping[int, bytes], purpose: str, count: int
) -> np.ndarray:
    """What a client adds for all others: one of each two adds what the other subtracts."""
    total = np.zeros(count, np.uint32)
    for other, public in publics.items():
        if other != client:
            low, high = sorted((client, other))
            key = agreed(private, public, f"pair {low} {high} {purpose}")
            mask = stream(key, count)
            total = total + mask if client < other else total - mask
    return total


def split(secret: bytes, threshold: int, clients: Sequence[int]) -> dict[int, bytes]:
    """Shares of a secret, one for each client, any `threshold` of which give it back."""
    shamir = require("flwr.common.secure_aggregation.crypto.shamir", extra=EXTRA)
    shares = shamir.create_shares(secret, threshold, len(clients))
    return dict(zip(clients, shares, strict=True))


def joined(shares: Iterable[bytes]) -> bytes:
    """Inverse of `split`, from at least as many shares as its threshold."""
    shamir = require("flwr.common.secure_aggregation.crypto.shamir", extra=EXTRA)
    return shamir.combine_shares(list(shares))


def sealed(key: bytes, text: bytes) -> bytes:
    """Encrypted, so that only who has the key can read or change it."""
    symmetric = require("flwr.common.secure_aggregation.crypto.symmetric_encryption", extra=EXTRA)
    return symmetric.encrypt(base64.urlsafe_b64encode(key), text)


def opened(key: bytes, text: bytes) -> bytes:
    """Inverse of `sealed`.

    Raises:
        ValueError: for what was changed on its way, or is for somebody else.
    """
    symmetric = require("flwr.common.secure_aggregation.crypto.symmetric_encryption", extra=EXTRA)
    fernet = require("cryptography.fernet", extra=EXTRA)
    try:
        return symmetric.decrypt(base64.urlsafe_b64encode(key), text)
    except fernet.InvalidToken as error:
        raise ValueError("masks: a share was changed on its way") from error


def least_threshold(clients: int) -> int:
    """More than half, so that no two halves can each be told the other half's secrets."""
    return clients // 2 + 1
