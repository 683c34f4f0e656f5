"""Memory and time of derivatives of a converged run, compared with hand-written ones.

    python -m bench.speed.adjoint                  # 50 clients of 120 samples, 784 features, 20
    python -m bench.speed.adjoint --small          # in a minute, with errors
    python -m bench.speed.adjoint --ways implicit  # compared with the solve, without the rivals

The loss is the held-out error of PerPCA, differentiated with respect to the samples and the
clients' weights, in single precision. Memory is what XLA allocates, without and with arguments and
results, because the data and a derivative with respect to them have the same size. The rivals are

* "plain JAX, unrolled": `plain_jax.py`, PerPCA without a library, differentiated as it is;
* "PyTorch, unrolled": the same rounds in PyTorch, with clients in a batch, on one thread; only for
  the small problem, and only if PyTorch is installed;
* "by hand": what a user of an implicit differentiation library writes, the gradient of the
  objective with respect to all components, and conjugate gradients on the normal equations of its
  Jacobian (JAXopt's default). It does not know about bases, does not eliminate the local
  components, and starts from a solution that others have computed.

Errors are those of directional derivatives, relative to central differences of whole solves in
double precision. The script skips whatever needs more than four gigabytes.
"""

import argparse
import os

os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from bench.common import every_turn, machine, table
from bench.speed import plain_jax

try:
    import torch
except ImportError:
    torch = None

SHAPES = {False: (50, 120, 784, 10, 10), True: (6, 40, 30, 3, 3)}


def draw(clients, samples, features, shared_rank, local_rank):
    """Samples with local components stronger than the shared ones, and others that are held out."""
    rng = np.random.default_rng(0)
    shared = np.linalg.qr(rng.normal(size=(features, shared_rank)))[0]
    values = []
    for _ in range(clients):
        own = np.linalg.qr(rng.normal(size=(features, local_rank)))[0]
        own = np.linalg.qr(own - shared @ (shared.T @ own))[0]
        scales = np.linspace(2.0, 1.2, shared_rank), np.linspace(6.0, 4.0, local_rank)
        scores = [rng.normal(size=(2 * samples, len(s))) * s for s in scales]
        noise = 0.1 * rng.normal(size=(2 * samples, features))
        values.append(scores[0] @ shared.T + scores[1] @ own.T + noise)
    return np.split(np.stack(values), 2, axis=1)


def error(held_out, shared, local):
    """The share of the held-out energy that the components leave."""
    captured = ((held_out @ shared) ** 2).sum() + ((held_out @ local) ** 2).sum()
    return 1 - captured / (held_out**2).sum()


def problem(algorithm, held_out, rounds):
    """The loss as a function of samples, weights, a warm start, a way to differentiate."""

    def loss(values, weights, start, adjoint):
        clients = jf.Clients.from_samples(values, weights=weights)
        run = jf.rollout(
            algorithm,
            clients,
            rounds=rounds,
            key=jax.random.key(0),
            warm_start=start,
            adjoint=adjoint,
        )
        return error(held_out, *run.result)

    return loss


def by_hand(algorithm, held_out, steps):
    """The gradient at a solution from the optimality of a hand-written objective."""

    def left(rows, own, shared):
        """The energy that the span of the columns leaves, whatever their lengths and angles."""
        frame = jnp.concatenate([shared, own], axis=1)
        scores = rows @ frame
        return (rows**2).sum() - jnp.trace(jnp.linalg.solve(frame.T @ frame, scores.T @ scores))

    def each(values, shared, local):
        # Not mapped by `vmap`: two batches of LAPACK's solves at once wait for each other for ever
        # (jaxlib 0.10.2).
        return jax.lax.map(lambda client: left(*client, shared), (values, local))

    def objective(frames, values, weights):
        shared, local = frames
        energies = each(values, shared, local)
        return (weights / weights.sum()) @ energies / values.shape[1]

    def error(frames):
        shared, local = frames
        return each(held_out, shared, local).sum() / (held_out**2).sum()

    def gradient(values, weights, frames):
        optimality = jax.grad(objective)
        _, product = jax.linearize(lambda f: optimality(f, values, weights), frames)

        def normal(x):  # the Hessian is symmetric
            return product(product(x))

        asked = jax.grad(error)(frames)
        answer, _ = jax.scipy.sparse.linalg.cg(normal, product(asked), maxiter=steps, tol=0.0)
        _, pull = jax.vjp(lambda v, w: optimality(frames, v, w), values, weights)
        return jax.tree.map(jnp.negative, pull(answer))

    return gradient


