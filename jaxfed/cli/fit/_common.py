"""What fitting any algorithm has in common: where from, where to, and runs taken up again."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from jaxfed import backend, participation
from jaxfed.cli import _report
from jaxfed.cli._folder import CHECKPOINT, RESULT, Folder
from jaxfed.cli.fit._processes import Together
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.files import locked
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution
from jaxfed.core.store.checkpoint import Checkpoint, CheckpointError
from jaxfed.data._files import MAX_BYTES

REPORT = "report.html"
# Pictures that a report has not by itself.
CAPTIONS = {
    "agreement.png": "How much of each component of the representation each view gives, 0 to 1",
    "reconstructions.png": "Images, and what the models make of them",
    "samples.png": "Samples that were drawn from the models",
}


def add_files(parser: argparse.ArgumentParser, data: str) -> None:
    """Add the options of where data come from (`data` says what they are) and results go."""
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help=data)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="results go here")
    parser.add_argument("--force", action="store_true", help="overwrite earlier results")
    parser.add_argument(
        "--report",
        action="store_true",
        help=f"also write {REPORT}: one page with what there is to see, for any browser",
    )
    add_max_bytes(parser)
    parser.add_argument(
        "--seed", type=int, default=0, help="of all that is drawn at random; default: %(default)s"
    )


def add_max_bytes(parser: Any) -> None:
    """Add how much a file may unpack to."""
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=MAX_BYTES,
        metavar="N",
        help="the most memory that a compressed file or a picture may take; default: %(default)s",
    )


def add_samples(parser: Any, out: str) -> None:
    """Add the samples that an earlier result is asked about, and where what is found goes.

    Args:
        parser: the command's.
        out: what goes there.
    """
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="samples, as for jaxfed fit"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"{out} go here")
    parser.add_argument("--force", action="store_true", help="overwrite earlier results")
    parser.add_argument(
        "--client-column", metavar="NAME", help="of one table: the column that names the client"
    )
    add_max_bytes(parser)


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add the options of how clients are mapped."""
    parser.add_argument(
        "--backend",
        choices=("auto", "vmap", "chunked", "pmap", "shard"),
        default="vmap",
        help="all clients at once, in blocks, or spread over devices; auto: blocks where the "
        "processor's cache is too small for all of them; default: %(default)s",
    )
    parser.add_argument(
        "--chunk-size", type=int, metavar="K", help="clients in a block; not for vmap and auto"
    )


def add_rounds(parser: Any, rounds: int) -> None:
    """Add how many rounds there are; `rounds` by default."""
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help="how many; default: %(default)s"
    )


def add_tol(parser: Any) -> None:
    """Add when a run has converged."""
    parser.add_argument(
        "--tol",
        type=float,
        metavar="X",
        help="stop once the objective changes by at most this, relatively; default: all rounds run",
    )


def add_participation(parser: Any) -> None:
    """Add how many clients take part in a round."""
    parser.add_argument(
        "--participation", type=int, metavar="K", help="clients a round; default: all"
    )


def add_checkpoints(parser: Any) -> None:
    """Add how often to save."""
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        default=50,
        metavar="ROUNDS",
        help="save the state so often, for the same command to take up an interrupted run; "
        "default: %(default)s",
    )


def chosen_backend(arguments: argparse.Namespace) -> backend.Backend:
    """The backend that was asked for.

    Raises:
        ValueError: for a size of blocks that does not go with it.
    """
    size = arguments.chunk_size
    if arguments.backend in ("auto", "vmap"):
        if size is not None:
            raise ValueError(
                f"--chunk-size: is for --backend chunked, pmap and shard, got {arguments.backend}"
            )
        return getattr(backend, arguments.backend)()
    if arguments.backend == "chunked":
        return backend.chunked(256 if size is None else size)
    inner = None if size is None else backend.chunked(size)
    return getattr(backend, arguments.backend)(inner=inner)


def chosen_participation(arguments: argparse.Namespace) -> participation.Participation | None:
    """Who was asked for in each round; None for everybody."""
    count = arguments.participation
    return None if count is None else participation.uniform(count)


def held_out_share(arguments: argparse.Namespace) -> float:
    """The share of the data that is held out.

    Raises:
        ValueError: if it is none.
    """
    share = arguments.held_out
    if not 0 <= share < 1:
        raise ValueError(f"--held-out: wanted a share from 0 to below 1, got {share}")
    return share


