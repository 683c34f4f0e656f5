"""A Flower grid within this process: clients answer when the server looks for answers."""

import itertools
from types import SimpleNamespace

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

SERVER = 1


class LocalGrid(Grid):
    """Nodes with a ClientApp each, behind Flower's own serialization; no socket, no process.

    `trouble(node, message, answer)` may return other answers in place of the answer: none, an
    error, two.
    """

    def __init__(self, apps, run_config, node_configs, trouble=None):
        self.nodes = {
            100 + i: (app, config)
            for i, (app, config) in enumerate(zip(apps, node_configs, strict=True))
        }
        self.run_config, self.trouble, self.run_id = run_config, trouble, 1
        self.seen = []  # all that the server has received, as it was on the wire
        self.sent = []
        self._names = itertools.count()
        self._waiting, self._answers = {}, []
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SERVER

    def set_run(self, run):
        pass

    @property
    def run(self):
        return SimpleNamespace(run_id=self.run_id)

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        names = []
        for message in messages:
            if message.metadata.dst_node_id not in self.nodes:
                names.append(None)
                continue
            name = f"message-{next(self._names)}"
            message.metadata.__dict__["_message_id"] = name
            travelled, contents = wire(message)
            self.sent.append(contents)
            self._waiting[name] = travelled
            names.append(name)
        return names

    def pull_messages(self, message_ids):
        wanted = set(message_ids)
        # Last come, first served: an order that is none of the clients'.
        for name in reversed([name for name in self._waiting if name in wanted]):
            self._answer(name, self._waiting.pop(name))
        ready = [reply for reply in self._answers if reply.metadata.reply_to_message_id in wanted]
        self._answers = [reply for reply in self._answers if reply not in ready]
        return ready

    def _answer(self, name, message):
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return
        app, config = self.nodes[node]
        context = Context(self.run_id, node, dict(config), RecordDict(), dict(self.run_config))
        try:
            replies = [app(message, context)]
        except Exception as error:  # as Flower's own process does
            replies = [Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)]
        if self.trouble is not None:
            replies = self.trouble(node, message, replies[0])
        for reply in replies:
            assert reply.metadata.reply_to_message_id == name
            if reply.has_error():
                # Flower's own errors come from the server's own node, not from the dead one.
                reply.metadata.__dict__["_src_node_id"] = SERVER
                self._answers.append(reply)
            else:
                travelled, contents = wire(reply)
                self.seen.append(contents)
                self._answers.append(travelled)


def wire(message):
    """A message after Flower's serialization, and all the bytes that it was."""
    name = message.metadata.message_id
    objects = get_all_nested_objects(message)
    contents = {key: each.deflate() for key, each in objects.items()}
    (root,) = [key for key, each in objects.items() if isinstance(each, Message)]
    travelled = inflate_object_from_contents(root, dict(contents))
    travelled.metadata.__dict__["_message_id"] = name
    return travelled, b"".join(contents.values())
