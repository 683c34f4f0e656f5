"""Call all public names with malformed arguments and print a table of the outcomes.

python -m bench.robustness.fuzz --cases 50000
"""

import argparse
import faulthandler
import os
import tempfile
import time
import warnings

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

# Compiled programs hold memory maps, of which a process has so many.
PROGRAMS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="callables whose name holds this")
    parser.add_argument("--faults", type=int, default=40, help="how many are shown")
    options = parser.parse_args()

    from . import run

    warnings.simplefilter("ignore")
    began, outcomes = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for case in run.cases(options.cases, options.seed):
            if options.only in case.target.name or case.taken is None:
                # What never returns ends the run, and one sees where.
                faulthandler.dump_traceback_later(4 * run.CLOCK, exit=True)
                outcomes.append(run.outcome(case))
                if len(outcomes) % PROGRAMS == 0:
                    jax.clear_caches()
    faulthandler.cancel_dump_traceback_later()
    print(run.table(outcomes))
    faults = [each for each in outcomes if each.kind not in run.GOOD]
    seen = set()
    for each in faults:
        where = (each.case.target.name, each.case.parameter, each.kind, each.message[:40])
        if where not in seen and len(seen) < options.faults:
            seen.add(where)
            print(f"{each.kind}: {each.case}: {each.message[:160]!r}")
    print(f"{len(faults)} faults in {len(outcomes)} cases, {time.perf_counter() - began:.0f} s")
    raise SystemExit(bool(faults))


main()
