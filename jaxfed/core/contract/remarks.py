"""Remarks on a result that its reader should know before relying on it."""

from typing import NamedTuple

import numpy as np

# Rounds after which every stopping measure is known; it may be infinite.
ENOUGH = 12
# Clients' diagnostics of an algorithm whose local components must not be common to all clients: the
# mean variance along a shared component and along a local one.
ENERGIES = ("shared_energy", "local_energy")
# Diagnostics from which a run computes its stopping measure and its status.
MEASURES = ("gap", "objective_scale", *ENERGIES)


class Words(NamedTuple):
    """How a reader follows a remark's advice, in the words of where it is read."""

    rounds: str
    steps: str | None = None  # shorter ones; None where the reader cannot choose
    memory: str | None = None  # around the run's channels
    unchanged: str | None = None  # around none
    start: str | None = None
    shared: str | None = None


PYTHON = Words(
    rounds="rounds=, or warm_start= to go on from this solution",
    steps="step_size=",
    memory="channel=jaxfed.channel.difference(...)",
    unchanged="channel=jaxfed.channel.difference(jaxfed.channel.lossless())",
    start='start="common"',
    shared="shared_rank=",
)


def is_told(measure: float, rounds: int) -> bool:
    """Whether a run was long enough for its stopping measure, the last one of which is given."""
    return bool(np.isfinite(measure)) or rounds >= ENOUGH


def advice(ending: "Ending", words: Words) -> tuple[str, ...]:
    """Return what is wrong with a run that did not converge, and what helps."""
    measure = ending.measure
    if ending.status == "round_limit" and np.isnan(ending.levels[1]):
        return ("Clients sent no objectives: whether the run has converged is not known.",)
    if ending.status == "round_limit" and not is_told(measure, ending.rounds):
        found = "Too few rounds to tell whether the run has converged"
        return (f"{found}: run more ({words.rounds}).",)
    if ending.status == "round_limit":
        found = f"The stopping measure is still {measure:.2g}"
        if np.isinf(measure):  # as where a run leaves a saddle
            found = "The objective falls faster and faster"
        return (f"{found}: the run has not converged; run more rounds ({words.rounds}).",)
    if ending.status == "suboptimal":
        cure = "learn more shared components" + _by(words.shared)
        if words.start is not None:
            cure = f"start from what clients have in common{_by(words.start)}, or {cure}"
        return (f"A local component is common to all clients and exceeds the shared ones: {cure}.",)
    if ending.status not in ("rising", "noisy"):
        return ()
    if ending.status == "rising":
        low, last = ending.levels
        found = f"The objective rose from {low:.4g} at its lowest to {last:.4g}"
    else:
        found = "The objective no longer falls, but the stopping measure is not small"
    if ending.private:
        cure = "the channel's noise moves the result; let more clients take part, or add less noise"
    elif ending.lossy:
        cure = "messages lose too much; send differences, which take as many bits"
        cure += _by(words.memory)
    elif ending.some:
        cure = "each round follows the few clients that take part; let all clients take part"
        if words.unchanged is not None:
            cure += ", or remember the messages of the others" + _by(words.unchanged)
    elif words.steps is not None and ending.status == "rising":
        cure = f"take shorter steps{_by(words.steps)}"
    else:
        cure = f"run more rounds{_by(words.rounds)}"
    return (f"{found}: {cure}.",)


def _by(words: str | None) -> str:
    return "" if words is None else f" ({words})"


class Ending(NamedTuple):
    """What advice depends on."""

    status: str  # a name of `jaxfed.Status`
    measure: float  # the last stopping measure
    rounds: int
    levels: tuple[float, float]  # of the objective: the lowest, and the last
    private: bool  # whether messages have noise
    lossy: bool  # whether messages lose something for good
    some: bool  # whether clients miss rounds and their messages are not remembered
