"""The public checks of channels, backends and reductions: ours pass, broken ones are named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.testing import check_backend, check_channel, check_reduction

CLIENTS = 7
RNG = np.random.default_rng(0)
MATRICES, VECTORS = RNG.normal(size=(CLIENTS, 5, 2)), RNG.normal(size=(CLIENTS, 6))

REDUCTIONS = {
    "Mean": (jf.reduction.Mean, MATRICES),
    "Sum": (jf.reduction.Sum, {"matrix": MATRICES, "count": np.arange(CLIENTS)}),
    "Gram": (jf.reduction.Gram, MATRICES),
    "Gram, a sum": (lambda x: jf.reduction.Gram(x, weighted=False), MATRICES),
    "Symmetric": (jf.reduction.Symmetric, VECTORS),
    "Max": (jf.reduction.Max, MATRICES),
    "Gather": (jf.reduction.Gather, MATRICES),
    "Groups": (lambda x: jf.reduction.Groups(x, 3), VECTORS),
    "a bare array": (lambda x: x, VECTORS),
}
CHANNELS = {
    "lossless": jf.channel.lossless(),
    "cast": jf.channel.cast("bfloat16"),
    "quantize": jf.channel.quantize(3),
    "entropy-coded": jf.channel.quantize(4, coding="entropy"),
    "sign": jf.channel.sign(),
    "random_k": jf.channel.random_k(0.5),
    "chain": jf.channel.chain(jf.channel.top_k(0.5), jf.channel.quantize(4)),
    "difference": jf.channel.difference(jf.channel.top_k(0.3)),
    "error_feedback": jf.channel.error_feedback(jf.channel.quantize(4)),
    "gaussian": jf.channel.gaussian(1e3, 0.1),
    "gaussian, shared": jf.channel.gaussian(1e3, 0.1, clients=3),
    "masks": jf.channel.secure_sum(3, bits=24, bound=9.0),
}
BACKENDS = {
    "chunked": lambda: jf.backend.chunked(3),
    "separate": jf.backend.separate,
    "pmap": lambda: jf.backend.pmap(2),
    "shard": lambda: jf.backend.shard(4),
    "chunks on devices": lambda: jf.backend.shard(2, inner=jf.backend.chunked(3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_reduction(name):
    report = check_reduction(*REDUCTIONS[name])
    assert {"absent", "backends", "derivatives"} <= set(report.checked)
    combined = {"monoid", "order"}
    assert combined <= (report.skipped.keys() if name == "Gather" else set(report.checked))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANNELS)
def test_every_channel(name):
    channel = CHANNELS[name]
    report = check_channel(channel)
    declared = {"settles": channel.settles, "private": channel.private}
    assert report.skipped.keys() == {flag for flag, holds in declared.items() if not holds}


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend(name):
    assert not check_backend(BACKENDS[name]()).skipped


def test_a_sum_passes_and_says_so():
    report = check_reduction(jf.reduction.Sum, VECTORS, backends={}, checks=["monoid", "linear"])
    assert report == (("monoid", "linear"), {})
    assert check_channel(jf.channel.lossless(), checks=["bits", "private"]).skipped.keys() == {
        "private"
    }
    assert check_backend(jf.backend.separate(), checks=["few"]).checked == ("few",)


class Late(jf.reduction.Additive):
    """A sum that squares what it adds, and does not hide absent clients."""

    value: jax.Array
    linear = True

    def contribution(self, weight):
        return self

    def over_clients(self):
        return Late((self.value**2).sum(0))


class Ordered(jf.reduction.Reduction):
    """The last client's part."""

    value: jax.Array

    def contribution(self, weight):
        return Ordered(jnp.where(weight > 0, self.value, 0))

    def over_clients(self):
        return Ordered(self.value[-1])

    def neutral(self):
        return Ordered(jnp.ones_like(self.value))

    def combined(self, other):
        return Ordered(other.value)

    @staticmethod
    def over_devices(parts, axis):
        return jax.tree.map(lambda x: jax.lax.all_gather(x, axis)[-1], parts)


class Detached(jf.reduction.Additive):
    value: jax.Array

    def contribution(self, weight):
        return Detached(jnp.where(weight > 0, jax.lax.stop_gradient(self.value), 0))

    def over_clients(self):
        return Detached(self.value.sum(0))


