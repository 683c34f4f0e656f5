"""Who takes part in a round."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

from jaxfed.core.checks import check_whole, host_array, refuse


class Participation(eqx.Module):
    """Chooses each round's clients. Absent clients keep their state; nothing recompiles."""

    @abc.abstractmethod
    def number(self, clients: int) -> int | None:
        """How many of so many clients take part in each round; None if that varies."""

    @abc.abstractmethod
    def inclusion(
        self, key: Key[Array, ""], round_index: Int[Array, ""], ids: Int[Array, " clients"]
    ) -> Float[Array, " clients"]:
        """Each client's factor on its weight: 0 if absent, else one over its chance to take part.

        With these factors a weighted sum over the participants is an unbiased estimate of the
        weighted sum over everybody (Horvitz-Thompson).
        """

    def check(self, clients: int) -> None:
        """Refuse a number of clients that this participation does not fit.

        Raises:
            ValueError: saying which number was given and what fits.
        """


class _Everybody(Participation):
    def number(self, clients):
        return clients

    def inclusion(self, key, round_index, ids):
        del key, round_index
        return jnp.ones(len(ids))


class _Uniform(Participation):
    size: int = eqx.field(static=True)

    def number(self, clients):
        del clients
        return self.size

    def inclusion(self, key, round_index, ids):
        del round_index
        # A lot for each id, so that the choice does not depend on the order of clients.
        lots = jax.vmap(lambda client: jax.random.uniform(jax.random.fold_in(key, client)))(ids)
        chosen = jax.lax.top_k(lots, self.size)[1]
        return jnp.zeros(len(ids)).at[chosen].set(len(ids) / self.size)

    def check(self, clients):
        if self.size > clients:
            raise ValueError(
                f"participation: {self.size} clients a round were asked for, there are {clients}"
            )


class _Given(Participation):
    present: Bool[Array, "rounds clients"]

    def number(self, clients):
        del clients

    def inclusion(self, key, round_index, ids):
        del key
        present = self.present[round_index % self.present.shape[0]].astype(jnp.float32)
        return present * (len(ids) / jnp.maximum(present.sum(), 1.0))

    def check(self, clients):
        if self.present.shape[1] != clients:
            raise ValueError(
                f"participation: the mask is for {self.present.shape[1]} clients, "
                f"there are {clients}"
            )


def everybody() -> Participation:
    """Every client, every round."""
    return _Everybody()


def uniform(size: int) -> Participation:
    """A fixed number of clients a round, drawn without replacement.

    Args:
        size: number of clients a round.

    Raises:
        ValueError: if `size` is not a positive whole number (larger than the number of clients
            is refused when a run starts).
    """
    check_whole("participation size", size)
    return _Uniform(int(size))


def mask(present: Bool[ArrayLike, "rounds clients"]) -> Participation:
    """Given participants: row t says who is there in round t; rows repeat after the last.

    Args:
        present: `(clients,)` for the same clients each round, or `(rounds, clients)`; the columns
            are in the order of the clients.

    Raises:
        ValueError: if it is not a boolean array of one or two axes, or a round has nobody.
    """
    wanted = "a boolean array (clients,) or (rounds, clients)"
    given = host_array("participation mask", present, wanted)
    if given.dtype != bool or given.ndim not in (1, 2):
        raise refuse("participation mask", wanted, present)
    table = np.atleast_2d(given)
    if len(table) == 0 or not table.any(axis=1).all():
        raise ValueError("participation mask: each round needs at least one client")
    return _Given(jnp.asarray(table))
