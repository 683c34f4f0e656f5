"""The report's section on privacy: what left the clients, and what a server could infer from it."""

from typing import Any

import numpy as np

from jaxfed.aggregation import Robust
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.calls import RESERVED
from jaxfed.core.run.message_parts import MessagePart, message_parts
from jaxfed.core.run.solution import Solution
from jaxfed.core.wire.release import Release
from jaxfed.privacy import spent, statement
from jaxfed.report._page import facts, paragraph, table

DELTA = 1e-5

RULES = {
    "Mean": "the weighted mean over the clients",
    "Sum": "the sum over the clients",
    "Max": "the maximum over the clients, entry by entry",
    "Gram": "the mean of each client's part times its transpose: a second moment",
    "Symmetric": "the mean of the clients' symmetric matrices: a second moment",
    "Groups": "the sum over each group of clients",
    "Gather": "every client's message separately",
}


def revealed(solution: Solution, clients: Clients) -> list[str]:
    """The section's HTML."""
    *earlier, first, last = solution.releases
    releases = [(release, _earlier(release)) for release in earlier]
    releases += [(first, "before the rounds"), (last, "in each round")]
    releases = [(release, when) for release, when in releases if release.bits]
    if not releases:
        text = "No client sent anything; each learned from its own data alone."
        return [paragraph(text)]
    parts = [
        paragraph(
            "Samples stayed with their clients. The tables list what left them, as declared by the "
            "algorithm. Even where the server needs only a mean or a sum, each client sends its "
            "own message, which whoever runs the server can read unless the channel hides it."
        ),
        table([_released(release, when) for release, when in releases]),
    ]
    messages = message_parts(solution, clients)
    if messages:
        parts.append(table([_message(part) for part in messages]))
    parts += [paragraph(text) for text in _meaning(solution, releases, messages)]
    diagnostics = ", ".join(sorted(solution.history.keys() - set(RESERVED)))
    others = {
        "sent besides": f"diagnostics for the history, averaged over the clients: {diagnostics}",
        "known to the server": "the number of clients, who took part in a round, and the weights",
        "never sent": "samples, and what a client keeps between rounds, such as its local model",
    }
    return [*parts, facts(others)]


def _earlier(release: Release) -> str:
    guarantee = release.guarantee
    of_units = guarantee is not None and guarantee.rows == "ranges"
    return "means and deviations, before the run" if of_units else "of an earlier run"


def _released(release: Release, when: str) -> dict[str, Any]:
    clients = len(release.weights)
    some = release.participation.number(clients)
    return {
        "messages": when,
        "times": int(np.asarray(release.times)),
        "senders": "varies" if some is None else f"{some:,} of {clients:,}",
        "bits per message": f"{release.bits:,.0f}",
        "channel": repr(release.channel),
    }


def _message(part: MessagePart) -> dict[str, Any]:
    size = " × ".join(map(str, part.shape)) or "1"
    return {
        "part": part.name or "the message",
        "sent": "before the rounds" if part.before else "in each round",
        "numbers": size,
        "what the server needs": RULES.get(part.rule, part.rule),
    }


def _meaning(
    solution: Solution, releases: list[tuple[Release, str]], messages: list[MessagePart]
) -> list[str]:
    """What this means for privacy, in sentences."""
    if all(release.guarantee is not None for release, _ in releases):
        return statement(solution).split("\n")
    channels = [release.channel for release, _ in releases]
    hidden = _groups(solution)
    noisy = all(channel.noise() is not None for channel in channels)
    if all(channel.private for channel in channels):
        sentences = []
        if all(channel.one_time for channel in channels):
            sentences.append("Masks hid single messages: the server could read only their sum.")
        if noisy:
            sentences.append("Messages were clipped and carried noise.")
        return [" ".join([*sentences, _guarantee(solution, noisy)]), *hidden]
    unprotected = [when for release, when in releases if not release.channel.private]
    sentences = [
        f"Messages {' and '.join(dict.fromkeys(unprotected))} were not protected: whoever runs the "
        "server could read each client's. jaxfed.channel.secure_sum hides single messages; "
        "jaxfed.channel.gaussian limits what can be inferred from them."
    ]
    rules = {part.rule for part in messages}
    if rules & {"Gram", "Symmetric"}:
        sentences.append(
            "A client's second moment, or a factor of it, reveals the variances and covariances of "
            "its features; for a client with few samples it may reveal the samples."
        )
    if "Gather" in rules:
        sentences.append(
            "Gathered messages cannot be hidden in a sum, because the server needs each one."
        )
    sentences += hidden
    return [*sentences, "There is no guarantee of differential privacy for this run."]


def _groups(solution: Solution) -> list[str]:
    """How many clients hide each one, if the server needs sums by groups."""
    if not isinstance(solution.algorithm, Robust):
        return []
    clients, groups = len(solution.failure.clients), solution.algorithm.groups
    return [
        f"The server needs the mean of each of {groups} groups of clients, so that masks hide a "
        f"client among {clients // groups} and not among {clients}."
    ]


def _guarantee(solution: Solution, noisy: bool) -> str:
    if not noisy:
        return "There is no guarantee of differential privacy for this run: sums had no noise."
    try:
        epsilon = spent(solution, delta=DELTA)
    except (ValueError, ImportError) as error:
        return f"The guarantee could not be computed: {error}."
    return (
        f"The messages are ({epsilon:.3g}, {DELTA:g})-differentially private with respect to all "
        "data of one client. This does not cover the diagnostics for the history."
    )
