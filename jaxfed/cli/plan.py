"""`jaxfed plan ALGORITHM`: predict the cost of a run on TPUs or GPUs you need not have."""

import argparse
from functools import partial

from jaxfed import nmf
from jaxfed.cli._command import Command
from jaxfed.cli._common import BITS, channel_of, rounds
from jaxfed.cli._options import call, first_line, option, options_of
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
    option("--chunk-size", int, "clients in a block; default: what fits", None, metavar="K"),
    BITS,
]


def command() -> Command:
    """Describe the command."""
    about = (
        "Compile a run for machines you need not have, and print its memory and messages, and "
        "whether it fits, or in blocks of how many clients it would. Nothing is run."
    )
    return Command(about, commands={name: _command(entry) for name, entry in PLANNED.items()})


def _command(entry: Entry) -> Command:
    options = {
        "clients": SHAPES,
        "algorithm": options_of(entry.algorithm),
        "where and how": MACHINE,
    }
    return Command(first_line(entry.algorithm), partial(run, entry=entry), options)


def run(arguments: argparse.Namespace, *, entry: Entry) -> None:
    """Run the command."""
    prediction = plan(
        call(arguments, entry.algorithm),
        shapes_of(arguments.clients, arguments.samples, arguments.features),
        topology=arguments.topology,
        rounds=arguments.rounds if entry.has_rounds else 1,
        channel=channel_of(arguments),
        chunk_size=arguments.chunk_size,
    )
    print(prediction)
