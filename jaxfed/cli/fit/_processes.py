"""`jaxfed fit ... --processes`: one run in several processes, each with its own clients' files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import jax

from jaxfed import backend
from jaxfed.cli._options import option
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.processes import attempted
from jaxfed.core.run.solution import Solution
from jaxfed.deploy import processes

NUMBER = "{process}"
OPTIONS = [
    option(
        "--processes",
        bool,
        "join the other processes, found through Slurm, Open MPI or a TPU pod. In --data, "
        f"{NUMBER} stands for the number of the process; its results go to --out/process{NUMBER}",
        False,
    ),
    option("--coordinator", str, "address of the first process", None, metavar="HOST:PORT"),
    option("--process-count", int, "number of processes", None),
    option("--process", int, "number of this process, from 0", None),
]


@runtime_checkable
class _Named(Protocol):
    @property
    def names(self) -> list[str]: ...  # of clients


Inputs = TypeVar("Inputs", bound=_Named)


class Together(NamedTuple):
    """This process's part in a run of all processes."""

    processes: int  # number of processes
    process: int  # number of this process
    out: Path  # the value of `--out`, which contains one folder per process

    @classmethod
    def join(cls, arguments: SimpleNamespace) -> Self:
        """Join the other processes, if there are any.

        Args:
            arguments: values of the options; folders and backend are replaced by those of this
                process.

        Raises:
            ValueError: if options exclude each other.
            RuntimeError: if the other processes cannot be reached.
        """
        options = [getattr(arguments, x, None) for x in ("coordinator", "process_count", "process")]
        if not getattr(arguments, "processes", False):
            if any(each is not None for each in options):
                raise ValueError("--coordinator, --process-count, --process: want --processes")
            return cls(1, 0, arguments.out)
        if arguments.backend not in ("vmap", "shard"):
            raise ValueError(f"--backend: wanted shard with --processes, got {arguments.backend}")
        for name in ("report", "impute", "bootstrap"):
            if getattr(arguments, name, None):
                raise ValueError(f"--{name}: is for one process, which has all clients' samples")
        for name in ("center", "scale"):
            if getattr(arguments, name) == "shared":
                raise ValueError(f"--{name}: wanted none or local with --processes, got shared")
        arguments.backend = "shard"
        processes.initialize(*options)
        together = cls(jax.process_count(), jax.process_index(), arguments.out)
        arguments.data = Path(str(arguments.data).replace(NUMBER, str(together.process)))
        arguments.out = together.out / f"process{together.process}"
        return together

    def read(self, prepare: Callable[[], Inputs]) -> Inputs:
        """Read this process's data; refuse clients that several processes have read."""
        found: list[Inputs] = []

        def attempt() -> list[str]:
            found.append(prepare())
            return found[0].names

        readers: dict[str, int] = {}
        for process, names in enumerate(attempted("--data", attempt)):
            for name in names:
                if name in readers:
                    raise ValueError(
                        f"--data: wanted other clients in each process, got {name} in "
                        f"{readers[name]} and {process}; {NUMBER} stands for the process's number"
                    )
                readers[name] = process
        return found[0]

    def spread(self, clients: Clients, mapping: backend.Backend) -> Clients:
        """Combine the clients of all processes."""
        if self.processes == 1:
            return clients
        return Clients.from_process_local(clients, backend=mapping)

    def local(self, solution: Solution, clients: Clients, own: Clients) -> Solution:
        """Return a solution with only the ids, names and local parts of this process's clients."""
        if self.processes == 1:
            return solution
        local, ids = clients.own((solution.result.local, solution.ids))
        result = solution.result._replace(local=local)
        return replace(solution, result=result, ids=ids, names=own.names)
