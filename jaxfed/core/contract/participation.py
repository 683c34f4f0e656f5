"""Which clients take part in a round: all, a random sample, or those of a mask."""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

from jaxfed._checks import check_whole, host_array, refuse
from jaxfed.core.common.printing import as_call


class Participation(eqx.Module):
    """Chooses each round's clients. Absent clients keep their state; nothing recompiles."""

    factory: ClassVar[str] = ""
    """Name of the function that makes it; empty for the class itself."""

    def __repr__(self) -> str:
        return as_call(self)

    @abc.abstractmethod
    def number(self, clients: int) -> int | None:
        """How many of `clients` take part in each round; None if that varies."""

    @abc.abstractmethod
    def inclusion(
        self,
        key: Key[Array, ""],
        round_index: Int[Array, ""],
        ids: Int[Array, " clients"],
        weights: Float[Array, " clients"],
    ) -> Float[Array, " clients"]:
        """Each client's factor on its weight: 0 if absent, positive if it takes part.

        For random participants the factor is one over the probability of taking part, so that a
        weighted sum over them is an unbiased estimate of the sum over all clients
        (Horvitz-Thompson). For given participants the factors make the weights sum to one.

        Args:
            key: the round's random key.
            round_index: counted from 0.
            ids: the clients' ids.
            weights: the clients' weights, which sum to one.
        """

    @abc.abstractmethod
    def turns(self, rounds: int, clients: int) -> Int[np.ndarray, " clients"]:
        """The largest number of `rounds` in which each client can take part."""

    def check(self, clients: int) -> None:
        """Refuse a number of clients that does not fit this participation.

        Raises:
            ValueError: states the number given and what fits.
        """


class _Everybody(Participation):
    factory = "everybody"

    def number(self, clients):
        return clients

    def inclusion(self, key, round_index, ids, weights):
        del key, round_index, weights
        return jnp.ones(len(ids))

    def turns(self, rounds, clients):
        return np.full(clients, rounds)


class _Uniform(Participation):
    factory = "uniform"
    size: int = eqx.field(static=True)

    def number(self, clients):
        del clients
        return self.size

    def inclusion(self, key, round_index, ids, weights):
        del round_index, weights
        # Draw by id, so that the choice does not depend on the order of clients.
        lots = jax.vmap(lambda client: jax.random.uniform(jax.random.fold_in(key, client)))(ids)
        chosen = jax.lax.top_k(lots, self.size)[1]
        return jnp.zeros(len(ids)).at[chosen].set(len(ids) / self.size)

    def turns(self, rounds, clients):
        # Chance may choose a client every time.
        return np.full(clients, rounds)

    def check(self, clients):
        if self.size > clients:
            raise ValueError(
                f"participation: {self.size} clients a round were asked for, there are {clients}"
            )


class _Given(Participation):
    factory = "mask"
    present: Bool[Array, "rounds clients"]

    def number(self, clients):
        del clients

    def inclusion(self, key, round_index, ids, weights):
        del key, ids
        present = self.present[round_index % self.present.shape[0]].astype(weights.dtype)
        total = present @ weights
        # Without any weight there is no mean, and `server.inclusion_of` calls the round off.
        return present / jnp.where(total > 0, total, 1)

    def turns(self, rounds, clients):
        del clients
        return np.resize(np.asarray(self.present), (rounds, self.present.shape[1])).sum(0)

    def check(self, clients):
        if self.present.shape[1] != clients:
            raise ValueError(
                f"participation: the mask is for {self.present.shape[1]} clients, "
                f"there are {clients}"
            )


def everybody() -> Participation:
    """All clients take part in every round."""
    return _Everybody()


def uniform(size: int) -> Participation:
    """A fixed number of clients takes part in each round, drawn without replacement.

    A participant's weight is multiplied by the number of clients over `size`, so that means over
    participants are unbiased estimates of means over all clients. A round whose participants all
    have weight 0 does not take place: nothing changes, and its history entries are NaN.

    Args:
        size: number of clients per round.

    Raises:
        ValueError: if `size` is not a positive integer. A `size` above the number of clients is
            refused when a run starts.
    """
    check_whole("size", size)
    return _Uniform(int(size))


def mask(present: Bool[ArrayLike, "*rounds clients"]) -> Participation:
    """The given clients take part: row t for round t; rows repeat after the last.

    Means are over the participants, whose weights are normalised to sum to one in each round. They
    estimate means over all clients only if the rows were drawn at random. A round whose
    participants all have weight 0 does not take place, as in `uniform`.

    Args:
        present: `(clients,)` for the same clients each round, or `(rounds, clients)`; columns are
            in the order of the clients.

    Raises:
        ValueError: if it is not a boolean array with one or two axes, or a round has no client.
    """
    wanted = "a boolean array (clients,) or (rounds, clients)"
    given = host_array("present", present, wanted)
    if given.dtype != bool or given.ndim not in (1, 2):
        raise refuse("present", wanted, present)
    table = np.atleast_2d(given)
    if len(table) == 0 or not table.any(axis=1).all():
        raise ValueError("present: each round needs at least one client")
    return _Given(jnp.asarray(table))
