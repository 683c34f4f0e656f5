"""Bad input is refused before anything runs, by a message that names the argument."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import jaxfed as jf

NAN, INF = float("nan"), float("inf")
FEATURES, CLIENTS = 4, 3


class Frame:
    """What converts to an array, such as a data frame or a tensor, and prints on many lines."""

    shape = (3, 2)

    def __array__(self, dtype=None, copy=None):
        return np.zeros(self.shape)

    def __repr__(self):
        return "a  b\n0  0\n0  0"


def block(**changed):
    values = np.random.default_rng(0).normal(size=(CLIENTS, 6, FEATURES)).astype(np.float32)
    for index, value in changed.get("put", {}).items():
        values[index] = value
    return values


def clients():
    return jf.Clients.from_samples(block())


def run(algorithm=None, *, with_rollout=True, **changed):
    """Both ways to run must refuse alike."""
    algorithm = algorithm or jf.pca.PerPCA(1, 1, solver="gradient")
    arguments = {"clients": clients(), "rounds": 2, "key": jax.random.key(0), **changed}
    given = arguments.pop("clients")
    messages = []
    for way in (jf.fit, jf.rollout) if with_rollout else (jf.fit,):
        with pytest.raises(ValueError) as refusal:
            way(algorithm, given, **arguments)
        messages.append(str(refusal.value))
    assert len(set(messages)) == 1
    raise ValueError(messages[0])


def start(shared, local):
    return jf.Personalized(jnp.ones(shared), jnp.ones(local))


def mixed(*arrays):
    return jf.Clients.from_samples([block()[0], *arrays])


ONE = block()[1]
SYMMETRIC = np.stack([np.eye(FEATURES, dtype=np.float32)] * CLIENTS)

DATA = {
    "a frame": (
        lambda: jf.Clients.from_samples([Frame()]),
        r"arrays\[0\]: wanted .* got a Frame of shape \(3, 2\); convert it with numpy.asarray",
    ),
    "no clients": (lambda: jf.Clients.from_samples([]), "arrays: at least one client is needed"),
    "no clients in a block": (
        lambda: jf.Clients.from_samples(np.zeros((0, 3, 4), "f")),
        "arrays: no axis may be empty",
    ),
    "no samples in a block": (
        lambda: jf.Clients.from_samples(np.zeros((3, 0, 4), "f")),
        "arrays: no axis may be empty",
    ),
    "a client without samples": (
        lambda: mixed(np.zeros((0, FEATURES), "f")),
        r"arrays\[1\]: a client needs at least one sample, or weight 0, got none",
    ),
    "no features": (
        lambda: jf.Clients.from_samples([np.zeros((3, 0), "f")]),
        r"arrays\[0\]: at least one feature is needed",
    ),
    "other features": (
        lambda: mixed(ONE, ONE[:, :3]),
        r"arrays\[2\]: has 3 features where arrays\[0\] has 4",
    ),
    "NaN": (
        lambda: jf.Clients.from_samples(block(put={(1, 2, 3): NAN})),
        r"arrays: NaN at index \(1, 2, 3\); with missing=.mask. NaN stands for an entry",
    ),
    "infinite": (
        lambda: mixed(np.where(ONE[4, 1] == ONE, -INF, ONE)),
        r"arrays\[1\]: NaN or infinite value at index \(4, 1\)",
    ),
    "infinite in single precision": (
        lambda: jf.Clients.from_samples(block().astype(np.float64) * 1e300),
        r"arrays: wanted numbers that single precision holds, got [0-9.]+e\+300 as feature \d",
    ),
    "large integers": (
        lambda: jf.Clients.from_samples(np.full((2, 3, 4), -(2**63))),
        r"arrays: wanted whole numbers up to 2\*\*53, .*got -9223372036854775808",
    ),
    "a feature far from zero": (
        lambda: jf.Clients.from_samples([ONE.astype(float) + np.asarray([0, 0, 1.7e9, 0])] * 2),
        "arrays: wanted features that single precision holds, got feature 2",
    ),
    "masked entries": (
        lambda: mixed(np.ma.masked_array(ONE, ONE[1, 1] == ONE)),
        r"arrays\[1\]: wanted complete numbers, got masked entries; missing='mask'",
    ),
    "extended precision": (
        lambda: mixed(ONE.astype(np.longdouble)),
        r"arrays\[1\]: wanted real.*got .*; convert with .astype\(numpy.float64\)",
    ),
    "extended precision of an array": (
        lambda: jf.linalg.polar(ONE.astype(np.longdouble)),
        "w: wanted an array .* in double precision at most, got an array of float",
    ),
    "time differences": (lambda: mixed(ONE.astype("timedelta64[s]")), r"arrays\[1\]: wanted real"),
    "a column of text": (
        lambda: mixed(pd.DataFrame({"age": [1.0, 2], "name": ["a", "b"]})),
        r"arrays\[1\]: wanted columns of numbers, got column 'name' of type",
    ),
    "missing values in a column": (
        lambda: mixed(pd.DataFrame({"age": pd.array([1, None], "Int64")})),
        r"arrays\[1\]: wanted complete numbers, got missing values; missing='mask'",
    ),
    "large integers in a column": (
        lambda: mixed(pd.DataFrame({"id": [2**60, 1]})),
        r"arrays\[1\], column 'id': wanted whole numbers",
    ),
    "booleans": (
        lambda: jf.Clients.from_samples(np.ones((2, 3, 4), bool)),
        "arrays: wanted real.*got bool",
    ),
    "complex": (
        lambda: jf.Clients.from_samples(np.ones((2, 3, 4), complex)),
        "arrays: wanted.*complex128",
    ),
    "half precision": (
        lambda: jf.Clients.from_samples(np.ones((2, 3, 4), np.float16)),
        r"arrays: wanted .* \(float32, float64 or bfloat16\), got float16; convert",
    ),
    "views of half precision": (
        lambda: jf.gcca.Views.from_arrays([jnp.ones((3, 4), jnp.bfloat16)]),
        r"arrays\[0\]: wanted .* \(float32 or float64\), got bfloat16; convert with .astype",
    ),
    "text": (lambda: mixed(np.full((2, FEATURES), "a")), r"arrays\[1\]: wanted real"),
    "one client's array": (
        lambda: jf.Clients.from_samples(ONE),
        r"arrays: wanted a list.*of shape \(6, 4\)",
    ),
    "vectors": (lambda: mixed(ONE[0]), r"arrays\[1\]: wanted shape \(samples, features\)"),
    "not a list": (lambda: jf.Clients.from_samples({"a": ONE}), "arrays: wanted a list.*'a'"),
    "weights by another name": (
        lambda: jf.Clients.from_samples(block(), weights="size"),
        "weights: wanted 'equal', 'samp",
    ),
    "too few weights": (
        lambda: jf.Clients.from_samples(block(), weights=[1, 2]),
        "weights: wanted 3 numbers",
    ),
    "negative weights": (
        lambda: jf.Clients.from_samples(block(), weights=[1, 2, -1]),
        "weights: .*non-negative",
    ),
    "no weight": (lambda: jf.Clients.from_samples(block(), weights=[0, 0, 0]), "weights: .*zero"),
    "NaN as a weight": (
        lambda: jf.Clients.from_samples(block(), weights=[1, NAN, 1]),
        "weights: wanted finite",
    ),
    "matrices that are not square": (
        lambda: jf.Clients.from_moments(block()),
        r"matrices: wanted shape .*got \(3, 6, 4\)",
    ),
    "matrices that are not symmetric": (
        lambda: jf.Clients.from_moments(SYMMETRIC + np.triu(SYMMETRIC + 1, 1)),
        "matrices: a second moment is symmetric",
    ),
    "NaN in a matrix": (
        lambda: jf.Clients.from_moments(SYMMETRIC * np.float32(NAN)),
        "matrices: NaN or infinite",
    ),
    "too few counts": (
        lambda: jf.Clients.from_moments(SYMMETRIC, counts=[3, 4]),
        "counts: wanted 3 positive",
    ),
    "no samples behind a matrix": (
        lambda: jf.Clients.from_moments(SYMMETRIC, counts=[3, 0, 4]),
        "counts: wanted 3 positive",
    ),
    "weights without counts": (
        lambda: jf.Clients.from_moments(SYMMETRIC, weights="samples"),
        "counts: weights='samples'",
    ),
}

HYPERPARAMETERS = {
    "no shared component": (
        lambda: jf.pca.PerPCA(0, 1, solver="gradient"),
        "shared_rank: .*at least 1, got 0",
    ),
    "negative rank": (
        lambda: jf.pca.PerPCA(1, -2, solver="gradient"),
        "local_rank: .*at least 1, got -2",
    ),
    "fraction": (
        lambda: jf.pca.PerPCA(1.5, 1, solver="gradient"),
        "shared_rank: wanted a whole number.*got 1.5",
    ),
    "a negative rank among several": (
        lambda: jf.pca.PerPCA(1, (1, -1), solver="gradient"),
        "local_rank: .*got -1",
    ),
    "no client has components": (
        lambda: jf.pca.PerPCA(1, (0, 0), solver="gradient"),
        "local_rank: at least one",
    ),
    "no ranks": (
        lambda: jf.pca.PerPCA(1, (), solver="gradient"),
        "local_rank: at least one client",
    ),
    "negative step": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient", step_size=-0.1),
        "step_size: wanted a positive .*got -0.1",
    ),
    "no step": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.0),
        "step_size: wanted a positive",
    ),
    "NaN step": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient", step_size=NAN),
        "step_size: wanted.*got nan",
    ),
    "infinite step": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient", step_size=INF),
        "step_size: wanted.*got inf",
    ),
    "a step in words": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient", step_size="auto"),
        "step_size: .*'auto'",
    ),
    "complex step": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient", step_size=1j),
        "step_size: wanted a positive",
    ),
    "one bad step of several": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient", step_size=jnp.asarray([0.1, -0.1])),
        "step_size: wanted",
    ),
    "negative decay": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient", decay=-1.0),
        "decay: wanted a positive",
    ),
    "unknown retraction": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient", retraction="cayley"),
        "retraction: wanted one of polar, qr, got 'cayley'",
    ),
    "unknown variant": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient", variant=2),
        "variant: wanted one of tangent, polar, power, got 2",
    ),
    "a step of power iteration": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient", variant="power", step_size=0.1),
        "step_size: wanted None with variant='power', which has no steps, got 0.1",
    ),
    "unknown start": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient", start="qu"),
        "start: wanted one of common",
    ),
    "unknown method": (lambda: jf.pca.OneShot(1, 1, method="qu"), "method: wanted one of proj"),
}

RUNS = {
    "more components than features": (
        lambda: run(jf.pca.PerPCA(3, 2, solver="gradient")),
        "shared_rank [+] local_rank: 5 orthonormal components do not fit into 4 features",
    ),
    "more components of one client": (
        lambda: run(jf.pca.PerPCA(3, (1, 2, 0), solver="gradient")),
        "shared_rank [+] local_rank: 5 ortho",
    ),
    "as many ranks as other clients": (
        lambda: run(jf.pca.PerPCA(1, (1, 2), solver="gradient")),
        "local_rank: 2 ranks for 3 clients",
    ),
    "ranks of clients that are gone": (
        lambda: run(jf.pca.PerPCA(1, (1, 2), solver="gradient"), clients=clients().take([1, 2])),
        "local_rank: the 2 ranks are those of the ids 0 to 1",
    ),
    "pooled components": (lambda: run(jf.pca.Pooled(5)), "rank: 5 orthonormal components"),
    "local components": (lambda: run(jf.pca.Local(5)), "rank: 5 orthonormal components"),
    "one shot": (lambda: run(jf.pca.OneShot(2, 3)), "shared_rank [+] local_rank: 5 ortho"),
    "no rounds": (lambda: run(rounds=0), "rounds: wanted a positive whole number.*, got 0"),
    "negative rounds": (lambda: run(rounds=-5), "rounds: wanted a positive whole number.*, got -5"),
    "half a round": (lambda: run(rounds=2.5), "rounds: wanted a positive whole number.*, got 2.5"),
    "True as rounds": (lambda: run(rounds=True), "rounds: wanted a positive whole"),
    "too many digits": (lambda: run(rounds=-(10**5000)), r"rounds: wanted .*, got -2\^16610"),
    "too many digits in a list": (
        lambda: run(rounds=[10**5000, 2]),
        r"rounds: wanted .*, got \[2\^16610, 2\]",
    ),
    "not an algorithm": (lambda: run("PerPCA"), "algorithm: wanted a jaxfed algorithm, got 'Per"),
    "the class itself": (
        lambda: run(jf.pca.PerPCA),
        r"algorithm: wanted a jaxfed algorithm, got the class PerPCA; call it: PerPCA\(...\)",
    ),
    "samples": (
        lambda: run(clients=block()),
        r"clients: wanted jaxfed.Clients, got ndarray; build them",
    ),
    "no key": (lambda: run(key=None), "key: wanted .*got None"),
    "a seed": (lambda: run(key=0), "key: wanted .*got 0"),
    "several keys": (lambda: run(key=jax.random.split(jax.random.key(0))), "key: wanted one"),
    "backend by name": (lambda: run(backend="vmap"), "backend: wanted one of jaxfed.backend"),
    "backend not made": (lambda: run(backend=jf.backend.vmap), "backend: wanted one of"),
    "channel by name": (lambda: run(channel="sign"), "channel: wanted a channel, or jf.Wire"),
    "participation as a share": (lambda: run(participation=0.5), "participation: wanted one of"),
    "more participants than clients": (
        lambda: run(participation=jf.participation.uniform(4)),
        "participation: 4 clients a round were asked for, there are 3",
    ),
    "another mask": (
        lambda: run(participation=jf.participation.mask(np.ones((2, 5), bool))),
        "participation: the mask is for 5 clients, there are 3",
    ),
    "negative tolerance": (lambda: run(tol=-1e-3), "tol: wanted a non-negative number .*-0.001"),
    "NaN as tolerance": (lambda: run(tol=NAN), "tol: wanted a non-negative number"),
    "tolerance in words": (lambda: run(tol="small"), "tol: wanted a non-negative .*'small'"),
    "no metrics_every": (lambda: run(metrics_every=0), "metrics_every: wanted a whole number"),
    "metrics as a name": (lambda: run(metrics="error"), "metrics: wanted a function"),
    "no chunk": (
        lambda: run(rounds_per_chunk=0, with_rollout=False),
        "rounds_per_chunk: wanted a whole number",
    ),
    "half a round a chunk": (
        lambda: run(rounds_per_chunk=1.5, with_rollout=False),
        "rounds_per_chunk: wanted a whole number",
    ),
    "checkpoint as a path": (
        lambda: run(checkpoint="runs", with_rollout=False),
        "checkpoint: wanted .*'runs'",
    ),
    "warm start of another kind": (
        lambda: run(warm_start=np.eye(4)),
        "warm_start: wanted a solution, its result, a fitted estimator, or what",
    ),
    "warm start of other clients": (
        lambda: run(warm_start=start((4, 1), (2, 4, 1))),
        "warm_start: .*2 clients, there are 3",
    ),
    "warm start of other features": (
        lambda: run(warm_start=start((5, 1), (3, 5, 1))),
        r"warm_start: .*\(4, 1\), got \(5, 1\)",
    ),
    "warm start of another shared rank": (
        lambda: run(warm_start=start((4, 2), (3, 4, 1))),
        r"warm_start: .*\(4, 1\), got \(4, 2\)",
    ),
    "warm start of another local rank": (
        lambda: run(warm_start=start((4, 1), (3, 4, 2))),
        r"warm_start: wanted local .*\(3, 4, 1\), got \(3, 4, 2\)",
    ),
    "warm start of other local features": (
        lambda: run(warm_start=start((4, 1), (3, 5, 1))),
        r"warm_start: .*local.*\(3, 5, 1\)",
    ),
    "warm start that is not finite": (
        lambda: run(warm_start=jf.Personalized(jnp.full((4, 1), NAN), jnp.ones((3, 4, 1)))),
        "warm_start: wanted finite shared components, got NaN",
    ),
    "warm start of a variable projection": (
        lambda: run(jf.pca.PerPCA(1, 1), warm_start=start((4, 2), (3, 4, 1))),
        r"warm_start: .*\(4, 1\), got \(4, 2\)",
    ),
}


class Own(jf.Algorithm):
    """An algorithm of one's own, of which one function returns something else."""

    function: str = eqx.field(static=True)
    returned: Any = eqx.field(static=True)
    number: Any = 1.0

    def first_message(self, key, data, warm_start):
        return self._answer("first_message", None)

    def server_init(self, key, first, like, warm_start):
        return jnp.zeros(3)

    def downlink(self, server):
        return server

    def client_init(self, key, downlink, data, warm_start):
        return jnp.zeros(2)

    def client_step(self, key, downlink, local, data):
        return self._answer("client_step", (1.0, local, {"objective": 1.0}))

    def server_step(self, key, server, uplink):
        return self._answer("server_step", (server, {}))

    def _answer(self, function, answer):
        return self.returned() if function == self.function else answer


