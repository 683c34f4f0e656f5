"""A command's folder of results, in which files of others are left alone."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from jaxfed.core.common.files import locked, replacing
from jaxfed.core.common.processes import attempted
from jaxfed.core.store import checkpoint
from jaxfed.core.store.checkpoint import CheckpointError

T = TypeVar("T")
RESULT = ("result.npz", "result.json")
CHECKPOINT = "checkpoint"
MANIFEST = "manifest.json"
_ABOUT = "what jaxfed wrote into this folder; all else is left as it is"  # marks manifests
_MARK = f"{CHECKPOINT}/.jaxfed"  # marks a checkpoint folder made by jaxfed


class Folder:
    """A folder of results, which may also hold other files.

    Its `manifest.json` lists the size and the SHA-256 hash of each file that jaxfed wrote. Any
    other file, and a listed file that has changed since, is foreign: it is neither overwritten nor
    removed, with or without `--force`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)

    @property
    def checkpoint(self) -> Path:
        """The folder of checkpoints in this folder."""
        return self.path / CHECKPOINT

    @property
    def interrupted(self) -> bool:
        """Whether a run with checkpoints began here and did not end."""
        started = _MARK in self._listed() and not self._is_foreign(CHECKPOINT)
        return started and not (self.path / RESULT[-1]).exists()

    def check(self, names: Iterable[str], *, force: bool, resumable: bool = False) -> None:
        """Refuse a folder whose files may not be overwritten, before anything is computed.

        Args:
            names: names of the files to write, or patterns.
            force: whether earlier results may be overwritten.
            resumable: whether an interrupted run may be resumed.

        Raises:
            ValueError: if the path is a file, the folder is not empty (without `force`), or foreign
                files have the names of results.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out: {self.path} is a file, wanted a folder")
        if not self.path.exists():
            return
        taken = _visible(self.path) - ({CHECKPOINT} if not _visible(self.checkpoint) else set())
        if taken and not force and not (resumable and self.interrupted):
            raise ValueError(
                f"--out: {self.path} is not empty; name another folder, or overwrite earlier "
                "results with --force"
            )
        self._refuse_foreign((MANIFEST, *RESULT, *names))

    def begin(self, *, resume: bool = False) -> None:
        """Create the folder, or remove the results of an earlier run from it.

        Args:
            resume: whether to keep checkpoints, so that the run can be resumed.

        Raises:
            BlockingIOError: if another process runs with checkpoints in the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._refuse_foreign([MANIFEST])
        with locked(self.checkpoint, "--out") if self._is_marked else nullcontext():
            if not resume:
                self.discard_checkpoint()
            listed = self._listed()
            for name in listed.keys() - {_MARK}:
                if not self._is_foreign(name):
                    (self.path / name).unlink(missing_ok=True)
            if listed:
                self._list({name: entry for name, entry in listed.items() if name == _MARK})

    def resume_or_begin(self, kind: str, *, force: bool) -> Callable[[Callable[[], T]], T]:
        """Begin a run with checkpoints, or resume one that was interrupted here.

        Args:
            kind: what to call the run.
            force: whether checkpoints of another run may be overwritten.

        Returns:
            A function that calls the run, and again if the checkpoints belonged to another run.
        """
        # All processes of a run share the first one's checkpoints, and must do the same with them.
        resumes = attempted("--out", lambda: self.interrupted)[0]
        self.begin(resume=resumes)
        self.begin_checkpoint()
        if resumes:
            print(f"Taking up the {kind} that was interrupted in {self.path}.")

        def attempt(run: Callable[[], T]) -> T:
            try:
                return run()
            except CheckpointError:
                if not (resumes and force):
                    raise
                attempted("--out", self.discard_checkpoint)
                return run()

        return attempt

    def begin_checkpoint(self) -> None:
        """Create the folder of checkpoints, which marks that a run has begun."""
        self._refuse_foreign([CHECKPOINT])
        self.checkpoint.mkdir(exist_ok=True)
        with self.writing(_MARK) as part:
            part.write_text("made by jaxfed\n", encoding="utf-8")

    def discard_checkpoint(self) -> None:
        """Remove the checkpoints that were saved here."""
        if self._is_marked:
            checkpoint.discard(self.checkpoint)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Write a file completely or not at all, and list it in the manifest.

        Args:
            name: name of the file.

        Yields:
            The path to write to.

        Raises:
            ValueError: if a foreign file is in its place.
        """
        self._refuse_foreign([name])
        with replacing(self.path / name) as part:
            yield part
            # Before the file is in place, so that it never looks foreign.
            self._list({**self._listed(), name: _entry(part)})

    @property
    def _is_marked(self) -> bool:
        """Whether jaxfed made the folder of checkpoints."""
        return os.path.lexists(self.path / _MARK) and not self._is_foreign(_MARK)

    def _refuse_foreign(self, patterns: Iterable[str]) -> None:
        for pattern in patterns:
            present = [name for name in os.listdir(self.path) if fnmatch(name, pattern)]
            for name in present if "/" not in pattern else [pattern]:
                if self._is_foreign(name):
                    raise ValueError(
                        f"--out: {self.path / name} was not written by jaxfed, or has changed "
                        "since; move it, or name another folder"
                    )

    def _is_foreign(self, name: str) -> bool:
        """Whether something exists at this path that jaxfed did not write."""
        path = self.path / name
        if not os.path.lexists(path):
            return False
        if name == MANIFEST:
            return _read(path) is None
        if name == CHECKPOINT:
            return not path.is_dir() or (bool(_visible(path)) and not self._is_marked)
        entry = self._listed().get(name)
        return entry is None or path.is_symlink() or not path.is_file() or entry != _entry(path)

    def _listed(self) -> dict[str, Any]:
        return _read(self.path / MANIFEST) or {}

    def _list(self, files: Mapping[str, Any]) -> None:
        with replacing(self.path / MANIFEST) as part:
            text = json.dumps({"about": _ABOUT, "files": files}, indent=2)
            part.write_text(text + "\n", encoding="utf-8")


def _visible(folder: Path) -> set[str]:
    """List a folder without incomplete files that a killed process has left."""
    names = os.listdir(folder) if folder.is_dir() else []
    return {name for name in names if not name.startswith(".part-")}


def _read(path: Path) -> dict[str, Any] | None:
    """Read the files that a manifest lists; None if it is not a manifest."""
    try:
        manifest = json.loads(path.read_bytes()) if path.is_file() else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict) or manifest.get("about") != _ABOUT:
        return None
    files = manifest.get("files")
    if not isinstance(files, dict) or any(Path(n).name != n for n in files.keys() - {_MARK}):
        return None
    return files


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
