"""`jaxfed fit local|pooled|oneshot`: what to compare with, in one exchange."""

from jaxfed import pca
from jaxfed.cli.fit import _pca


def add_parser(subparsers) -> None:
    """Add the algorithms.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    for name, summary, algorithm in (
        ("local", "PCA of each client alone", pca.Local),
        ("pooled", "PCA of all samples together", pca.Pooled),
    ):
        parser = _pca.add_command(
            subparsers,
            name,
            summary,
            lambda arguments, algorithm=algorithm: _pca.Plan(algorithm(arguments.rank)),
        )
        parser.add_argument("--rank", type=int, required=True, metavar="R")

    parser = _pca.add_command(
        subparsers,
        "oneshot",
        "shared and local components from one exchange",
        lambda arguments: _pca.Plan(
            pca.OneShot(arguments.shared_rank, arguments.local_rank, method=arguments.method)
        ),
    )
    _pca.add_ranks(parser)
    parser.add_argument(
        "--method", choices=("projector", "spectrum", "local_first"), default="projector"
    )
