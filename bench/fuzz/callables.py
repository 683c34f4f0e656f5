"""Every public callable, arguments that are right, and which values each parameter takes."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import scipy.sparse
import xarray

import jaxfed as jf

from .kinds import (
    LARGEST,
    Kind,
    anything,
    array,
    count,
    either,
    factor,
    flag,
    function,
    instance,
    key,
    known,
    listed,
    mapping,
    number,
    one_of,
    optional,
    path,
    positive,
    text,
    texts,
    whole,
)

CLIENTS, SAMPLES, FEATURES, RANK, ROUNDS = 3, 4, 5, 2, 3


@cache
def given() -> dict[str, Any]:
    """What is right, by name: small, and made once."""
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(CLIENTS, SAMPLES, FEATURES)).astype(np.float32)
    frames = np.linalg.qr(rng.normal(size=(CLIENTS, FEATURES, RANK)))[0].astype(np.float32)
    moments = np.einsum("mnd,mne->mde", samples, samples) / SAMPLES
    clients = jf.Clients.from_samples(samples)
    perpca = jf.pca.PerPCA(1, 1)
    random = jax.random.key(0)
    model = jf.models.Autoencoder(FEATURES, 2, key=random)
    denoiser = jf.models.Perceptron(FEATURES + 1, FEATURES, hidden=(4,), key=random)
    training = jf.generative.FedAvg(
        model, jf.models.reconstruction_loss, optax.sgd(0.1), local_steps=1
    )
    rounds = rng.normal(size=(ROUNDS, FEATURES, RANK))
    images = rng.uniform(size=(4, 13, 13)).astype(np.float32)
    return {
        "samples": samples, "frames": frames, "frame": frames[0], "other": frames[1],
        "matrix": samples[0], "square": moments[0], "moments": moments, "clients": clients,
        "moment": jf.linalg.Moment.from_dense(jnp.asarray(moments[0])),
        "views": jf.gcca.Views.from_arrays([samples[0], samples[1]]),
        "sparse": scipy.sparse.csr_array(samples[0]),
        "solution": jf.fit(perpca, clients, rounds=1, key=random),
        "perpca": perpca, "hierarchical": jf.pca.HierarchicalPCA(1, 0.5, 0.1), "key": random, "model": model, "training": training,
        "denoiser": denoiser, "corruption": jf.models.interpolation(),
        "start": jf.Personalized(jnp.asarray(frames[0, :, :1]), jnp.asarray(frames[:, :, 1:])),
        "labels": np.arange(CLIENTS), "optimizer": optax.sgd(0.1), "images": images,
        "inputs": rounds, "outputs": rounds + 1.0,
        "grid": xarray.Dataset({"error": ("step", np.arange(3.0))}, {"step": np.arange(3.0)}),
    }  # fmt: skip


def from_given(name: str) -> Any:
    """A thunk is not needed where what is right cannot be changed."""
    return given()[name]


@dataclass(frozen=True)
class Target:
    """One callable.

    Attributes:
        name: of the callable, within `jaxfed`.
        right: arguments that are right, by name.
        kinds: which values each parameter takes.
        cheap: whether a right call takes no time; else only wrong ones are made.
        call: how it is called, where that is not by its parameters' names.
        says: what else a message may call a parameter.
    """

    name: str
    right: Mapping[str, Any]
    kinds: Mapping[str, Kind]
    cheap: bool = False
    call: Callable[..., Any] | None = None
    says: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __call__(self, /, **arguments: Any) -> Any:
        """Call it."""
        function = self.call or attrgetter(self.name)(jf)
        return function(**arguments)


HYPER = positive()
MAYBE = optional(HYPER)
WHOLE = count()  # of Python, for what becomes static
COUNT = whole()
UNPACKED = whole(1, 2**63 - 1)
SOME = optional(count())
REAL = "fiu"
SIZES = either(whole(), listed(whole(), CLIENTS))


def dtype(value) -> bool:
    """A floating type, by its class, its name or as a dtype."""
    if not isinstance(value, str | type | np.dtype):
        return False
    try:
        return jnp.dtype(value) in (np.float32, np.float64)
    except TypeError:
        return False


def default_dtype(value) -> bool:
    return value is None or dtype(value)


def optimizer(value) -> bool:
    return isinstance(value, optax.GradientTransformation)


def tracked(name: str) -> Kind:
    """What is right, or an object of its class."""
    return lambda value: isinstance(value, type(given()[name]))


def a_channel(value) -> bool:
    return isinstance(value, jf.channel.Channel)


def channels(value) -> bool:
    return isinstance(value, jf.channel.Channel | jf.Wire)


def compressor(value) -> bool:
    from jaxfed.core.wire.compressor import Compressor

    return isinstance(value, Compressor)


def tolerance(value) -> bool:
    return value is None or number(least=0)(value) or value == float("inf")


def never(value) -> bool:
    """That there is no such file is always said."""
    return False


def start(value) -> bool:
    return value is None


def weights(value) -> bool:
    return one_of("equal", "samples")(value) or (
        array(CLIENTS, kinds=REAL, finite=True)(value)
        and (np.asarray(value) >= 0).all()
        and np.asarray(value).sum() > 0
    )


def real(*shape: int | None, finite: bool = False) -> Kind:
    return array(*shape, kinds=REAL, finite=finite)


def fraction(value) -> bool:
    return number(above=0, most=1)(value) and not isinstance(value, np.number)


RUN = {
    "algorithm": instance(jf.Algorithm), "clients": tracked("clients"), "rounds": COUNT,
    "key": either(key, array(2, kinds="u")), "warm_start": start, "channel": channels,
    "participation": optional(instance(jf.participation.Participation)),
    "backend": instance(jf.backend.Backend), "tol": tolerance, "metrics": optional(function),
    "metrics_every": WHOLE,
}  # fmt: skip
PLANNED = ("algorithm", "clients", "rounds", "warm_start", "channel", "participation")


def targets() -> list[Target]:
    """All of them."""
    right, adjoint = given(), jf.adjoint.Adjoint
    run = {
        "algorithm": right["perpca"],
        "clients": right["clients"],
        "rounds": 2,
        "key": right["key"],
    }

    found = [
        # --- runs
        Target(
            "fit",
            run,
            RUN
            | {
                "progress": flag,
                "checkpoint": optional(instance(jf.Checkpoint)),
                "callbacks": listed(function, least=0),
                "best": optional(text),
                "chunk_rounds": SOME,
                "throw": flag,
            },
        ),
        Target(
            "personalize",
            {
                "algorithm": right["perpca"],
                "solution": right["solution"],
                "clients": right["clients"],
            },
            {
                "algorithm": lambda value: value is right["perpca"],
                "solution": lambda value: value is right["solution"],
                "clients": tracked("clients"),
                "rounds": whole(0),
                "key": optional(RUN["key"]),
                "backend": RUN["backend"],
            },
            says={"algorithm": ("solution",)},
        ),
        Target(
            "deploy.flower.server_app",
            {"make_algorithm": dict, "clients": CLIENTS, "rounds": 2, "key": right["key"]},
            {
                "make_algorithm": function,
                "clients": lambda value: value == CLIENTS,
                "rounds": COUNT,
                "key": either(RUN["key"], whole(0, 2**32 - 1)),
                "channel": channels,
                "participation": RUN["participation"],
                "warm_start": optional(function),
                "weights": weights,
                "tol": tolerance,
                "deadline": optional(positive(arrays=False)),
                "at_least": never,
                "patience": positive(arrays=False),
                "out": path,
            },
            cheap=True,
        ),
        Target(
            "deploy.flower.client_app",
            {"make_algorithm": dict, "make_data": dict},
            {
                "make_algorithm": function,
                "make_data": function,
                "channel": channels,
                "warm_start": optional(function),
                "folder": optional(path),
            },
            cheap=True,
        ),
        Target(
            "plan",
            {"algorithm": jf.pca.Pooled(1), "clients": right["clients"], "topology": "cpu"},
            {name: RUN[name] for name in PLANNED}
            | {
                "topology": one_of("cpu"),
                "backend": optional(instance(jf.backend.Backend)),
                "chunk_size": SOME,
            },
        ),
        Target(
            "shapes_of",
            {"clients": 3, "samples": 4, "features": 5},
            {"clients": COUNT, "samples": COUNT, "features": COUNT, "dtype": dtype},
        ),
        Target("rollout", run, RUN | {"adjoint": instance(adjoint)}),
        Target(
            "tune",
            {
                "algorithm": right["hierarchical"],
                "clients": right["clients"],
                "held_out": lambda result: result.local.sum(),
                "optimizer": right["optimizer"],
                "names": ["prior_variance"],
                "rounds": 2,
                "steps": 1,
                "key": right["key"],
            },
            {
                "algorithm": lambda value: value is right["hierarchical"],
                "clients": tracked("clients"),
                "held_out": function,
                "optimizer": optimizer,
                "names": lambda value: False,
                "rounds": COUNT,
                "steps": WHOLE,
                "key": RUN["key"],
                "tol": tolerance,
                "patience": SOME,
                "adjoint": optional(instance(adjoint)),
                "progress": flag,
            },
            says={"algorithm": ("names",)},
        ),
        Target("adjoint.unrolled", {}, {"remat": flag}, cheap=True),
        Target("adjoint.checkpointed", {}, {"n": optional(count(2))}, cheap=True),
        Target(
            "adjoint.implicit",
            {},
            {
                "tol": optional(positive(arrays=False)),
                "max_rounds": WHOLE,
                "through": optional(instance(jf.Algorithm)),
                "memory": WHOLE,
                "fixed_point_tol": optional(positive(arrays=False)),
                "turning_tol": positive(arrays=False),
                "report": optional(instance(jf.adjoint.Report)),
                "throw": flag,
            },
            cheap=True,
        ),
        Target(
            "sweep",
            {
                "algorithms": right["perpca"],
                "clients": right["clients"],
                "keys": right["key"],
                "rounds": 2,
            },
            {
                "algorithms": either(instance(jf.Algorithm), listed(instance(jf.Algorithm))),
                "clients": either(tracked("clients"), listed(tracked("clients"))),
                "keys": lambda value: (
                    isinstance(value, jax.Array)
                    and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
                    and value.ndim <= 1
                ),
                "rounds": COUNT,
                "block": SOME,
                "tol": tolerance,
                "metrics_every": WHOLE,
                "backend": RUN["backend"],
                "channel": channels,
                "participation": RUN["participation"],
                "metrics": optional(function),
                "warm_start": start,
                "adjoint": instance(adjoint),
            },
        ),
        Target(
            "grid",
            {"function": lambda x: {"y": x}, "axes": {"x": [1.0, 2.0]}},
            {
                "function": lambda value: False if value is int else callable(value),
                "axes": lambda value: (
                    isinstance(value, dict)
                    and list(value) == ["x"]
                    and real(None, finite=True)(value["x"])
                ),
                "dims": lambda value: value is None or value == {},
                "block": SOME,
                "backend": RUN["backend"],
                "progress": flag,
                "folder": optional(path),
            },
        ),
        Target("stack", {"trees": [right["perpca"]] * 2}, {"trees": listed(anything)}),
        Target("enable_compilation_cache", {}, {"folder": optional(path)}),
        Target(
            "load",
            {"path": "absent.npz"},
            {"path": never, "like": never},
            says={"like": ("absent.npz",)},
        ),
        Target(
            "Checkpoint", {"path": "run"}, {"path": path, "every": WHOLE, "keep": WHOLE}, cheap=True
        ),
        Target(
            "EarlyStopping",
            {"monitor": "objective"},
            {
                "monitor": text,
                "patience": count(0),
                "min_delta": factor(arrays=False),
            },
            cheap=True,
        ),
        # --- clients
        Target(
            "Clients.from_samples",
            {"arrays": right["samples"]},
            {
                "arrays": either(array(None, None, None, finite=True), _tables),
                "weights": weights,
                "bucket": optional(number(least=1.1)),
            },
        ),
        Target(
            "Clients.from_source",
            {"source": right["samples"]},
            {
                "weights": weights,
                "counts": optional(listed(whole(SAMPLES, SAMPLES), CLIENTS)),
                "bucket": optional(number(least=1.1)),
                "block_bytes": count(),
                "states": lambda value: value is None or (path(value) and Path(value).is_dir()),
            },
        ),
        Target(
            "data.NpyFolder", {}, {"folder": lambda value: path(value) and Path(value).is_dir()}
        ),
        Target(
            "data.ParquetGroups", {}, {"path": lambda value: path(value) and Path(value).is_file()}
        ),
        Target(
            "Clients.from_moments",
            {"matrices": right["moments"]},
            {
                "matrices": _moments,
                "counts": lambda value: (
                    value is None
                    or (real(CLIENTS, finite=True)(value) and (np.asarray(value) > 0).all())
                ),
                "weights": lambda v: weights(v) and not one_of("samples")(v),
            },
            says={"weights": ("counts",)},
        ),
        Target(
            "Clients.from_process_local",
            {"own": right["clients"]},
            {
                "own": instance(jf.Clients),
                "backend": lambda value: value is None or value == jf.backend.shard(),
                "ids": optional(_ids),
                "weights": weights,
            },
        ),
        Target(
            "Clients.restrict",
            {"self": right["clients"]},
            {
                "clients": optional(_part(CLIENTS)),
                "samples": optional(_part(SAMPLES)),
            },
        ),
        Target(
            "Clients.take", {"self": right["clients"], "indices": [0, 1]}, {"indices": _indices}
        ),
        Target(
            "gcca.Views.from_arrays",
            {"arrays": list(right["samples"])},
            {
                "arrays": _views,
                "center": flag,
            },
        ),
        Target(
            "gcca.Views.from_sparse",
            {"matrices": [right["sparse"]] * 2},
            {
                "matrices": listed(scipy.sparse.issparse),
                "center": flag,
            },
        ),
        # --- channels, participation, backends
        Target("channel.cast", {"dtype": "float16"}, {"dtype": _cast}, cheap=True),
        Target(
            "channel.chain",
            {"compressors": [jf.channel.sign()]},
            {
                "compressors": listed(compressor),
            },
            cheap=True,
            call=lambda compressors: (
                jf.channel.chain(*compressors)
                if isinstance(compressors, list | tuple)
                else jf.channel.chain(compressors)
            ),
            says={"compressors": ("compressor",)},
        ),
        Target(
            "channel.difference",
            {"compressor": jf.channel.sign()},
            {"compressor": compressor},
            cheap=True,
        ),
        Target(
            "channel.error_feedback",
            {"compressor": jf.channel.sign()},
            {"compressor": compressor},
            cheap=True,
        ),
        Target(
            "channel.gaussian",
            {"clip": 1.0, "noise_multiplier": 1.0},
            {
                "clip": positive(arrays=False),
                "noise_multiplier": positive(arrays=False),
                "clients": WHOLE,
            },
            cheap=True,
        ),
        Target(
            "channel.quantize",
            {"bits": 8},
            {
                "bits": whole(2, 8),
                "norm": one_of("max", "frobenius"),
                "contraction": number(least=1),
                "rounding": one_of("stochastic", "nearest"),
                "coding": one_of("fixed", "entropy"),
                "scale_bits": lambda value: False,
            },
            cheap=True,
        ),
        Target("channel.quantize", {"levels": 3}, {"levels": whole(1, 127)}, cheap=True),
        Target(
            "channel.random_k",
            {"fraction": 0.5},
            {"fraction": number(above=0, most=1), "scaled": flag},
            cheap=True,
        ),
        Target(
            "channel.top_k", {"fraction": 0.5}, {"fraction": number(above=0, most=1)}, cheap=True
        ),
        Target(
            "channel.secure_sum",
            {"clients": 3, "bits": 16, "bound": 1.0},
            {
                "clients": count(2, 2**15 - 1),
                "bits": count(3, 32),
                "bound": positive(arrays=False),
                "neighbours": optional(whole(2, 2)),
                "inner": lambda value: value is None or isinstance(value, jf.channel.Channel),
            },
            cheap=True,
            says={"clients": ("bits",)},
        ),
        Target(
            "Wire",
            {"up": jf.channel.sign(), "down": jf.channel.lossless()},
            {"up": a_channel, "down": a_channel, "first": optional(a_channel)},
            cheap=True,
        ),
        Target(
            "participation.uniform",
            {"size": 2},
            {"size": COUNT},
            cheap=True,
            says={"size": ("participation size",)},
        ),
        Target(
            "participation.mask",
            {"present": np.ones((2, CLIENTS), bool)},
            {
                "present": either(array(None, kinds="b"), array(None, None, kinds="b")),
            },
            cheap=True,
            says={"present": ("participation mask",)},
        ),
        Target("backend.chunked", {"size": 2}, {"size": COUNT}, cheap=True),
        Target(
            "backend.pmap",
            {},
            {
                "devices": _devices,
                "inner": optional(instance(jf.backend.Backend)),
            },
            cheap=True,
        ),
        Target(
            "backend.shard",
            {},
            {
                "mesh": _devices,
                "axis": optional(one_of("clients")),
                "inner": optional(instance(jf.backend.Backend)),
            },
            cheap=True,
            says={"mesh": ("devices",)},
        ),
        # --- algorithms
        *_algorithms(right),
        *_layers(right),
        *_estimators(right),
        # --- everything that computes on arrays
        *_functions(right),
        *_data(right),
        *_models(right),
        *_plots(right),
        *_reports(right),
    ]
    return found


def _tables(value) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(
            isinstance(x, np.ndarray | jax.Array) and array(None, None, finite=True)(x)
            for x in value
        )
        and all(np.asarray(x).dtype.itemsize >= 4 for x in value)
        and len({(np.shape(x)[1], np.asarray(x).dtype) for x in value}) == 1
    )


def _views(value) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(
            array(None, None, finite=True)(x) and np.asarray(x).dtype.itemsize >= 4 for x in value
        )
        and len({len(x) for x in value}) == 1
    )


def _moments(value) -> bool:
    return (
        array(None, None, None, finite=True)(value)
        and np.shape(value)[1] == np.shape(value)[2]
        and np.asarray(value).dtype.itemsize >= 4
        and np.allclose(value, np.swapaxes(value, 1, 2))
    )


def _indices(value) -> bool:
    found = known(value, "iu")
    return found is not None and found.ndim == 1 and bool((abs(found + 0.5) < CLIENTS).all())


def _ids(value) -> bool:
    found = known(value, "iu")
    fits = found is not None and found.shape == (CLIENTS,) and len(set(found.tolist())) == CLIENTS
    return fits and found.min() >= 0 and found.max() <= LARGEST


def _part(most: int) -> Kind:
    """A whole number, in an array too."""
    return either(
        whole(1, most), lambda v: array(kinds="iu")(v) and bool(1 <= np.asarray(v) <= most)
    )


def _cast(value) -> bool:
    if not isinstance(value, str | type | np.dtype):
        return False
    try:
        return jnp.dtype(value) in map(jnp.dtype, ("float16", "bfloat16", "float32"))
    except TypeError:
        return False


def _devices(value) -> bool:
    return value is None or whole(1, len(jax.local_devices()))(value)


def _algorithms(right) -> list[Target]:
    stop = one_of("objective", "kkt")
    start = one_of("pooled", "random")
    solver, likelihood = one_of("gradient", "eigenvectors"), one_of("exact", "half")
    bayes = {
        "rank": WHOLE, "noise_variance": HYPER, "prior_variance": HYPER, "step_size": MAYBE,
        "global_step_size": MAYBE, "solver": solver, "likelihood": likelihood, "start": start,
        "align": flag,
    }  # fmt: skip
    arrays_in = lambda v: [
        x for x in jax.tree.leaves(v) if isinstance(x, np.ndarray | np.generic | jax.Array)
    ]
    training = {
        "model": lambda value: any(
            jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in arrays_in(value)
        ) and all(
            leaf.dtype.kind != "O" and not isinstance(leaf, np.ma.MaskedArray)
            and (not jnp.issubdtype(leaf.dtype, jnp.inexact) or np.isfinite(leaf).all())
            for leaf in arrays_in(value)
        ),
        "loss": function, "local_steps": WHOLE, "batch_size": SOME, "step_size": factor(),
        "global_step_size": factor(), "spread_step_size": factor(), "hyper_prior": HYPER,
        "initial_spread": number(least=1e-3, most=100, arrays=True),
        "prior_weight": optional(factor()), "lazy_rounds": count(0), "clip": MAYBE, "spread_clip": MAYBE,
        "bounds": _bounds, "optimizer": optimizer, "global_optimizer": optimizer,
        "preset": one_of("text", "published"), "prior_step": one_of("gradient", "proximal"),
    }  # fmt: skip
    two = {"shared_rank": 1, "local_rank": 1}
    model = {"model": right["model"], "loss": jf.models.reconstruction_loss}
    cheap = [
        Target("pca.PerPCA", two, {
            "shared_rank": WHOLE,
            "local_rank": either(WHOLE, lambda v: isinstance(v, tuple | list) and ((listed(count(0), least=2)(v) and any(v)) or listed(count(), 1)(v))),
            "step_size": MAYBE, "variant": one_of("tangent", "polar"), "retraction": one_of("polar", "qr"),
            "start": one_of("local_first", "random"), "decay": MAYBE, "shrinkage": flag,
        }),
        Target("pca.VarProPerPCA", two, {"shared_rank": WHOLE, "local_rank": WHOLE}),
        Target("pca.OneShot", two, {
            "shared_rank": WHOLE, "local_rank": WHOLE, "method": one_of("projector", "spectrum", "local_first"),
        }),
        Target("pca.Pooled", {"rank": 1}, {"rank": WHOLE}),
        Target("pca.Local", {"rank": 1}, {"rank": WHOLE}),
        Target("pca.SubspaceIteration", {"rank": 1}, {"rank": WHOLE, "stop": stop, "retraction": one_of("qr", "polar")},
        ),
        Target("pca.BlockLanczos", {"rank": 1}, {"rank": WHOLE, "memory": optional(count(3)), "stop": stop}),
        Target("pca.LocalPower", {"rank": 1}, {
            "rank": WHOLE, "local_steps": WHOLE, "alignment": one_of("none", "sign", "procrustes"), "stop": stop,
        }),
        Target("pca.FAPS", {"rank": 1}, {
            "rank": WHOLE, "penalty": HYPER, "penalty_growth": MAYBE,
            "local_solver": one_of("fixed", "relative_change", "sufficient_decrease"),
            "local_steps": SOME, "local_tol": lambda v: v is None, "stop": stop,
        }),
        Target("pca.AdaptivePCA", {"rank": 1, "noise_variance": 0.5}, bayes | {
            "hyper_prior": MAYBE, "spread": one_of("closed_form", "log", "gradient"),
            "spread_step_size": MAYBE, "dimension": one_of("subspace", "frame"),
        }),
        Target("pca.HierarchicalPCA", {"rank": 1, "noise_variance": 0.5, "prior_variance": 0.5}, bayes),
        Target("pca.EmpiricalBayesPCA", {"rank": 1, "noise_variance": 0.5}, {"rank": WHOLE, "noise_variance": HYPER}),
        Target("pca.GlobalProbabilisticPCA", {"rank": 1, "noise_variance": 0.5}, {
            "rank": WHOLE, "noise_variance": HYPER, "step_size": MAYBE, "start": start,
        }),
        Target("pca.LocalProbabilisticPCA", {"rank": 1, "noise_variance": 0.5}, {
            "rank": WHOLE, "noise_variance": HYPER, "step_size": MAYBE,
        }),
        Target("gcca.MaxVar", {"rank": 1}, {
            "rank": WHOLE, "solver": one_of("gradient", "exact"), "inner_steps": WHOLE, "batch_size": SOME,
            "ridge": factor(), "proximal": factor(),
        }),
        Target("gcca.MVLSA", {"rank": 1}, {"rank": WHOLE, "view_rank": SOME}),
        Target("gcca.DeepMaxVar", {"network": network, "optimizer": right["optimizer"], "rank": 1}, {
            "network": lambda v: callable(v) and not isinstance(v, eqx.Module), "optimizer": optimizer, "rank": WHOLE, "inner_epochs": WHOLE,
            "batch_size": SOME, "step_size": factor(), "proximal": factor(),
        }),
        Target("generative.FedAvg", model | {"client_optimizer": right["optimizer"], "local_steps": 1}, {
            "model": training["model"], "loss": function, "client_optimizer": optimizer,
            "local_steps": WHOLE, "batch_size": SOME, "step_size": factor(), "proximal": factor(),
            "server_optimizer": optional(optimizer), "fine_tuning_steps": count(0),
        }),
        Target("generative.AdaptiveTraining", model, training),
        Target("generative.AdaptiveAutoencoder", {"model": right["model"]}, training),
        Target("generative.AdaptiveDiffusion", {"model": right["denoiser"]}, {
            name: training[name] for name in (
                "model", "local_steps", "step_size", "global_step_size", "spread_step_size",
                "hyper_prior", "batch_size", "initial_spread",
            )
        } | {
            "corruption": tracked("corruption"), "conditional": flag, "decay_after": SOME,
            "optimizer": optional(optimizer), "global_optimizer": optional(optimizer),
        }),
    ]  # fmt: skip
    return [Target(t.name, t.right, t.kinds, cheap=True) for t in cheap]


def network(features, *, mask=None, key):
    """A view's network."""
    return jf.models.Perceptron(features, 1, mask=mask, key=key)


