"""Checkpoints: a run saved between chunks of rounds, to be resumed bit for bit.

Each saved round is a file `rounds/ROUND.npz` in the run's folder. A run that is spread over
processes has one file for each of them, `rounds/PROCESS-of-COUNT/ROUND.npz`, with the pieces of
arrays which that process holds; the round counts once all of these files are there.
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
    """A round of which no part is missing."""

    number: int
    processes: int  # that saved it, each its part


class _Processes(NamedTuple):
    """The processes that share a run, seen from one of them."""

    own: int  # the number of this one
    total: int
    exchange: Callable[[Any], list[Any]]  # gives the values of all

    @classmethod
    def of(cls, tree: PyTree) -> "_Processes":
        """Those that hold pieces of a tree's arrays."""
        if spans(tree):
            return cls(jax.process_index(), jax.process_count(), exchanged)
        return cls(0, 1, lambda value: [value])


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
        """
        check_count("every", every)
        check_count("keep", keep)
        self.path, self.every, self.keep = checked_path("path", path).resolve(), every, keep

    def save(
        self, identity: Identity, rounds: int, tree: PyTree, history: Mapping[str, Any]
    ) -> None:
        """Write the state of a run and its history so far; complete or not at all.

        Args:
            identity: what tells this run from another, see `fingerprint`.
            rounds: how many rounds have run.
            tree: arrays.
            history: arrays by name.

        Raises:
            OSError: if it cannot be written, as on a full disk. What was saved before stays.
        """
        processes, failure = _Processes.of(tree), None
        # Of later rounds this run has passed over the damage: they count for nothing.
        saved = [one.number for one in self._saved() if one.processes == processes.total]
        before = [number for number in saved if number <= rounds]
        part = _part(self.path, processes.own, processes.total)
        arrays = named("run", tree) | {HISTORY + name: values for name, values in history.items()}
        try:
            part.save(rounds, {"identity": dict(identity)}, arrays)
        except OSError as error:
            failure = error
        # Where one process has failed, all stop: the others would wait for it in the next round.
        failures = [each for each in processes.exchange(failure and reason(failure)) if each]
        if failures:
            stays = f"round {max(before)} stays" if before else "nothing was saved before"
            raise OSError(
                f"checkpoint: round {rounds} cannot be saved in {self.path} ({failures[0]}); "
                f"{stays}"
            ) from failure
        part.remove_before(sorted({*before, rounds})[-self.keep :][0])

    def restore(
        self, identity: Identity, like: PyTree, extends: Callable[[int, int], bool] | None = None
    ) -> tuple[PyTree, dict[str, np.ndarray]] | None:
        """The state of the newest checkpoint, and its history; None where nothing was saved yet.

        A damaged checkpoint is passed over with a warning, for the one before it; by all processes
        of a run, if one of them cannot read its part.

        Args:
            identity: what tells this run from another.
            like: arrays of the same shapes and types, on the devices where the state goes.
            extends: whether this run goes on from another one's round, if they differ in nothing
                but how many rounds they have: `(rounds of the other, the round)`.

        Raises:
            ValueError: if what was saved belongs to another run (the message names what differs),
                or all of it is damaged.
        """
        processes = _Processes.of(like)
        # The first process decides: others may see a shared folder as it was a moment ago.
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
                f"checkpoint: wanted a round that can be read, got damage, or what another version "
                f"of jaxfed has saved, in {self.path}"
            )
        return None

    def _saved(self) -> list[_Saved]:
        """The rounds of which no part is missing, in order."""
        found = []
        shared = [path.name.removeprefix("0-of-") for path in self.path.glob(f"{ROUNDS}/0-of-*")]
        for total in [1, *(int(total) for total in shared if total.isdecimal())]:
            parts = [_part(self.path, process, total).numbers() for process in range(total)]
            found += [_Saved(number, total) for number in set(parts[0]).intersection(*parts)]
        return sorted(found)

    def _read(self, one: _Saved, processes: _Processes) -> Content | None:
        """This process's part of a round; None, with a warning, if any finds its own damaged."""
        # Of a run of other processes, any part says whose it is.
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
    """Remove what a run, or a grid, has saved in a folder, and nothing else."""
    Series(path, KIND).discard()
    for folder in [*path.glob(f"{ROUNDS}/[0-9]*-of-[0-9]*"), path / ROUNDS]:
        Series(folder, KIND).discard()
        with contextlib.suppress(OSError):  # it is not there, or holds something else
            folder.rmdir()


def _part(path: Path, process: int, total: int) -> Series:
    """What one of several processes has saved, by round."""
    folder = path / ROUNDS
    return Series(folder if total == 1 else folder / f"{process}-of-{total}", KIND)
