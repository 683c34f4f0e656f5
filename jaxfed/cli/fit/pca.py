"""`jaxfed fit`, the PCA family: every exported algorithm, by one table."""

import argparse
import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jaxfed import pca
from jaxfed.cli.fit import _pca, _signature
from jaxfed.core.contract.algorithm import Algorithm


class Command(NamedTuple):
    """How an algorithm is run from the command line; its options are those of its class."""

    made: Callable[..., Algorithm]
    rounds: bool = True  # whether there are any
    warm: bool = False  # whether it may start from another algorithm's solution


COMMANDS = {
    "perpca": Command(pca.PerPCA, warm=True),
    "varpro": Command(pca.VarProPerPCA, warm=True),
    "local": Command(pca.Local, rounds=False),
    "pooled": Command(pca.Pooled, rounds=False),
    "oneshot": Command(pca.OneShot, rounds=False),
    "hierarchical": Command(pca.HierarchicalPCA),
    "adaptive": Command(pca.AdaptivePCA),
    "empirical-bayes": Command(pca.EmpiricalBayesPCA),
    "local-probabilistic": Command(pca.LocalProbabilisticPCA),
    "global-probabilistic": Command(pca.GlobalProbabilisticPCA),
    "block-lanczos": Command(pca.BlockLanczos),
    "subspace-iteration": Command(pca.SubspaceIteration),
    "local-power": Command(pca.LocalPower),
    "faps": Command(pca.FAPS),
}


def add_parser(subparsers) -> None:
    """Add the algorithms.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    for name, command in COMMANDS.items():
        build = partial(plan, command=command)
        parser = _pca.add_command(subparsers, name, _signature.summary(command.made), build)
        group = parser.add_argument_group("algorithm")
        # A warm start is one more choice of the first components.
        without = {"start"} if command.warm else set()
        _signature.add_settings(group, command.made, without=without)
        if command.rounds:
            _pca.add_loop(parser, starts=_starts(command))


def plan(arguments: argparse.Namespace, *, command: Command) -> _pca.Plan:
    """The algorithm that was asked for, and the one whose solution it starts from."""
    start = _pca.warm_start(arguments) if command.warm else None
    if start is None:
        return _pca.Plan(_signature.chosen(arguments, command.made))
    known = inspect.signature(command.made).parameters
    own = {"start": known["start"].default} if "start" in known else {}
    return _pca.Plan(_signature.chosen(arguments, command.made, **own), start)


def _starts(command: Command) -> tuple[str, ...]:
    """What `--start` may be, where it is not only the algorithm's own; its default first."""
    if not command.warm:
        return ()
    known = inspect.signature(command.made).parameters
    own = _signature.names_of(known["start"]) if "start" in known else ("local_first",)
    return (*own, *_pca.WARM_STARTS)
