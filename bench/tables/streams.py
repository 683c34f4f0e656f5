"""A subspace that turns by 0.2 degrees a step: updates compared with refits, F-PCA and GROUSE.

    python -m bench.tables.streams [--octave PATH]

In each of a hundred steps, fifty clients have twenty new samples of sixty features. The samples
have three shared components of variance one, whose span turns by 0.2 degrees a step in each of its
directions, two local components of variance one in the first of two streams, and noise of variance
0.09. A cell of "error" contains ‖P_U − P‖²/2 with the span of that step, which is at most 3: the
mean over the last fifty steps and three draws, and that of the last step alone. Bits are those of
one client in the last step, in both directions.

PATH is a checkout of the authors' github.com/andylamp/federated_pca. GNU Octave runs its
`fpca_edge.m` and `fpca_subspace_merge.m` at each client, and `grouse.m` on all samples in order of
arrival. These functions give a result only at the end of a stream. Without PATH, the script leaves
these rows out.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float
from scipy.io import loadmat, savemat

import jaxfed as jf
from bench.common import machine, table

CLIENTS, FEATURES, SHARED, LOCAL, SAMPLES = 50, 60, 3, 2, 20
STEPS, SEEDS, DEGREES, NOISE = 100, 3, 0.2, 0.3
RATE, ROWS = 0.2, 20
WINDOW = 5  # about as many steps as the forgotten moments remember: 1 / RATE

OCTAVE = """
addpath('{path}'); load('{folder}/stream.mat'); steps = steps(:)';
for s = 1:numel(steps)
  first = size(Y, 3) - steps(s) * samples + 1;
  for i = 1:size(Y, 1)
    params = struct('blk_size', samples, 'no_err', 1, 'verbose', 0);
    [U{{i}}, S{{i}}] = fpca_edge(squeeze(Y(i, :, first:end)), rank, params);
  end
  left = size(Y, 1);
  while left > 1
    for i = 1:floor(left / 2)
      j = 2 * i;
      [U{{i}}, S{{i}}] = fpca_subspace_merge(U{{j-1}}, S{{j-1}}, U{{j}}, S{{j}}, 1, 1, rank, 1);
    end
    if mod(left, 2), U{{ceil(left/2)}} = U{{left}}; S{{ceil(left/2)}} = S{{left}}; end
    left = ceil(left / 2);
  end
  edge(s, :, :) = U{{1}};
end
% From clients, features and samples to features, and columns as they come.
columns = permute(reshape(Y, size(Y, 1), size(Y, 2), samples, []), [2 3 1 4]);
[grouse_U, ~] = my_grouse(reshape(columns, size(Y, 2), []), rank);
save('-v7', '{folder}/found.mat', 'edge', 'grouse_U');
"""


class Stream(NamedTuple):
    """Samples of each step, and the span of the shared components."""

    samples: Float[np.ndarray, "steps clients samples features"]
    truth: Float[np.ndarray, "steps features rank"]


class Method(NamedTuple):
    """How the stream is followed."""

    forgetting: jf.stream.Forgetting
    solve: Callable[[jf.Solution | None, jf.Clients, jax.Array], jf.Solution]


class Followed(NamedTuple):
    """What following a stream gave."""

    errors: Float[np.ndarray, " steps"]
    bits: float  # of one client in the last step


def stream(seed: int, local: int) -> Stream:
    """A stream of samples."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(FEATURES, 2 * SHARED)))[0]
    angle = np.deg2rad(DEGREES) * np.arange(STEPS)[:, None, None]
    truth = basis[:, :SHARED] * np.cos(angle) + basis[:, SHARED:] * np.sin(angle)
    own = rng.normal(size=(CLIENTS, FEATURES, local))
    samples = np.empty((STEPS, CLIENTS, SAMPLES, FEATURES), np.float32)
    for step, shared in enumerate(truth):
        beside = np.linalg.qr(own - shared @ (shared.T @ own))[0]
        scores = rng.normal(size=(2, CLIENTS, SAMPLES, max(SHARED, local)))
        samples[step] = scores[0, ..., :SHARED] @ shared.T
        samples[step] += scores[1, ..., :local] @ beside.mT
        samples[step] += NOISE * rng.normal(size=samples[step].shape)
    return Stream(samples, truth)