def _bounds(value) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(number(above=0)(x) and not isinstance(x, np.generic) for x in value)
        and value[0] < value[1]
        and value[0] <= 1 <= value[1]
    )


def _layers(right) -> list[Target]:
    """Solves as layers, and the check of algorithms of one's own."""
    solve = {name: RUN[name] for name in ("algorithm", "rounds", "key", "tol")} | {
        "adjoint": optional(instance(jf.adjoint.Adjoint))
    }
    samples = {"samples": array(None, None, None, finite=True)}
    views = {"views": tracked("views")}
    of_samples = {n: run_of(right)[n] for n in ("algorithm", "rounds", "key")} | {
        "samples": right["samples"]
    }
    of_views = of_samples | {"algorithm": jf.gcca.MaxVar(1), "views": right["views"]}
    del of_views["samples"]
    maybe = optional(function)
    return [
        Target("nn.personalized_projection", of_samples, solve | samples | {"start": start}),
        Target("nn.common_projection", of_views, solve | views | {"start": start}),
        Target("nn.PersonalizedProjection", of_samples, solve | samples),
        Target("nn.CommonRepresentation", of_views, solve | views),
        Target(
            "testing.check_algorithm",
            {"algorithm": right["perpca"], "clients": right["clients"], "checks": ["structure"]},
            {
                "algorithm": instance(jf.Algorithm), "clients": tracked("clients"),
                "rounds": whole(2), "key": optional(RUN["key"]), "essence": maybe, "loss": maybe,
                "constraint": maybe, "others": optional(tracked("clients")),
                "wider": optional(instance(jf.Algorithm)), "pad": maybe, "deterministic": flag,
                "channels": lambda value: value is None or isinstance(value, dict),
                "backends": lambda value: value is None or isinstance(value, dict),
                "checks": lambda value: value is None or value in ([], ()), "rtol": factor(arrays=False),
                "atol": factor(arrays=False),
            },
        ),
    ]  # fmt: skip


