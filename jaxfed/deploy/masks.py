"""Cryptography of masks that cancel in a sum: keys, agreement, streams and shares.

Every two clients agree on a seed (X25519, HKDF with SHA-256), from which one adds a stream
(ChaCha20) and the other subtracts it; each also adds a mask of its own. Every client gives shares
(Shamir) of the secrets behind its masks to all others, encrypted for each (Fernet, as in Flower's
SecAgg+). In the end those who answer reveal, of each client, one of two shares: that of its own
seed if the server has its message, so that its own mask can be taken off; that of its key if it
dropped out, so that its masks with the others can. Any `threshold` shares are enough, fewer tell
nothing.

The server passes public keys on, and is trusted to pass on the right ones: it may be curious, but
follows the rules. So may clients, below the threshold.

Source: Bonawitz et al. (2017), Practical secure aggregation for privacy-preserving machine
learning, Figure 4 without the signatures.
"""

import base64
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxfed._optional import require

KEY = 32  # bytes of keys and seeds


class Keys(NamedTuple):
    """ONE client's secrets of one round: private keys for shares and for masks, and a seed."""

    sealing: bytes
    masking: bytes
    seed: bytes

    @classmethod
    def draw(cls) -> "Keys":
        """New ones, from the operating system's generator."""
        return cls(*(secrets.token_bytes(KEY) for _ in cls._fields))

    @property
    def public(self) -> tuple[bytes, bytes]:
        """The public keys, for shares and for masks."""
        curve = _flower("cryptography.hazmat.primitives.asymmetric.x25519").X25519PrivateKey
        sealing, masking = map(curve.from_private_bytes, (self.sealing, self.masking))
        return sealing.public_key().public_bytes_raw(), masking.public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, purpose: str) -> bytes:
    """The secret of two clients, from one's private key and the other's public one.

    Raises:
        ValueError: for a public key with which there is no secret.
    """
    curve = _flower("cryptography.hazmat.primitives.asymmetric.x25519")
    own, other = curve.X25519PrivateKey, curve.X25519PublicKey
    secret = own.from_private_bytes(private).exchange(other.from_public_bytes(public))
    return derive(secret, purpose)


def derive(secret: bytes, purpose: str) -> bytes:
    """A key for one purpose."""
    hashes = _flower("cryptography.hazmat.primitives.hashes")
    hkdf = _flower("cryptography.hazmat.primitives.kdf.hkdf")
    kind = hkdf.HKDF(algorithm=hashes.SHA256(), length=KEY, salt=None, info=purpose.encode())
    return kind.derive(secret)


def stream(key: bytes, count: int) -> np.ndarray:
    """So many whole numbers of 32 bits; a key is for one stream."""
    # A nonce of zeros is safe, since no key is used twice.
    ciphers = _flower("cryptography.hazmat.primitives.ciphers")
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None)
    return np.frombuffer(cipher.encryptor().update(bytes(4 * count)), "<u4").astype(np.uint32)


def own_mask(seed: bytes, purpose: str, count: int) -> np.ndarray:
    """What a client adds for itself."""
    return stream(derive(seed, f"own {purpose}"), count)


def pair_masks(
    client: int, private: bytes, publics: Mapping[int, bytes], purpose: str, count: int
) -> np.ndarray:
    """What a client adds for all others: one of each two adds what the other subtracts."""
    total = np.zeros(count, np.uint32)
    for other, public in publics.items():
        if other != client:
            # Both clients must derive the same stream, whichever of them asks.
            low, high = sorted((client, other))
            mask = stream(agree(private, public, f"pair {low} {high} {purpose}"), count)
            total = total + mask if client < other else total - mask
    return total


def split(secret: bytes, threshold: int, clients: Sequence[int]) -> dict[int, bytes]:
    """Shares of a secret, one for each client, any `threshold` of which give it back."""
    shamir = _flower("flwr.common.secure_aggregation.crypto.shamir")
    shares = shamir.create_shares(secret, threshold, len(clients))
    return dict(zip(clients, shares, strict=True))


def join(shares: Iterable[bytes]) -> bytes:
    """Inverse of `split`, from at least as many shares as its threshold."""
    shamir = _flower("flwr.common.secure_aggregation.crypto.shamir")
    return shamir.combine_shares(list(shares))


def encrypt(key: bytes, text: bytes) -> bytes:
    """A text that only who has the key can read or change."""
    symmetric = _flower("flwr.common.secure_aggregation.crypto.symmetric_encryption")
    return symmetric.encrypt(base64.urlsafe_b64encode(key), text)


def decrypt(key: bytes, text: bytes) -> bytes:
    """Inverse of `encrypt`.

    Raises:
        ValueError: for what was changed on its way, or is for somebody else.
    """
    symmetric = _flower("flwr.common.secure_aggregation.crypto.symmetric_encryption")
    try:
        return symmetric.decrypt(base64.urlsafe_b64encode(key), text)
    except _flower("cryptography.fernet").InvalidToken as error:
        raise ValueError("masks: a share was changed on its way") from error


def least_threshold(clients: int) -> int:
    """More than half, so that no two halves can each be told the other half's secrets."""
    return clients // 2 + 1


def _flower(module: str) -> Any:
    return require(module, extra="flower")
