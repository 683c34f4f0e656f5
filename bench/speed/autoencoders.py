"""Adaptive autoencoders of fifty clients: one compiled call against a PyTorch loop over clients.

    python -m bench.speed.autoencoders

One round is 20 local steps with batches of 6 for each of 50 clients with 120 images of 28 x 28, the
setting of ADEPT's experiments (Ozkara, Huang, Zhou & Diggavi). The rivals are

* `authors' way`: one process that loops over clients and steps. Like the authors' program, each
  step differentiates the regularizer, the loss with the regularizer, and the squared distance to
  the global model by autograd, with the same weight clipping and optimizers for each client.
* `lean loop`: the same loop for the rule in the paper's text. The gradients of the prior are
  written out, so autograd differentiates only the reconstruction.

The script first checks that both compute the same as the compiled round.

PyTorch uses one thread, because more threads slow steps this small down, especially on a busy
machine. Only this script needs PyTorch, and the package does not depend on it: `pip install torch
--index-url https://download.pytorch.org/whl/cpu`. Without PyTorch, the script says so and times
only the compiled rounds.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from bench.common import machine, table, turns
from jaxfed.generative import AdaptiveTraining
from jaxfed.models import Autoencoder

try:
    import torch
except ImportError:
    torch = None

CLIENTS, SAMPLES, FEATURES, LATENT = 50, 120, 784, 10
STEPS, BATCH, LAZY = 20, 6, 2
RATE, GLOBAL_RATE, SPREAD_RATE, XI, SPREAD = 1e-2, 1e-2, 1e-3, 1e-6, 1.0
ROUNDS = 10  # per compiled call, so that the call itself does not count

MAKERS = {
    preset: partial(AdaptiveTraining.autoencoder, preset=preset) for preset in ("published", "text")
}


def images() -> np.ndarray:
    """Blobs in place of digits; what the pixels are does not matter for the time."""
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((CLIENTS, SAMPLES, LATENT))
    pixels = codes @ rng.standard_normal((LATENT, FEATURES)) / 6
    return np.clip(0.2 + 0.2 * pixels, 0, 1).astype(np.float32)


def compiled(rule: str, samples, batch: int | None, rounds: int):
    """A function that runs so many rounds from the start."""
    clients = jf.Clients.from_samples(samples)
    model = Autoencoder(FEATURES, LATENT, key=jax.random.key(0))
    algorithm = MAKERS[rule](
        model,
        batch_size=batch,
        local_steps=STEPS,
        step_size=RATE,
        global_step_size=GLOBAL_RATE,
        spread_step_size=SPREAD_RATE,
        hyper_prior=XI,
        initial_spread=SPREAD,
        lazy_rounds=LAZY,
    )
    run = jax.jit(lambda clients, key: jf.rollout(algorithm, clients, rounds=rounds, key=key))
    return lambda: run(clients, jax.random.key(1))


# --- the loop in PyTorch -------------------------------------------------------------------------


class Loop:
    """One process that goes through the clients, and through the steps of each."""

    def __init__(self, rule: str, samples, batch: int | None):
        self.published = rule == "published"
        model = Autoencoder(FEATURES, LATENT, key=jax.random.key(0))
        start = [torch.tensor(np.asarray(leaf)) for leaf in jax.tree.leaves(model)]
        self.data = torch.tensor(samples)
        self.batch = SAMPLES if batch is None else batch
        self.mean = [p.clone() for p in start]
        self.spread = [torch.full_like(p, SPREAD) for p in start]
        self.personal, self.copies, self.optimizers, self.collected = [], [], [], []
        for _ in range(CLIENTS):
            own, copy = ([p.clone().requires_grad_() for p in start] for _ in range(2))
            self.personal.append(own)
            self.copies.append(copy)
            momentum = 0.9 if self.published else 0.0
            self.optimizers.append(
                (torch.optim.SGD(own, RATE, momentum=momentum), torch.optim.SGD(copy, GLOBAL_RATE))
            )
            self.collected.append([torch.zeros_like(p) for p in start])
        self.rounds = 0

    def run(self, rounds: int):
        """So many more rounds."""
        for _ in range(rounds):
            self._round()

    def _round(self):
        means = [torch.zeros_like(p) for p in self.mean]
        spreads = [torch.zeros_like(p) for p in self.spread]
        client = self._authors_client if self.published else self._lean_client
        for i in range(CLIENTS):
            order = torch.randperm(SAMPLES)
            with torch.no_grad():
                for own, shared in zip(self.copies[i], self.mean, strict=True):
                    own.copy_(shared)
            spread = [s.clone() for s in self.spread]
            client(i, order, spread)
            for total, own in zip(means, self.copies[i], strict=True):
                total += own.detach() / CLIENTS
            for total, own in zip(spreads, spread, strict=True):
                total += own.detach() / CLIENTS
        self.mean, self.spread = means, spreads
        self.rounds += 1

    def _reconstruction(self, own, x):
        w1, b1, w2, b2 = own
        code = torch.nn.functional.linear(x, w1, b1)
        missed = torch.nn.functional.linear(code, w2, b2) - x
        return (missed**2).sum() / len(x)

    def _batches(self, i, order):
        for step in range(STEPS):
            first = step * self.batch % SAMPLES
            yield step, self.data[i, order[first : first + self.batch]]

    def _authors_client(self, i, order, spread):
        own, copy = self.personal[i], self.copies[i]
        optimizer, global_optimizer = self.optimizers[i]
        for s, g in zip(spread, self.collected[i], strict=True):
            s.requires_grad_()
            s.grad = g
        for step, x in self._batches(i, order):
            regularizer(own, copy, spread).backward()
            if step == 0 and self.rounds >= LAZY:
                with torch.no_grad():
                    for s in spread:
                        torch.nn.utils.clip_grad_norm_(s, 10, "inf")
                        s -= SPREAD_RATE * s.grad
                        s.grad.zero_()
                        s.clamp_(1e-3, 100)
            optimizer.zero_grad()
            loss = self._reconstruction(own, x) + 0.1 * regularizer(own, copy, spread)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(own, 1, "inf")
            optimizer.step()
            global_optimizer.zero_grad()
            sum(((p - q) ** 2).sum() for p, q in zip(own, copy, strict=True)).backward()
            torch.nn.utils.clip_grad_norm_(copy, 1, "inf")
            global_optimizer.step()
        self.collected[i] = [s.grad for s in spread]

    def _lean_client(self, i, order, spread):
        own, copy = self.personal[i], self.copies[i]
        optimizer, global_optimizer = self.optimizers[i]
        with torch.no_grad():
            if self.rounds >= LAZY:
                slopes = [
                    (1 - (2 * XI + (p - q) ** 2) / s**2) / s
                    for p, q, s in zip(own, copy, spread, strict=True)
                ]
                norm = torch.sqrt(sum((g**2).sum() for g in slopes))
                for s, g in zip(spread, slopes, strict=True):
                    s -= SPREAD_RATE * g * torch.clamp(10 / norm, max=1)
                    s.clamp_(1e-3, 100)
            precisions = [1 / s**2 for s in spread]
        for _, x in self._batches(i, order):
            optimizer.zero_grad()
            self._reconstruction(own, x).backward()
            with torch.no_grad():
                for p, q, h in zip(own, copy, precisions, strict=True):
                    p.grad += (p - q) * h / SAMPLES
                torch.nn.utils.clip_grad_norm_(own, 1)
                optimizer.step()
                for p, q, h in zip(own, copy, precisions, strict=True):
                    q.grad = (q - p) * h
                torch.nn.utils.clip_grad_norm_(copy, 1)
                global_optimizer.step()


def regularizer(own, copy, spread):
    """R, to be differentiated."""
    total = 0
    for p, q, s in zip(own, copy, spread, strict=True):
        total = total + torch.log(s).sum() + ((2 * XI + (p - q) ** 2) / (2 * s**2)).sum()
    return total


def check(rule: str, samples) -> float:
    """Largest difference of global model and spread after three rounds of all samples."""
    loop = Loop(rule, samples, None)
    loop.run(3)
    server = compiled(rule, samples, SAMPLES, 3)().server
    pairs = zip(jax.tree.leaves(server), loop.mean + loop.spread, strict=True)
    return max(float(jnp.abs(a - b.numpy()).max()) for a, b in pairs)


def main() -> None:
    samples = images()
    names = {"published": "authors' way", "text": "lean loop"}
    print(machine())
    rivals = {f"compiled, {rule}": compiled(rule, samples, BATCH, ROUNDS) for rule in MAKERS}
    each = dict.fromkeys(rivals, ROUNDS)
    if torch is None:
        print("PyTorch is not installed: the compiled rounds are timed alone.", file=sys.stderr)
    else:
        torch.set_num_threads(1)
        print(f"torch {torch.__version__}, one thread")
        for rule, name in names.items():
            print(f"{name}: differs by at most {check(rule, samples):.1e} after 3 rounds")
            loop = Loop(rule, samples, BATCH)
            rivals[f"{name} (PyTorch)"] = lambda loop=loop: loop.run(1)
            each[f"{name} (PyTorch)"] = 1
    times = turns(rivals, repeats=5)
    rows = []
    for name, seconds in times.items():
        row = {"round of 50 clients": name, "ms": 1e3 * seconds["wall"] / each[name]}
        row["processor ms"] = 1e3 * seconds["cpu"] / each[name]
        rows.append(row)
    print(table(rows))
    if torch is not None:
        for rule, name in names.items():
            ours, theirs = times[f"compiled, {rule}"], times[f"{name} (PyTorch)"]
            wall, cpu = (ROUNDS * theirs[kind] / ours[kind] for kind in ("wall", "cpu"))
            print(f"{name} / compiled: {wall:.1f} in time, {cpu:.1f} in processor time")


if __name__ == "__main__":
    main()