def _estimators(right) -> list[Target]:
    """As scikit-learn wants it, parameters are only looked at in `fit`."""

    def fitted(name: str, data: Any) -> Callable[..., Any]:
        return lambda **parameters: getattr(jf.estimators, name)(**parameters).fit(data).summary_

    seed = either(whole(0, 2**32 - 1), lambda value: value is None or isinstance(value, bool))
    few, always = whole(1, 2), {"rounds": COUNT, "center": flag, "random_state": seed}
    rows = np.concatenate(right["samples"])
    return [
        Target(
            f"estimators.{name}", {"rounds": 1}, always | kinds,
            call=fitted(name, list(right["samples"]) if name == "FederatedGCCA" else rows),
            says={"random_state": ("seed", "Seed")},
        )
        for name, kinds in {
            "PersonalizedPCA": {
                "shared_rank": few, "local_rank": few, "shrinkage": flag,
                "start": one_of("better", "local_first", "projector"),
            },
            "FederatedPCA": {"n_components": few, "tol": tolerance},
            "HierarchicalPCA": {
                "n_components": few, "noise_variance": HYPER, "prior_variance": optional(HYPER),
            },
            "FederatedGCCA": {
                "n_components": few, "ridge": factor(), "solver": one_of("gradient", "exact"),
            },
        }.items()
    ]  # fmt: skip


