"""How far a run has come: what the server keeps after each round, and goes on from."""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed.core.round.problem import Costs, State
from jaxfed.deploy.federation import Member
from jaxfed.deploy.run import Run
from jaxfed.deploy.store import Kept, Store

LOG = logging.getLogger("jaxfed.deploy")
_COUNTED = ("first_bytes_up", "first_bytes_down")


class Progress(NamedTuple):
    """A run after a round."""

    run: Run
    dtype: str  # of weights
    members: list[Member]
    state: State
    costs: Costs
    payloads: dict[int, bytes]  # broadcasts that somebody may miss, by round
    history: dict[str, np.ndarray]  # of the rounds that have run
    present: list[list[int]]  # ids, by round

    def save(self, store: Store, description: Mapping[str, str]) -> None:
        """Write it, and forget all but the round before.

        Args:
            store: the server's own.
            description: what must be the same when the run goes on.
        """
        names = sorted(self.history)
        history = [self.history[name] for name in names]
        payloads = [np.frombuffer(self.payloads[k], np.uint8) for k in sorted(self.payloads)]
        words = {
            "run": self.run.words, "members": self.members, "dtype": self.dtype,
            "costs": {k: int(v) for k, v in vars(self.costs).items()},
            "payloads": sorted(self.payloads), "history": names, "present": self.present,
            "description": dict(description),
        }  # fmt: skip
        number = int(self.state.round)
        store.save(number, words, (self.state, payloads, history))
        store.forget_before(number - 1)

    @classmethod
    def load(
        cls, store: Store, description: Mapping[str, str],
        like: Callable[[Run, str, list[Member]], State],
    ) -> Self | None:  # fmt: skip
        """What was saved last and is not damaged; None where nothing is.

        Args:
            store: the server's own.
            description: of the run that is to go on.
            like: the shapes of the state, for a run, the type of its weights and its members.

        Raises:
            ValueError: if it is another run's.
        """
        kept = _newest(store)
        if kept is None:
            return None
        words = kept.words
        for name, value in description.items():
            if words["description"].get(name) != value:
                raise ValueError(
                    f"out: {store.folder} holds a run with another {name}, "
                    f"{words['description'].get(name)}; wanted {value}, or another folder"
                )
        run, members = Run.read(words["run"]), [Member(*member) for member in words["members"]]
        shapes = like(run, words["dtype"], members)
        own = len(jax.tree.leaves(shapes))
        state, rest = kept._replace(leaves=kept.leaves[:own]).tree(shapes), kept.leaves[own:]
        payloads = {k: x.tobytes() for k, x in zip(words["payloads"], rest, strict=False)}
        history = dict(zip(words["history"], rest[len(payloads) :], strict=True))
        costs = {k: v if k not in _COUNTED else jnp.uint32(v) for k, v in words["costs"].items()}
        return cls(
            run, words["dtype"], members, state, Costs(**costs), payloads, history, words["present"]
        )  # fmt: skip


def _newest(store: Store) -> Kept | None:
    for number in reversed(store.numbers()):
        try:
            return store.load(number)
        except ValueError as error:
            LOG.warning("%s; the round before is taken", error)
    return None
