"""What makes each table of `bench/RESULTS.md` and of the documentation, and how long that takes.

python bench/tables.py     # the list, as it stands in RESULTS.md
"""

from typing import NamedTuple


class Made(NamedTuple):
    """How a table is made again.

    Attributes:
        command: what prints it.
        minutes: about how many, on two quiet cores.
        note: what is not of that command.
    """

    command: str
    minutes: str
    note: str = ""


_REPRODUCE = "jaxfed reproduce"
# By the beginning of a section's heading.
TABLES = {
    "What was not measured again": Made(
        f"{_REPRODUCE} gcca/table1", "2", "all but the last row, of the code before",
    ),
    "Before the contract was rebuilt": Made(
        "python bench/perpca_round.py; python bench/polar.py; python bench/sweep.py; "
        "python bench/many_clients.py; python bench/consensus.py rounds; "
        "python bench/consensus.py solves; python bench/gcca.py; "
        "python bench/hierarchical_sweep.py; python bench/channels.py",
        "60", "before: the same of the earlier revision",
    ),
    "Tries to break it": Made(
        "python bench/properties.py --cases 100000; python -m bench.fuzz --cases 50000; "
        "python bench/kills.py --runs 100", "120",
    ),
    "Polar factor": Made("python bench/polar.py", "3"),
    "First calls": Made("python bench/first_call.py", "10", "before, and the last starts"),
    "Results before first calls": Made(
        "python bench/verdicts.py BEFORE AFTER", "60", "before: the earlier revision's targets",
    ),
    "A round of PerPCA": Made("python bench/perpca_round.py", "2", "the earlier run"),
    "Minibatches": Made("python bench/minibatches.py", "2", "the sort's are of the code before"),
    "Sweeps and many clients": Made(
        "python bench/sweep.py; python bench/many_clients.py growth", "10"
    ),
    "Clients of very different sizes": Made("python bench/heavy_tails.py", "5"),
    "A federation larger than memory": Made(
        "python bench/larger_than_memory.py --gigabytes 40 --folder DIR", "40",
        "2 GB, and 0.5 GB of before",
    ),
    "Algorithms on separate machines": Made("python bench/machines.py --rounds 10", "20"),
    "Clients that took no part": Made("python bench/unseen_clients.py", "2"),
    "Rounds to the optimum": Made("python bench/small_tables.py optimum", "1"),
    "Shared components that stay true": Made("python bench/small_tables.py shrinkage", "2"),
    "Reproductions": Made(f"{_REPRODUCE} all --full --out DIR", "100"),
    "Federated eigensolvers": Made("python bench/small_tables.py eigensolvers", "3",
                                   "arithmetic spectra and 2 10^-2.5 are of longer runs"),
    "A round of a federated eigensolver": Made("python bench/consensus.py rounds", "5"),
    "Whole solves": Made("python bench/consensus.py solves", "5"),
    "Two updates of PerPCA": Made("python bench/small_tables.py variants", "1"),
    "Channels against a copy": Made("python bench/channels.py", "2"),
    "Memory in channels": Made("python bench/channel_table.py papers", "10"),
    "Entropy coding": Made(f"{_REPRODUCE} gcca/table1 --seeds 5", "5", "not the two last rows"),
    "Precision": Made("python bench/precision.py", "10"),
    "Generalized CCA": Made("python bench/gcca.py", "10"),
    "Figure 1(b) of hierarchical PCA as one grid": Made("python bench/hierarchical_sweep.py", "30"),
    "Figures of hierarchical PCA": Made(f"{_REPRODUCE} adept/figure2", "10"),
    "Descent on the prior variance": Made(
        "jupyter execute notebooks/how_much_to_share.ipynb", "2",
    ),
    "Memory of derivatives at a solution": Made("python bench/adjoint.py", "15", "the code before"),
    "Manifolds beside Pymanopt and geoopt": Made(
        "python bench/manifolds.py", "1", "Pymanopt, autograd, PyTorch and geoopt are wanted"
    ),
    "Fifty clients' autoencoders": Made("python bench/autoencoders.py", "5", "PyTorch is wanted"),
    "Personal autoencoders": Made(
        f"{_REPRODUCE} adept/table1; {_REPRODUCE} adept/table2 --data DIR", "60"
    ),
    "Personal diffusion models": Made(f"{_REPRODUCE} adept/table3 --data DIR", "20"),
    "Deep GCCA": Made(
        f"{_REPRODUCE} gcca/figure11; {_REPRODUCE} gcca/figure10; "
        f"{_REPRODUCE} gcca/deep_digits --data DIR", "20",
    ),
}  # fmt: skip

# Pages with measured tables.
PAGES = {
    "README.md": Made("jaxfed demo --force", "1"),
    "docs/guides/bits.md": Made("python bench/channel_table.py", "10"),
    "docs/guides/consensus.md": Made(
        f"{_REPRODUCE} faps/table4 --seeds 3; python bench/small_tables.py eigensolvers", "5"
    ),
    "docs/guides/hardware.md": Made(
        "python -m pytest tests/accelerators; python bench/accelerator.py", "40",
        "the compilers are wanted, and an H100",
    ),
    "docs/guides/privacy.md": Made("python bench/privacy_table.py", "5"),
    "docs/guides/sharing.md": Made(
        "python bench/start_table.py; python bench/shrinkage_table.py", "3"
    ),
    "docs/guides/views.md": Made(f"{_REPRODUCE} gcca/digits --seeds 2 --data DIR", "4"),
}  # fmt: skip


def listed() -> str:
    """The list as a table in Markdown."""
    lines = ["| table | command | minutes | not of it |", "| --- | --- | --- | --- |"]
    for name, made in (TABLES | {f"`{page}`": made for page, made in PAGES.items()}).items():
        lines.append(f"| {name} | `{made.command}` | {made.minutes} | {made.note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(listed())
