"""What a run returns, and what it raises."""

import html
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Int, Key, PyTree, UInt32

from jaxfed._checks import check_instance, refuse
from jaxfed._versions import versions
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.imputation import Imputation
from jaxfed.core.clients.standardization import Standardization
from jaxfed.core.common.printing import columns, is_known
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.contract.participation import Participation
from jaxfed.core.contract.remarks import HasRemarks, not_converged
from jaxfed.core.round.problem import Failure, State
from jaxfed.core.store import saved
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.release import Release
from jaxfed.core.wire.wire import Wire


class Status(eqx.Enumeration):
    """How a run ended."""

    round_limit = "All rounds ran."
    converged = "The stopping measure met the tolerance."
    diverged = "An objective or a message is no longer finite."
    stopped = "A callback stopped the run."


class Solution(eqx.Module):
    """What a run returns.

    Attributes:
        server: the algorithm's final server state.
        local: the clients' final states, leading axis = clients.
        history: `(rounds,)` arrays: the weighted means of the clients' diagnostics
            (`"objective"` is evaluated at the iterate that enters the round), the server's
            diagnostics, the requested metrics, `"participants"`, and `"bits_up"` and
            `"bits_down"`, cumulative per client, the exchange before the rounds included. Entries
            that were not computed (metrics between their rounds, rounds after the tolerance was
            met or whose participants have no weight) are NaN.
        rounds: number of rounds that ran.
        status: how the run ended, one of `jaxfed.Status`.
        failure: where it diverged: the round, counted from 1 (0: it did not), and a truth value
            for each client.
        result: the learned models, `result.shared` and `result.local`.
        state: what the next round would start from.
        releases: what left the clients, how often and with which participation, that of a solution
            which was the warm start included; `jaxfed.privacy.spent` is the account of it.
        algorithm: what ran.
        ids: of the clients, by which a run that starts from this one finds its own.
        wire: the channels that messages went through.
    """

    server: PyTree
    local: PyTree
    history: dict[str, Any]
    rounds: int | Int[Array, ""]
    status: Status
    failure: Failure
    result: Personalized
    state: State
    releases: tuple[Release, ...]
    algorithm: Algorithm
    ids: Int[Array, " m"]
    wire: Wire

    def update(
        self,
        clients: Clients,
        *,
        rounds: int,
        key: Key[Array, ""] | UInt32[Array, " 2"],
        channel: Channel | Wire | None = None,
        participation: Participation | None = None,
        **options: Any,
    ) -> "Solution":
        """A few rounds on newer data from where this run ended, by `jaxfed.fit`.

        Clients are found by their ids: those of this run go on from their local models, new ones
        begin as in `jaxfed.personalize`, and models of those that are gone are dropped. What the
        server knew besides the shared model, and what channels remember, begins anew.

        Args:
            clients: with their newest data, such as `jaxfed.stream.Forgetting` keeps.
            rounds: how many rounds.
            key: random key, another one in each update.
            channel: by default the channels of this run.
            participation: by default as in this run.
            options: all else that `jaxfed.fit` takes but for an algorithm and a warm start.

        Returns:
            The solution. The first entry of `history["objective"]` is the objective on the newer
            data of the models that this run has learned. Where the shared model is an orthonormal
            basis, the last entry of `history["drift"]` is the sine of the largest principal angle
            by which its span has turned, from 0 to 1; the other entries are NaN.

        Raises:
            ValueError: as `jaxfed.fit`.
            DivergenceError: as `jaxfed.fit`.
        """
        # It runs `fit`, which imports this module.
        from jaxfed.core.run.update import update

        wire = self.wire if channel is None else channel
        participants = self.releases[-1].participation if participation is None else participation
        options = {"channel": wire, "participation": participants} | options
        return update(self, clients, rounds=rounds, key=key, **options)

    def summary(self) -> str:
        """What ran, how it ended and what it cost, in two columns of text.

        Raises:
            ValueError: for the solutions of several runs, and one that is traced.
        """
        return columns(saved.story(self._saved("summary")._replace(remarks=self.remarks())))

    def remarks(self) -> tuple[str, ...]:
        """What to know before relying on the result, in sentences; empty if there is nothing.

        They say whether the run was still on its way when the rounds were over, and what the
        algorithm finds wrong with the result. `summary` and `save` include them.

        Raises:
            ValueError: for the solutions of several runs, and one that is traced.
        """
        run = self._saved("remarks")
        found: tuple[str, ...] = ()
        if run.status == "round_limit":
            found = not_converged(run.history)
        if isinstance(self.algorithm, HasRemarks):
            found += self.algorithm.remarks(self.result, run.history)
        return found

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        preprocessing: Standardization | None = None,
        imputation: Imputation | None = None,
    ) -> None:
        """Write the result and the history to a file, which `jaxfed.load` reads.

        Args:
            path: of the file, such as `"result.npz"`; one that is there is replaced. The layout is
                that of `jaxfed.core.store.saved`.
            preprocessing: what the clients' samples went through before the fit, such as
                `solution.result.local` of `jaxfed.preprocess.Standardize`.
            imputation: what completed them after that, such as `solution.result.local` of
                `jaxfed.preprocess.Impute`.

        Raises:
            ValueError: for what is no path, the solutions of several runs, one that is traced, and
                another preprocessing or imputation.
            OSError: if it cannot be written.
        """
        before = {"preprocessing": preprocessing, "imputation": imputation}
        saved.write(path, self._whole("save", before))

    def entries(
        self,
        *,
        preprocessing: Standardization | None = None,
        imputation: Imputation | None = None,
    ) -> dict[str, np.ndarray]:
        """What `save` writes, by name, for a file that holds more.

        Args:
            preprocessing: as for `save`.
            imputation: as for `save`.

        Raises:
            ValueError: as `save`.
        """
        before = {"preprocessing": preprocessing, "imputation": imputation}
        return saved.entries(self._whole("entries", before))

    def _whole(self, asked: str, before: Mapping[str, Any]) -> saved.Saved:
        for name, kind in saved.BEFORE.items():
            if before[name] is not None:
                check_instance(name, before[name], kind, f"a jaxfed.preprocess.{kind.__name__}")
        return self._saved(asked)._replace(remarks=self.remarks(), **before)

    def _saved(self, asked: str) -> saved.Saved:
        if not self._is_one:
            raise refuse(asked, "the solution of one run, not traced", self.rounds)
        history = {name: np.asarray(values) for name, values in self.history.items()}
        return saved.Saved(
            self.result,
            history,
            int(self.rounds),
            name_of(self.status),
            repr(self.algorithm),
            len(self.failure.clients),
            versions(),
        )

    @property
    def _is_one(self) -> bool:
        """Whether this is the solution of one run, with values."""
        # Every run has these two: of several runs they have an axis, and under jit no value.
        arrays = [x for x in jax.tree.leaves((self.rounds, self.status)) if eqx.is_array(x)]
        return all(is_known(x) and x.ndim == 0 for x in arrays)

    def __repr__(self) -> str:
        if not self._is_one:
            return eqx.tree_pformat(self)
        rows = saved.story(self._saved("repr"))
        return f"Solution({', '.join(f'{name}: {text}' for name, text in rows.items())})"

    def _repr_html_(self) -> str | None:
        """The summary as a table, for notebooks."""
        if not self._is_one:
            return None
        rows = saved.story(self._saved("repr")._replace(remarks=self.remarks())).items()
        cells = (f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>" for name, text in rows)
        return f"<table>{''.join(cells)}</table>"


def name_of(status: Status) -> str:
    """The name of a status that is not traced."""
    (name,) = [name for name in saved.STATUSES if status == getattr(Status, name)]
    return name


class DivergenceError(FloatingPointError):
    """An objective or a message that is no longer finite.

    Attributes:
        round: the round in which it is not, counted from 1; what is sent before the rounds counts
            to the first.
        clients: the positions of the clients whose own are not; empty if all are.
        solution: what there was before that round.
    """

    def __init__(self, message: str, solution: Solution):
        """Keep what is known."""
        super().__init__(message)
        self.round, self.solution = int(solution.failure.round), solution
        self.clients = tuple(np.flatnonzero(solution.failure.clients).tolist())


def with_earlier(warm_start: Solution | Personalized | None, solution: Solution) -> Solution:
    """With the releases of the warm start: the same objects, by which an account knows them."""
    earlier = warm_start.releases if isinstance(warm_start, Solution) else ()
    return replace(solution, releases=(*earlier, *solution.releases))
