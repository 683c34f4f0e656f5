"""`Solution`, which runs return, and `DivergenceError`, which they raise."""

import html
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Int, PyTree

from jaxfed._checks import check_instance, refuse
from jaxfed._versions import versions
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import Guarantee
from jaxfed.core.clients.imputation import Imputation
from jaxfed.core.clients.names import NAMELESS, Names, with_names
from jaxfed.core.clients.standardization import Standardization
from jaxfed.core.common.printing import columns, is_known
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.contract.remarks import PYTHON, Ending, Words, advice
from jaxfed.core.round.problem import Failure, State
from jaxfed.core.run.status import Status
from jaxfed.core.store import saved
from jaxfed.core.store.arrays import named
from jaxfed.core.wire.release import Release
from jaxfed.core.wire.wire import Wire
from jaxfed.linalg import Moment


class Solution(eqx.Module):
    """The solution of a run.

    Attributes:
        server: the algorithm's final server state.
        local: the clients' final states, leading axis = clients.
        history: `(rounds,)` arrays by name: the weighted means of the clients' diagnostics
            (`"objective"` is evaluated at the iterate that enters the round), the server's
            diagnostics, the requested metrics, `"participants"`, and `"bits_up"` and
            `"bits_down"`, cumulative per client and including the exchange before the rounds.
            Entries that were not computed are NaN: metrics between their rounds, rounds after the
            tolerance was met, and rounds whose participants have no weight.
        rounds: number of rounds that ran.
        status: how the run ended, one of `jaxfed.Status`.
        failure: where the run diverged: the round, counted from 1 (0 if it did not), and a boolean
            per client.
        result: the learned models, `result.shared` and `result.local`.
        state: the state from which the next round would start.
        releases: what left the clients, how often and with which participation, including the
            releases of a solution used as warm start; `jaxfed.privacy.spent` accounts for them.
        algorithm: the algorithm that ran.
        ids: the clients' ids, by which a run that starts from this solution matches its clients.
        wire: the channels of the messages.
        stops: whether the run was given a tolerance, at which it stops.
        names: the names of clients and features, as far as the clients had some: `names.clients`
            in the order of `result.local`, `names.features` in that of a component's entries.
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
    stops: bool = eqx.field(static=True)
    names: Names = eqx.field(static=True, default=NAMELESS)

    def summary(self) -> str:
        """Describe the run, how it ended and what it cost, in two columns of text.

        Raises:
            ValueError: if this is the solution of several runs, or traced.
        """
        return columns(saved.story(self._record("summary")))

    def remarks(self, words: Words = PYTHON) -> tuple[str, ...]:
        """Return what to know before relying on the result, in sentences; possibly none.

        Remarks say why the run has not converged and what the algorithm finds wrong with the
        result. `summary` and `save` include them.

        Args:
            words: how a reader follows the advice; by default in Python.

        Raises:
            ValueError: if this is the solution of several runs, or traced.
        """
        return self._record("remarks", words).remarks

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        preprocessing: Standardization | None = None,
        imputation: Imputation | None = None,
        moments: Clients | None = None,
    ) -> None:
        """Write the result and the history to a file for `jaxfed.load`.

        Args:
            path: the file, such as `"result.npz"`; an existing one is replaced. Its layout is that
                of `jaxfed.core.store.saved`.
            preprocessing: the standardization of the clients' samples before the fit, such as
                `solution.result.local` of `jaxfed.preprocess.Standardize`.
            imputation: what completed them after that, such as `solution.result.local` of
                `jaxfed.preprocess.Impute`.
            moments: the clients' second moments, as `jaxfed.stream.Forgetting` keeps them, so that
                the file alone continues a stream. They are private data; only the file's owner may
                then read it.

        Raises:
            ValueError: if `path` is not a path, `preprocessing`, `imputation` or `moments` is
                something else, or this is the solution of several runs, or traced.
            OSError: if the file cannot be written.
        """
        before = {"preprocessing": preprocessing, "imputation": imputation}
        whole = self._whole("save", before, moments)
        saved.write(path, whole, private=moments is not None)

    def entries(
        self,
        *,
        preprocessing: Standardization | None = None,
        imputation: Imputation | None = None,
        moments: Clients | None = None,
        words: Words = PYTHON,
    ) -> dict[str, np.ndarray]:
        """Return what `save` writes, by name, to store it in a larger file.

        Args:
            preprocessing: as for `save`.
            imputation: as for `save`.
            moments: as for `save`.
            words: as for `remarks`.

        Raises:
            ValueError: as `save`.
        """
        before = {"preprocessing": preprocessing, "imputation": imputation}
        return saved.entries(self._whole("entries", before, moments, words))

    def _whole(
        self, asked: str, before: Mapping[str, Any], moments: Clients | None, words: Words = PYTHON
    ) -> saved.Saved:
        if moments is not None and not (
            isinstance(moments, Clients) and isinstance(moments.data, Moment)
        ):
            raise refuse("moments", "jaxfed.Clients with moments, as Forgetting keeps", moments)
        for name, kind in saved.BEFORE.items():
            if before[name] is not None:
                check_instance(name, before[name], kind, f"a jaxfed.preprocess.{kind.__name__}")
        downlink = None
        if jax.tree.leaves(self.result.local):
            downlink = named(saved.DOWNLINK, self.algorithm.downlink(self.server))
        return self._record(asked, words)._replace(downlink=downlink, moments=moments, **before)

    def _record(self, asked: str, words: Words = PYTHON) -> saved.Saved:
        """Return what `save` writes, without what the fit did not learn.

        Args:
            asked: what the caller is asked for, for the message.
            words: as for `remarks`.

        Raises:
            ValueError: as `summary`.
        """
        run = self._saved(asked)
        remarks = self._advice(run, words) + self.algorithm.remarks(self.result, run.history)
        return run._replace(remarks=remarks)

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
            ids=self.ids,
            channel=repr(self.wire),
            participation=repr(self.releases[-1].participation),
            guarantees=guarantees_of(self.releases),
            names=self.names,
        )

    def advice(self, words: Words = PYTHON) -> tuple[str, ...]:
        """Return why the run did not converge, and what helps; nothing if it did.

        Args:
            words: as for `remarks`.
        """
        return self._advice(self._saved("advice"), words)

    def _advice(self, run: saved.Saved, words: Words) -> tuple[str, ...]:
        objective = run.history["objective"]
        known = objective[np.isfinite(objective)]
        measure = run.history["stopping_measure"]
        measure = measure[~np.isnan(measure)]
        ways = self.wire.up, self.wire.down
        present = run.history["participants"]
        ending = Ending(
            run.status,
            float(measure[-1]) if len(measure) else np.inf,
            len(measure),
            (float(known.min()), float(known[-1])) if len(known) else (np.nan, np.nan),
            private=self.wire.up.noise() is not None,
            lossy=not all(way.settles for way in ways),
            some=bool((present < run.clients).any()) and not self.wire.up.cumulative,
        )
        return advice(ending, words)

    @property
    def _is_one(self) -> bool:
        """Whether this is the solution of one run, with known values."""
        # Every solution has these two. In that of several runs they have an axis; in a traced one
        # they have no values.
        arrays = [x for x in jax.tree.leaves((self.rounds, self.status)) if eqx.is_array(x)]
        return all(is_known(x) and x.ndim == 0 for x in arrays)

    def __repr__(self) -> str:
        if not self._is_one:
            return eqx.tree_pformat(self)
        rows = saved.story(self._saved("repr"))
        return f"Solution({', '.join(f'{name}: {text}' for name, text in rows.items())})"

    def _repr_html_(self) -> str | None:
        """The summary as an HTML table for notebooks."""
        if not self._is_one:
            return None
        rows = saved.story(self._record("repr")).items()
        cells = (f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>" for name, text in rows)
        return f"<table>{''.join(cells)}</table>"


def guarantees_of(releases: tuple[Release, ...]) -> tuple[Guarantee, ...]:
    """What protects the persons behind all messages; nothing if some messages have no guarantee.

    The same object counts once.
    """
    found = [each.guarantee for each in releases if each.bits]
    known = {id(each): each for each in found if each is not None}
    return () if None in found else tuple(known.values())


def name_of(status: Status) -> str:
    """The name of a status, which must not be traced."""
    # By its text, since comparisons of statuses are small programs to compile.
    return next(name for name, text in saved.STATUSES.items() if text == Status[status])


class DivergenceError(FloatingPointError):
    """An objective or a message has become NaN or infinite.

    Attributes:
        round: the round, counted from 1, which includes messages before the rounds.
        clients: positions of the clients with such values; empty if only their mean is not finite.
        solution: the solution before that round.
    """

    def __init__(self, message: str, solution: Solution):
        """Store the failure and the solution."""
        super().__init__(message)
        self.round, self.solution = int(solution.failure.round), solution
        self.clients = tuple(np.flatnonzero(solution.failure.clients).tolist())


def with_earlier(warm_start: object, clients: Clients, solution: Solution) -> Solution:
    """Add the clients' names, the warm start's releases, and the guarantee of the data to its own.

    Accounts recognise earlier releases by object identity.
    """
    earlier = warm_start.releases if isinstance(warm_start, Solution) else ()
    own = [replace(each, guarantee=clients.guarantee) for each in solution.releases]
    result = with_names(solution.result, clients.names)
    return replace(solution, releases=(*earlier, *own), result=result, names=clients.names)
