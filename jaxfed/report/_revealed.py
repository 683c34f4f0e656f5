"""What left the clients, and what a server that keeps everything could have made of it."""

import re
from typing import Any

import numpy as np

from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.calls import RESERVED
from jaxfed.core.run.sent import Sent, sent
from jaxfed.core.run.solution import Solution
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.release import Release
from jaxfed.privacy import spent
from jaxfed.report._page import facts, paragraph, table

DELTA = 1e-5

RULES = {
    "Mean": "the weighted mean over the clients",
    "Sum": "the sum over the clients",
    "Max": "the largest of any client, entry by entry",
    "Gram": "the mean of the products of each part with itself: a second moment",
    "Symmetric": "the mean of the clients' symmetric matrices: a second moment",
    "Gather": "every client's own, each by itself",
}


def revealed(solution: Solution, clients: Clients) -> list[str]:
    """What the section says, as HTML."""
    *earlier, first, last = solution.releases
    releases = [(release, "of an earlier run") for release in earlier]
    releases += [(first, "before the rounds"), (last, "in each round")]
    releases = [(release, when) for release, when in releases if release.bits]
    if not releases:
        text = "No client sent anything: what it learned, it learned from its own data alone."
        return [paragraph(text)]
    parts = [
        paragraph(
            "Samples stayed with their clients. Below is what left them, as the algorithm itself "
            "declares it. Where the server is meant to get a mean or a sum, each client still "
            "sends its own part, which whoever runs the server can read unless the channel hides "
            "it."
        ),
        table([_released(release, when) for release, when in releases]),
    ]
    messages = sent(solution, clients)
    if messages:
        parts.append(table([_message(part) for part in messages]))
    parts += [paragraph(text) for text in _meaning(solution, releases, messages)]
    told = sorted(solution.history.keys() - set(RESERVED))
    parts.append(
        facts(
            {
                "beside the messages": f"numbers for the history, their means over the clients: "
                f"{', '.join(told)}",
                "known anyway": "how many clients there are, who took part in a round, and their "
                "weights",
                "never sent": "samples, and what a client keeps between rounds, its local model "
                "among it",
            }
        )
    )
    return parts


def _released(release: Release, when: str) -> dict[str, Any]:
    clients = len(release.weights)
    some = release.participation.number(clients)
    return {
        "messages": when,
        "times": int(np.asarray(release.times)),
        "senders": "varies" if some is None else f"{some:,} of {clients:,}",
        "bits of one": f"{release.bits:,.0f}",
        "channel": _called(release.channel),
    }


def _called(channel: Channel) -> str:
    """A channel as the call that makes it."""
    text = " ".join(repr(channel).split()).replace("( ", "(").replace(" )", ")")

    def function(match: re.Match[str]) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", match[1]).lower()

    return re.sub(r"\b_([A-Za-z]+)(?=\()", function, text)


def _message(part: Sent) -> dict[str, Any]:
    size = " × ".join(map(str, part.shape)) or "1"
    return {
        "part": part.name or "the message",
        "sent": "before the rounds" if part.before else "in each round",
        "numbers": size,
        "what the server is meant to get": RULES.get(part.rule, part.rule),
    }


def _meaning(
    solution: Solution, releases: list[tuple[Release, str]], messages: list[Sent]
) -> list[str]:
    """What all this comes to, in sentences."""
    channels = [release.channel for release, _ in releases]
    if all(channel.private for channel in channels):
        said = []
        if all(channel.one_time for channel in channels):
            said.append("Masks hid single messages: the server could read their sum alone.")
        if all(channel.noise() is not None for channel in channels):
            said.append("Messages were clipped and carried noise.")
        return [" ".join([*said, _guarantee(solution, channels)])]
    open_ = [when for release, when in releases if not release.channel.private]
    said = [
        f"Messages {' and '.join(dict.fromkeys(open_))} came as they are: whoever runs the server "
        "could have read each client's by itself. jaxfed.channel.secure_sum hides single messages, "
        "jaxfed.channel.gaussian limits what can be inferred at all."
    ]
    rules = {part.rule for part in messages}
    if rules & {"Gram", "Symmetric"}:
        said.append(
            "A client's second moment, or a factor of it, tells the variance of each feature and "
            "how each two go together; of a client with few samples it may tell the samples."
        )
    if "Gather" in rules:
        said.append("What is gathered cannot be hidden in a sum: the server needs each by itself.")
    return [*said, "There is no guarantee of differential privacy for this run."]


def _guarantee(solution: Solution, channels: list[Channel]) -> str:
    if any(channel.noise() is None for channel in channels):
        return "There is no guarantee of differential privacy for this run: sums had no noise."
    try:
        epsilon = spent(solution, delta=DELTA)
    except (ValueError, ImportError) as error:
        return f"The guarantee could not be computed: {error}."
    return (
        f"Its messages are ({epsilon:.3g}, {DELTA:g})-differentially private with respect to all "
        "that one client has; that is said of the messages, not of the numbers for the history."
    )
