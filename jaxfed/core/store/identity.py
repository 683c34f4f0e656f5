"""Identities of runs: for each argument, a description and a digest of its content."""

import contextlib
import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from jaxfed.core.common.processes import exchanged, is_here
from jaxfed.core.store.arrays import is_key

# For each argument, a description and a digest that may cover more. It must survive JSON.
Identity = Mapping[str, list[str]]


class CheckpointError(ValueError):
    """A folder holds something that this run cannot resume: another run, or damaged files."""


def check_same(argument: str, folder: Path, kind: str, saved: Identity, identity: Identity) -> None:
    """Refuse to resume something else.

    Args:
        argument: the caller's name for the folder.
        folder: the folder.
        kind: what it holds, such as a run.
        saved: the saved identity.
        identity: the identity of this call.

    Raises:
        CheckpointError: if they differ; the message names the arguments.
    """
    found = []
    for name, value in identity.items():
        earlier = saved.get(name, ["missing", ""])
        if earlier[0] != value[0]:
            found.append(f"{name} was {earlier[0]} and is {value[0]}")
        elif earlier != value and name != "computation":
            found.append(f"{name} has other values")
    # The computation depends on the other arguments, so compare it only if they agree.
    if not found and saved.get("computation") != identity.get("computation"):
        found = ["computation differs, by a function such as metrics, its data or a version"]
    if found:
        raise CheckpointError(
            f"{argument}: wanted a folder of this {kind}, got {folder}, which belongs to another "
            f"{kind}: {'; '.join(found)}"
        )


def fingerprint(
    clients: Any, program: str, key: Any, warm_start: Any, **arguments: Any
) -> Identity:
    """The identity of a run: everything that its numbers depend on.

    Args:
        clients: its clients.
        program: the text of the program of a chunk of rounds, with all functions' code.
        key: the random key, which is not shown, since it may protect noise.
        warm_start: the warm start.
        **arguments: the other arguments, in the order in which differences are reported.
    """
    return {
        **{name: text_and_digest(value) for name, value in arguments.items()},
        "clients": [f"{len(clients)} clients", digest_of(clients.identity())],
        "key": ["", digest_of(key)],
        "warm_start": ["none" if warm_start is None else "some", digest_of(warm_start)],
        # The code of the algorithm and of functions such as metrics, which no description shows.
        "computation": ["", digest_of_text(program)],
    }


def text_and_digest(value: Any) -> list[str]:
    """A description of a value, cut to 200 characters, and a digest of all its content."""
    text = " ".join(eqx.tree_pformat(value, short_arrays=False).split())
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # a function's address differs between processes
    # The text alone is not enough: functions print without the values that they captured, and large
    # arrays with only a few of theirs.
    content = " ".join([text, *_carried(value, set()), digest_of(value)])
    return [text[:200], digest_of_text(content)]


def _carried(value: Any, seen: set[int]) -> Iterator[str]:
    """The values captured by functions, such as the step size in an Optax optimizer."""
    if isinstance(value, str | int | float):
        yield repr(value)
    elif isinstance(value, jax.Array | np.ndarray):
        yield digest_of(value)
    elif id(value) not in seen:  # functions may refer to themselves
        seen.add(id(value))
        parts: list[Any] = []
        if isinstance(value, Mapping):
            parts += value.items()
        elif isinstance(value, tuple | list):
            parts += value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts += [getattr(value, field.name) for field in dataclasses.fields(value)]
        elif isinstance(value, functools.partial):
            parts += value.func, value.args, value.keywords
        for cell in getattr(value, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # the cell of an unassigned name is empty
                parts.append(cell.cell_contents)
        for part in parts:
            yield from _carried(part, seen)


def digest_of_text(text: str) -> str:
    """A short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of(tree: PyTree) -> str:
    """A short digest of a tree of arrays."""
    digest, everywhere = hashlib.sha256(), True
    for leaf in jax.tree.leaves(tree):
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array) and not is_here(leaf):
            everywhere = False
            for shard in leaf.addressable_shards:
                digest.update(f"{shard.index}".encode() + np.asarray(shard.data).tobytes())
        elif isinstance(leaf, jax.Array | np.ndarray | float | int):
            leaf = np.asarray(leaf)
            # Shape and type too, since the same bytes may be other numbers.
            digest.update(f"{leaf.shape} {leaf.dtype}".encode() + leaf.tobytes())
    if not everywhere:
        # Each process sees only its own shards, but all must compute the same digest.
        return digest_of_text(" ".join(exchanged(digest.hexdigest())))
    return digest.hexdigest()[:16]