def _functions(right) -> list[Target]:
    m, d, r = CLIENTS, FEATURES, RANK
    counts = lambda v: (
        v is None
        or (
            real(m, finite=True)(v)
            and (np.asarray(v) >= 0).all()
            and (np.asarray(v) <= SAMPLES).all()
        )
    )
    data = either(real(m, None, d), instance(jf.linalg.Moment))
    shared, local = optional(real(d, None)), optional(real(m, d, None))
    only = either(real(None, None, d), instance(jf.linalg.Moment))
    parts = {"samples": data, "shared": shared, "local": local, "counts": counts}
    three = {"samples": right["samples"], "shared": right["frame"], "local": right["frames"]}
    energy = parts | {"per_client": flag}
    frame = {"w": right["frame"]}
    own = jf.Personalized(None, jnp.asarray(right["frames"]))
    shared_alone = jf.Personalized(jnp.asarray(right["frame"]), None)
    fitted, asked = {"fitted": own}, {"fitted": lambda v: v is own}
    of_all = lambda last: either(real(m, None, last), listed(real(None, last), m))
    tall = lambda v: array(None, None, kinds="f")(v) and len(v) >= np.shape(v)[1]
    labels = array(m, kinds="biufU")
    sets = {"features_a": right["matrix"], "features_b": right["matrix"]}
    rows = lambda v: real(None, FEATURES)(v) and len(v) >= 2
    pair = {"features_a": rows, "features_b": rows}
    point = {"x": right["frame"], "y": right["other"]}
    base = either(real(d, r))
    metric = one_of("euclidean", "canonical")
    attack = {"inputs": right["inputs"], "outputs": right["outputs"]}
    frames3 = real(ROUNDS, d, r)
    views = {
        "views": right["views"],
        "shared": np.eye(SAMPLES, 2, dtype=np.float32),
        "local": np.ones((2, FEATURES, 2), np.float32),
    }
    unit = number(above=0)
    single = lambda v: isinstance(v, float | np.number) or whole(-(2**63), 2**64 - 1)(v)
    reals = either(real(...), lambda v: single(v) and real()(np.asarray(v)))
    beside = lambda v: (
        reals(v)
        and all(
            length in (1, wanted) for length, wanted in zip(np.shape(v)[::-1], (r, d), strict=False)
        )
    )
    return [
        Target("linalg.polar", frame, {"w": array(None, None), "method": optional(one_of("newton_schulz", "eigh", "svd", "pallas"))}),
        Target("linalg.orthonormalize", frame, {"w": tall, "method": optional(one_of("qr", "cholesky"))}),
        Target("linalg.ratio", {"numerator": right["frame"], "denominator": 2.0}, {"numerator": reals, "denominator": beside}, cheap=True),
        Target("linalg.svd", frame, {"w": array(None, None)}),
        Target("linalg.thin_product", frame | {"x": np.ones((RANK, 2), np.float32)}, {"w": real(None, RANK), "x": real(RANK, None)}),
        Target("linalg.transposed_product", {"x": frame["w"], "y": np.ones((len(frame["w"]), 2), np.float32)}, {"x": real(len(frame["w"]), None), "y": real(len(frame["w"]), None)}),
        Target("linalg.top_eigenvectors", {"matrix": right["square"], "rank": 1}, {
            "matrix": lambda v: array(None, None)(v) and len(v) == np.shape(v)[1], "rank": whole(1, d),
        }),
        Target("linalg.should_densify", {"samples": 4, "features": 5, "rank": 1, "rounds": 2}, {
            "samples": COUNT, "features": COUNT, "rank": COUNT, "rounds": COUNT,
        }, cheap=True),
        Target("linalg.largest_eigenvalue", {
            "product": lambda a, x: a @ x, "operator": jnp.eye(3), "start": jnp.ones(3), "steps": 3,
        }, {"product": function, "start": array(None), "steps": COUNT}),
        Target("linalg.not_rounding", {"singular": np.ones(3, np.float32), "shape": (3, 3)}, {
            "singular": array(None), "shape": listed(whole()),
        }),
        Target("linalg.Moment.from_samples", {"samples": right["matrix"]}, {
            "samples": array(None, None), "count": optional(factor(arrays=False)),
        }),
        Target("linalg.Moment.from_dense", {"matrix": right["square"]}, {
            "matrix": lambda v: array(None, None)(v) and len(v) == np.shape(v)[1], "count": factor(arrays=False),
        }),
        *(
            Target(f"manifolds.{kind}.{name}", {"x": right["frame"], **given}, kinds)
            for kind in ("stiefel", "grassmann")
            for name, given, kinds in (
                ("project", {"g": right["other"]}, {"x": base, "g": base}),
            )
        ),
        Target("manifolds.stiefel.transport", {"x_new": right["frame"], "g": right["other"]}, {"x_new": base, "g": base}),
        Target("manifolds.grassmann.transport", {"x_new": right["frame"], "g": right["other"]}, {"x_new": base, "g": base}),
        *(Target(f"manifolds.stiefel.retract_{n}", {"x": right["frame"], "v": right["other"]}, {"x": base, "v": base}) for n in ("polar", "qr", "cayley")),
        Target("manifolds.grassmann.exp", {"x": right["frame"], "v": right["other"]}, {"x": base, "v": base}),
        Target("manifolds.grassmann.log", point, {"x": base, "y": base}),
        Target("manifolds.grassmann.principal_angles", point, {"x": real(d, None), "y": real(d, None)}),
        Target("manifolds.grassmann.distance", point, {"x": real(d, None), "y": real(d, None), "kind": one_of("chordal", "geodesic", "procrustes")}),
        Target("manifolds.stiefel.distance", point, {"x": base, "y": base, "kind": one_of("chordal", "euclidean", "canonical")}),
        Target("manifolds.stiefel.exp", {"x": right["frame"], "v": right["other"]}, {"x": base, "v": base, "metric": metric}),
        Target("manifolds.stiefel.log", point, {"x": base, "y": base, "metric": metric}),
        Target("manifolds.stiefel.norm", {"x": right["frame"], "v": right["other"]}, {"x": base, "v": base, "metric": metric}),
        Target("manifolds.stiefel.egrad2rgrad", {"x": right["frame"], "g": right["other"]}, {"x": base, "g": base, "metric": metric}),
        Target("manifolds.stiefel.inner", {"x": right["frame"], "u": right["other"], "v": right["other"]}, {"x": base, "u": base, "v": base, "metric": metric}),
        Target("manifolds.stiefel.transport_cayley", {"x": right["frame"], "v": right["other"], "u": right["other"]}, {"x": base, "v": base, "u": base}),
        Target("manifolds.grassmann.norm", {"x": right["frame"], "v": right["other"]}, {"x": base, "v": base}),
        Target("manifolds.grassmann.egrad2rgrad", {"x": right["frame"], "g": right["other"]}, {"x": base, "g": base}),
        Target("manifolds.grassmann.inner", {"x": right["frame"], "u": right["other"], "v": right["other"]}, {"x": base, "u": base, "v": base}),
        Target("manifolds.grassmann.transport_parallel", {"x": right["frame"], "v": right["other"], "u": right["other"]}, {"x": base, "v": base, "u": base}),
        *(
            target
            for kind in ("stiefel", "grassmann")
            for target in (
                Target(f"manifolds.{kind}.random_tangent", {"key": right["key"], "x": right["frame"]}, {
                    "key": key,
                    "x": lambda v, kind=kind: real(None, None)(v) and len(v) >= np.shape(v)[1] and np.shape(v)[0] > (np.shape(v)[1] if kind == "grassmann" else 1),
                }),
                Target(f"manifolds.{kind}.ehess2rhess", {"x": right["frame"], **dict.fromkeys("ghv", right["other"])}, dict.fromkeys("xghv", base)),
                Target(f"manifolds.{kind}.transport_differential", {"x": right["frame"], "v": right["other"], "u": right["other"]}, {
                    "x": base, "v": base, "u": base, "retraction": one_of("polar", "qr", "cayley"),
                }),
            )
        ),
        Target("manifolds.minimise", {"function": lambda x: x.sum(), "start": right["frame"], "max_steps": 3}, {
            "function": function, "start": anything, "manifold": one_of("stiefel", "grassmann", "euclidean"),
            "solver": one_of("conjugate_gradients", "lbfgs", "trust_regions"),
            "retraction": one_of("polar", "qr", "cayley"), "tol": optional(positive(arrays=False)),
            "max_steps": COUNT,
        }),
        Target("manifolds.stiefel.is_on", {"x": right["frame"]}, {"x": real(None, None), "tolerance": optional(positive(arrays=False))}),
        Target("manifolds.stiefel.retraction", {"name": "polar"}, {"name": one_of("polar", "qr", "cayley")}, cheap=True, says={"name": ("retraction",)}),
        Target("manifolds.stiefel.random", {"key": right["key"], "dim": 3, "rank": 2}, {
            "key": key, "dim": whole(2), "rank": whole(1, 3),
        }, says={"dim": ("rank",)}),
        Target("manifolds.riemannian", {"transformation": right["optimizer"]}, {
            "transformation": optimizer, "manifold": one_of("stiefel", "grassmann", "euclidean"),
            "retraction": one_of("polar", "qr", "cayley"), "mask": anything,
        }),
        # --- metrics
        *(Target(f"metrics.{name}", three, energy) for name in ("reconstruction_error", "captured_energy", "separation")),
        Target("metrics.kkt_violation", three, parts),
        Target("metrics.reconstructed_energy", {"samples": right["samples"], "reconstructions": right["samples"]}, {
            "samples": real(m, SAMPLES, d), "reconstructions": real(m, SAMPLES, d), "counts": counts, "per_client": flag,
        }),
        Target("metrics.scaled_kkt_violation", {n: three[n] for n in ("samples", "shared")}, {"samples": only, "shared": real(d, None), "counts": counts}),
        Target("metrics.relative_singular_value_error", {"samples": right["samples"], "shared": right["frame"], "singular_values": np.ones(2, np.float32)}, {
            "samples": only, "shared": real(d, 2), "singular_values": real(2), "counts": counts,
        }),
        Target("metrics.projector_distance", point, {"x": real(..., d, None), "y": real(..., d, None)}),
        Target("metrics.subspace_error", {"shared": right["frame"], "local": right["frames"], "true_shared": right["frame"], "true_local": right["frames"]}, {
            "shared": shared, "local": local, "true_shared": shared, "true_local": local,
        }),
        Target("metrics.misalignment", {"local": right["frames"]}, {"local": real(None, None, None)}),
        Target("metrics.client_distances", {"local": right["frames"]}, {"local": real(None, None, None)}),
        Target("metrics.expected_reconstruction_error", {"local": right["frames"], "truth": right["frames"], "noise_variance": 0.1}, {
            "local": real(m, d, None), "truth": real(m, d, None), "noise_variance": factor(arrays=False), "relative": flag, "per_client": flag,
        }),
        Target("metrics.adjusted_rand_index", {"labels": right["labels"], "assigned": right["labels"]}, {"labels": labels, "assigned": labels}, cheap=True),
        Target("metrics.clustering_accuracy", {"labels": right["labels"], "assigned": right["labels"]}, {"labels": labels, "assigned": labels}, cheap=True),
        Target("metrics.rounds_to_accuracy", {"values": np.arange(3.0), "accuracy": 0.5}, {"values": real(..., None), "accuracy": number()}),
        Target("metrics.floats_to_accuracy", {"values": np.arange(3.0), "accuracy": 0.5, "bits": np.arange(3.0)}, {
            "values": real(..., 3), "accuracy": number(), "bits": real(..., 3), "precision": COUNT,
        }, says={"values": ("bits",)}),
        Target("metrics.frechet_distance", sets, pair),
        Target("metrics.kernel_distance", sets, pair),
        Target("metrics.kernel_distance_with_error", sets, {n: lambda v: rows(v) and len(v) >= 3 for n in sets}),
        Target("metrics.kernel_distance_of_subsets", sets | {"key": right["key"], "subset_size": 2}, pair | {
            "key": key, "subsets": whole(2), "subset_size": whole(2, SAMPLES),
        }),
        Target("metrics.noise_level", {"images": right["images"]}, {
            "images": lambda v: real(..., None, None)(v) and min(np.shape(v)[-2:]) >= 3,
        }),
        Target("metrics.client_distribution", {"values": np.arange(3.0), "good": "small"}, {"values": real(None), "good": one_of("small", "large")}),
        Target("metrics.svm_accuracy", {"train": right["matrix"], "train_labels": np.arange(4) % 2, "test": right["matrix"], "test_labels": np.arange(4) % 2}, {
            "train": real(SAMPLES, FEATURES, finite=True), "train_labels": array(SAMPLES, kinds="biufU"),
            "test": real(SAMPLES, FEATURES, finite=True), "test_labels": array(SAMPLES, kinds="biufU"),
            "kernel": one_of("linear", "rbf"), "penalty": positive(arrays=False),
        }),
        Target("metrics.spectral_clustering_accuracy", {"rows": right["matrix"], "labels": np.arange(4) % 2}, {
            "rows": real(SAMPLES, None, finite=True), "labels": array(SAMPLES, kinds="biufU"), "gamma": positive(arrays=False), "seed": whole(0),
        }),
        # --- GCCA
        Target("gcca.cost", views, {"views": tracked("views"), "shared": real(SAMPLES, 2), "local": real(2, FEATURES, 2), "ridge": factor()}),
        Target("gcca.optimum", {"views": right["views"], "rank": 1}, {"views": tracked("views"), "rank": count(1, SAMPLES), "ridge": factor()}),
        Target("gcca.transform", {"fitted": jf.Personalized(views["shared"], views["local"]), "views": right["views"]}, {
            "fitted": instance(jf.Personalized), "views": tracked("views"),
        }),
        Target("gcca.alignment_accuracy", {"scores": np.ones((2, 3, 2), np.float32)}, {"scores": lambda v: real(None, None, None)(v) and len(v) >= 2}),
        Target("gcca.subspace_distance", {"shared": right["frame"], "other": right["other"]}, {"shared": real(d, None), "other": real(d, None)}),
        Target("gcca.bits_per_variable", {"rounds": 2, "bits": 3.0}, {
            "rounds": count(0), "bits": either(positive(arrays=False)), "entries": SOME, "start_bits": optional(positive(arrays=False)),
        }, cheap=True),
        Target("gcca.compression_ratio", {"rounds": 2, "full_rounds": 2, "bits": 3.0}, {
            "rounds": number(least=1), "full_rounds": positive(arrays=False), "bits": positive(arrays=False), "start_bits": positive(arrays=False),
        }, cheap=True),
        # --- applications of PCA
        Target("pca.cluster_clients", {"local": right["frames"], "clusters": 2}, {"local": real(None, None, None, finite=True), "clusters": count(1, m), "seed": count(0)}),
        Target("pca.embed_clients", {"local": right["frames"]}, {"local": real(None, None, None), "dims": count(1, m)}),
        Target("pca.robust_pca", {"matrix": right["matrix"]}, {
            "matrix": array(None, None, kinds=REAL, finite=True), "sparsity": optional(positive(arrays=False)), "rounds": WHOLE, "tol": optional(positive(arrays=False)),
        }),
        Target("pca.separate_video", {"frames": right["images"], "shared_rank": 1, "local_rank": 1}, {
            "frames": real(None, None, None, finite=True), "shared_rank": count(1, 12), "local_rank": count(1, 12), "rounds": WHOLE,
            "algorithm": optional(instance(jf.pca.PerPCA)), "warm_start": start,
        }, says={"algorithm": ("shared_rank",)}),
        Target("pca.topic_words", {"counts": [np.abs(right["matrix"])] * 2, "vocabulary": ["a", "b", "c", "d", "e"], "shared_rank": 1, "local_rank": 1, "words": 2}, {
            "counts": lambda v: _tables(v) and np.shape(v[0])[1] == FEATURES, "vocabulary": lambda v: texts(v) and len(v) == FEATURES,
            "shared_rank": count(1, 4), "local_rank": count(1, 4), "words": WHOLE, "rounds": WHOLE,
            "algorithm": optional(instance(jf.pca.PerPCA)), "warm_start": start,
        }),
        Target("pca.transform", fitted | {"samples": right["samples"]}, asked | {"samples": of_all(d)}, says={"samples": ("client",)}),
        Target("pca.transform", fitted | {"samples": right["matrix"], "client": 1}, asked | {"samples": real(None, d), "client": whole(0, m - 1)}),
        Target("pca.anomaly_score", fitted | {"samples": right["samples"]}, asked | {"samples": of_all(d)}, says={"samples": ("client",)}),
        Target("pca.anomaly_score", fitted | {"samples": right["matrix"], "client": 1}, asked | {"samples": real(None, d), "client": whole(0, m - 1)}),
        Target("pca.inverse_transform", fitted | {"scores": right["matrix"][:, :RANK], "client": 1}, asked | {"scores": real(None, RANK), "client": whole(0, m - 1)}),
        Target("pca.inverse_transform", fitted | {"scores": right["samples"][..., :RANK]}, asked | {"scores": of_all(RANK)}, says={"scores": ("client",)}),
        Target("pca.explained_variance", fitted | {"samples": right["samples"]}, {
            "fitted": asked["fitted"], "samples": either(of_all(d), instance(jf.linalg.Moment)),
        }),
        Target("pca.personalize", {"fitted": shared_alone, "samples": right["samples"], "rank": 1}, {
            "fitted": lambda v: v is shared_alone, "samples": either(array(None, None, d, finite=True), lambda v: _tables(v) and np.shape(v[0])[1] == d),
            "rank": count(1, d - RANK),
        }, says={"samples": ("arrays",)}),
        Target("pca.principal_axes", {"basis": right["frame"], "samples": list(right["samples"])}, {
            "basis": real(d, None, finite=True), "samples": lambda v: isinstance(v, list | tuple) and len(v) > 0 and all(real(None, d, finite=True)(x) for x in v),
        }),
        Target("pca.shrink", {"moment": right["moment"], "rank": 1}, {"moment": tracked("moment"), "rank": whole(1, d)}),
        Target("pca.split_half", {"algorithms": [right["perpca"]], "clients": right["clients"], "rounds": 1, "key": right["key"]}, {
            "algorithms": listed(instance(jf.Algorithm)), "clients": tracked("clients"), "rounds": WHOLE, "key": key,
        }),
        Target("pca.suggest_ranks", {"clients": right["clients"], "shared_ranks": [1], "local_ranks": [1], "key": right["key"]}, {
            "clients": tracked("clients"), "shared_ranks": either(listed(count(1, 4)), lambda v: isinstance(v, range)), "local_ranks": either(listed(count(1, 4)), lambda v: isinstance(v, range)),
            "key": key, "rounds": WHOLE, "held_out": lambda v: number(least=0)(v) and v < 1, "min_gain": number(least=0, most=1),
            "min_misalignment": number(least=0, most=1), "algorithm": function, "starts": listed(one_of("projector", "spectrum", "local_first")),
        }),
        # --- privacy
        *(
            Target(f"privacy.{name}", {first: 1.0, "rounds": 3, "delta": 1e-5}, {
                first: positive(arrays=False), "rounds": WHOLE, "delta": number(above=0, most=1 - 1e-7),
                "participants": lambda v: v is None, "clients": lambda v: v is None,
                "adjacency": one_of("replace", "zero_out"), "first_message": flag,
            })
            for name, first in (("epsilon", "noise_multiplier"), ("noise_multiplier", "epsilon"))
        ),
        Target("privacy.client_matrix", {"clients": right["clients"]}, {"clients": tracked("clients"), "client": whole(0, m - 1)}),
        Target("privacy.public_guess", {"clients": right["clients"]}, {"clients": tracked("clients"), "client": whole(0, m - 1)}),
        Target("privacy.minimum_norm", attack, {"inputs": frames3, "outputs": frames3}),
        Target("privacy.outside_span", attack, {"inputs": frames3, "outputs": frames3, "tol": unit}),
        Target("privacy.relative_error", {"estimate": right["square"], "truth": right["square"]}, {
            "estimate": real(d, d), "truth": real(d, d), "calibrated": flag,
        }),
        Target("privacy.record", run_of(right) | {"client": 0}, {n: RUN[n] for n in ("algorithm", "clients", "rounds", "key", "warm_start", "channel")} | {"client": whole(0, m - 1)}),
        Target("privacy.restart_attack", {n: run_of(right)[n] for n in ("algorithm", "clients", "key")}, {
            "algorithm": instance(jf.Algorithm), "clients": tracked("clients"), "key": RUN["key"], "client": whole(0, m - 1),
            "restarts": optional(COUNT), "summed": flag, "calibrated": flag, "norm_factor": optional(positive(arrays=False)), "channel": channels,
        }),
    ]  # fmt: skip


