"""Whatever is given: it fits, or it is refused at once by a message that names the argument."""

import inspect
import random

import jax
import pytest

import jaxfed as jf
from bench.robustness.fuzz import callables, files, run

CASES = 2_000  # more by `python -m bench.robustness.fuzz --cases 50000`

ROOMS = [
    jf, jf.adjoint, jf.backend, jf.channel, jf.data, jf.deploy.flower, jf.estimators,
    jf.gcca, jf.generative,
    jf.linalg, jf.manifolds, jf.manifolds.grassmann, jf.manifolds.stiefel, jf.metrics, jf.models,
    jf.nn, jf.participation, jf.pca, jf.plot, jf.privacy, jf.report, jf.testing,
]  # fmt: skip

# What takes no argument, or what other parts of the library give it: arrays within a traced
# function, payloads, transcripts.
INNER = {
    "Adjoint", "Algorithm", "Backend", "Callback", "Channel", "Clients", "Compressor", "Corruption",
    "DenoisingLoss", "DivergenceError", "Ended", "EnergyWarning", "Link", "Moment",
    "Participation", "Payload", "ProcessError",
    "Samples", "Solution", "SparseView", "Status", "View", "Views", "auto",
    "bits", "collect",
    "english_stop_words", "everybody",
    "first_message_attack", "fixed_bits", "from_bytes",
    "linear_attack", "lossless", "matmul", "norm_leak",
    "reconstruction_loss", "separate", "sign",
    "spent", "straight_through", "to_bytes", "variable_bytes",
    "varies", "vmap", "with_report",
}  # fmt: skip
# What may be any tree of arrays, or is only looked at once the others fit.
OPEN = {
    "shapes_of": {"dtype"},
    "linalg.largest_eigenvalue": {"operator"},
    "generative.sample": {"arrays", "features", "at_once"},
    "manifolds.stiefel.random": {"dtype"},
}


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore")  # Pillow's, of damaged pictures
def test_malformed_arguments_and_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcomes = [run.outcome(case) for case in run.cases(CASES, seed=0)]
    faults = [each for each in outcomes if each.kind not in run.GOOD]
    assert not faults, "\n".join(f"{x.kind}: {x.case}: {x.message}" for x in faults[:20])
    # Both must happen, or nothing was tested.
    assert {each.kind for each in outcomes} == set(run.GOOD)


def test_every_public_callable_and_parameter_is_fuzzed():
    fuzzed = {}
    for target in callables.targets():
        fuzzed.setdefault(target.name, set()).update(target.kinds)
    missing = []
    for room in ROOMS:
        home = "jaxfed.core" if room is jf else room.__name__
        for name in dir(room):  # those too that are imported when they are asked for
            found = getattr(room, name)
            own = callable(found) and getattr(found, "__module__", "").startswith(home)
            result = isinstance(found, type) and issubclass(found, tuple)
            if not own or result or name.startswith("_") or name in INNER:
                continue
            place = ".".join([*room.__name__.split(".")[1:], name]).removeprefix("core.")
            known = fuzzed.get(place, set()) | OPEN.get(place, set())
            missing += [
                f"{place}({parameter.name})"
                for parameter in inspect.signature(found).parameters.values()
                if parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in known
            ]
    assert not missing


def test_files_that_are_not_damaged_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "DAMAGE", {"not at all": lambda rng, content: content})
    seen = set()
    for number in range(400):
        reader, how, place = files.written(random.Random(number), tmp_path / str(number))
        if (reader, how) not in seen:
            seen.add((reader, how))
            assert jax.tree.leaves(getattr(jf.data, reader)(place))
    assert len(seen) == len(files.sound())