def in_plain_jax(held_out, rounds, step_size):
    """The same loss without a library, by samples."""

    def loss(values, weights, start):
        del weights  # all the same
        shared, local, _ = plain_jax.perpca(values, start.shared, start.local, step_size, rounds)
        return error(held_out, shared, local)

    return loss


def in_pytorch(held_out, rounds, step_size):
    """The rounds of `plain_jax.perpca` in PyTorch: the gradient of the loss by samples."""
    assert torch is not None
    torch.set_num_threads(1)

    def factor(w):
        q, r = torch.linalg.qr(w)
        return q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1)).unsqueeze(-2)

    def gradient(values, weights, start):
        del weights  # all the same
        samples = torch.tensor(np.asarray(values), requires_grad=True)
        shared, local = (torch.tensor(np.asarray(x)) for x in (start.shared, start.local))
        rank = shared.shape[1]
        moments = samples.mT @ samples / samples.shape[1]
        for _ in range(rounds):
            local = factor(local - shared @ (shared.mT @ local))
            w = torch.cat([shared.expand(len(local), -1, -1), local], 2)
            product = moments @ w
            w = w + step_size * (product - w @ (w.mT @ product))
            shared, local = factor(w[:, :, :rank].mean(0)), factor(w[:, :, rank:])
        local = factor(local - shared @ (shared.mT @ local))
        fresh = torch.tensor(np.asarray(held_out))
        captured = ((fresh @ shared) ** 2).sum() + ((fresh @ local) ** 2).sum()
        (slope,) = torch.autograd.grad(1 - captured / (fresh**2).sum(), samples)
        return slope.numpy()

    return gradient


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=[""], help="the beginnings of their names")
    given = parser.parse_args()
    print(machine())
    shape = SHAPES[given.small]
    algorithm = jf.pca.PerPCA(*shape[3:], solver="gradient")
    double, others = draw(*shape)
    values, held_out = double.astype(np.float32), others.astype(np.float32)
    weights = np.full(shape[0], 1 / shape[0], np.float32)
    loss = problem(algorithm, held_out, given.rounds)
    # From a solution, so that every run ends at a fixed point.
    solution = jf.fit(
        jf.pca.PerPCA(*shape[3:], local_penalty=0.0),
        jf.Clients.from_samples(values),
        rounds=300,
        key=jax.random.key(0),
    )
    start = solution.result
    step_size = float(1 / np.linalg.norm(values, 2, axis=(1, 2)).max() ** 2 * shape[1])
    plain = in_plain_jax(held_out, given.rounds, step_size)

    implicit, unrolled = jf.adjoint.implicit(throw=False), jf.adjoint.unrolled()

    def gradient(way, by):
        return jax.value_and_grad(lambda *a: loss(*a, way), argnums=by)

    functions = {
        "solve": lambda *a: loss(*a, unrolled),
        "implicit, by weights": gradient(implicit, 1),
        "implicit, by samples": gradient(implicit, 0),
        "checkpointed, by weights": gradient(jf.adjoint.checkpointed(), 1),
        "checkpointed, by samples": gradient(jf.adjoint.checkpointed(), 0),
        "checkpointed(2), by weights": gradient(jf.adjoint.checkpointed(2), 1),
        "unrolled, by weights": gradient(unrolled, 1),
        "plain JAX, unrolled, by samples": jax.value_and_grad(plain),
        "by hand, beside the solve": lambda values, weights, start: by_hand(
            algorithm, held_out, 100
        )(values, weights, (start.shared, start.local)),
    }
    chosen = ("solve", *given.ways)
    functions = {name: f for name, f in functions.items() if name.startswith(chosen)}
    given_to = (jnp.asarray(values), jnp.asarray(weights), start)
    programs = {name: jax.jit(f).lower(*given_to).compile() for name, f in functions.items()}
    beside, whole = {}, {}
    for name, program in programs.items():
        memory = program.memory_analysis()
        beside[name] = memory.temp_size_in_bytes
        whole[name] = beside[name] + memory.argument_size_in_bytes + memory.output_size_in_bytes
    print(
        table(
            [
                {
                    "way": name,
                    "MB": f"{size / 1e6:.1f}",
                    "over solve": f"{size / beside['solve']:.2f}",
                    "with arguments and results": f"{whole[name] / whole['solve']:.2f}",
                }
                for name, size in beside.items()
            ]
        ),
        flush=True,
    )
    report = jax.jit(jax.grad(lambda r, *a: loss(*a, jf.adjoint.implicit(report=r, throw=False))))(
        jf.adjoint.Report(), *given_to
    )
    print(
        f"adjoint rounds {int(report.rounds)}, residual {float(report.residual):.1e}, "
        f"share that turns bases {float(report.turning):.1e}",
        flush=True,
    )
    if given.small:
        accuracy(algorithm, double, others, weights, given.rounds, start, step_size)
    timed = [name for name, size in beside.items() if size < 4e9]
    runs = {n: lambda n=n: programs[n](*given_to) for n in timed}
    if torch is not None and given.small and given.ways == [""]:
        slope = in_pytorch(held_out, given.rounds, step_size)
        runs["PyTorch, unrolled, by samples"] = lambda: slope(*given_to)
    took = every_turn(runs, given.repeats)
    print(
        table(
            [
                {
                    "way": name,
                    **{
                        f"{clock} over the solve's": f"{np.median(x / took['solve'][clock]):.2f}"
                        for clock, x in took[name].items()
                    },
                }
                for name in runs
            ]
        )
    )


