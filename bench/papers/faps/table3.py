"""Errors of the three methods on images."""

from typing import Any

from papers.faps._images import IMAGES, NOTES, Images, images
from papers.faps._problems import ERROR, KKT, POWER, PRINTED, SSI
from papers.report import Found, Labels, Target, cells, draws


def run(found: Images) -> Found:
    """Errors by data set."""
    runs, notes = found
    measured: dict[Labels, Any] = {}
    for labels, run in runs.items():
        measured[(*labels, KKT)], measured[(*labels, ERROR)] = run.kkt, run.error
    return Found(cells(measured, by="median"), notes)


def _paper() -> dict[Labels, float]:
    printed = {SSI: (4.34e-6, 5.80e-8), POWER: (4.59e-6, 6.27e-8), PRINTED: (4.42e-6, 5.06e-8)}
    return {
        (name, method, quantity): value
        for name, _ in IMAGES.values()
        for method, values in printed.items()
        for quantity, value in zip((KKT, ERROR), values, strict=True)
    }


TARGET = Target(
    run,
    experiment=images,
    title="Wang, Liu & Zhang (2022), Table 3: errors on images",
    columns=("images", "method", "quantity"),
    reference={
        ("MNIST", SSI, KKT): draws(5.75e-7, 7.22e-7, 8.07e-7),
        ("MNIST", SSI, ERROR): draws(9.07e-11, 2.96e-10, 3.71e-10),
    },
    paper=_paper(),
    notes=[
        *NOTES,
        "What is printed are means over four data sets. The reference has twenty starts of "
        "subspace iteration on MNIST's test images.",
        "The printed violations are those of a looser rule than (27) at 1e-10, which leaves "
        "violations of about its root and errors of about its size.",
    ],
)
