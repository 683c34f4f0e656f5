"""`jaxfed fit ALGORITHM`: fit an algorithm to your own files.

Each module describes the commands of one family of algorithms, reads their data and evaluates their
solutions. They all use the run in `_run`.
"""

from cyclopts import App, Group

from jaxfed.cli.fit import autoencoder, diffusion, nmf, pca, views

GROUPS = {
    "Shared and local components": ("perpca", "hmf", "tcmf", "pertucker", "oneshot"),
    "Non-negative shared and local components": ("inmf",),
    "Local components under a common prior": (
        "hierarchicalpca",
        "empiricalbayespca",
    ),
    "One subspace for all clients": ("blocklanczos", "subspaceiteration", "localpower", "faps"),
    "Views of the same entities": ("maxvar", "mvlsa", "deepmaxvar", "ajive"),
    "Networks": ("autoencoder", "diffusion"),
    "For comparison, each client alone or all together": ("local", "pooled"),
}

command = App("fit")
commands = {}
for family in (pca, nmf, views, autoencoder, diffusion):
    commands |= family.commands()
for place, (title, names) in enumerate(GROUPS.items()):
    group = Group(title, sort_key=place)
    for number, name in enumerate(names):
        command.command(commands.pop(name), name=name, group=group, sort_key=number)
