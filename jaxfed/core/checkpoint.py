"""Checkpoints of a run through Orbax: saved between chunks of rounds, resumed bit for bit."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxfed._optional import require


class Checkpoint:
    """Where and how often a run is saved."""

    def __init__(self, path: str | Path, *, every: int = 50, keep: int = 2):
        """Save into a folder.

        Args:
            path: the folder; made if it is not there. One run per folder.
            every: save every so many rounds, and at the end.
            keep: how many of the newest checkpoints stay.

        Raises:
            ValueError: if `every` or `keep` is not positive.
            ImportError: if Orbax is not installed.
        """
        if every <= 0 or keep <= 0:
            raise ValueError(f"every and keep must be positive, got {every} and {keep}")
        require("orbax.checkpoint", extra="checkpoint")
        self.path, self.every, self.keep = Path(path).resolve(), every, keep

    def save(self, identity: Any, state: PyTree, pieces: list[dict[str, np.ndarray]]) -> None:
        """Write the state and the history so far; complete or not at all."""
        history = {k: np.concatenate([piece[k] for piece in pieces]) for k in pieces[0]}
        self.path.mkdir(parents=True, exist_ok=True)
        described = self.path / "run.json"
        if not described.exists():
            # Complete or not at all, like the checkpoints themselves.
            draft = described.with_suffix(".tmp")
            draft.write_text(json.dumps(identity, indent=1))
            draft.replace(described)
        ocp = require("orbax.checkpoint", extra="checkpoint")
        with self._manager() as manager:
            # Orbax refuses arrays without elements.
            leaves = {name: leaf for name, leaf in _numbered(state).items() if leaf.size > 0}
            tree = {"state": leaves, "history": history}
            manager.save(int(state.round), args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()

    def restore(self, identity: Any, like: PyTree) -> tuple[PyTree, dict[str, np.ndarray]] | None:
        """The newest state and its history, or None where nothing was saved yet.

        Raises:
            ValueError: if what was saved belongs to another run; the message names what differs.
        """
        described = self.path / "run.json"
        if not described.exists():
            return None
        saved = json.loads(described.read_text())
        for name, value in identity.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"checkpoint {self.path}: belongs to another run; its {name} is "
                    f"{saved.get(name)}, this run's is {value}"
                )
        ocp = require("orbax.checkpoint", extra="checkpoint")
        with self._manager() as manager:
            newest = manager.latest_step()
            if newest is None:
                return None
            tree = manager.restore(newest, args=ocp.args.StandardRestore())
        leaves, structure = jax.tree.flatten(like)
        stored = _numbered(like) | tree["state"]
        # The devices' layout is this run's, not the saved one's.
        placed = [
            jax.device_put(jnp.asarray(np.asarray(stored[name]), leaf.dtype), leaf.sharding)
            for name, leaf in zip(sorted(stored), leaves, strict=True)
        ]
        history = {name: np.asarray(values) for name, values in tree["history"].items()}
        return jax.tree.unflatten(structure, placed), history

    def _manager(self):
        ocp = require("orbax.checkpoint", extra="checkpoint")
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.keep, create=True, enable_async_checkpointing=False
        )
        return ocp.CheckpointManager(self.path / "rounds", options=options)


def fingerprint(algorithm, clients, *, key, start, **arguments) -> dict[str, str]:
    """What tells one run from another: everything that its numbers depend on."""
    return {
        "algorithm": f"{_described(algorithm)} {digest_of(algorithm)}",
        "clients": f"{len(clients)} clients {digest_of(clients)}",
        "key": digest_of(key),
        "warm_start": digest_of(start),
        **{name: f"{value!r} {digest_of(value)}" for name, value in arguments.items()},
    }


def _described(algorithm) -> str:
    """In one line, with the values of its hyperparameters and of what its functions carry along."""
    text = " ".join(eqx.tree_pformat(algorithm, short_arrays=False).split())
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # where a function lies differs between processes
    carried = hashlib.sha256(" ".join(_carried(algorithm, set())).encode())
    return f"{text} {carried.hexdigest()[:16]}"


def _carried(value: Any, seen: set[int]) -> Iterator[str]:
    """The values within functions, such as the step size within an Optax optimizer."""
    if isinstance(value, str | int | float):
        yield repr(value)
    elif isinstance(value, jax.Array | np.ndarray):
        yield digest_of(value)
    elif id(value) not in seen:  # functions may know themselves
        seen.add(id(value))
        if isinstance(value, Mapping):
            parts = [*value.keys(), *value.values()]
        elif isinstance(value, tuple | list):
            parts = list(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
        elif isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
        else:
            parts = []
            for cell in getattr(value, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # one that is still empty
                    parts.append(cell.cell_contents)
        for part in parts:
            yield from _carried(part, seen)


def _numbered(tree: PyTree) -> dict[str, Any]:
    return {f"{position:04d}": leaf for position, leaf in enumerate(jax.tree.leaves(tree))}


def digest_of(tree: PyTree) -> str:
    """A short number that tells one tree of arrays from another."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array | np.ndarray | float | int):
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]
