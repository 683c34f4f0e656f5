"""What estimators say of the run that they are the result of."""

import abc

from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.result import saved_of
from jaxfed.core.run.solution import Solution
from jaxfed.core.store.saved import Saved


class HasRun(abc.ABC):
    """An estimator with the record of a run."""

    _run_record: Saved
    n_iter_: int

    @abc.abstractmethod
    def _result(self) -> Personalized:
        """Return what was learned, as a run returns it."""

    def _record(self, solution: Solution) -> None:
        """Keep the record of a run without its models, which the estimator's attributes hold."""
        self.n_iter_ = int(solution.rounds)
        record = saved_of(solution)._replace(result=Personalized(None, None))
        self._run_record = record._replace(ids=None)  # estimators know clients by their labels

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