def run_of(right) -> dict[str, Any]:
    return {
        "algorithm": right["perpca"],
        "clients": right["clients"],
        "rounds": 2,
        "key": right["key"],
    }


def _data(right) -> list[Target]:
    m = CLIENTS
    the_key = {"key": right["key"]}
    sizes = SIZES
    samples, labels = right["samples"].reshape(-1, FEATURES), np.arange(12) % 3
    of_labels = array(12, kinds="biufU")
    of_samples = lambda v: (
        isinstance(v, np.ndarray | jax.Array)
        and v.ndim >= 1
        and len(v) == 12
        and v.dtype.kind != "O"
    )
    many = {"samples": samples, "labels": labels, "clients": 3, **the_key}
    split = {"samples": of_samples, "labels": of_labels, "clients": whole(1, 12), "key": key}
    scale = either(number(least=0), listed(number(least=0), 1))
    law = {"shared_scale": scale, "local_scale": scale, "noise_variance": scale, "dtype": dtype}
    return [
        Target("data.perpca_synthetic", the_key | {"clients": m, "features": 5, "shared_rank": 1, "local_rank": 2, "samples": 4}, {
            "key": key, "clients": COUNT, "features": whole(3), "shared_rank": whole(1, 3), "local_rank": whole(1, 4), "samples": sizes,
            "local": one_of("window", "random"), "window": optional(whole(2, 4)), "groups": lambda v: v is None, "rotate": flag,
            "shared_scale": scale, "local_scale": either(scale, lambda v: real(2, finite=True)(v) and (np.asarray(v) >= 0).all()),
            "noise_variance": scale, "dtype": dtype,
        }, says={"features": ("shared_rank",), "local_rank": ("window",), "shared_rank": ("window",)}),
        Target("data.misalignment_pair", the_key | {"theta": 0.1}, law | {
            "key": key, "theta": number(least=0, most=0.5), "samples": either(whole(), listed(whole(), 2)),
        }),
        Target("data.gcca_synthetic", the_key, {
            "key": key, "views": COUNT, "entities": COUNT, "features": either(whole(), listed(whole(), 3)), "latent": COUNT,
            "noise": scale, "densities": listed(fraction, 3), "dtype": default_dtype,
        }),
        Target("data.nonlinear_views_synthetic", the_key, {"key": key, "entities": whole(2), "noise": scale, "dtype": default_dtype}),
        Target("data.hierarchical_synthetic", the_key | {"clients": m, "features": 5, "rank": 2, "samples": 4, "prior_variance": 0.1}, {
            "key": key, "clients": COUNT, "features": whole(3), "rank": whole(1, 4), "samples": sizes, "prior_variance": scale, "noise_variance": scale, "dtype": dtype,
        }, says={"features": ("rank",)}),
        Target("data.image_sequence_synthetic", the_key, {
            "key": key, "frames": COUNT, "height": whole(10), "width": whole(10), "blobs": COUNT, "radius": number(above=0, most=15),
            "brightness": number(least=0, most=1), "background_rank": whole(2), "noise_variance": scale, "dtype": dtype,
        }, says={"height": ("radius",), "width": ("radius",)}),
        Target("data.spectrum_synthetic", the_key | {"clients": m, "features": 5, "samples": 10}, {
            "key": key, "clients": COUNT, "features": whole(1), "samples": sizes, "spectrum": one_of("geometric", "arithmetic"),
            "decay": number(least=1), "condition": number(least=1), "rotate": flag, "dtype": dtype,
        }, says={"features": ("samples",)}),
        Target("data.topics_synthetic", the_key, {
            "key": key, "groups": COUNT, "documents": COUNT, "words_per_topic": COUNT, "words_per_document": positive(arrays=False), "dtype": dtype,
        }),
        Target("data.partition_iid", many, split | {"labels": optional(of_labels), "sizes": optional(either(whole(1, 4), listed(whole(), 3)))}),
        Target("data.partition_by_class", many | {"classes_per_client": 1}, split | {
            "classes_per_client": whole(1, 3), "sizes": optional(either(whole(1, 4), listed(whole(), 3))),
            "classes": lambda v: v is None or (array(None, kinds="iuf")(v) and set(np.asarray(v)) <= {0, 1, 2} and len(set(np.asarray(v))) == len(v)),
        }, says={"clients": ("class",), "classes_per_client": ("class",), "labels": ("class",), "sizes": ("class",)}),
        Target("data.partition_dirichlet", many | {"alpha": 1.0}, split | {"alpha": positive(arrays=False), "min_samples": whole(1, 4)}, says={"clients": ("min_samples",)}),
        Target("data.partition_sizes", the_key | {"total": 10, "clients": 3}, {
            "key": key, "total": whole(3), "clients": whole(1, 10), "skew": factor(arrays=False), "min_samples": whole(1, 3),
        }, says={"total": ("clients",), "min_samples": ("clients",)}),
        Target("data.train_test_split", the_key | {"arrays": right["samples"], "test": 1}, {
            "key": key, "arrays": lambda v: isinstance(v, np.ndarray | jax.Array | list | tuple) and len(v) > 0 and _splits(v),
            "test": either(lambda v: isinstance(v, float | np.floating) and number(above=0)(v) and v < 1, whole(1, 3), listed(whole(1, 3), m)),
        }, says={"test": ("client",), "arrays": ("client", "test")}),
        Target("data.bag_of_words", {"groups": [["some words", "more words"], ["words"]], "min_count": 1}, {
            "groups": lambda v: listed(listed(text))(v), "min_count": whole(1, 3), "stop_words": lambda v: isinstance(v, Collection) and not isinstance(v, str | bytes) and all(isinstance(w, str) for w in v),
            "vocabulary": optional(lambda v: texts(v) and len(v) > 0 and False), "drop_empty": flag,
        }, cheap=True),
        Target("data.paragraphs", {"text": "a\n\nb"}, {"text": text}, cheap=True),
        Target("data.repair_mojibake", {"text": "a"}, {"text": text}, cheap=True),
        Target("data.strip_transcript", {"text": "a"}, {"text": text}, cheap=True),
        *(
            Target(f"data.read_{name}", {parameter: "nowhere"}, {parameter: lambda v: False} | more)
            for name, parameter, more in (
                ("arrays", "path", {"max_bytes": UNPACKED, "names": optional(texts), "same_features": flag}),
                ("cifar10", "path", {"max_bytes": UNPACKED, "split": one_of("train", "test")}),
                ("femnist", "path", {}),
                ("folder", "path", {"max_bytes": UNPACKED, "client_column": optional(text)}),
                ("idx", "path", {"max_bytes": UNPACKED}),
                ("images", "folder", {"max_bytes": UNPACKED, "color": flag}),
                ("mnist", "folder", {"max_bytes": UNPACKED, "split": one_of("train", "test")}),
                ("table", "path", {"max_bytes": UNPACKED, "client_column": optional(text)}),
                ("text", "folder", {"suffix": text}),
                ("views", "path", {"max_bytes": UNPACKED, "names": optional(texts)}),
            )
        ),
    ]  # fmt: skip


