"""`jaxfed plan ALGORITHM`: predict the cost of a run on TPUs or GPUs you need not have."""

from functools import partial
from types import SimpleNamespace

from cyclopts import App

from jaxfed import nmf
from jaxfed.cli._common import BITS, channel_of, rounds
from jaxfed.cli._options import call, define, first_line, option, options_of
from jaxfed.cli.fit.pca import ALGORITHMS, Entry
from jaxfed.planning.plan import plan, shapes_of

SHAPES = [
    option("--clients", int, "number of clients"),
    option("--samples", int, "number of samples of each client"),
    option("--features", int, "number of features of each sample"),
]
TOPOLOGY = (
    "slice of TPUs such as v5e:4x4, one chip such as v5e, h100, h100:8, or cpu for the CPU of this "
    "machine; TPUs and h100 need pip install 'jaxfed[aot]'"
)
PLANNED = {**ALGORITHMS, "inmf": Entry(nmf.INMF)}
MACHINE = [
    option("--topology", str, TOPOLOGY, "v5e", metavar="TOPOLOGY"),
    rounds(100),
    option("--clients-per-block", int, "clients in a block; default: what fits", None),
    BITS,
]


def run(arguments: SimpleNamespace, *, entry: Entry) -> None:
    """Run the command."""
    prediction = plan(
        call(arguments, entry.algorithm),
        shapes_of(arguments.clients, arguments.samples, arguments.features),
        topology=arguments.topology,
        rounds=arguments.rounds if entry.has_rounds else 1,
        channel=channel_of(arguments),
        clients_per_block=arguments.clients_per_block,
    )
    print(prediction)


command = App("plan")
for name, entry in PLANNED.items():
    options = {
        "Clients": SHAPES,
        "Algorithm": options_of(entry.algorithm),
        "Where and how": MACHINE,
    }
    about = first_line(entry.algorithm)
    command.command(define(partial(run, entry=entry), options, about), name=name)
