"""What estimators say of the run that they are the result of."""

import abc
import warnings

from sklearn.exceptions import ConvergenceWarning

from jaxfed._names import caller
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.contract.remarks import Words
from jaxfed.core.run.result import saved_of
from jaxfed.core.run.solution import Solution
from jaxfed.core.store.saved import Saved, ended_badly

WORDS = Words(rounds="rounds=")


class HasRun(abc.ABC):
    """An estimator with the record of a run."""

    _run_record: Saved
    n_iter_: int

    @abc.abstractmethod
    def _result(self) -> Personalized:
        """Return what was learned, as a run returns it."""

    def _record(self, solution: Solution) -> None:
        """Keep the record of a run without its models, which the estimator's attributes hold.

        Warns:
            ConvergenceWarning: if the run did not converge.
        """
        self.n_iter_ = int(solution.rounds)
        remarks = solution.remarks(WORDS)
        record = saved_of(solution)._replace(result=Personalized(None, None), remarks=remarks)
        self._run_record = record._replace(ids=None)  # estimators know clients by their labels
        if ended_badly(self._run_record.status, self._run_record.history):
            warnings.warn(remarks[0], ConvergenceWarning, stacklevel=caller())

    @property
    def saved_(self) -> Saved:
        """What was learned and how, in the form that `jaxfed.load` returns.

        Functions that take a solution's result take the estimator as well. Samples must be centred.
        """
        return self._run_record._replace(result=self._result())

    @property
    def summary_(self) -> str:
        """A summary of the run."""
        return self.saved_.summary()
