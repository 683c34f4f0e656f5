"""`jaxfed fit ALGORITHM`: fit an algorithm to your own files.

Each module describes the commands of one family of algorithms, reads their data and evaluates their
solutions. They all use the run in `_run`.
"""

import textwrap

from jaxfed.cli._command import Command
from jaxfed.cli.fit import autoencoder, diffusion, nmf, pca, views

GROUPS = {
    "Shared and local components": (
        "perpca",
        "perpca-gradient",
        "hmf",
        "tcmf",
        "pertucker",
        "oneshot",
    ),
    "Non-negative shared and local components": ("inmf",),
    "Local components under a common prior": ("hierarchical", "adaptive", "empirical-bayes"),
    "One subspace for all clients": ("block-lanczos", "subspace-iteration", "local-power", "faps"),
    "Views of the same entities": ("gcca", "mvlsa", "deep-gcca", "ajive"),
    "Networks": ("autoencoder", "diffusion"),
    "For comparison, each client alone or all together": ("local", "pooled"),
}


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
    groups = [
        textwrap.fill(f"{title}: {', '.join(names)}", 79, subsequent_indent="  ")
        for title, names in GROUPS.items()
    ]
    text = "\n".join([textwrap.fill(about, 79), "", *groups])
    ordered = {name: commands.pop(name) for names in GROUPS.values() for name in names}
    return Command(text, commands={**ordered, **commands})
