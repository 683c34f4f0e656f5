"""Sends the server's questions to clients over a Flower grid, and collects answers by deadlines."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxfed._checks import check_count, shown
from jaxfed.deploy.messages import Packet, message_of, packet_of

LOG = logging.getLogger("jaxfed.deploy")
RAISED = 2  # Flower's code for a ClientApp that raised an exception
PAUSE = 0.2  # seconds between checks for answers


class RefusedError(ValueError):
    """An answer that is an error or makes no sense; asking again would not help."""


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
        raise RefusedError(
            f"{sender}: wanted an answer of jaxfed.deploy, got one that cannot be read "
            f"({type(error).__name__}: {error})"
        ) from error


class Exchange:
    """Keeps track of the connected clients and their answers.

    Clients are known by their partition ids. Each of Flower's nodes is asked once for its client. A
    machine that returns is a new node, which replaces its old one.

    Attributes:
        hello: each client's description of itself, by id.
        accept: called with that description; raises for a client that does not fit the run.
    """

    def __init__(self, grid: Any):
        """Communicate over Flower's grid."""
        self._grid = grid
        self._client_of: dict[int, int | None] = {}  # by node; None until its hello has arrived
        self._node_of: dict[int, int] = {}  # by client
        self._greetings: dict[str, int] = {}  # nodes by the message that asks who they are
        self.hello: dict[int, Mapping[str, Any]] = {}
        self.accept: Callable[[Mapping[str, Any]], None] = lambda words: None

    def gather(self, number: int, patience: float) -> None:
        """Wait until `number` clients are connected.

        Raises:
            TimeoutError: if they are not after `patience` seconds.
        """
        end = time.monotonic() + patience
        while len(self.clients()) < number:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"clients: wanted {number}, and after {patience:g} seconds there are "
                    f"{len(self._node_of)}: {sorted(self._node_of)}"
                )
            time.sleep(PAUSE)

    def clients(self) -> list[int]:
        """The connected clients, in order."""
        self._meet()
        return sorted(self._node_of)

    def ask(
        self,
        questions: Mapping[int, Packet],
        *,
        group: str,
        deadline: float | None,
        at_least: int,
        patience: float,
    ) -> dict[int, Packet]:
        """Ask questions and return the answers that arrive in time, in the clients' order.

        A client that returns as another node is asked again. Further answers to the same question
        are ignored.

        Args:
            questions: by client.
            group: what the messages belong to, such as the round.
            deadline: seconds after which to give up on missing answers, if there are `at_least`
                others; None waits for all.
            at_least: number of answers needed.
            patience: seconds after which too few answers are an error.

        Raises:
            RefusedError: if a client answers with an error, or its answer cannot be read.
            TimeoutError: if too few clients answer.
        """
        start = time.monotonic()
        answers: dict[int, Packet] = {}
        asked: dict[str, int] = {}  # clients by message
        last_node: dict[int, int] = {}  # the node that last received each client's question
        while True:
            self._meet()
            nodes = {
                client: self._node_of[client]
                for client in questions
                if client not in answers
                and self._node_of.get(client) not in (None, last_node.get(client))
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
                if client is None or client in answers:
                    continue
                answer = self._answer(client, reply)
                if answer is not None:
                    answers[client] = answer
            seconds = time.monotonic() - start
            missing = [client for client in questions if client not in answers]
            # With a deadline, do not wait for clients that have left, unless a node that has yet to
            # say hello may be one of them.
            gone = not self._greetings and all(c not in self._node_of for c in missing)
            late = deadline is not None and (seconds >= deadline or gone)
            if not missing or (late and len(answers) >= at_least):
                return {client: answers[client] for client in sorted(answers)}
            if seconds >= max(patience, deadline or 0):
                raise TimeoutError(
                    f"{group}: wanted answers of at least {at_least} clients, got {len(answers)} "
                    f"after {seconds:.0f} seconds; missing are {missing}"
                )
            time.sleep(PAUSE)

    def _answer(self, client: int, reply: Any) -> Packet | None:
        """Read a reply; None if the client was lost before it could answer."""
        if reply.has_error():
            # The app raised an error, and would again; after any other error the client counts as
            # lost.
            if reply.error.code == RAISED:
                raise RefusedError(f"client {client} refuses: {reply.error.reason}")
            LOG.warning("client %d is lost: %s", client, reply.error.reason)
            self._lose(client)
            return None
        with reading_from(f"client {client}"):
            answer = packet_of(reply)
            if (other := answer.words["id"]) != client:
                raise RefusedError(
                    f"client {client}: wanted its own answer, got one of client {shown(other)}; "
                    "partition ids must differ"
                )
            return answer

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
            # The client may have returned as another node meanwhile.
            if client is not None and self._node_of.get(client) == node:
                del self._node_of[client]
        new, hello = sorted(there - self._client_of.keys()), Packet({"kind": "hello"})
        names = self._push([message_of(hello, node, "hello") for node in new])
        for node, name in zip(new, names, strict=True):
            if name is not None:
                self._client_of[node] = None
                self._greetings[name] = node
        for reply in self._pull(self._greetings):
            node = self._greetings.pop(reply.metadata.reply_to_message_id, None)
            if node is None or node not in there:
                continue
            if reply.has_error():
                if reply.error.code == RAISED:
                    raise RefusedError(f"a node refuses: {reply.error.reason}")
                self._client_of.pop(node, None)
                continue
            with reading_from(f"node {node}"):
                words = packet_of(reply).words
                client = words["id"]
                check_count("id", client, least=0)
                self.accept(words)
            LOG.info("client %d is node %d", client, node)
            self._client_of[node] = client
            self._node_of[client] = node
            self.hello[client] = words