def _splits(value) -> bool:
    return all(
        isinstance(x, np.ndarray | jax.Array)
        and np.ndim(x) >= 1
        and len(x) >= 2
        and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        and np.asarray(x).dtype.kind != "O"
        for x in value
    )


def _models(right) -> list[Target]:
    the_key = {"key": right["key"]}
    image = listed(count(), 3)
    large = lambda v: image(v) and min(v[:2]) >= 13
    widths = listed(count())
    share = number(least=0, most=1)
    return [
        Target("models.Autoencoder", the_key | {"features": 5, "latent": 2}, {
            "key": key, "features": WHOLE, "latent": WHOLE, "hidden": one_of("linear", "relu"), "output": one_of("linear", "sigmoid"),
        }),
        Target("models.Classifier", the_key | {"image_shape": (13, 13, 1), "classes": 2}, {
            "key": key, "image_shape": large, "classes": WHOLE, "features": WHOLE, "channels": listed(count(), 2),
            "offset": number(arrays=False), "scale": positive(arrays=False),
        }),
        Target("models.ConvolutionalAutoencoder", the_key | {"latent": 2}, {
            "key": key, "latent": WHOLE, "image_shape": lambda v: False, "channels": WHOLE, "hidden": one_of("linear", "relu"),
        }),
        Target("models.Perceptron", the_key | {"features": 3, "outputs": 2}, {
            "key": key, "features": WHOLE, "outputs": WHOLE, "hidden": listed(count(), least=0), "momentum": number(least=0, most=1), "mask": optional(array(3, kinds="biuf")),
        }),
        Target("models.UNet", the_key, {"key": key, "image_shape": lambda v: False, "widths": widths}),
        Target("models.denoiser", {"model": right["model"]}, {"model": function, "conditional": flag}, cheap=True),
        Target("models.generate", {"denoise": lambda x, t: x, "corruption": right["corruption"], "key": right["key"], "shape": (2, 3), "steps": 2}, {
            "denoise": function, "corruption": tracked("corruption"), "key": key, "shape": listed(count(), 2), "steps": WHOLE, "dtype": dtype,
        }),
        Target("models.interpolation", {}, {"low": share, "high": lambda v: share(v) and v > 0}, cheap=True),
        Target("models.variance_preserving", {}, {"low": share, "high": lambda v: share(v) and v > 0}, cheap=True),
        Target("models.train_classifier", {"key": right["key"], "images": right["images"], "labels": np.arange(4) % 2, "batch_size": 2}, {
            "key": key, "images": real(4, 13, 13, finite=True), "labels": lambda v: array(4, kinds="iu")(v) and (np.asarray(v) >= 0).all() and set(np.asarray(v)) == {0, 1},
            "classes": optional(count(2, 2)), "image_shape": lambda v: v is None, "features": WHOLE, "epochs": WHOLE, "batch_size": count(1, 4), "learning_rate": positive(arrays=False),
        }, says={"classes": ("labels",), "labels": ("classes",)}),
        Target("models.inception_features", {"path": "no such file"}, {"path": lambda v: False, "batch_size": WHOLE, "sha256": lambda v: False}),
        Target("generative.sample", {"algorithm": right["training"], "key": right["key"], "arrays": right["training"].arrays, "count": 1}, {
            "algorithm": lambda v: False, "key": lambda v: False, "count": lambda v: False, "steps": lambda v: False,
        }, says={"key": ("algorithm",), "count": ("algorithm",), "steps": ("algorithm",)}),
    ]  # fmt: skip


