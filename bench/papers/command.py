"""The command `jaxfed reproduce`."""

import sys
from pathlib import Path
from types import SimpleNamespace

import papers
from jaxfed.cli import _report
from jaxfed.cli._folder import Folder
from jaxfed.cli._options import define, option
from papers.every import PAGE, QUICK, folder_of, run_all
from papers.report import text, write
from papers.runs import Seeds

ALL = "all"


def run(arguments: SimpleNamespace) -> None:
    """Run the command.

    Raises:
        ValueError: for an unknown target, no target, seeds that are not positive, a negative base,
            a data folder that does not exist, a scale that is none or of a target that has none,
            all targets without a length or a folder, and results that would be overwritten without
            `--force`.
    """
    if arguments.quick and arguments.full:
        raise ValueError("--full: wanted --quick or --full, got both")
    if arguments.list:
        known = papers.names()
        width = max(map(len, known))
        for name in known:
            print(f"{name:{width}}  {papers.description(name)}")
        return
    if not arguments.targets:
        raise ValueError(f"TARGET: wanted {ALL} or one of {', '.join(papers.names())}")
    count = arguments.seeds
    if count is None:
        count = 1 if arguments.quick else 3
    seeds = Seeds(count, arguments.seed)
    if arguments.data is not None and not arguments.data.is_dir():
        raise ValueError(f"--data: {arguments.data} is not a folder")
    if arguments.targets == (ALL,):
        _run_all(arguments, seeds)
        return
    for name in ("quick", "full"):
        if getattr(arguments, name):
            raise ValueError(
                f"--{name}: wanted with {ALL} alone, got {', '.join(arguments.targets)}"
            )
    targets = {name: papers.find(name) for name in arguments.targets}
    options = {}
    if arguments.scale is not None:
        for name, target in targets.items():
            if not target.takes("scale"):
                raise ValueError(f"--scale: {name} always runs at its full size")
        if not 0 < arguments.scale <= 1:
            raise ValueError(f"--scale: wanted a share above 0 and up to 1, got {arguments.scale}")
        options["scale"] = arguments.scale
    out = arguments.out
    folders = dict.fromkeys(targets, out)
    if out is not None:
        if len(targets) > 1:
            folders = {name: folder_of(name, out) for name in targets}
        for folder in folders.values():
            Folder(folder).check(force=arguments.force)
    if _report.on_terminal():
        print("this may take a few minutes ...", file=sys.stderr)
    made = {}
    for name, target in targets.items():
        report = target(seeds, data=arguments.data, made=made, **options)
        print(text(report))
        if folders[name] is not None:
            for path in write(report, folders[name]):
                print(f"wrote {path}")


def _run_all(arguments: SimpleNamespace, seeds: Seeds) -> None:
    """Run the targets one after the other, and write the page of the papers' items."""
    if not (arguments.quick or arguments.full):
        raise ValueError(f"{ALL}: wanted --quick or --full")
    if arguments.out is None:
        raise ValueError(f"{ALL}: wanted --out DIR, the folder of the results and their page")
    if arguments.scale is not None:
        raise ValueError(f"--scale: {ALL} runs each target at its own size")
    Folder(arguments.out).check(force=arguments.force)
    budget = QUICK if arguments.quick else None
    run_all(seeds, arguments.out, data=arguments.data, names=papers.names(), budget=budget)
    print(f"wrote {arguments.out / PAGE}")


OPTIONS = [
    option(
        "targets",
        tuple[str, ...],
        f"e.g. perpca/table2, or {ALL}; several of one experiment make it once",
        (),
        metavar="TARGET",
    ),
    option("--list", bool, "list all targets and stop", False),
    option("--data", Path, "folder of the data files", None),
    option("--seeds", int, "number of seeds; default: 3, with --quick 1", None),
    option(
        "--quick",
        bool,
        f"of {ALL} what is done within {round(QUICK / 60)} minutes, the quickest first",
        False,
    ),
    option("--full", bool, f"of {ALL} each one, however long it takes", False),
    option("--seed", int, "base that the seeds are derived from; 0 gives 0, 1, ...", 0),
    option(
        "--scale",
        float,
        "share of the published size, for targets that train networks; 1 is all of it",
        None,
    ),
    option("--out", Path, "folder to write results to, of several targets in one for each", None),
    option("--force", bool, "replace earlier results", False),
]
command = define(run, {"": OPTIONS})