def checked_folder(arguments: argparse.Namespace, pictures: Iterable[str]) -> Folder:
    """The folder for the results, refused before anything is computed if it is in use."""
    lasting = arguments.checkpoint_every is not None
    folder = Folder(arguments.out)
    names = [*pictures, REPORT, *([CHECKPOINT] if lasting else [])]
    folder.check(names, force=arguments.force, resumable=lasting)
    return folder


class Run(NamedTuple):
    """A run whose results go to a folder, taken up again where one was interrupted there."""

    folder: Folder
    checkpoint: Checkpoint | None
    resumes: bool
    discards: bool  # whether another run's checkpoint may be overwritten
    together: Together

    @classmethod
    def begin(
        cls, folder: Folder, arguments: argparse.Namespace, together: Together | None = None
    ) -> Self:
        """Make the folder, without the results of an earlier run.

        The first process has the checkpoint of all in its folder.
        """
        together = Together(1, 0, arguments.out) if together is None else together
        if arguments.checkpoint_every is None:
            folder.begin()
            return cls(folder, None, False, arguments.force, together)
        first = folder if together.processes == 1 else Folder(together.first_out)
        checkpoint = Checkpoint(first.checkpoint, every=arguments.checkpoint_every)
        resumes = together.each("--out", lambda: folder.interrupted)[0]
        folder.begin(resume=resumes)
        folder.begin_checkpoint()
        if resumes:
            print(f"Taking up the run that was interrupted in {folder.path}.")
        return cls(folder, checkpoint, resumes, arguments.force, together)

    def fit(self, algorithm: Algorithm, clients: Clients, *, rounds: int, **options) -> Solution:
        """`jaxfed.fit` with this run's checkpoint and, where somebody watches, a progress bar."""

        def attempt() -> Solution:
            return fit(
                algorithm, clients, rounds=rounds, checkpoint=self.checkpoint,
                progress=_report.on_terminal() and rounds > 1, **options,
            )  # fmt: skip

        if self.checkpoint is None:
            return attempt()
        with ExitStack() as stack:

            def lock() -> None:
                if self.together.speaks:
                    assert self.checkpoint is not None
                    stack.enter_context(locked(self.checkpoint.path, "--out"))

            self.together.each("--out", lock)
            try:
                return attempt()
            except CheckpointError:
                if not (self.resumes and self.discards):
                    raise
                # Another run's checkpoint, and leave to overwrite it.
                self.together.each("--out", self.folder.discard_checkpoint)
                return attempt()

    def write(
        self,
        arguments: argparse.Namespace,
        arrays: Mapping[str, Any],
        summary: Mapping[str, Any],
        figures: Mapping[str, Any],
        page: Callable[..., str],
    ) -> None:
        """Write the results, the settings with them, and say so.

        Args:
            arguments: the parsed arguments.
            arrays: what goes into `result.npz`.
            summary: what goes into `result.json`: `seconds`, `table` and more.
            figures: pictures by the names of their files.
            page: `jaxfed.report.html` of this run, where `--report` asks for it.
        """
        for name, figure in figures.items():
            with self.folder.writing(name) as part:
                figure.savefig(part, dpi=150)
        written = [*RESULT, *figures]
        if arguments.report:
            text = page(
                title=f"jaxfed fit {arguments.algorithm}, {arguments.data.absolute().name}",
                seconds=summary["seconds"],
                table=summary["table"],
                pictures={CAPTIONS[name]: x for name, x in figures.items() if name in CAPTIONS},
            )
            with self.folder.writing(REPORT) as part:
                part.write_text(text, encoding="utf-8")
            written.append(REPORT)
        settings = {name: value for name, value in vars(arguments).items() if name != "run"}
        _report.write(self.folder, arrays, {"settings": settings, **summary})
        print(f"Written to {self.folder.path}: {', '.join(written)}.")


def show(rows: Sequence[Mapping[str, Any]], solution: Solution) -> None:
    """Print a run's table, and below it what to know before relying on the result."""
    print()
    _report.show(rows)
    for remark in solution.remarks():
        print(f"\n{remark}")
    print()


def traffic(*solutions: Solution | None) -> dict[str, int]:
    """Lines of the table: what a client has sent and received in all runs that there were."""
    up, down = (
        sum(float(s.history[way][-1]) for s in solutions if s is not None)
        for way in ("bits_up", "bits_down")
    )
    return {"bits sent by a client": round(up), "bits received by a client": round(down)}