def _reports(right) -> list[Target]:
    run = {"solution": right["solution"], "clients": right["clients"]}
    kinds = {"solution": lambda v: v is right["solution"], "clients": tracked("clients")}
    each = lambda kind: optional(lambda v: kind(v) and len(v) == CLIENTS)
    return [
        Target("report.html", run, kinds | {
            "title": text, "names": each(texts), "metadata": optional(either(array(3, finite=True), array(3, kinds="biuU"))),
            "label": optional(text), "image_shape": lambda v: v is None, "ranks": lambda v: v is None, "seconds": optional(number(least=0)),
            "table": lambda v: v in ((), []) and isinstance(v, tuple | list), "pictures": lambda v: v is None or v == {},
        }),
        Target("report.write", {"path": "report.html", **run}, {"path": path, **kinds}),
    ]  # fmt: skip


def _plots(right) -> list[Target]:
    figure = optional(instance(matplotlib.figure.Figure, matplotlib.figure.SubFigure))
    nothing = lambda v: v is None  # axes are drawn into, and those of one case would be full
    pixels = lambda v: listed(count())(v) and len(v) in (2, 3) and int(np.prod(v)) == 6
    image = np.ones((2, 6), np.float32)
    rows = real(2, 6, finite=True)
    two = {"image_shape": (2, 3)}
    names = lambda n: optional(lambda v: texts(v) and len(v) == n)
    return [
        Target("plot.agreement", {"shares": np.ones((2, 3)), "names": ["a", "b"]}, {"shares": real(2, None, finite=True), "names": lambda v: texts(v) and len(v) == 2, "figure": figure, "ax": nothing}),
        Target("plot.client_map", {"clients": np.ones((3, 2))}, {
            "clients": lambda v: either(real(None, 2, finite=True), real(None, None, None, finite=True))(v) and len(v) > 1, "metadata": optional(either(array(3, finite=True), array(3, kinds="biuU"))), "label": optional(text), "names": names(3), "figure": figure, "ax": nothing,
        }),
        Target("plot.clusters", {"embedding": np.ones((3, 2)), "labels": np.arange(3)}, {
            "embedding": real(3, 2, finite=True), "labels": array(3, kinds="biufU"), "names": names(3), "figure": figure, "ax": nothing,
        }),
        Target("plot.components", {"groups": {"a": np.ones((6, 2))}, **two}, {
            "groups": mapping(lambda v: v is None or real(6, None, finite=True)(v)), "image_shape": optional(pixels), "columns": WHOLE, "figure": figure, "ax": nothing,
        }),
        Target("plot.confusion", {"first": np.eye(6, 2), "second": np.eye(6, 2)}, {
            "first": real(6, None, finite=True), "second": real(6, None, finite=True), "names": lambda v: texts(v) and len(v) == 2, "figure": figure, "ax": nothing,
        }),
        Target("plot.convergence", {"history": {"objective": np.arange(3.0)}}, {
            "history": lambda v: mapping(real(None))(v) and "objective" in v, "quantities": lambda v: texts(v) and len(v) > 0 and set(v) <= {"objective"},
            "levels": optional(mapping(number())), "against": one_of("rounds"), "label": optional(text), "bits": lambda v: v is False, "figure": figure, "ax": nothing,
        }),
        Target("plot.grid", {"found": right["grid"], "x": "step"}, {
            "found": tracked("grid"), "x": one_of("step"), "over": lambda v: v in ((), []) and isinstance(v, tuple | list), "names": lambda v: v is None,
            "scale": one_of("log", "linear"), "label": optional(text), "figure": figure, "ax": nothing,
        }),
        Target("plot.reconstructions", {"original": image, "found": {"a": image}, **two}, {
            "original": rows, "found": mapping(rows), "image_shape": pixels, "names": names(2), "figure": figure, "ax": nothing,
        }),
        Target("plot.samples", {"groups": {"a": image}, **two}, {
            "groups": mapping(real(None, 6, finite=True)), "image_shape": pixels, "columns": WHOLE, "notes": lambda v: v is None or v == {}, "figure": figure, "ax": nothing,
        }),
        Target("plot.separation", {"original": image, "shared": image, "own": image, **two}, {
            "original": rows, "shared": optional(rows), "own": optional(rows), "image_shape": pixels, "mean": optional(real(6, finite=True)), "names": names(2), "figure": figure, "ax": nothing,
        }),
        Target("plot.scree", {"variances": {"a": np.ones(3)}}, {
            "variances": mapping(lambda v: (real(None, finite=True)(v) or real(None, None, finite=True)(v)) and np.min(v) >= 0), "total": optional(number(above=0)), "chosen": optional(mapping(count())), "figure": figure, "ax": nothing,
        }),
        Target("plot.variance_shares", {"shares": jf.metrics.EnergyShares(*np.full((3, 4), 0.25))}, {
            "shares": lambda v: isinstance(v, tuple) and len(v) == 3 and all(real(4, finite=True)(x) for x in v), "names": names(4), "figure": figure, "ax": nothing,
        }),
    ]  # fmt: skip