@pytest.mark.parametrize(
    ("part", "check", "sentence"),
    [
        (Ordered, "monoid", "combined is commutative"),
        (Ordered, "order", "the order of clients does not matter"),
        (Late, "absent", "absent clients' parts do not count"),
        (Late, "linear", "the result is linear in what clients send"),
        (Detached, "derivatives", "all derivatives are zero"),
    ],
)
def test_a_broken_reduction_is_reported(part, check, sentence):
    with pytest.raises(AssertionError, match=sentence) as error:
        check_reduction(part, VECTORS, checks=[check])
    assert error.value.__notes__ == [f"This check alone: check_reduction(..., checks=[{check!r}])."]


class Plain(jf.channel.Channel):
    """Sends messages as they are; subclasses break one thing."""

    def encode(self, key, message, memory):
        return message, memory

    def decode(self, payload):
        return payload


class Inverse(Plain):
    """Divides by what may be zero."""

    def decode(self, payload):
        return jax.tree.map(lambda x: x * (x / x), payload)


class Rounding(Plain):
    settles = True

    def encode(self, key, message, memory):
        return jax.tree.map(jnp.round, message), memory


class Open(Plain):
    private = True


class Narrow(Plain):
    def decode(self, payload):
        return jax.tree.map(lambda x: x.astype("float32"), payload)


@pytest.mark.parametrize(
    ("channel", "check", "sentence"),
    [
        (Inverse(), "finite", "what is received is finite: of zeros"),
        (Rounding(), "settles", "arrives without loss"),
        (Open(), "private", "with another key, most numbers at .* are the same"),
        (Rounding(), "derivatives", "all derivatives are zero"),
    ],
)
def test_a_broken_channel_is_reported(channel, check, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_channel(channel, checks=[check])


def test_a_channel_that_breaks_the_contract_is_refused():
    with pytest.raises(ValueError, match=r"^Narrow\.receive\(decode\(payload\)\): wanted .*f64"):
        check_channel(Narrow(), checks=["shapes"])


class Halves(jf.backend.OneDevice):
    """Maps clients, and breaks one thing."""

    wrong: str = ""

    def map_clients(self, work, shared, own):
        if self.wrong == "derivatives":
            shared = jax.lax.stop_gradient(shared)
        sent, kept = jax.vmap(work, in_axes=(None, 0))(shared, own)
        if self.wrong == "vmap":
            kept = jax.tree.map(lambda x: jnp.roll(x, 1, 0), kept)
        if self.wrong == "buckets" and len(jax.tree.leaves(own)[0]) == CLIENTS:
            sent = jax.tree.map(lambda x: x[:-1], sent)
        return jf.reduction.over_clients(sent), kept

    def in_blocks(self, size, remembered):
        return Halves("vmap") if self.wrong == "blocks" else self


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("vmap", "the backend gives what vmap gives"),
        ("buckets", "clients in buckets give what vmap gives"),
        ("blocks", "in_blocks gives what vmap gives"),
        ("derivatives", "derivatives are those of vmap"),
    ],
)
def test_a_broken_backend_is_reported(wrong, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_backend(Halves(wrong), checks=[wrong])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (functools.partial(check_channel, "text"), "channel: wanted one of jaxfed.channel"),
        (functools.partial(check_channel, Plain(), clients=0), "clients: wanted"),
        (
            functools.partial(check_channel, Plain(), checks=["all"]),
            "checks: wanted some of shapes",
        ),
        (functools.partial(check_backend, "text"), "backend: wanted a jaxfed.backend.Backend"),
        (functools.partial(check_backend, Halves(), clients=2), "clients: wanted"),
        (functools.partial(check_reduction, "text", VECTORS), "part: wanted a function"),
        (functools.partial(check_reduction, Late, VECTORS[:2]), "values: wanted arrays with one"),
        (functools.partial(check_reduction, Late, VECTORS, weights=[1, 0]), "weights: wanted"),
        (functools.partial(check_reduction, Late, VECTORS, weights=[0] * 7), "weights: wanted"),
        (functools.partial(check_reduction, Late, "text"), "values: wanted arrays of finite"),
        (functools.partial(check_channel, Plain(), ["text"]), "message: wanted arrays of finite"),
        (functools.partial(check_channel, Plain(), key="text"), "key: wanted"),
    ],
)
def test_bad_arguments_are_refused(call, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        call()
