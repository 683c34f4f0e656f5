"""Checkpoints: a run saved between chunks of rounds, to be resumed bit for bit.

Each saved round is a file `rounds/ROUND.npz` in the run's folder. A run that is spread over
processes has one file for each of them, `rounds/ROUND.PROCESS-of-COUNT.npz`, with what that process
holds of the arrays; the round counts once all of these are there.
"""

import contextlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike, PyTree

from jaxfed._names import caller
from jaxfed.core.common.checks import check_count, checked_path
from jaxfed.core.common.files import reason
from jaxfed.core.common.processes import exchanged, is_here, spans
from jaxfed.core.store.arrays import Content, named, read, write
from jaxfed.core.store.identity import CheckpointError, Identity, check_same

KIND = "jaxfed.checkpoint"
HISTORY = "history "
FILE = re.compile(r"([0-9]+)(?:\.([0-9]+)-of-([0-9]+))?\.npz")


class _Part(NamedTuple):
    """What one process saved of a round."""

    rounds: int
    processes: int
    process: int

    @property
    def name(self) -> str:
        """Of its file."""
        alone = self.processes == 1
        return f"{self.rounds}{'' if alone else f'.{self.process}-of-{self.processes}'}.npz"


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
            RuntimeError: if the folder holds a later round of something else.
            OSError: if it cannot be written, as on a full disk. What was saved before stays.
        """
        part, tell = _part(rounds, tree)
        before = [whole.rounds for whole in self._whole_rounds()]
        if any(number > rounds for number in before):
            raise RuntimeError(
                f"checkpoint {self.path}: round {rounds} was not saved; the folder holds later "
                "rounds, of another run"
            )
        path, failure = _folder(self.path) / part.name, None
        arrays = _pieces(tree) | {HISTORY + name: values for name, values in history.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, KIND, {"identity": dict(identity)}, arrays)
        except OSError as error:
            failure = error
        if reasons := [each for each in tell(failure and reason(failure)) if each]:
            if failure is None:
                path.unlink()  # another process has no part of this round
            earlier = [number for number in before if number != rounds]
            stays = f"round {max(earlier)} stays" if earlier else "nothing was saved before"
            raise OSError(
                f"checkpoint {self.path}: round {rounds} cannot be saved ({reasons[0]}); {stays}"
            ) from failure
        oldest = sorted({*before, rounds})[-self.keep :][0]
        for old in _parts(self.path):
            if old.rounds < oldest and old.process == part.process:
                (path.parent / old.name).unlink(missing_ok=True)

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
        part, tell = _part(0, like)
        rounds = [_Part(*first) for first in tell(self._whole_rounds())[0]]
        for first in reversed(rounds):
            # Of a run of other processes, any part says whose it is.
            same = first.processes == part.processes
            found = self._read(part._replace(rounds=first.rounds) if same else first, tell)
            if found is None:
                continue
            saved, arrays = found.header["identity"], found.arrays
            differ = [name for name, value in identity.items() if saved.get(name) != value]
            if not (
                differ == ["rounds"]
                and extends is not None
                and extends(int(saved["rounds"][0]), first.rounds)
            ):
                check_same(f"checkpoint {self.path}:", "run", saved, identity)
            history = {k.removeprefix(HISTORY): arrays[k] for k in arrays if k.startswith(HISTORY)}
            return _placed(arrays, like), history
        if rounds:
            raise CheckpointError(
                f"checkpoint {self.path}: wanted one that can be read, got damage, or what "
                "another version of jaxfed has saved"
            )
        return None

    def _whole_rounds(self) -> list[_Part]:
        """The first parts of all rounds of which no part is missing, in order."""
        found = Counter(part._replace(process=0) for part in _parts(self.path))
        return sorted(first for first, count in found.items() if count == first.processes)

    def _read(self, part: _Part, tell: Callable[[Any], list[Any]]) -> Content | None:
        """What a part holds; None, with a warning, if a process finds its own damaged."""
        found, wrong = None, None
        try:
            found = read(_folder(self.path) / part.name, KIND)
        except (OSError, ValueError) as error:
            wrong = str(error) or type(error).__name__
        everywhere = tell([wrong, found and found.header["identity"]])
        damage = [each for each, _ in everywhere if each is not None]
        if not damage and any(saved != everywhere[0][1] for _, saved in everywhere):
            damage = ["its parts are of different runs"]
        if damage:
            warnings.warn(
                f"checkpoint {self.path}: round {part.rounds} is damaged and passed over "
                f"({damage[0]})",
                stacklevel=caller(),
            )
            return None
        return found


def discard(path: Path) -> None:
    """Remove the rounds that were saved in a folder, and nothing else."""
    for file in [*_folder(path).glob("[0-9]*.npz"), *_folder(path).glob(".part-[0-9]*.npz")]:
        if FILE.fullmatch(file.name.removeprefix(".part-")) and not file.is_symlink():
            file.unlink()
    with contextlib.suppress(OSError):  # of a folder that is not there, or holds something else
        _folder(path).rmdir()


def _folder(path: Path) -> Path:
    return path / "rounds"


def _parts(path: Path) -> Iterator[_Part]:
    """The files of rounds in a folder."""
    for file in list(_folder(path).glob("[0-9]*.npz")):
        if found := FILE.fullmatch(file.name):
            rounds, process, processes = found.groups(default="")
            yield _Part(int(rounds), int(processes or 1), int(process or 0))


def _part(rounds: int, tree: PyTree) -> tuple[_Part, Callable[[Any], list[Any]]]:
    """This process's part of a round, and how it tells the other processes of the run something."""
    if spans(tree):
        return _Part(rounds, jax.process_count(), jax.process_index()), exchanged
    return _Part(rounds, 1, 0), lambda value: [value]


def _pieces(tree: PyTree) -> dict[str, ArrayLike]:
    """What this process has of a tree's arrays, by path and, where others have more, by place."""
    found = {}
    for name, leaf in named("run", tree).items():
        if isinstance(leaf, jax.Array) and not is_here(leaf):
            found |= {f"{name} {each.index}": each.data for each in leaf.addressable_shards}
        else:
            found[name] = leaf
    return found


def _placed(pieces: Mapping[str, np.ndarray], like: PyTree) -> PyTree:
    """Inverse of `_pieces`: the arrays in this run's structure and on its devices."""

    def place(name: str, leaf: Any) -> Any:
        def at(index: Any) -> np.ndarray:
            # The lowered computation, which is in the identity, fixes how arrays are spread.
            piece = pieces[name][index] if name in pieces else pieces[f"{name} {index}"]
            return np.asarray(piece, leaf.dtype)

        if isinstance(leaf, jax.Array):
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, at)
        return at(...)

    leaves = [place(name, leaf) for name, leaf in named("run", like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
