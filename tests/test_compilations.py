"""A law of the public functions: the same call again compiles nothing."""

import jax
import jaxtyping
import pytest

import jaxfed as jf
from bench.robustness.fuzz import callables
from jaxfed.testing._compare import compilations

# These take a user's function, run within one, or check a user's part, whose methods they compile.
OF_USERS = {
    "linalg.largest_eigenvalue",
    "models.generate",
    "nn.common_projection",
    "nn.personalized_projection",
    "rollout",
    "testing.check_channel",
    "tune",
}


def compiled_again(target):
    """What a second call compiles; None if the first call is refused, as of a file that is not."""
    try:
        target(**target.right)
    except (OSError, ValueError):
        return None
    with compilations() as compiled:
        target(**target.right)
    return compiled


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # of runs that are too short
def test_no_public_function_compiles_again_for_the_same_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    found = {}
    for target in callables.targets():
        if (again := compiled_again(target)) is not None:
            found.setdefault(target.name, []).extend(again)
    assert len(found) > 200
    assert {name for name, again in found.items() if again} == OF_USERS


def test_a_fit_and_its_scores_compile_once(key):
    samples = [jax.random.normal(jax.random.fold_in(key, i), (6, 5)) for i in range(3)]

    def call():
        clients = jf.Clients.from_samples(samples)
        solution = jf.fit(jf.pca.BlockLanczos(2), clients, rounds=4, key=key)
        return jf.pca.transform(solution, samples), solution.summary()

    call()
    with compilations() as compiled:
        call()
    assert not compiled
