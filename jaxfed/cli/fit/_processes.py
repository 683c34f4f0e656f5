"""`jaxfed fit ... --processes`: one run in several processes, each with its own clients' files."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax

from jaxfed import backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.processes import attempted
from jaxfed.core.run.solution import Solution
from jaxfed.deploy import processes

PLACE = "{process}"


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run in several processes."""
    group = parser.add_argument_group("several processes, each with the files of its own clients")
    group.add_argument(
        "--processes",
        action="store_true",
        help="join the others, as Slurm, Open MPI or a TPU pod tells; in --data, "
        f"{PLACE} stands for the number of the process, whose results go to --out/process{PLACE}",
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of the first process, where nothing tells"
    )
    group.add_argument("--process-count", type=int, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="K", help="which one this is, from 0")


class Together(NamedTuple):
    """What this process does for all, or alone where it is the only one."""

    processes: int
    place: int
    out: Path  # what --out names

    @classmethod
    def join(cls, arguments: argparse.Namespace) -> Self:
        """Join the others, and find this process's folders.

        Args:
            arguments: the parsed ones; paths become those of this process.

        Raises:
            ValueError: for options that do not go together.
            RuntimeError: if the others cannot be reached.
        """
        given = arguments.coordinator, arguments.process_count, arguments.process
        if not arguments.processes:
            if any(each is not None for each in given):
                raise ValueError("--coordinator, --process-count, --process: want --processes")
            return cls(1, 0, arguments.out)
        if arguments.backend not in ("vmap", "shard"):
            raise ValueError(f"--backend: wanted shard with --processes, got {arguments.backend}")
        if arguments.report:
            raise ValueError("--report: is for one process, which has all clients' samples")
        if arguments.center == "common":
            raise ValueError("--center: wanted own or none with --processes, got common")
        arguments.backend = "shard"
        processes.initialize(*given)
        number, place, out = jax.process_count(), jax.process_index(), arguments.out
        arguments.data = Path(str(arguments.data).replace(PLACE, str(place)))
        arguments.out = out / f"process{place}"
        return cls(number, place, out)

    @property
    def first_out(self) -> Path:
        """The folder of the first process's results."""
        return self.out / "process0"

    @property
    def speaks(self) -> bool:
        """Whether this process tells of the run."""
        return self.place == 0

    def each(self, name: str, attempt: Callable[[], Any]) -> list[Any]:
        """What an attempt gives in every process; an error in one is one in all."""
        return [attempt()] if self.processes == 1 else attempted(name, attempt)

    def check_names(self, names: list[str]) -> None:
        """Refuse clients whose files several processes have read."""
        found: dict[str, int] = {}
        for place, own in enumerate(self.each("--data", lambda: names)):
            for name in own:
                if name in found:
                    raise ValueError(
                        f"--data: wanted other clients in each process, got {name} in "
                        f"{found[name]} and {place}; {PLACE} stands for the number of the process"
                    )
                found[name] = place

    def spread(self, clients: Clients, mapped: backend.Backend) -> Clients:
        """All processes' clients."""
        return (
            clients if self.processes == 1 else Clients.from_process_local(clients, backend=mapped)
        )

    def own(self, solution: Solution, clients: Clients) -> Solution:
        """A solution with the local parts of this process's clients alone."""
        if self.processes == 1:
            return solution
        own = clients.own(solution.result.local)
        return replace(solution, result=solution.result._replace(local=own))
