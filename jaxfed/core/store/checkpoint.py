"""Checkpoints of a run through Orbax: saved between chunks of rounds, resumed bit for bit."""

import contextlib
import dataclasses
import functools
import hashlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, PyTree

from jaxfed._names import caller
from jaxfed._optional import require
from jaxfed.core.common.checks import check_count, checked_path
from jaxfed.core.common.files import reason, uninterrupted
from jaxfed.core.common.processes import exchanged, is_here, spans

# What tells a run from another: by argument, how it reads and a digest of all that it is.
Identity = Mapping[str, list[str]]


class CheckpointError(ValueError):
    """What a folder holds cannot be taken up by this run: it is another one's, or damaged."""


class Checkpoint:
    """Where and how often a run is saved."""

    def __init__(self, path: str | Path, *, every: int = 50, keep: int = 2):
        """Save into a folder.

        Args:
            path: the folder; made if it is not there. One run per folder.
            every: save every so many rounds, and at the end.
            keep: how many of the newest checkpoints stay.

        Raises:
            ValueError: if `path` is none, or `every` or `keep` is not a positive whole number.
            ImportError: if Orbax is not installed.
        """
        check_count("every", every)
        check_count("keep", keep)
        require("orbax.checkpoint", extra="checkpoint")
        self.path, self.every, self.keep = checked_path("path", path).resolve(), every, keep

    def save(
        self, identity: Identity, rounds: int, kept: PyTree, history: Mapping[str, Any]
    ) -> None:
        """Write what a run keeps and its history so far; complete or not at all.

        Args:
            identity: what tells this run from another, see `fingerprint`.
            rounds: how many rounds have run.
            kept: arrays.
            history: arrays by name.

        Raises:
            RuntimeError: if the folder holds a later round of something else.
            OSError: if it cannot be written, as on a full disk. What was saved before stays.
        """
        ocp = require("orbax.checkpoint", extra="checkpoint")
        tree = ocp.args.StandardSave({"kept": _numbered(kept), "history": dict(history)})
        parts = ocp.args.Composite(identity=ocp.args.JsonSave(dict(identity)), tree=tree)
        steps: list[int] = []
        try:
            with self._manager(together=spans(kept)) as manager:
                steps += manager.all_steps()
                if rounds in steps:  # a damaged one, which restoring has passed over
                    manager.delete(rounds)
                    steps.remove(rounds)
                saved = manager.save(rounds, args=parts, force=True)
                manager.wait_until_finished()
        except Exception as error:  # of every kind, by the layer that could not write
            for part in (self.path / "rounds").glob(f"{rounds}.*-tmp*"):
                shutil.rmtree(part, ignore_errors=True)  # on a full disk, it takes what is left
            kept_round = f"round {max(steps)} stays" if steps else "nothing was saved before"
            raise OSError(
                f"checkpoint {self.path}: round {rounds} cannot be saved ({reason(error)}); "
                f"{kept_round}"
            ) from error
        if not saved:
            raise RuntimeError(
                f"checkpoint {self.path}: round {rounds} was not saved; the folder holds later "
                "rounds, of another run"
            )

    def restore(
        self, identity: Identity, like: PyTree, extends: Callable[[int, int], bool] | None = None
    ) -> tuple[PyTree, dict[str, np.ndarray]] | None:
        """What the newest checkpoint keeps, and its history; None where nothing was saved yet.

        A damaged checkpoint is passed over with a warning, for the one before it; by all processes
        of a run, if one of them cannot read its part.

        Args:
            identity: what tells this run from another.
            like: the shapes and types of what is kept, and on which devices it goes.
            extends: whether this run goes on from another one's round, if they differ in nothing
                but how many rounds they have: `(rounds of the other, the round)`.

        Raises:
            ValueError: if what was saved belongs to another run (the message names what differs),
                or all of it is damaged.
        """
        ocp = require("orbax.checkpoint", extra="checkpoint")
        told = exchanged if spans(like) else lambda value: [value]
        # Without the others, who would wait for one that finds damage.
        with self._manager() as manager:
            steps = told(sorted(manager.all_steps(), reverse=True))[0]
            for step in steps:
                saved = self._read(manager, step, "identity", ocp.args.JsonRestore(), told)
                if saved is None:
                    continue
                # First, since one process cannot read what several have saved.
                self._check_identity(saved, identity, step, extends)
                tree = self._read(manager, step, "tree", ocp.args.StandardRestore(), told)
                if tree is not None:
                    history = {name: np.asarray(values) for name, values in tree["history"].items()}
                    return self._placed(tree["kept"], like), history
        if steps:
            raise CheckpointError(
                f"checkpoint {self.path}: wanted one that can be read, got damage, or what "
                "another version of jaxfed has saved"
            )
        return None

    def _read(self, manager: Any, step: int, part: str, how: Any, told: Callable) -> Any:
        """A part of what a round saved; None, with a warning, if a process finds it damaged."""
        ocp = require("orbax.checkpoint", extra="checkpoint")
        found, wrong = None, None
        try:
            found = manager.restore(step, args=ocp.args.Composite(**{part: how}))[part]
        except Exception as error:
            wrong = type(error).__name__
        if damage := [each for each in told(wrong) if each is not None]:
            warnings.warn(
                f"checkpoint {self.path}: round {step} is damaged and passed over ({damage[0]})",
                stacklevel=caller(),
            )
            return None
        return found

    def _check_identity(
        self,
        saved: Identity,
        identity: Identity,
        step: int,
        extends: Callable[[int, int], bool] | None,
    ) -> None:
        differ = [name for name, value in identity.items() if saved.get(name) != value]
        if differ == ["rounds"] and extends and extends(int(saved["rounds"][0]), step):
            return
        there, here = ({k: text for k, (text, _) in each.items()} for each in (saved, identity))
        if "processes" in differ:
            raise CheckpointError(
                f"checkpoint {self.path}: wanted a run over as many processes as saved it, "
                f"{there['processes']}, got one over {here['processes']}"
            )
        if differ:
            told = [
                f"{name} was {there[name]} and is {here[name]}"
                if there[name] != here[name]
                else f"{name} has other values"
                for name in differ
                if name != "computation"  # which follows from other arguments, if these differ
            ] or ["computation differs, by a function such as metrics or by a version"]
            raise CheckpointError(
                f"checkpoint {self.path}: belongs to another run: {'; '.join(told)}"
            )

    def _placed(self, stored: Mapping[str, ArrayLike], like: PyTree) -> PyTree:
        """The stored arrays in this run's structure and on its devices, not on the saved ones."""

        def place(leaf: Any, found: Any) -> Any:
            found = found if spans(found) else np.asarray(found)
            if isinstance(leaf, jax.Array):
                return jax.device_put(jnp.asarray(found, leaf.dtype), leaf.sharding)
            return np.asarray(found, leaf.dtype)

        leaves, structure = jax.tree.flatten(like)
        numbered = zip(_numbered(like), leaves, strict=True)
        return jax.tree.unflatten(structure, [place(leaf, stored[name]) for name, leaf in numbered])

    @contextlib.contextmanager
    def _manager(self, *, together: bool = False) -> Iterator[Any]:
        """Orbax's manager, for all processes together or this one by itself; not interrupted."""
        ocp = require("orbax.checkpoint", extra="checkpoint")
        folder, among = self.path / "rounds", {}
        if jax.process_count() > 1 and not together:
            place = jax.process_index()
            among["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
                primary_host=place, active_processes={place}, barrier_sync_key_prefix=f"{place}"
            )
            folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.keep, create=not among, enable_async_checkpointing=False, **among
        )
        with uninterrupted(), ocp.CheckpointManager(folder, options=options) as manager:
            yield manager


