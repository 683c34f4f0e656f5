"""Every exported algorithm of every family runs through one common list of checks."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.core.clients.samples import SampleRows
from jaxfed.core.round.rounds import begin
from jaxfed.core.round.whole import WHOLE, prepared
from jaxfed.core.run.arguments import problem_of
from jaxfed.generative._adaptive import Adaptive
from jaxfed.testing import CHECKS, check_algorithm
from tests.examples import (
    CLIENTS,
    EXAMPLES,
    FAMILIES,
    GOOD,
    REFUSED,
    ROUNDS_OF_TRAINING,
    draw_samples,
    every_example,
    family,
    first_example,
    quick_first_example,
    settings_example,
)

# What depends on an algorithm's settings is checked for every example, and what takes long to
# compile and depends little on them for the first of each algorithm, in two portions.
EVERY = ("structure", "order", "bits", "refusals", "samples")
FIRST = ("types", "vmap", "gradients", "padding")
SIZES = ("buckets", "source")
RUNS = tuple(name for name in CHECKS if name not in EVERY + FIRST + SIZES)

LOSSY = {
    "cast": jf.channel.cast("bfloat16"),
    "difference(quantize(3))": jf.channel.difference(jf.channel.quantize(3)),
    "quantize": jf.channel.quantize(3),
    "sign": jf.channel.sign(),
    "top_k": jf.channel.top_k(0.25),
    "random_k": jf.channel.random_k(0.5),
    "difference(sign)": jf.channel.difference(jf.channel.sign()),
    "error_feedback(top_k)": jf.channel.error_feedback(jf.channel.top_k(0.25)),
}
# Those that keep little of each number, or few numbers.
LOSSIEST = ("difference(quantize(3))", "sign", "error_feedback(top_k)")


class Lossy(jf.channel.Channel):
    """One of the channels that lose something, by its number: one program serves for all."""

    number: jax.Array
    names: tuple[str, ...] = eqx.field(static=True)

    def memory(self, message):
        return [LOSSY[name].memory(message) for name in self.names]

    def encode(self, key, message, memory):
        """What arrives: of differences, with what has arrived before."""

        def through(number, kind):
            payload, after = kind.encode(key, message, memory[number])
            arrives = kind.receive(kind.decode(payload), memory[number])
            return arrives, [*memory[:number], after, *memory[number + 1 :]]

        kinds = [LOSSY[name] for name in self.names]
        branches = [functools.partial(through, *kind) for kind in enumerate(kinds)]
        return jax.lax.switch(self.number, branches)

    def decode(self, payload):
        return payload

    def differentiable(self, decoded, message, memory):
        return decoded

    def receive(self, decoded, last):
        return decoded


def run_checks(name, checks, lossy=LOSSIEST):
    """Those of an example."""
    make = GOOD[name].make
    algorithm, wider = make(CLIENTS), make(CLIENTS + 1)
    kind = family(algorithm)
    with jax.enable_x64(True):
        others = kind.draw(1)
        report = check_algorithm(
            algorithm,
            kind.draw(),
            checks=checks,
            rounds=kind.rounds,
            essence=kind.essence,
            loss=lambda result: kind.loss(algorithm, result, others.data.values),
            constraint=lambda result: kind.check(algorithm, result),
            others=others,
            wider=wider,
            pad=kind.pad,
            deterministic=True,
            channels={name: Lossy(jnp.asarray(i), lossy) for i, name in enumerate(lossy)}
            | ({} if lossy == LOSSIEST else {"by itself": LOSSY["difference(quantize(3))"]}),
            backends={
                "chunks on devices": jf.backend.shard(2, inner=jf.backend.chunked(2)),
            },
        )
    assert set(report.checked) | report.skipped.keys() >= set(checks)
    return report


def test_every_exported_algorithm_has_examples():
    exported = {
        value
        for package in FAMILIES
        for value in vars(package).values()
        if isinstance(value, type) and issubclass(value, jf.Algorithm)
    }
    missing = sorted(kind.__name__ for kind in exported - EXAMPLES.keys())
    assert not missing, f"add an entry for {', '.join(missing)} to EXAMPLES in {__file__}"
    assert all(examples.good and examples.refused for examples in EXAMPLES.values())


@settings_example
def test_what_depends_on_settings(name):
    skipped = run_checks(name, EVERY).skipped
    assert not skipped.keys() - {"samples"}


@first_example
def test_numbers_and_derivatives(name):
    assert not run_checks(name, FIRST).skipped


@first_example
def test_runs(name):
    report = run_checks(name, RUNS)
    # What cannot be had is refused for a reason that is known here.
    assert report.skipped.keys() <= {"participation"}


@pytest.mark.slow
@first_example
def test_channels(name):
    report = run_checks(name, ["channels"], lossy=tuple(LOSSY))
    assert report.skipped.keys() <= {"channel by itself"}


@pytest.mark.slow
@every_example
def test_sizes(name):
    algorithm = GOOD[name].make(CLIENTS)
    refused = set() if isinstance(family(algorithm).draw().data, SampleRows) else set(SIZES)
    gradient = isinstance(algorithm, jf.pca.HMF) and algorithm.solver == "gradient"
    if gradient or isinstance(algorithm, jf.pca.TCMF):  # whose clients' states have their samples
        refused = {"buckets"}
    assert run_checks(name, SIZES).skipped.keys() == refused


@quick_first_example
def test_messages_cost_what_they_should(name, key, x64):
    make, (first, up, down) = GOOD[name]
    algorithm = make(CLIENTS)
    clients = family(algorithm).draw()

    def start(algorithm, clients):
        problem, warm = problem_of(
            algorithm, clients, 1, key, None, jf.channel.lossless(), None, jf.backend.vmap()
        )
        return begin(prepared(problem, 1), warm, WHOLE)[1]

    costs = jax.eval_shape(start, algorithm, clients)
    assert costs.first_up == 64 * first and costs.up == 64 * up
    assert costs.first_down == costs.down == 64 * down


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in EXAMPLES if issubclass(kind, Adaptive)])
def test_spreads_stay_within_their_bounds(kind, key, x64):
    algorithm = next(iter(EXAMPLES[kind].good.values())).make(CLIENTS)
    algorithm = eqx.tree_at(lambda a: a.spread_step_size, algorithm, jnp.asarray(1e3))
    solution = jf.fit(algorithm, draw_samples(), rounds=ROUNDS_OF_TRAINING, key=key)
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(solution.server.spread)])
    least, most = algorithm.bounds
    assert least <= values.min() and values.max() <= most
    assert np.abs(values - algorithm.initial_spread).max() > 0.05


@pytest.mark.parametrize(("make", "argument"), REFUSED)
def test_bad_hyperparameters_are_refused(make, argument):
    with pytest.raises(ValueError, match=rf"^{argument}: .*(got|needs)"):
        make()


@every_example
def test_bad_clients_and_rounds_are_refused(name, key):
    algorithm = GOOD[name].make(CLIENTS)
    kind = family(algorithm)
    with pytest.raises(ValueError, match=kind.refusal):
        jf.fit(algorithm, kind.narrow(), rounds=1, key=key)
    with pytest.raises(ValueError, match=r"^rounds: "):
        jf.fit(algorithm, kind.draw(), rounds=0, key=key)
