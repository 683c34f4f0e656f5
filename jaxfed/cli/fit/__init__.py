"""`jaxfed fit ALGORITHM`: fit an algorithm to your own files.

Each module describes the commands of one family of algorithms, reads their data and evaluates their
solutions. They all use the run in `_run`.
"""

from jaxfed.cli._command import Command
from jaxfed.cli.fit import autoencoder, diffusion, nmf, pca, views


def command() -> Command:
    """Describe the command."""
    about = (
        "Fit an algorithm to your own files, one for each client or for each view, and write "
        "results, pictures and a table to a folder. jaxfed fit ALGORITHM --help lists the options "
        "of an algorithm. perpca is a good first choice; compare it with local and pooled."
    )
    commands = {}
    for family in (pca, nmf, views, autoencoder, diffusion):
        commands |= family.commands()
    return Command(about, commands=commands)