class Pair(NamedTuple):
    mean: jax.Array
    count: jax.Array


class Fields(Own):
    """One whose states have as many fields as its steps return results."""

    def server_init(self, key, first, like, warm_start):
        return Pair(jnp.zeros(3), jnp.zeros(2))

    def client_init(self, key, downlink, data, warm_start):
        return jnp.ones(1), jnp.ones(1), jnp.ones(1)


def own(function, make, message):
    algorithm = Own(function, make)
    return lambda: run(algorithm), f"algorithm: wanted of Own.{function} {message}"


GOOD = {"objective": 1.0}

OWN = {
    "a field that is not static": (
        lambda: run(Own("", None, "one")),
        "algorithm: wanted numbers and arrays as fields of Own, and others static, got 'one'",
    ),
    "too few results": own(
        "client_step", lambda: (jnp.ones(3), jnp.ones(2)), r"\(uplink, local, diagnostics\), got"
    ),
    "no results": own("client_step", lambda: None, r"\(uplink, .*got None"),
    "no names": own(
        "client_step", lambda: (1.0, jnp.ones(2), jnp.ones(())), r"diagnostics by name, got f32\[\]"
    ),
    "no objective": own("client_step", lambda: (1.0, jnp.ones(2), {}), "a scalar 'objective'"),
    "several objectives": own(
        "client_step", lambda: (1.0, jnp.ones(2), {"objective": jnp.ones(2)}), "a scalar 'obj"
    ),
    "a name of the history": own(
        "client_step",
        lambda: (1.0, jnp.ones(2), GOOD | {"bits_up": 1.0}),
        "diagnostics with o",
    ),
    "a client's state alone": (
        lambda: run(Fields("client_step", lambda: (jnp.ones(1), jnp.ones(1), jnp.ones(1)))),
        r"algorithm: wanted of Fields.client_step \(uplink, local, diagnostics\), got \(f32\[1\]",
    ),
    "words": own("client_step", lambda: ("up", jnp.ones(2), GOOD), "arrays, got 'up'"),
    "another state": own(
        "client_step", lambda: (1.0, jnp.ones(5), GOOD), r"a state .*client_init, f32\[2\], got"
    ),
    "words at first": own("first_message", lambda: "up", "arrays, got 'up'"),
    "a server's state alone": own(
        "server_step", lambda: jnp.zeros(3), r"\(server, diagnostics\), got f32\[3\]"
    ),
    "a server's state of two fields alone": (
        lambda: run(Fields("server_step", lambda: Pair(jnp.zeros(3), jnp.zeros(2)))),
        r"algorithm: wanted of Fields.server_step \(server, diagnostics\), got Pair\(",
    ),
    "another server's state": own(
        "server_step", lambda: (jnp.zeros(4), {}), r"a state .*server_init, f32\[3\], got f32\[4\]"
    ),
    "a server's words": own("server_step", lambda: (jnp.zeros(3), "x"), "diagnostics by name, got"),
}

CASES = [
    pytest.param(make, message, id=name)
    for table in (DATA, HYPERPARAMETERS, RUNS, OWN)
    for name, (make, message) in table.items()
]


@pytest.mark.parametrize(("make", "message"), CASES)
def test_refused(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_two_precisions_do_not_mix_where_both_are_there(x64):
    with pytest.raises(ValueError, match=r"^arrays\[1\]: is float64 where arrays\[0\] is float32"):
        mixed(ONE.astype(np.float64))


def test_values_are_not_looked_at_under_a_transformation():
    """What is traced has no values to refuse yet; shapes are refused all the same."""

    @jax.jit
    def loss(values, step_size):
        algorithm = jf.pca.PerPCA(1, 1, solver="gradient", step_size=step_size)
        given = jf.Clients.from_samples(values)
        return jf.rollout(algorithm, given, rounds=1, key=jax.random.key(0)).history["objective"]

    assert jnp.isfinite(loss(block(), 0.1)).all()
    assert jnp.isnan(loss(block(put={(0, 0, 0): NAN}), 0.1)).all()
    with pytest.raises(ValueError, match="do not fit into 1 features"):
        loss(block()[:, :, :1], 0.1)
