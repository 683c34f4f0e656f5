"""Plan how many clients fit into absent TPUs, with the TPU compiler.

    python -m bench.tables.accelerator_plans  # writes the docs' table, some minutes
    python -m bench.tables.accelerator_plans v5e 1000000     # one of its rows, printed

Needs `pip install -e '.[aot]'`. The run is PerPCA with ranks 3 and 2, on clients with 8 samples of
32 features, for ten rounds. Nothing runs on a device: memory is the compiler's analysis of the
program that `fit` would run.
"""

import os
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jaxfed as jf
from bench.common import replace_table
from bench.tables.accelerator_matrix import PAGE

TOPOLOGIES, CLIENTS = ("v5e", "v5e:4x4", "v5e:16x16"), (10**6, 10**7, 10**8)
BLOCK = 1024  # blocks of a multiple of 128 clients are cut without a copy
MARKS = "<!-- plans -->\n", "<!-- end of plans -->"


def row(topology: str, clients: int) -> dict[str, Any]:
    """What one plan says."""
    start_time = time.process_time()
    plan = jf.plan(
        jf.pca.PerPCA(3, 2, solver="gradient"),
        jf.shapes_of(clients, 8, 32),
        topology=topology,
        rounds=10,
        clients_per_block=BLOCK,
    )
    cells: dict[str, Any] = {"target": topology, "clients": f"{clients:,}"}
    memory = dict.fromkeys(("arguments GB", "temporaries GB", "code MB"), "")
    if plan.memory is not None:
        memory = {
            "arguments GB": round(plan.memory.arguments / 1e9, 3),
            "temporaries GB": round(plan.memory.temporaries / 1e9, 3),
            "code MB": round(plan.memory.code / 1e6, 1),
        }
    return cells | {
        "of a chip": f"{plan.clients:,}",
        "fits": "yes" if plan.fits else "no",
        "GB in all": round(plan.needed / 1e9, 3),
        **memory,
        "processor s": round(time.process_time() - start_time, 1),
        "what would": plan.advice or "",
    }


def main() -> None:
    """Print the rows, and write the page's table where none is left out."""
    wanted = sys.argv[1:]
    rows = []
    for topology in TOPOLOGIES:
        for clients in CLIENTS:
            if not wanted or wanted == [topology, str(clients)]:
                rows.append(row(topology, clients))
                print(rows[-1], flush=True)
    if not wanted:
        replace_table(PAGE, MARKS, rows)


if __name__ == "__main__":
    main()
