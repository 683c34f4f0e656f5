"""Agreement with plain float64 NumPy, and with the paper's two ways of writing the method."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from tests import helpers
from tests.references import perpca as reference

FEATURES, SHARED, LOCAL, ROUNDS, STEP = 6, 1, 2, 50, 0.03
COUNTS = (20, 9, 14, 11, 30, 17)
CLIENTS = len(COUNTS)
RANKS = {"equal": LOCAL, "unequal": (2, 1, 2, 0, 1, 2)}
TOLERANCE = 1e-8

pytestmark = pytest.mark.usefixtures("x64")
solve = functools.partial(helpers.solve, rounds=ROUNDS)
draw_samples = functools.partial(helpers.planted_samples, COUNTS, FEATURES, [3.0], [2.0, 1.5])


def first(ranks):
    """A common start, not feasible: the reference's list of frames, and the library's array."""
    rng = np.random.default_rng(1)
    each = (ranks,) * CLIENTS if isinstance(ranks, int) else ranks
    shared = reference.qr_positive(rng.normal(size=(FEATURES, SHARED)))
    frames = [rng.normal(size=(FEATURES, rank)) for rank in each]
    local = np.zeros((CLIENTS, FEATURES, max(each)))
    for padded, frame in zip(local, frames, strict=True):
        padded[:, : frame.shape[1]] = frame
    return shared, frames, jf.Personalized(jnp.asarray(shared), jnp.asarray(local))


def agree(result, shared, frames, atol=TOLERANCE):
    for part, frame in ((result.shared, shared), *_pairs(result.local, frames)):
        if part is None:  # what the algorithm does not learn has no columns in the reference
            assert frame.shape[1] == 0
        else:
            projector = reference.projector(frame)
            np.testing.assert_allclose(part @ part.T, projector, atol=atol)


def _pairs(local, frames):
    return zip([None] * len(frames) if local is None else local, frames, strict=True)


def polar_step_with_qr(samples, shared, frames, participants):
    """Choice 2 of Algorithm 2 with QR everywhere but in the joint step.

    QR there would make the shared copy depend on nothing but itself.
    """
    moments = [reference.moment(y) for y in samples]
    frames = list(frames)

    def deflated(frame):
        return reference.qr_positive(frame - shared @ (shared.T @ frame))

    for present in participants:
        copies = []
        for i in present:
            w = np.hstack([shared, deflated(frames[i])])
            w = reference.polar(w + STEP * moments[i] @ w)
            copies.append(w[:, :SHARED])
            frames[i] = w[:, SHARED:]
        shared = reference.qr_positive(sum(copies))
    return shared, [deflated(frame) for frame in frames]


CASES = [
    (variant, retraction, *clients)
    for variant in ("tangent", "polar", "power")
    for retraction in ("polar", "qr")
    for clients in (("equal", False), ("equal", True), ("unequal", True))
]
QUICK = [
    ("tangent", "polar", "equal", False),
    ("polar", "qr", "unequal", True),
    ("power", "polar", "unequal", True),
]


@pytest.mark.parametrize(
    ("variant", "retraction", "ranks", "some"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_every_variant(variant, retraction, ranks, some):
    samples, ranks = draw_samples(), RANKS[ranks]
    shared, frames, start = first(ranks)
    present = np.random.default_rng(2).random((ROUNDS, CLIENTS)) < (0.5 if some else 1.1)
    present[np.arange(ROUNDS), np.arange(ROUNDS) % CLIENTS] = True
    participants = [np.flatnonzero(row) for row in present]
    # Before the rounds, every client's start is deflated by the shared components.
    frames = [v - shared @ (shared.T @ v) for v in frames]

    if (variant, retraction) == ("polar", "qr"):
        wanted = polar_step_with_qr(samples, shared, frames, participants)
    else:
        wanted = reference.perpca(
            samples,
            shared,
            frames,
            step_size=STEP,
            rounds=ROUNDS,
            variant=variant,
            retraction=retraction,
            participants=participants,
        )[:2]
    step = None if variant == "power" else STEP
    solution = solve(
        jf.pca.PerPCA(
            SHARED, ranks, solver="gradient", step_size=step, variant=variant, retraction=retraction
        ),
        samples,
        warm_start=start,
        participation=jf.participation.mask(present) if some else None,
    )
    # Power iteration keeps a trace of the old basis, of the order of the root of rounding.
    agree(solution.result, *wanted, atol=1e-7 if variant == "power" else TOLERANCE)


@pytest.mark.slow
def test_the_largest_client_does_not_slow_power_iteration():
    """One client's data are ten times as large, and the objective never rises."""
    samples = draw_samples()
    samples[0] = 10 * samples[0]
    power, tangent = (
        solve(
            jf.pca.PerPCA(SHARED, LOCAL, solver="gradient", variant=variant, start="local_first"),
            samples,
            rounds=1000,
        )
        for variant in ("power", "tangent")
    )
    objective = power.history["objective"]
    assert jnp.diff(objective).max() <= 1e-12 * objective[0]
    violation = reference.kkt_violation(samples, *map(np.asarray, power.result))
    np.testing.assert_allclose(violation, 0, atol=1e-10 * objective[0])
    assert tangent.history["objective"][-1] > 1.1 * objective[-1]


