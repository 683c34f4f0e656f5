"""The public check finds what is wrong and says so in a sentence."""

import functools
import inspect
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.testing import CHECKS, _compare, check_algorithm
from tests.helpers import gaussian

sampled = functools.partial(gaussian, (5, 4, 7, 6), (1, 1, 1))


class Average(jf.Algorithm):
    """The mean of all clients' means, and each client's distance to it, as briefly as possible.

    What the tests break is a field, or a method of a subclass.
    """

    step: jax.Array = eqx.field(converter=jf.hyperparameter, default=0.5)

    def check(self, clients, warm_start):
        if not isinstance(clients.parts[0], jf.Samples):
            raise ValueError(f"clients: wanted samples, got {type(clients.data).__name__}")

    def mean(self, data):
        return data.values.sum(0) / data.count

    def server_init(self, key, first, like, warm_start):
        return jnp.zeros(like.values.shape[-1:], like.values.dtype)

    def downlink(self, server):
        return server

    def client_init(self, key, downlink, data, warm_start):
        return downlink - self.mean(data)

    def client_step(self, key, downlink, local, data):
        offset = self.mean(data) - downlink
        return offset, -offset, {"objective": (offset**2).sum()}

    def server_step(self, key, server, uplink):
        return server + self.step * uplink, {}


def test_the_contract_is_five_functions_and_at_most_twelve_with_defaults():
    """Nine with defaults say how a run goes, three what its result means.

    The three are `remarks`, `through` and `bases`. Each is rarely needed, but as classes to inherit
    from they were as many to know, and whoever calls them had to ask for the class.
    """
    functions = {name for name, value in vars(jf.Algorithm).items() if inspect.isfunction(value)}
    assert len(jf.Algorithm.__abstractmethods__) == 5
    assert len({name for name in functions if name[0] != "_"}) <= 17


class Empty(Average):
    def first_message(self, key, data, warm_start):
        return jnp.zeros((0, 2), data.values.dtype)


class Infinite(Average):
    def server_step(self, key, server, uplink):
        return server + uplink / 0.0, {}


class Single(Average):
    def server_step(self, key, server, uplink):
        return (server + self.step * uplink.astype(jnp.float32)).astype(server.dtype), {
            "size": jnp.float32(1)
        }


class Hasty(Average):
    """With a derivative that is not finite where the function is."""

    def server_step(self, key, server, uplink):
        return server + self.step * uplink + jnp.sqrt(jnp.sum(uplink * 0)), {}


class Stopped(Average):
    def mean(self, data):
        return jax.lax.stop_gradient(data.values.sum(0) / data.count)


class Wrong(Average):
    """With half a derivative."""

    def mean(self, data):
        mean = data.values.sum(0) / data.count
        return mean / 2 + jax.lax.stop_gradient(mean / 2)


class Dividing(Average):
    """It divides by what a channel may set to zero."""

    def server_step(self, key, server, uplink):
        return server + self.step * uplink * (uplink / uplink), {}


class Padded(Average):
    def mean(self, data):
        return data.values.mean(0)


class Quadratic(Average):
    """With a claim that does not hold for means."""

    quadratic_in_samples = True


class Trusting(Average):
    def check(self, clients, warm_start):
        pass


@pytest.mark.slow
def test_an_algorithm_that_keeps_the_contract_passes():
    report = check_algorithm(Average(), sampled(), deterministic=True)
    assert set(report.checked) | report.skipped.keys() == set(CHECKS)
    # A mean is not quadratic in the samples, and says so.
    assert report.skipped.keys() <= {"checkpoint", "samples"}


BROKEN = {
    "structure": (Empty, r"None, never an array without elements: got shape \(0, 2\)"),
    "structure, numbers": (Infinite, "the result and the objective are finite"),
    "types": (Single, "numbers have the data's type: got float32"),
    "gradients": (Hasty, "derivatives by hyperparameters and data are finite"),
    "gradients, zero": (Stopped, "the result depends on the data"),
    "gradients, wrong": (Wrong, "equal finite differences"),
    "padding": (Padded, "a further client of weight 0 and padding change nothing"),
    "samples": (Quadratic, "a sample times the root of a weight counts as that many samples"),
    "channels": (Dividing, r"a run through a channel has finite numbers: top_k\(0.5\)"),
    "refusals": (Trusting, "data of an unknown kind is refused by a ValueError that begins"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_violation_is_reported(name):
    kind, sentence = BROKEN[name]
    with pytest.raises(AssertionError, match=sentence):
        check_algorithm(
            kind(),
            sampled(),
            checks=[name.partition(",")[0]],
            deterministic=True,
            channels={"top_k(0.5)": jf.channel.top_k(0.5)},
        )


def test_the_check_that_fails_is_named_and_progress_is_shown(capsys):
    with pytest.raises(AssertionError) as raised:
        check_algorithm(Trusting(), sampled(), progress=True)
    assert raised.value.__notes__ == [
        "This check alone: check_algorithm(..., checks=['refusals'])."
    ]
    check_algorithm(Average(), sampled(), checks=["refusals"], progress=True)
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("refusals ... refusals ... passed, ") and shown.endswith(" s")


@pytest.mark.parametrize(
    ("function", "check", "wanted"),
    [
        ({"essence": lambda result: result.shared}, "order", r"returns a pair \(shared, local\)"),
        ({"loss": lambda result: result.shared}, "gradients", "returns a scalar array of floats"),
        ({"constraint": lambda result: False}, "structure", "raises an AssertionError, or else"),
    ],
)
def test_functions_that_return_something_else_are_named(function, check, wanted):
    (name,) = function
    with pytest.raises(ValueError, match=rf"^{name}: wanted a function that {wanted}"):
        check_algorithm(Average(), sampled(), checks=[check], **function)


@pytest.mark.parametrize("name", ["essence", "loss", "constraint", "pad"])
def test_what_is_no_function_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name}: wanted a function or None, got 3"):
        check_algorithm(Average(), sampled(), **{name: 3})


def test_progress_is_shown_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    check_algorithm(Average(), sampled(), checks=["refusals"])
    assert capsys.readouterr().err.startswith("refusals ... passed, ")


def test_compilations_are_detected():
    with _compare.compilations() as compiled:
        jax.jit(lambda x: x + 1)(jnp.zeros(3))
    assert any("lambda" in name for name in compiled)


@pytest.mark.slow
def test_a_constraint_is_checked_in_both_precisions_and_through_channels():
    seen = []
    check_algorithm(
        Average(),
        sampled(),
        checks=["structure", "types"],
        constraint=lambda result: seen.append(result.shared.dtype),
    )
    assert seen == [np.float64, np.float32]

    def refuse(result):
        raise AssertionError("it is not")

    for check, sentence in (("structure", "it is not"), ("channels", "through top_k: it is not")):
        with pytest.raises(AssertionError, match=sentence):
            check_algorithm(
                Average(),
                sampled(),
                checks=[check],
                constraint=refuse,
                channels={"top_k": jf.channel.top_k(0.5)},
            )


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"checks: wanted some of refusals, .* got \['speed'\]"):
        check_algorithm(Average(), sampled(), checks=["speed"])
    with pytest.raises(ValueError, match=r"clients: wanted at least 3, got 2"):
        check_algorithm(Average(), sampled().take([0, 1]))
    with pytest.raises(ValueError, match=r"rounds: wanted a whole number of at least 2, got 1"):
        check_algorithm(Average(), sampled(), rounds=1)
