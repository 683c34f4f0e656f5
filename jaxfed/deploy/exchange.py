"""Questions to clients and their answers over a Flower grid, with deadlines."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxfed.core.common.checks import check_count, shown
from jaxfed.deploy.wire import Packet

LOG = logging.getLogger("jaxfed.deploy")
RAISED = 2  # Flower's code for a ClientApp that raised an exception
PAUSE = 0.2  # seconds between two looks for answers


class RefusedError(ValueError):
    """A client that answers with an error of its own, which asking again would not mend."""


@contextmanager
def reading(sender: str) -> Iterator[None]:
    """Read what somebody has sent.

    Raises:
        RefusedError: naming the sender, for whatever else is raised.
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
    """Who is there, and what they say.

    Clients are known by their partition ids. Which of Flower's nodes has which is asked once of
    each node: a machine that comes back is another node, and takes the place of the one it was.
    """

    def __init__(
        self,
        grid: Any,
        message: Callable[[Packet, int, str], Any],
        packet: Callable[[Any], Packet],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Talk over a grid.

        Args:
            grid: Flower's.
            message: makes one of its messages from a packet, the node and a group.
            packet: the packet in a message.
            clock: seconds.
            sleep: waits so many of them.
        """
        self._grid, self._message, self._packet = grid, message, packet
        self._clock, self._sleep = clock, sleep
        self._client_of: dict[int, int | None] = {}  # by node; None until it has said hello
        self._node_of: dict[int, int] = {}  # by client
        self._greetings: dict[str, int] = {}  # nodes by the message that asks them
        self.hello: dict[int, Mapping[str, Any]] = {}  # what each client said of itself
        self.accept: Callable[[Mapping[str, Any]], None] = lambda words: None  # or raises
        self.bytes_sent = self.bytes_received = 0  # of all parts, without any framing

    def gather(self, number: int, patience: float) -> None:
        """Wait until so many clients are there.

        Raises:
            TimeoutError: if they are not after `patience` seconds.
        """
        end = self._clock() + patience
        while len(self._node_of) < number:
            self._meet()
            if len(self._node_of) >= number:
                return
            if self._clock() > end:
                raise TimeoutError(
                    f"clients: wanted {number}, and after {patience:g} seconds there are "
                    f"{len(self._node_of)}: {sorted(self._node_of)}"
                )
            self._sleep(PAUSE)

    def clients(self) -> list[int]:
        """Those that are there, in order."""
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
        """The answers that arrive in time, in the clients' order.

        A question is put again to a client that comes back as another node. A second answer to one
        question is passed over.

        Args:
            questions: by client.
            group: what the messages belong to, such as the round.
            deadline: seconds after which those that are missing are given up, if there are
                `at_least` answers; None: all are waited for.
            at_least: how many answers are needed.
            patience: seconds after which too few answers are an error.

        Raises:
            RefusedError: if a client answers with an error, or with what cannot be read.
            TimeoutError: if too few answer.
        """
        begun = self._clock()
        answers: dict[int, Packet] = {}
        asked: dict[str, int] = {}  # clients by message
        at: dict[int, int | None] = dict.fromkeys(questions)  # the node that was asked
        while True:
            self._meet()
            waiting = [c for c in questions if c not in answers]
            new = [c for c in waiting if self._node_of.get(c) not in (None, at[c])]
            for client, name in zip(
                new, self._push({c: questions[c] for c in new}, group), strict=True
            ):
                at[client] = self._node_of[client]
                if name is None:  # Flower refused it: the node is gone
                    self._lose(client)
                else:
                    asked[name] = client
            for reply in self._pull(asked):
                client = asked.pop(reply.metadata.reply_to_message_id, None)
                if client is None or client in answers:
                    continue  # a second answer
                if reply.has_error():
                    self._failed(client, reply.error)
                    continue
                with reading(f"client {client}"):
                    answers[client] = self._packet(reply)
                    if (other := answers[client].words["id"]) != client:
                        raise RefusedError(
                            f"client {client}: wanted its own answer, got one of client "
                            f"{shown(other)}; partition ids must differ"
                        )
            passed = self._clock() - begun
            missing = [client for client in questions if client not in answers]
            # Who is not there at all is not waited for, if it need not be.
            gone = not self._greetings and all(c not in self._node_of for c in missing)
            late = deadline is not None and (passed >= deadline or gone)
            if len(answers) == len(questions) or (late and len(answers) >= at_least):
                self.bytes_received += sum(len(x.body) for x in answers.values())
                return {client: answers[client] for client in sorted(answers)}
            if passed >= max(patience, deadline or 0):
                raise TimeoutError(
                    f"{group}: wanted answers of at least {at_least} clients, got {len(answers)} "
                    f"after {passed:.0f} seconds; missing are {missing}"
                )
            self._sleep(PAUSE)

    def _push(self, packets: Mapping[int, Packet], group: str) -> list[str | None]:
        if not packets:
            return []
        messages = [
            self._message(packet, self._node_of[client], group)
            for client, packet in packets.items()
        ]
        names = list(self._grid.push_messages(messages))
        self.bytes_sent += sum(len(packet.body) for packet in packets.values())
        return names + [None] * (len(messages) - len(names))

    def _pull(self, asked: Mapping[str, Any]) -> list[Any]:
        return list(self._grid.pull_messages(list(asked))) if asked else []

    def _failed(self, client: int, error: Any) -> None:
        if error.code == RAISED:
            raise RefusedError(f"client {client} refuses: {error.reason}")
        LOG.warning("client %d is lost: %s", client, error.reason)
        self._lose(client)

    def _lose(self, client: int) -> None:
        node = self._node_of.pop(client, None)
        if node is not None:
            # It may say hello again: a machine whose process died comes back as the same node.
            self._client_of.pop(node, None)

    def _meet(self) -> None:
        """Greet nodes that are new, and hear who they are."""
        there = set(self._grid.get_node_ids())
        for node in [node for node in self._client_of if node not in there]:
            client = self._client_of.pop(node)
            if client is not None and self._node_of.get(client) == node:
                del self._node_of[client]
        new = sorted(there - self._client_of.keys())
        if new:
            hello = Packet({"kind": "hello"})
            names = self._grid.push_messages([self._message(hello, node, "hello") for node in new])
            for node, name in zip(new, names, strict=False):
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
            with reading(f"node {node}"):
                words = self._packet(reply).words
                client = words["id"]
                check_count("id", client, least=0)
                self.accept(words)
            LOG.info("client %d is node %d", client, node)
            self._client_of[node] = client
            self._node_of[client] = node
            self.hello[client] = words