def test_algorithm_1_is_the_polar_variant():
    samples = draw_samples()
    shared, frames, start = first(LOCAL)
    wanted = reference.algorithm1(samples, shared, frames, step_size=STEP, rounds=ROUNDS)
    algorithm = jf.pca.PerPCA(SHARED, LOCAL, solver="gradient", step_size=STEP, variant="polar")
    agree(solve(algorithm, samples, warm_start=start).result, *wanted)


@pytest.mark.parametrize("retraction", ["polar", "qr"])
def test_the_objective(retraction):
    """The library's is the variance left over, the reference's half the variance captured."""
    samples = draw_samples()
    shared, frames, start = first(LOCAL)
    wanted = reference.perpca(
        samples, shared, frames, step_size=STEP, rounds=ROUNDS, retraction=retraction
    ).objective
    algorithm = jf.pca.PerPCA(
        SHARED, LOCAL, solver="gradient", step_size=STEP, retraction=retraction
    )
    objective = solve(algorithm, samples, warm_start=start).history["objective"]
    total = np.mean([np.trace(reference.moment(y)) for y in samples])
    # An entry is evaluated where its round begins, the reference's where it ends.
    np.testing.assert_allclose(objective[1:], total - 2 * wanted[:-1], rtol=1e-9)


@pytest.mark.parametrize("ranks", RANKS)
def test_decay(ranks):
    """The step shrinks for the rounds after one that began with a larger mean objective."""
    samples, ranks = draw_samples(), RANKS[ranks]
    shared, frames, start = first(ranks)
    step = 0.5  # too large for a descent without decay
    algorithm = jf.pca.PerPCA(SHARED, ranks, solver="gradient", step_size=step, decay=0.6)
    solution = solve(algorithm, samples, warm_start=start)

    steps, last = [], np.inf
    for _ in range(ROUNDS):
        entered = [reference.polar(v - shared @ (shared.T @ v)) for v in frames]
        value = reference.reconstruction_errors(samples, shared, entered).mean()
        shared, frames, *_ = reference.perpca(samples, shared, frames, step_size=step, rounds=1)
        step = 0.6 * step if value > last else step
        last = value
        steps.append(step)
    np.testing.assert_allclose(solution.history["step_size"], steps, rtol=1e-12)
    assert 0 < steps[-1] < steps[0]
    agree(solution.result, shared, frames)


def test_the_automatic_step_is_one_over_the_largest_eigenvalue():
    samples = draw_samples()
    shared, frames, start = first(LOCAL)
    step = 1 / max(np.linalg.eigvalsh(reference.moment(y))[-1] for y in samples)
    wanted = reference.perpca(samples, shared, frames, step_size=step, rounds=ROUNDS)
    solution = solve(jf.pca.PerPCA(SHARED, LOCAL, solver="gradient"), samples, warm_start=start)
    np.testing.assert_allclose(solution.history["step_size"], step, rtol=1e-10)
    agree(solution.result, *wanted[:2])


@pytest.mark.slow
def test_the_start_from_local_components():
    samples = draw_samples()
    shared, frames = reference.local_first(samples, SHARED, LOCAL)
    wanted = reference.perpca(samples, shared, frames, step_size=STEP, rounds=ROUNDS)
    algorithm = jf.pca.PerPCA(SHARED, LOCAL, solver="gradient", step_size=STEP, start="local_first")
    agree(solve(algorithm, samples).result, *wanted[:2])


def test_missing_local_components_of_a_warm_start_are_the_best_ones():
    samples = draw_samples()
    shared, *_ = first(LOCAL)
    frames = [reference.best_local(reference.moment(y), shared, LOCAL) for y in samples]
    wanted = reference.perpca(samples, shared, frames, step_size=STEP, rounds=ROUNDS)
    start = jf.Personalized(jnp.asarray(shared), None)
    algorithm = jf.pca.PerPCA(SHARED, LOCAL, solver="gradient", step_size=STEP)
    agree(solve(algorithm, samples, warm_start=start).result, *wanted[:2])


NOTHING = np.zeros((FEATURES, 0))
# Short clients keep their samples, long ones their second moment: both ways to the same numbers.
LENGTHS = {"long": None, "short": 3}
ONE_SHOT = {
    "Local": (
        lambda: jf.pca.Local(3),
        lambda samples: (NOTHING, reference.local_pca(samples, 3)),
    ),
    "Pooled": (
        lambda: jf.pca.Pooled(3),
        lambda samples: (reference.pooled_pca(samples, 3), CLIENTS * [NOTHING]),
    ),
    "projector": (
        lambda: jf.pca.OneShot(1, 2),
        lambda samples: reference.one_shot_projector(samples, 1, 2),
    ),
    "spectrum": (
        lambda: jf.pca.OneShot(1, 2, method="spectrum"),
        lambda samples: reference.one_shot_spectrum(samples, 1, 2),
    ),
    "local_first": (
        lambda: jf.pca.OneShot(1, 2, method="local_first"),
        lambda samples: reference.local_first(samples, 1, 2),
    ),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ONE_SHOT)
def test_one_shot_algorithms(name, length):
    make, wanted = ONE_SHOT[name]
    samples = [y[: LENGTHS[length]] for y in draw_samples()]
    solution = solve(make(), samples, rounds=1)
    shared, frames = wanted(samples)
    agree(solution.result, shared, frames)
    errors = reference.reconstruction_errors(samples, shared, frames)
    np.testing.assert_allclose(solution.history["objective"], [errors.mean()], atol=1e-10)
