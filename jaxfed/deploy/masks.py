"""Cryptography of masks that cancel in a sum: keys, agreement, streams and shares.

Each two clients agree on a seed (X25519, HKDF with SHA-256), from which one adds a stream
(ChaCha20) and the other subtracts it; each client also adds a mask of its own. Every client gives
all others shares (Shamir) of the secrets behind its masks, encrypted for each (Fernet, as in
Flower's SecAgg+). At the end, the clients that answer reveal one of two shares of each client. If
the server has the client's message, it is the share of its own seed, to remove its own mask; if the
client dropped out, it is the share of its key, to remove its masks with the others. Any `threshold`
shares are enough; fewer reveal nothing.

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
    """ONE client's secrets in one round: private keys for shares and for masks, and a seed."""

    sealing: bytes
    masking: bytes
    seed: bytes

    @classmethod
    def draw(cls) -> "Keys":
        """New secrets, from the operating system's generator."""
        return cls(*(secrets.token_bytes(KEY) for _ in cls._fields))

    @property
    def public(self) -> tuple[bytes, bytes]:
        """The public keys, for shares and for masks."""
        curve = _flower("cryptography.hazmat.primitives.asymmetric.x25519").X25519PrivateKey
        sealing, masking = map(curve.from_private_bytes, (self.sealing, self.masking))
        return sealing.public_key().public_bytes_raw(), masking.public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, purpose: str) -> bytes:
    """The shared secret of two clients, from one's private key and the other's public key.

    Raises:
        ValueError: if the public key is invalid.
    """
    curve = _flower("cryptography.hazmat.primitives.asymmetric.x25519")
    own, other = curve.X25519PrivateKey, curve.X25519PublicKey
    secret = own.from_private_bytes(private).exchange(other.from_public_bytes(public))
    return derive(secret, purpose)


def derive(secret: bytes, purpose: str) -> bytes:
    """Derive a key for one purpose."""
    hashes = _flower("cryptography.hazmat.primitives.hashes")
    hkdf = _flower("cryptography.hazmat.primitives.kdf.hkdf")
    kind = hkdf.HKDF(algorithm=hashes.SHA256(), length=KEY, salt=None, info=purpose.encode())
    return kind.derive(secret)


def stream(key: bytes, count: int) -> np.ndarray:
    """A stream of `count` 32-bit integers; use a key for one stream only."""
    # A nonce of zeros is safe, since no key is used twice.
    ciphers = _flower("cryptography.hazmat.primitives.ciphers")
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None)
    return np.frombuffer(cipher.encryptor().update(bytes(4 * count)), "<u4").astype(np.uint32)


def own_mask(seed: bytes, purpose: str, count: int) -> np.ndarray:
    """The mask that a client adds for itself."""
    return stream(derive(seed, f"own {purpose}"), count)


def pair_masks(
    client: int, private: bytes, publics: Mapping[int, bytes], purpose: str, count: int
) -> np.ndarray:
    """The sum of a client's masks with all others; of each two, one adds and one subtracts."""
    total = np.zeros(count, np.uint32)
    for other, public in publics.items():
        if other != client:
            # Both clients must derive the same stream.
            low, high = sorted((client, other))
            mask = stream(agree(private, public, f"pair {low} {high} {purpose}"), count)
            # Unsigned integers wrap around, so the two cancel exactly.
            total = total + mask if client < other else total - mask
    return total


def split_secret(secret: bytes, threshold: int, clients: Sequence[int]) -> dict[int, bytes]:
    """Split a secret into one share per client, any `threshold` of which recover it."""
    shamir = _flower("flwr.common.secure_aggregation.crypto.shamir")
    shares = shamir.create_shares(secret, threshold, len(clients))
    return dict(zip(clients, shares, strict=True))


def join_shares(shares: Iterable[bytes]) -> bytes:
    """Inverse of `split_secret`, from at least `threshold` shares."""
    shamir = _flower("flwr.common.secure_aggregation.crypto.shamir")
    return shamir.combine_shares(list(shares))


def encrypt(key: bytes, text: bytes) -> bytes:
    """Encrypt a text, so that only holders of the key can read or change it."""
    symmetric = _flower("flwr.common.secure_aggregation.crypto.symmetric_encryption")
    return symmetric.encrypt(base64.urlsafe_b64encode(key), text)


def decrypt(key: bytes, text: bytes) -> bytes:
    """Inverse of `encrypt`.

    Raises:
        ValueError: if the text was changed on its way, or is for another client.
    """
    symmetric = _flower("flwr.common.secure_aggregation.crypto.symmetric_encryption")
    try:
        return symmetric.decrypt(base64.urlsafe_b64encode(key), text)
    except _flower("cryptography.fernet").InvalidToken as error:
        raise ValueError("masks: a share was changed on its way") from error


def least_threshold(clients: int) -> int:
    """More than half, so that no two halves can each learn the other half's secrets."""
    return clients // 2 + 1


def _flower(module: str) -> Any:
    return require(module, extra="flower")
