"""A federation over Flower within this process, and comparisons with `fit`."""

import jax
import numpy as np
import pytest

import jaxfed as jf

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict

from jaxfed.deploy import flower
from tests.deploy.flower_grid import LocalGrid

SEPARATE = jf.backend.separate()


def alone(clients, number):
    """One of these clients as its machine holds it: not padded to the longest."""
    data = jax.tree.map(lambda x: x[number], clients.data)
    count = int(data.count)
    if isinstance(clients, jf.gcca.Views):
        return jf.gcca.Views.from_arrays([np.asarray(data.values[:, :count])])
    missing = "mask" if np.isnan(data.values).any() else "refuse"
    return jf.Clients.from_samples([np.asarray(data.values[:count])], missing=missing)


class Federation:
    """Clients behind a grid, and a server for them."""

    def __init__(
        self,
        folder,
        algorithm,
        clients,
        *,
        channel=None,
        weights="equal",
        precision=None,
        order=None,
        trouble=None,
    ):
        self.folder, self.algorithm, self.clients = folder, algorithm, clients
        self.channel = jf.channel.lossless() if channel is None else channel
        self.app = flower.client_app(
            lambda config: algorithm,
            lambda config: alone(self.clients, config["partition-id"]),
            channel=self.channel,
            weights=weights,
            precision=precision,
            folder=folder / "nodes",
        )
        order = range(len(clients)) if order is None else order
        configs = [{"partition-id": i} for i in order]
        self.grid = LocalGrid([self.app] * len(configs), {}, configs, trouble)

    def run(self, rounds, *, out="out", **options):
        """The saved solution."""
        given = {"clients": len(self.grid.nodes), "key": 3, "channel": self.channel}
        app = flower.server_app(
            lambda config: self.algorithm, rounds=rounds, out=self.folder / out, **(given | options)
        )
        app(self.grid, Context(1, 1, {}, RecordDict(), {}))
        return jf.load(self.folder / out / "solution.npz", like=None)

    def local(self, number):
        """The model that one machine has in the end."""
        (path,) = (self.folder / "nodes").glob(f"*/client-{number}/result.npz")
        return path

    def fit(self, rounds, **options):
        """The same in one process."""
        return jf.fit(
            self.algorithm,
            self.clients,
            rounds=rounds,
            key=jax.random.key(3),
            channel=self.channel,
            backend=SEPARATE,
            **options,
        )


def check_equal(federation, saved, solution):
    """Bit for bit, on the server and on every machine."""
    for name, values in solution.history.items():
        np.testing.assert_array_equal(saved.history[name], values, name)
    same(federation.folder / "out" / "solution.npz", solution.result.shared, "shared")
    for i in range(len(solution.failure.clients)):
        own = jax.tree.map(lambda x, i=i: x[i : i + 1], solution.result.local)
        same(federation.local(i), own, "local")


def same(path, tree, part):
    """Whether a file's part is this tree, bit for bit."""
    with np.load(path) as stored:
        found = [stored[name] for name in stored.files if name.split(".")[0].split("[")[0] == part]
    wanted = [np.asarray(x) for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
