"""`jaxfed fit varpro`: personalized PCA with the local components eliminated."""

import argparse

from jaxfed import pca
from jaxfed.cli.fit import _pca


def add_parser(subparsers) -> None:
    """Add the algorithm.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = _pca.add_command(
        subparsers,
        "varpro",
        "the objective of perpca in fewer rounds, by variable projection; no step size",
        build,
    )
    _pca.add_ranks(parser)
    _pca.add_loop(parser, starts=("local_first", *_pca.WARM_STARTS))


def build(arguments: argparse.Namespace) -> _pca.Plan:
    """The algorithm that was asked for, and the one whose solution it starts from."""
    algorithm = pca.VarProPerPCA(arguments.shared_rank, arguments.local_rank)
    return _pca.Plan(algorithm, _pca.warm_start(arguments))
