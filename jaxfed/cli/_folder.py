"""A command's folder of results."""

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

from jaxfed.core.common.files import locked, replacing
from jaxfed.core.common.processes import attempted
from jaxfed.core.store import checkpoint
from jaxfed.core.store.checkpoint import CheckpointError

T = TypeVar("T")
RESULT = ("result.npz", "result.json")
CHECKPOINT = "checkpoint"


class Folder:
    """A folder of results, which may also hold other files.

    Without `--force`, it must be new or empty, or hold a run that was interrupted, which the same
    command resumes. With `--force`, a command replaces the files whose names it writes, and removes
    the `result.npz`, `result.json` and saved rounds of an earlier run when it begins, so that they
    never stand beside what it writes. It leaves all other files, and refuses a folder whose
    `result.npz` or `result.json` no command of jaxfed wrote.
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
        return self._mark.exists() and not (self.path / RESULT[-1]).exists()

    def check(self, *, force: bool, resumable: bool = False) -> None:
        """Refuse a folder whose files may not be replaced, before anything is computed.

        Args:
            force: whether files may be replaced.
            resumable: whether an interrupted run may be resumed.

        Raises:
            ValueError: if the path is a file, or the folder is not empty (without `force`), or a
                result in it is another program's.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out: {self.path} is a file, wanted a folder")
        # Empty folders, and what a killed process has left incomplete, do not count.
        taken = any(
            not path.is_dir() and not path.name.startswith(".part-")
            for path in self.path.rglob("*")
        )
        if taken and not force and not (resumable and self.interrupted):
            raise ValueError(
                f"--out: {self.path} is not empty; name another folder, or replace earlier results "
                "with --force"
            )
        others = [name for name in RESULT if (self.path / name).exists()]
        if force and others and not self._mark.exists() and not self._is_own:
            raise ValueError(
                f"--force: {self.path / others[0]} may be another program's, since no {RESULT[-1]} "
                "of jaxfed is there; name another folder, or move the file"
            )

    def begin(self, *, resume: bool = False) -> None:
        """Create the folder, or remove the result of an earlier run from it.

        Args:
            resume: whether to keep checkpoints, so that the run can be resumed.

        Raises:
            BlockingIOError: if another process runs with checkpoints in the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.checkpoint, "--out") if self._mark.exists() else nullcontext():
            if not resume:
                self.discard_checkpoint()
                for name in RESULT:
                    (self.path / name).unlink(missing_ok=True)

    def resume_or_begin(self, kind: str, *, force: bool) -> Callable[[Callable[[], T]], T]:
        """Begin a run with checkpoints, or resume one that was interrupted here.

        Args:
            kind: what to call the run.
            force: whether checkpoints of another run may be replaced.

        Returns:
            A function that calls the run, and again if the checkpoints belonged to another run.
        """
        # All processes of a run share the first one's checkpoints, and must do the same with them.
        resumes = attempted("--out", lambda: self.interrupted)[0]
        self.begin(resume=resumes)
        self.checkpoint.mkdir(exist_ok=True)
        self._mark.touch()
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

    def discard_checkpoint(self) -> None:
        """Remove the checkpoints that were saved here, and nothing else."""
        if self._mark.exists():
            checkpoint.discard(self.checkpoint)

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Write a file completely or not at all: yields the path to write to."""
        return replacing(self.path / name)

    @property
    def _is_own(self) -> bool:
        """Whether a command of jaxfed finished here: `result.json`, its last file, has versions."""
        with suppress(ValueError, OSError):  # of a file that is not text, or no JSON
            summary = json.loads((self.path / RESULT[-1]).read_text(encoding="utf-8"))
            return "jaxfed" in summary.get("versions", ()) if isinstance(summary, dict) else False
        return False

    @property
    def _mark(self) -> Path:
        """Marks a folder of checkpoints made by jaxfed."""
        return self.checkpoint / ".jaxfed"
