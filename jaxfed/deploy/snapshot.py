"""A run after a round, which the server saves after each round and resumes from."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from jaxfed.core.clients.names import Texts
from jaxfed.core.round.problem import Costs, State
from jaxfed.core.store.arrays import Content, named, rebuilt
from jaxfed.core.store.identity import Identity
from jaxfed.core.store.series import Series
from jaxfed.deploy.federation import RegisteredClient
from jaxfed.deploy.run import Run

LOG = logging.getLogger("jaxfed.deploy")
_COUNTED = ("first_bytes_up", "first_bytes_down")
_PAYLOAD, _HISTORY = "payload ", "history "  # prefixes of arrays' names


class Snapshot(NamedTuple):
    """A run after a round."""

    run: Run
    dtype: str  # of weights
    members: list[RegisteredClient]
    state: State
    costs: Costs
    payloads: dict[int, bytes]  # broadcasts that some member may need, by round
    digests: list[str]  # of all broadcasts
    history: dict[str, np.ndarray]  # of the rounds that have run
    present: list[list[int]]  # ids, by round
    features: Texts | None  # their names

    def save(self, store: Series, identity: Identity) -> None:
        """Save it, and remove what was saved before the previous round.

        Args:
            store: the server's files.
            identity: what must be the same when the run continues.
        """
        header = {
            "identity": identity,
            "run": self.run.words,
            "members": self.members,
            "dtype": self.dtype,
            "costs": {k: int(v) if k in _COUNTED else v for k, v in vars(self.costs).items()},
            "present": self.present,
            "digests": self.digests,
            "features": self.features,
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
        like: Callable[[Identity, Run, str, list[RegisteredClient]], State],
    ) -> Self | None:
        """Load the newest undamaged snapshot; None if there is none.

        Args:
            store: the server's files.
            like: returns the shapes of the state, for the identity of the run that was saved, the
                run, the type of its weights and its members; raises if it is another run.
        """
        found = _newest(store)
        if found is None:
            return None
        header, arrays = found
        run = Run.read(header["run"])
        members = [RegisteredClient(*member) for member in header["members"]]
        payloads = {int(k): x.tobytes() for k, x in _after(_PAYLOAD, arrays).items()}
        costs: dict[str, Any] = {
            k: np.asarray(v, np.uint32) if k in _COUNTED else v for k, v in header["costs"].items()
        }
        return cls(
            run=run,
            dtype=header["dtype"],
            members=members,
            state=rebuilt("state", arrays, like(header["identity"], run, header["dtype"], members)),
            costs=Costs(**costs),
            payloads=payloads,
            digests=header["digests"],
            history=_after(_HISTORY, arrays),
            present=header["present"],
            features=header["features"] and tuple(header["features"]),
        )


def _after(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays whose names have this prefix, by the rest of their names."""
    return {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}


def _newest(store: Series) -> Content | None:
    for number in reversed(store.numbers()):
        try:
            return store.load(number)
        except ValueError as error:
            LOG.warning("%s; the round before is taken", error)
    return None
