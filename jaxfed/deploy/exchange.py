"""Sends the server's questions to clients over a Flower grid, and collects answers by deadlines."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from jaxfed._checks import check_count, refuse, shown
from jaxfed.deploy.messages import REFUSALS, Packet, message_of, packet_of

LOG = logging.getLogger("jaxfed.deploy")
RAISED = 2  # Flower's code for a ClientApp that raised an exception
PAUSE = 0.2  # seconds between checks for answers
LARGEST_ID = 2**31 - 1  # an int32
HELLO = Packet({"kind": "hello"})
T = TypeVar("T")


class RefusedError(ValueError):
    """An answer that is an error or makes no sense; asking again would not help."""


class TurnedAway(NamedTuple):
    """A node that stays out."""

    client: int | None  # None if it is not known
    reason: str


@contextmanager
def reading_from(sender: str) -> Iterator[None]:
    """Turn any exception while a message is read into an error that names its sender.

    Raises:
        RefusedError: for any exception.
    """
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        # Its words may hold those of the sender, which could be a terminal's commands.
        raise RefusedError(
            f"{sender}: wanted an answer of jaxfed.deploy, got one that cannot be read "
            f"({type(error).__name__}: {shown(str(error))})"
        ) from error


def read_answer(sender: str, question: Packet, reply: Any) -> Packet:
    """The answer in a reply of Flower's.

    Raises:
        RefusedError: if it is a refusal, or no answer to this question.
    """
    log = "the log of its machine says more"
    if reply.has_error():
        raise RefusedError(f"{sender} refuses: its app raised an exception; {log}")
    with reading_from(sender):
        answer = packet_of(reply)
        if answer.words["kind"] == "refusal":
            raise RefusedError(f"{sender} refuses: {REFUSALS[answer.words['code']]}; {log}")
        if answer.words["question"] != question.digest:
            raise RefusedError(f"{sender}: wanted an answer to its question, got another's")
        return answer


class Exchange:
    """Keeps track of the connected clients and their answers.

    Clients are known by their partition ids. Each of Flower's nodes is asked once for its client. A
    machine that returns is a new node, which replaces its old one.

    Attributes:
        hello: each client's description of itself, by id.
        accept: called with that description; raises for a client that does not fit the run.
        turned_away: connected nodes that stay out, by node.
    """

    def __init__(self, grid: Any):
        """Communicate over Flower's grid."""
        self._grid = grid
        self._client_of: dict[int, int | None] = {}  # by node; None until its hello has arrived
        self._node_of: dict[int, int] = {}  # by client
        self._greetings: dict[str, int] = {}  # nodes by the message that asks who they are
        self.hello: dict[int, Mapping[str, Any]] = {}
        self.accept: Callable[[Mapping[str, Any]], None] = lambda words: None
        self.turned_away: dict[int, TurnedAway] = {}

    def gather(self, number: int, patience: float) -> None:
        """Wait until `number` clients are connected.

        Raises:
            RefusedError: if so many are connected, and some of them stay out.
            TimeoutError: if they are not after `patience` seconds.
        """
        end = time.monotonic() + patience
        while (found := len(self.clients())) < number:
            reasons = [one.reason for one in self.turned_away.values()]
            if found + len(reasons) >= number and not self._greetings:
                raise RefusedError("; ".join(reasons))
            if time.monotonic() > end:
                words = (
                    f"clients: wanted {number}, and after {patience:g} seconds there are {found}: "
                    f"{sorted(self._node_of)}"
                )
                raise TimeoutError("; ".join([words, *reasons]))
            time.sleep(PAUSE)

    def clients(self, seconds: float = 0.0) -> list[int]:
        """The connected clients, in order.

        Args:
            seconds: how long to wait for connected nodes that have yet to say which client they
                are.
        """
        end = time.monotonic() + seconds
        self._meet()
        while self._greetings and time.monotonic() < end:
            time.sleep(PAUSE)
            self._meet()
        return sorted(self._node_of)

    def ask(
        self,
        questions: Mapping[int, Packet],
        read: Callable[[int, Packet], T],
        *,
        group: str,
        deadline: float | None,
        at_least: int,
        patience: float,
    ) -> dict[int, T]:
        """Ask questions and return the answers that arrive in time, in the clients' order.

        A client that returns as another node is asked again. Further answers to the same question
        are ignored. A client that refuses, or whose answer makes no sense, is left out, with a
        warning.

        Args:
            questions: by client.
            read: reads and checks the answer of a client.
            group: what the messages belong to, such as the round.
            deadline: seconds after which to give up on missing answers, if there are `at_least`
                others; by default `patience`.
            at_least: number of answers needed.
            patience: seconds after which too few answers are an error.

        Raises:
            RefusedError: if too many clients are left out.
            TimeoutError: if too few clients answer.
        """
        start = time.monotonic()
        answers: dict[int, T] = {}
        left_out: dict[int, str] = {}  # reasons, by client
        asked: dict[str, int] = {}  # clients by message
        last_node: dict[int, int] = {}  # the node that last received each client's question
        while True:
            self._meet()
            for client, reason in self.turned_away.values():
                if client is None or client in answers or client in self._node_of:
                    continue
                if client in questions:
                    left_out[client] = reason
            missing = [c for c in questions if c not in answers and c not in left_out]
            nodes = {
                client: self._node_of[client]
                for client in missing
                if self._node_of.get(client) not in (None, last_node.get(client))
            }
            last_node |= nodes
            names = self._push([message_of(questions[c], nodes[c], group) for c in nodes])
            for client, name in zip(nodes, names, strict=True):
                if name is None:  # Flower refuses it because the node is gone
                    self._lose(client)
                else:
                    asked[name] = client
            for reply in self._pull(asked):
                client = asked.pop(reply.metadata.reply_to_message_id, None)
                if client is None or client not in missing or client in answers:
                    continue
                # After any error but the app's own, the client counts as lost.
                if reply.has_error() and reply.error.code != RAISED:
                    LOG.warning("client %d is lost: %s", client, shown(reply.error.reason))
                    self._lose(client)
                    continue
                sender = f"client {client}"
                try:
                    with reading_from(sender):
                        answer = read_answer(sender, questions[client], reply)
                        if (other := answer.words["id"]) != client:
                            raise refuse("id", f"{client}, its own", other)
                        answers[client] = read(client, answer)
                except RefusedError as error:
                    LOG.warning("%s: %s", group, error)
                    left_out[client] = str(error)
            if len(questions) - len(left_out) < at_least:
                raise RefusedError(f"{group}: {'; '.join(left_out.values())}")
            seconds = time.monotonic() - start
            missing = [c for c in questions if c not in answers and c not in left_out]
            # With a deadline, do not wait for clients that have left, unless a node that has yet to
            # say hello may be one of them.
            gone = not self._greetings and all(c not in self._node_of for c in missing)
            late = deadline is not None and (seconds >= deadline or gone)
            ends = seconds >= max(patience, deadline or 0)
            if not missing or ((late or ends) and len(answers) >= at_least):
                return {client: answers[client] for client in sorted(answers)}
            if ends:
                words = [
                    f"{group}: wanted answers of at least {at_least} clients, got {len(answers)} "
                    f"after {seconds:.0f} seconds; missing are {missing}"
                ]
                raise TimeoutError("; ".join([*words, *left_out.values()]))
            time.sleep(PAUSE)

    def _push(self, messages: list[Any]) -> list[str | None]:
        names = list(self._grid.push_messages(messages)) if messages else []
        return names + [None] * (len(messages) - len(names))

    def _pull(self, asked: Mapping[str, Any]) -> list[Any]:
        return list(self._grid.pull_messages(list(asked))) if asked else []

    def _lose(self, client: int) -> None:
        node = self._node_of.pop(client, None)
        if node is not None:
            # Let it say hello again: a machine whose process died returns as the same node.
            self._client_of.pop(node, None)

    def _meet(self) -> None:
        """Ask new nodes which clients they are, read their answers, and forget nodes that left."""
        there = set(self._grid.get_node_ids())
        for node in self._client_of.keys() - there:
            client = self._client_of.pop(node)
            self.turned_away.pop(node, None)
            # The client may have returned as another node meanwhile.
            if client is not None and self._node_of.get(client) == node:
                del self._node_of[client]
        new = sorted(there - self._client_of.keys())
        names = self._push([message_of(HELLO, node, "hello") for node in new])
        for node, name in zip(new, names, strict=True):
            if name is not None:
                self._client_of[node] = None
                self._greetings[name] = node
        for reply in self._pull(self._greetings):
            node = self._greetings.pop(reply.metadata.reply_to_message_id, None)
            if node is None or node not in there:
                continue
            if reply.has_error() and reply.error.code != RAISED:
                self._client_of.pop(node, None)
                continue
            self._greet(node, reply)

    def _greet(self, node: int, reply: Any) -> None:
        """Read a node's hello, and turn the node away if it does not fit."""
        client, sender = None, f"node {node}"
        try:
            with reading_from(sender):
                words = read_answer(sender, HELLO, reply).words
                check_count("id", words["id"], least=0, most=LARGEST_ID)
                client = int(words["id"])
                other = self._node_of.get(client)
                # The machine itself, which has returned, has the same tag.
                if other is not None and self.hello[client]["tag"] != words["tag"]:
                    raise RefusedError(
                        f"{sender}: wanted a partition-id of its own, got {client}, which is that "
                        f"of node {other}"
                    )
                self.accept(words)
        except RefusedError as error:
            LOG.warning("node %d stays out: %s", node, error)
            self.turned_away[node] = TurnedAway(client, str(error))
            return
        LOG.info("client %d is node %d", client, node)
        self._client_of[node] = client
        self._node_of[client] = node
        self.hello[client] = words
