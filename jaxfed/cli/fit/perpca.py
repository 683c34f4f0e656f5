"""`jaxfed fit perpca`: personalized PCA by Stiefel gradient descent."""

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
        "perpca",
        "personalized PCA: shared and local components (Shi & Kontar 2024)",
        build,
    )
    _pca.add_ranks(parser)
    _pca.add_loop(parser, starts=("local_first", "random", *_pca.WARM_STARTS))
    group = parser.add_argument_group("iteration")
    group.add_argument(
        "--step-size",
        type=float,
        metavar="ETA",
        help="default: one over the largest eigenvalue of any client's second moment",
    )
    group.add_argument("--variant", choices=("tangent", "polar"), default="tangent")
    group.add_argument("--retraction", choices=("polar", "qr"), default="polar")
    group.add_argument(
        "--decay",
        type=float,
        metavar="FACTOR",
        help="multiply the step size by this whenever the objective has risen",
    )
    group.add_argument(
        "--shrinkage", action="store_true", help="take the noise out of the second moments first"
    )


def build(arguments: argparse.Namespace) -> _pca.Plan:
    """The algorithm that was asked for, and the one whose solution it starts from."""
    warm = arguments.start in _pca.WARM_STARTS
    algorithm = pca.PerPCA(
        arguments.shared_rank,
        arguments.local_rank,
        step_size=arguments.step_size,
        variant=arguments.variant,
        retraction=arguments.retraction,
        start="local_first" if warm else arguments.start,
        decay=arguments.decay,
        shrinkage=arguments.shrinkage,
    )
    return _pca.Plan(algorithm, _pca.warm_start(arguments))
