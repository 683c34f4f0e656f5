"""How far a run has come: what the server saves after each round, and goes on from."""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from jaxfed.core.round.problem import Costs, State
from jaxfed.core.store.arrays import Content, named, rebuilt
from jaxfed.core.store.identity import Identity, check_same
from jaxfed.core.store.series import Series
from jaxfed.deploy.federation import Member
from jaxfed.deploy.run import Run

LOG = logging.getLogger("jaxfed.deploy")
_COUNTED = ("first_bytes_up", "first_bytes_down")
_PAYLOAD, _HISTORY = "payload ", "history "  # how names of arrays begin


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

    def save(self, store: Series, description: Mapping[str, str]) -> None:
        """Write it, and remove what was saved before the last round.

        Args:
            store: the server's own.
            description: what must be the same when the run goes on.
        """
        header = {
            "identity": _identity(description),
            "run": self.run.words,
            "members": self.members,
            "dtype": self.dtype,
            "costs": {k: int(v) if k in _COUNTED else v for k, v in vars(self.costs).items()},
            "present": self.present,
        }
        payloads = {k: np.frombuffer(payload, np.uint8) for k, payload in self.payloads.items()}
        arrays = named("state", self.state)
        arrays |= {f"{_PAYLOAD}{number}": payload for number, payload in payloads.items()}
        arrays |= {_HISTORY + name: values for name, values in self.history.items()}
        number = int(self.state.round)
        store.save(number, header, arrays)
        store.remove_before(number - 1)

    @classmethod
    def load(
        cls,
        store: Series,
        description: Mapping[str, str],
        like: Callable[[Run, str, list[Member]], State],
    ) -> Self | None:
        """What was saved last and is not damaged; None where nothing is.

        Args:
            store: the server's own.
            description: of the run that is to go on.
            like: the shapes of the state, for a run, the type of its weights and its members.

        Raises:
            ValueError: if it is another run's.
        """
        found = _newest(store)
        if found is None:
            return None
        header, arrays = found
        check_same("out", store.folder, "run", header["identity"], _identity(description))
        run, members = Run.read(header["run"]), [Member(*member) for member in header["members"]]
        payloads = {int(k): x.tobytes() for k, x in _after(_PAYLOAD, arrays).items()}
        costs = {k: jnp.uint32(v) if k in _COUNTED else v for k, v in header["costs"].items()}
        return cls(
            run=run,
            dtype=header["dtype"],
            members=members,
            state=rebuilt("state", arrays, like(run, header["dtype"], members)),
            costs=Costs(**costs),
            payloads=payloads,
            history=_after(_HISTORY, arrays),
            present=header["present"],
        )


def _identity(description: Mapping[str, str]) -> Identity:
    return {name: [value, ""] for name, value in description.items()}


def _after(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays whose names begin so, by the rest of their names."""
    return {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}


def _newest(store: Series) -> Content | None:
    for number in reversed(store.numbers()):
        try:
            return store.load(number)
        except ValueError as error:
            LOG.warning("%s; the round before is taken", error)
    return None