def accuracy(algorithm, values, held_out, weights, rounds, start, step_size):
    """Errors of directional derivatives, single precision, against differences in double."""
    rng = np.random.default_rng(1)
    direction = rng.normal(size=values.shape)
    frames = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), start)
    exact = jax.jit(
        lambda v, s: problem(algorithm, held_out, rounds)(
            v, jnp.asarray(weights, jnp.float64), s, jf.adjoint.unrolled()
        )
    )
    step = 1e-4
    wanted = (
        exact(values + step * direction, frames) - exact(values - step * direction, frames)
    ) / (2 * step)
    single = jnp.asarray(values, jnp.float32), jnp.asarray(weights), start
    held_out = held_out.astype(np.float32)
    loss, plain = problem(algorithm, held_out, rounds), in_plain_jax(held_out, rounds, step_size)
    hand = by_hand(algorithm, held_out, 100)
    ways = {
        "implicit": jax.grad(lambda *a: loss(*a, jf.adjoint.implicit(throw=False))),
        "unrolled": jax.grad(lambda *a: loss(*a, jf.adjoint.unrolled())),
        "plain JAX, unrolled": jax.grad(plain),
        "by hand": lambda v, w, start: hand(v, w, (start.shared, start.local))[0],
    }
    slopes = {name: jax.jit(way)(*single) for name, way in ways.items()}
    if torch is not None:
        slopes["PyTorch, unrolled"] = in_pytorch(held_out, rounds, step_size)(*single)
    errors = {
        name: abs(float((slope * direction).sum() / wanted) - 1) for name, slope in slopes.items()
    }
    print(table([{"way": name, "error": f"{x:.1e}"} for name, x in errors.items()]), flush=True)


if __name__ == "__main__":
    main()