def methods(algorithm: jf.Algorithm) -> dict[str, Method]:
    """The library's ways to follow a stream."""

    def refit(**options) -> Callable:
        return lambda _, clients, key: jf.fit(algorithm, clients, key=key, **options)

    def update(**options) -> Callable:
        def solve(last, clients, key):
            if last is None:
                return jf.fit(algorithm, clients, rounds=100, key=key, tol=1e-6, **options)
            return jf.update(last, clients, rounds=1, key=key)

        return solve

    moments = jf.stream.Forgetting(RATE)
    newest, everything = jf.stream.Forgetting(1.0), jf.stream.Forgetting(None)
    factors = jf.stream.Forgetting(RATE, rank=ROWS)
    eight = jf.channel.quantize(8)
    return {
        "refit, tolerance 1e-6": Method(moments, refit(rounds=100, tol=1e-6)),
        "refit, 3 rounds": Method(moments, refit(rounds=3)),
        "refit, 1 round": Method(moments, refit(rounds=1)),
        "update, 1 round": Method(moments, update()),
        f"update, {ROWS} rows a client": Method(factors, update()),
        "update, 8 bits an entry": Method(moments, update(channel=eight)),
        "update, nothing forgotten": Method(everything, update()),
        "refit on the newest samples": Method(newest, refit(rounds=100, tol=1e-6)),
    }


def followed(method: Method, given: Stream, seed: int) -> Followed:
    """Follow a stream; errors of the last half of it."""
    clients, last, errors = None, None, []
    for step, key in enumerate(jax.random.split(jax.random.key(seed), STEPS)):
        clients = method.forgetting.update(clients, jf.Clients.from_samples(given.samples[step]))
        last = method.solve(last, clients, key)
        if step >= STEPS // 2:
            errors.append(error(last.result.shared, given.truth[step]))
    assert last is not None
    return Followed(np.asarray(errors), last.history["bits_up"][-1] + last.history["bits_down"][-1])


def error(basis, truth) -> float:
    """Half the squared distance of the projectors."""
    return float(jf.metrics.projector_distance(np.asarray(basis, np.float32), truth)) / 2


def of_octave(path: Path, given: Stream) -> dict[str, float]:
    """The authors' errors at the last step."""
    by_client = given.samples.astype(float).transpose(1, 3, 0, 2).reshape(CLIENTS, FEATURES, -1)
    spans = {"F-PCA, whole stream": STEPS, f"F-PCA, {WINDOW} newest steps": WINDOW}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"samples": SAMPLES, "rank": SHARED, "steps": list(spans.values())}
        savemat(Path(folder, "stream.mat"), {"Y": by_client} | settings)
        script = Path(folder, "run.m")
        script.write_text(OCTAVE.format(path=path.resolve(), folder=folder))
        command = ["octave-cli", "--quiet", "--no-init-file", script]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = loadmat(Path(folder, "found.mat"))
    bases = dict(zip(spans, found["edge"], strict=True))
    bases["GROUSE, all samples"] = found["grouse_U"]
    return {name: error(basis, given.truth[-1]) for name, basis in bases.items()}


def rows(local: int, octave: Path | None) -> Iterator[dict[str, object]]:
    """One row a method."""
    algorithm: jf.Algorithm = jf.pca.SubspaceIteration(SHARED)
    if local:
        algorithm = jf.pca.PerPCA(SHARED, local, solver="gradient", variant="power")
    streams = [stream(seed, local) for seed in range(SEEDS)]
    for name, method in methods(algorithm).items():
        runs = [followed(method, given, seed) for seed, given in enumerate(streams)]
        errors = np.mean([run.errors for run in runs], axis=0)
        yield row(name, f"{errors.mean():.3g}", errors[-1], np.mean([run.bits for run in runs]))
    if octave is None:
        return
    # Of each step: a basis with its singular values, both ways; and all samples.
    bits = {"F-PCA": 2 * 32 * SHARED * (FEATURES + 1), "GROUSE": 32 * SAMPLES * FEATURES}
    found = [of_octave(octave, given) for given in streams]
    for name in found[0]:
        last = float(np.mean([errors[name] for errors in found]))
        yield row(name, "", last, bits[name.partition(",")[0]])


def row(name: str, mean: str, last: float, bits: float) -> dict[str, object]:
    """A row of the table."""
    return {
        "method": name,
        "error": mean,
        "at the last step": f"{last:.3g}",
        "bits a step": f"{bits:,.0f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--octave", type=Path, metavar="PATH")
    octave = parser.parse_args(arguments).octave
    print(machine())
    if octave is None:
        print(
            "F-PCA and GROUSE are left out: install GNU Octave, clone "
            "https://github.com/andylamp/federated_pca and give its folder by --octave PATH"
        )
    elif not (octave / "fpca_edge.m").is_file():
        parser.error(f"--octave: wanted the folder with fpca_edge.m, got {octave}")
    for local in (LOCAL, 0):
        print(f"\n{SHARED} shared and {local} local components")
        print(table(list(rows(local, octave))))


if __name__ == "__main__":
    main()