def discard(path: Path) -> None:
    """Remove the rounds that were saved in a folder, and nothing else."""
    for step in (path / "rounds").glob("[0-9]*"):
        if re.fullmatch(r"[0-9]+(\.orbax-checkpoint-tmp.*)?", step.name) and not step.is_symlink():
            shutil.rmtree(step)
    with contextlib.suppress(OSError):  # of a folder that is not there, or holds something else
        (path / "rounds").rmdir()


def fingerprint(
    algorithm: Any, clients: Any, lowered: Any, *, key: Any, start: Any, rounds: int,
    processes: int, **arguments: Any,
) -> Identity:  # fmt: skip
    """What tells one run from another: everything that its numbers depend on.

    Args:
        algorithm: what runs.
        clients: on whom.
        lowered: a chunk of rounds, `jax.jit(...).lower(...)`: the bodies of all functions.
        key: the random key.
        start: the warm start.
        rounds: how many there are.
        processes: over how many processes it is spread.
        **arguments: the others, by name.
    """
    clients = clients.identity()
    computation = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
    return {
        "processes": [str(processes), ""],
        "rounds": [str(rounds), ""],
        "algorithm": _known(algorithm),
        "clients": [f"{len(clients)} clients", digest_of(clients)],
        "key": ["", digest_of(key)],
        "warm_start": ["none" if start is None else "some", digest_of(start)],
        **{name: _known(value) for name, value in arguments.items()},
        "computation": ["", computation],
    }


def _known(value: Any) -> list[str]:
    """How a value reads, its hyperparameters with it, and a digest of all that it carries along."""
    text = " ".join(eqx.tree_pformat(value, short_arrays=False).split())
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # where a function lies differs between processes
    known = " ".join([text, *_carried(value, set()), digest_of(value)])
    return [text[:200], hashlib.sha256(known.encode()).hexdigest()[:16]]


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
    digest, everywhere = hashlib.sha256(), True
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array) and not is_here(leaf):
            everywhere = False
            for shard in leaf.addressable_shards:
                digest.update(f"{shard.index}".encode() + np.asarray(shard.data).tobytes())
        elif isinstance(leaf, jax.Array | np.ndarray | float | int):
            leaf = np.asarray(leaf)
            digest.update(f"{leaf.shape} {leaf.dtype}".encode() + leaf.tobytes())
    if not everywhere:
        # Of what lies across processes, each knows its own; all of them ask.
        digest = hashlib.sha256(" ".join(exchanged(digest.hexdigest())).encode())
    return digest.hexdigest()[:16]
