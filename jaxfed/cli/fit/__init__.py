"""`jaxfed fit ALGORITHM`: one algorithm on your own files.

The PCA family is a table, in `pca`; each other algorithm is a module here with an
`add_parser(subparsers)`, named in `ALGORITHMS`. Their settings are those of the classes. `_common`
holds what all have in common, `_pca`, `_views` and `_images` what those of one kind of data have.
"""

from jaxfed.cli.fit import autoencoder, deep_gcca, diffusion, gcca, pca
from jaxfed.gcca import MVLSA, DeepMaxVar, MaxVar
from jaxfed.generative import AdaptiveAutoencoder, AdaptiveDiffusion, FedAvg

ALGORITHMS = (pca, gcca, autoencoder, diffusion, deep_gcca)
# Which algorithms each command runs, of all that are exported.
COMMANDS = {
    **{name: (command.made,) for name, command in pca.COMMANDS.items()},
    "gcca": (MaxVar, MVLSA),
    "mvlsa": (MVLSA,),
    "deep-gcca": (DeepMaxVar,),
    "autoencoder": (AdaptiveAutoencoder, FedAvg),
    "diffusion": (AdaptiveDiffusion, FedAvg),
}


def add_parser(subparsers) -> None:
    """Add the `fit` command.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "fit",
        help="fit an algorithm to your own files",
        description="Fit an algorithm to your own files: a file for each client, or for each view. "
        "Results, pictures and a table go to a folder. jaxfed fit ALGORITHM --help lists the "
        "settings of one; perpca is a good first choice, local and pooled are what to compare "
        "it with.",
    )
    algorithms = parser.add_subparsers(metavar="ALGORITHM", required=True)
    for module in ALGORITHMS:
        module.add_parser(algorithms)
