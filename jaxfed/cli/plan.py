"""`jaxfed plan ALGORITHM`: what a run takes on TPUs or GPUs, before anything is rented."""

import argparse
from functools import partial

from jaxfed import channel
from jaxfed.cli.fit import _common, _signature
from jaxfed.cli.fit.pca import COMMANDS, Command
from jaxfed.planning.plan import plan, shapes_of

SHAPES = {
    "clients": "how many there are",
    "samples": "of each client",
    "features": "of each sample",
}


def add_parser(subparsers) -> None:
    """Add the `plan` command.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    about = (
        "Compile a run for machines that are not here and say what it takes: memory, messages, and "
        "whether it fits, or in which blocks it would. Nothing runs."
    )
    parser = subparsers.add_parser(
        "plan",
        help="what a run takes on TPUs or GPUs, before anything is rented",
        description=about,
    )
    algorithms = parser.add_subparsers(metavar="ALGORITHM", required=True)
    for name, command in COMMANDS.items():
        summary = _signature.summary(command.made)
        own = algorithms.add_parser(name, help=summary, description=summary)
        shapes = own.add_argument_group("clients")
        for option, words in SHAPES.items():
            shapes.add_argument(f"--{option}", type=int, required=True, metavar="N", help=words)
        _signature.add_settings(own.add_argument_group("algorithm"), command.made)
        where = own.add_argument_group("where and how")
        where.add_argument(
            "--topology",
            default="v5e",
            help="a slice of TPUs as v5e:4x4, one chip as v5e, h100, h100:8, or cpu for this "
            "processor; default: %(default)s",
        )
        _common.add_rounds(where, 100)
        where.add_argument(
            "--chunk-size", type=int, metavar="K", help="clients in a block; default: what fits"
        )
        where.add_argument(
            "--bits", type=int, metavar="B", help="of messages by difference(quantize(B))"
        )
        own.set_defaults(run=partial(run, command=command))


def run(arguments: argparse.Namespace, *, command: Command) -> int:
    """Run the command.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for arguments that do not fit together.
        ImportError: if the compiler is not installed.
    """
    wire = channel.lossless()
    if arguments.bits is not None:
        wire = channel.difference(channel.quantize(arguments.bits))
    found = plan(
        _signature.chosen(arguments, command.made),
        shapes_of(arguments.clients, arguments.samples, arguments.features),
        topology=arguments.topology,
        rounds=arguments.rounds if command.rounds else 1,
        channel=wire,
        chunk_size=arguments.chunk_size,
    )
    print(found)
    return 0
