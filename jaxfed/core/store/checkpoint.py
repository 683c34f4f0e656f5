"""Checkpoints save a run between chunks of rounds, so that it can resume bit for bit.

Each saved round is a file `rounds/ROUND.npz` in the run's folder. A run over several processes has
a file for each of them, `rounds/PROCESS-of-COUNT/ROUND.npz`, with that process's pieces of arrays;
the round is valid once all of these files exist.
"""

import contextlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from jaxfed._checks import check_count, checked_path
from jaxfed._names import caller
from jaxfed.core.common.files import reason
from jaxfed.core.common.processes import exchanged, spans
from jaxfed.core.store.arrays import Content, named, rebuilt
from jaxfed.core.store.identity import CheckpointError, Identity, check_same
from jaxfed.core.store.series import Series

KIND = "jaxfed.checkpoint"
HISTORY = "history "
ROUNDS = "rounds"


class _Saved(NamedTuple):
    """A completely saved round."""

    number: int
    processes: int  # number of processes that each saved a part


class _Processes(NamedTuple):
    """The processes that share a run, from the point of view of one of them."""

    own: int  # this process's number
    total: int
    exchange: Callable[[Any], list[Any]]  # returns the values of all processes

    @classmethod
    def of(cls, tree: PyTree) -> "_Processes":
        """The processes that hold pieces of a tree's arrays."""
        if spans(tree):
            return cls(jax.process_index(), jax.process_count(), exchanged)
        return cls(0, 1, lambda value: [value])


class Checkpoint:
    """Where and how often to save a run."""

    def __init__(self, path: str | Path, *, every: int = 50, keep: int = 2):
        """Save into a folder.

        Args:
            path: the folder, created if missing. Use one folder per run.
            every: number of rounds between checkpoints; the end is saved too.
            keep: number of newest checkpoints to keep.

        Raises:
            ValueError: if `path` is not a path, or `every` or `keep` is not a positive integer.
        """
        check_count("every", every)
        check_count("keep", keep)
        self.path, self.every, self.keep = checked_path("path", path).resolve(), every, keep

    def save(
        self, identity: Identity, rounds: int, tree: PyTree, history: Mapping[str, Any]
    ) -> None:
        """Write the state and the history of a run, completely or not at all.

        Args:
            identity: identifies the run, see `fingerprint`.
            rounds: number of rounds that have run.
            tree: the state's arrays.
            history: arrays by name.

        Raises:
            OSError: if it cannot be written, as on a full disk. Earlier checkpoints stay.
        """
        processes, failure = _Processes.of(tree), None
        # Ignore later rounds, which were damaged if this run resumed before them.
        saved = [one.number for one in self._saved() if one.processes == processes.total]
        before = [number for number in saved if number <= rounds]
        part = _part(self.path, processes.own, processes.total)
        arrays = named("run", tree) | {HISTORY + name: values for name, values in history.items()}
        try:
            part.save(rounds, {"identity": dict(identity)}, arrays)
        except OSError as error:
            failure = error
        # If one process fails, stop all: the others would wait for it in the next round.
        failures = [each for each in processes.exchange(failure and reason(failure)) if each]
        if failures:
            stays = f"round {max(before)} stays" if before else "nothing was saved before"
            raise OSError(
                f"checkpoint: round {rounds} cannot be saved in {self.path} ({failures[0]}); "
                f"{stays}"
            ) from failure
        # Only after all processes have saved: until then, the round before is the last that is
        # complete.
        part.remove_before(sorted({*before, rounds})[-self.keep :][0])

    def restore(
        self, identity: Identity, like: PyTree, extends: Callable[[int, int], bool] | None = None
    ) -> tuple[PyTree, dict[str, np.ndarray]] | None:
        """Load the newest checkpoint's state and history; None if nothing was saved yet.

        If a checkpoint is damaged, the one before it is used, with a warning. If one process cannot
        read its part, all processes skip the checkpoint.

        Args:
            identity: identifies the run.
            like: arrays of the same shapes and types, on the devices for the state.
            extends: whether this run continues a run that differs only in its number of rounds:
                called with `(rounds of the other run, the saved round)`.

        Raises:
            ValueError: if the checkpoints belong to another run (the message names what differs),
                or all of them are damaged.
        """
        processes = _Processes.of(like)
        # The first process decides, since others may see an outdated view of a shared folder.
        rounds = [_Saved(*one) for one in processes.exchange(self._saved())[0]]
        for one in reversed(rounds):
            content = self._read(one, processes)
            if content is None:
                continue
            saved, arrays = content.header["identity"], content.arrays
            differ = [name for name, value in identity.items() if saved.get(name) != value]
            if not (
                differ == ["rounds"]
                and extends is not None
                and extends(int(saved["rounds"][0]), one.number)
            ):
                check_same("checkpoint", self.path, "run", saved, identity)
            history = {k.removeprefix(HISTORY): arrays[k] for k in arrays if k.startswith(HISTORY)}
            return rebuilt("run", arrays, like), history
        if rounds:
            raise CheckpointError(
                "checkpoint: wanted a round that can be read, got only damaged ones, or ones saved "
                f"by another version of jaxfed, in {self.path}"
            )
        return None

    def _saved(self) -> list[_Saved]:
        """The completely saved rounds, in order."""
        found = []
        shared = [path.name.removeprefix("0-of-") for path in self.path.glob(f"{ROUNDS}/0-of-*")]
        for total in [1, *(int(total) for total in shared if total.isdecimal())]:
            parts = [_part(self.path, process, total).numbers() for process in range(total)]
            # A process that was killed may be a round behind; what not all have saved does not
            # count.
            found += [_Saved(number, total) for number in set(parts[0]).intersection(*parts)]
        return sorted(found)

    def _read(self, one: _Saved, processes: _Processes) -> Content | None:
        """This process's part of a round; None, with a warning, if any process's is damaged."""
        # If other processes saved the run, any part identifies it.
        process = processes.own if one.processes == processes.total else 0
        content, damage = None, None
        try:
            content = _part(self.path, process, one.processes).load(one.number)
            if content is None:
                raise ValueError(f"round {one.number} is missing in one process")
        except ValueError as error:
            damage = str(error)
        damages = [each for each in processes.exchange(damage) if each]
        if not damages:
            return content
        warnings.warn(f"checkpoint: {damages[0]}; it is passed over", stacklevel=caller())
        return None


def discard(path: Path) -> None:
    """Remove what a run or a grid has saved in a folder, and nothing else."""
    Series(path, KIND).discard()
    for folder in [*path.glob(f"{ROUNDS}/[0-9]*-of-[0-9]*"), path / ROUNDS]:
        Series(folder, KIND).discard()
        with contextlib.suppress(OSError):  # it does not exist, or holds something else
            folder.rmdir()


def _part(path: Path, process: int, total: int) -> Series:
    """The files of one process, by round."""
    folder = path / ROUNDS
    return Series(folder if total == 1 else folder / f"{process}-of-{total}", KIND)
