"""Whatever is given: it fits, or it is refused at once by a message that names the argument."""

import inspect
import random
from operator import attrgetter

import jax
import jaxtyping
import pytest

import jaxfed as jf
from bench.robustness.fuzz import callables, files, run

CASES = 2_000  # more by `python -m bench.robustness.fuzz --cases 50000`


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore")  # Pillow's, of damaged pictures
def test_malformed_arguments_and_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Types are wrong on purpose, and what counts is the function's own answer.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    outcomes = [run.outcome(case) for case in run.cases(CASES, seed=0)]
    faults = [each for each in outcomes if each.kind not in run.GOOD]
    assert not faults, "\n".join(f"{x.kind}: {x.case}: {x.message}" for x in faults[:20])
    # Both must happen, or nothing was tested.
    assert {each.kind for each in outcomes} == set(run.GOOD)


def parameters_of(name):
    """The parameters of a callable, and whether it takes others by name."""
    found = inspect.signature(attrgetter(name)(jf)).parameters
    return found, any(each.kind is each.VAR_KEYWORD for each in found.values())


def test_every_public_callable_and_parameter_is_fuzzed():
    targets = {}
    for target in callables.targets():
        targets.setdefault(target.name, []).append(target)
    assert set(callables.public()) <= set(targets)
    for name, each in targets.items():
        table = callables.TABLE["callables"].get(name, {})
        fuzzed = {parameter for target in each for parameter in target.kinds}
        for parameter, found in parameters_of(name)[0].items():
            if found.kind is found.VAR_KEYWORD or parameter == "self":
                continue
            assert parameter in fuzzed | set(table.get("open", [])), (name, parameter)
            if found.default is found.empty and found.kind is not found.VAR_POSITIONAL:
                assert all(parameter in target.right for target in each), (name, parameter)


def test_the_table_of_callables_has_nothing_that_is_gone():
    for name, entry in callables.TABLE["callables"].items():
        parameters, others = parameters_of(name.partition(",")[0])
        named = {*entry.get("open", []), *entry.get("right", {}), *entry.get("kinds", {})}
        assert others or named <= set(parameters), name
    public = {name for room in callables.ROOMS for name in dir(room)}
    assert set(callables.TABLE["inner"]) <= public


def test_files_that_are_not_damaged_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "DAMAGE", {"not at all": lambda rng, content: content})
    seen = set()
    for number in range(400):
        reader, how, place = files.written(random.Random(number), tmp_path / str(number))
        if (reader, how) not in seen:
            seen.add((reader, how))
            assert jax.tree.leaves(getattr(jf.data, reader)(place))
    assert len(seen) == len(files.sound())
