"""The command `jaxfed reproduce`."""

import argparse
import sys
from pathlib import Path

import papers
from jaxfed.cli import _report
from jaxfed.cli._folder import Folder
from papers.every import FILES, PAGE, QUICK, folder_of, run_all
from papers.report import text, write
from papers.runs import Seeds

ALL = "all"


def add_parser(subparsers) -> None:
    """Add the `reproduce` command.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "reproduce",
        help="reproduce a table or figure of a paper",
        description="Reproduce a table or figure of a paper, beside the published numbers, or all.",
    )
    parser.add_argument(
        "targets",
        metavar="TARGET",
        nargs="*",
        help=f"e.g. perpca/table2, or {ALL}; several of one experiment make it once",
    )
    parser.add_argument("--list", action="store_true", help="list all targets and stop")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the data files")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: 3, with --quick 1)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--quick",
        action="store_true",
        help=f"of {ALL} what is done within {round(QUICK / 60)} minutes, the quickest first",
    )
    length.add_argument(
        "--full", action="store_true", help=f"of {ALL} each one, however long it takes"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="BASE",
        help="base that the seeds are derived from; 0, the default, gives 0, 1, ...",
    )
    parser.add_argument(
        "--scale",
        type=float,
        metavar="SHARE",
        help="of the published size, for targets that train networks; 1 is all of it",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to write results to, of several targets in one for each",
    )
    parser.add_argument("--force", action="store_true", help="overwrite earlier results")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for an unknown target, no target, seeds that are not positive, a negative base,
            a data folder that does not exist, a scale that is none or of a target that has none,
            all targets without a length or a folder, and results that would be overwritten without
            `--force`.
    """
    if arguments.list:
        known = papers.names()
        width = max(map(len, known))
        for name in known:
            print(f"{name:{width}}  {papers.description(name)}")
        return 0
    if not arguments.targets:
        raise ValueError(f"TARGET: wanted {ALL} or one of {', '.join(papers.names())}")
    count = arguments.seeds
    if count is None:
        count = 1 if arguments.quick else 3
    seeds = Seeds(count, arguments.seed)
    if arguments.data is not None and not arguments.data.is_dir():
        raise ValueError(f"--data: {arguments.data} is not a folder")
    if arguments.targets == [ALL]:
        return _run_all(arguments, seeds)
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
            Folder(folder).check(["table.csv", "*.png"], force=arguments.force)
    if _report.on_terminal():
        print("this may take a few minutes ...", file=sys.stderr)
    made = {}
    for name, target in targets.items():
        report = target(seeds, data=arguments.data, made=made, **options)
        print(text(report))
        if folders[name] is not None:
            for path in write(report, folders[name]):
                print(f"wrote {path}")
    return 0


def _run_all(arguments: argparse.Namespace, seeds: Seeds) -> int:
    """Run the targets one after the other, and write the page of the papers' items."""
    if not (arguments.quick or arguments.full):
        raise ValueError(f"{ALL}: wanted --quick or --full")
    if arguments.out is None:
        raise ValueError(f"{ALL}: wanted --out DIR, the folder of the results and their page")
    if arguments.scale is not None:
        raise ValueError(f"--scale: {ALL} runs each target at its own size")
    Folder(arguments.out).check(FILES, force=arguments.force)
    budget = QUICK if arguments.quick else None
    run_all(seeds, arguments.out, data=arguments.data, names=papers.names(), budget=budget)
    print(f"wrote {arguments.out / PAGE}")
    return 0
