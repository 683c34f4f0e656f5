"""Small valid arguments by name, each made once."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse
import xarray

import jaxfed as jf

CLIENTS, SAMPLES, FEATURES, RANK, ROUNDS = 3, 4, 5, 2, 3


def network(features, *, mask=None, key):
    """A view's network."""
    return jf.models.Perceptron(features, 1, mask=mask, key=key)


@cache
def given() -> dict[str, Any]:
    """All of them."""
    clients = jf.Clients.from_samples(_arrays()["samples"])
    key, perpca = jax.random.key(0), jf.pca.PerPCA(1, 1, solver="gradient")
    model = jf.models.Autoencoder(FEATURES, 2, key=key)
    training = jf.generative.FedAvg(
        model, jf.models.reconstruction_loss, optax.sgd(0.1), local_steps=1
    )
    return {
        **_arrays(),
        **_functions(),
        **_results(),
        "clients": clients,
        "key": key,
        "solution": jf.fit(perpca, clients, rounds=1, key=key),
        # algorithms and channels
        "perpca": perpca,
        "one_algorithm": [perpca],
        "lossless": jf.channel.lossless(),
        "separate": jf.backend.separate(),
        "sum": jf.reduction.Sum,
        "two_algorithms": [perpca] * 2,
        "hierarchical": jf.pca.HierarchicalPCA(1, 0.5, 0.1),
        "max_var": jf.gcca.MaxVar(1),
        "pooled": jf.pca.Pooled(1),
        "sign": jf.channel.sign(),
        "compressors": [jf.channel.sign()],
        # networks
        "model": model,
        "training": training,
        "noisy_training": jf.generative.FedAvg(
            model,
            jf.models.reconstruction_loss,
            optax.sgd(0.1),
            batch_size=2,
            gradient_noise=jf.generative.GradientNoise(1.0, 2.0),
        ),
        "arrays": training.arrays,
        "denoiser": jf.models.Perceptron(FEATURES + 1, FEATURES, hidden=(4,), key=key),
        "corruption": jf.models.interpolation(),
        "optimizer": optax.sgd(0.1),
        "loss": jf.models.reconstruction_loss,
    }


@cache
def _arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(CLIENTS, SAMPLES, FEATURES)).astype(np.float32)
    frames = np.linalg.qr(rng.normal(size=(CLIENTS, FEATURES, RANK)))[0].astype(np.float32)
    moments = np.einsum("mnd,mne->mde", samples, samples) / SAMPLES
    rounds = rng.normal(size=(ROUNDS, FEATURES, RANK))
    image = np.ones((2, 6), np.float32)
    return {
        "samples": samples,
        "tables": list(samples),
        "matrix": samples[0],
        "twelve": samples.reshape(-1, FEATURES),
        "twelve_counts": np.abs(samples.reshape(-1, FEATURES)),
        "two_counts": [np.abs(samples[0])] * 2,
        "two_sparse": [scipy.sparse.csr_array(samples[0])] * 2,
        "three_sparse": [scipy.sparse.csr_array(samples[0])] * 3,
        "frames": frames,
        "frame": frames[0],
        "other": frames[1],
        "scores": samples[0][:, :RANK],
        "all_scores": samples[..., :RANK],
        "moments": moments,
        "square": moments[0],
        "moment": jf.linalg.Moment.from_dense(jnp.asarray(moments[0])),
        "inputs": rounds,
        "outputs": rounds + 1.0,
        "views": jf.gcca.Views.from_arrays([samples[0], samples[1]]),
        "view_shared": np.eye(SAMPLES, 2, dtype=np.float32),
        "view_local": np.ones((2, FEATURES, 2), np.float32),
        "view_scores": np.ones((2, 3, 2), np.float32),
        "labels": np.arange(CLIENTS),
        "two_classes": np.arange(4) % 2,
        "classes_of_twelve": np.arange(12) % 3,
        "present": np.ones((2, CLIENTS), bool),
        "identity": jnp.eye(3),
        "ones": np.ones(3, np.float32),
        "two_ones": np.ones(2, np.float32),
        "small_square": np.ones((RANK, 2), np.float32),
        "thin": np.ones((FEATURES, 2), np.float32),
        "three": np.arange(3.0),
        "points": np.ones((3, 2)),
        "agreement": np.ones((2, 3)),
        "components": np.eye(6, 2),
        "images": rng.uniform(size=(4, 13, 13)).astype(np.float32),
        "image": image,
        "named_image": {"a": image},
        "named_components": {"a": np.ones((6, 2))},
        "named_variances": {"a": np.ones(3)},
        "history": {"objective": np.arange(3.0)},
        "grid": xarray.Dataset({"error": ("step", np.arange(3.0))}, {"step": np.arange(3.0)}),
        "axes": {"x": [1.0, 2.0]},
    }


def _results() -> dict[str, Any]:
    arrays = _arrays()
    frame, frames = jnp.asarray(arrays["frame"]), jnp.asarray(arrays["frames"])
    return {
        "personal_alone": jf.Personalized(None, frames),
        "factors": jf.Personalized(np.abs(frame), np.abs(frames)),
        "shared_alone": jf.Personalized(frame, None),
        "view_result": jf.Personalized(arrays["view_shared"], arrays["view_local"]),
        "shares": jf.metrics.EnergyShares(*np.full((3, 4), 0.25)),
        "confidence": _confidence(),
        "ranks": _ranks(),
    }


def _confidence() -> jf.inference.Confidence:
    """Of three clients and one axis of six features."""
    axes, share = np.ones((6, 1)), jf.inference.Interval(0.5, 0.4, 0.6)
    return jf.inference.Confidence(
        level=0.95,
        of="samples",
        angle=0.1,
        groups=((0,),),
        group_angles=np.asarray([0.1]),
        axes=axes,
        axes_std=axes,
        variances=jf.inference.Interval(*np.ones((3, 1))),
        shared_energy=share,
        local_energy=share,
        distance=jf.inference.Interval(*np.full((3, 3), 0.5)),
        replicates=axes[None],
        remarks=(),
    )


def _functions() -> dict[str, Any]:
    return {
        "dict": dict,
        "network": network,
        "sum": lambda x: x.sum(),
        "product": lambda a, x: a @ x,
        "denoise": lambda x, t: x,
        "held_out": lambda result: result.local.sum(),
        "of_a_point": lambda x: {"y": x},
        "statistic": lambda result, clients: result.shared,
    }


def _ranks() -> jf.pca.SuggestedRanks:
    """One shared component of two, and no local one of one."""
    return jf.pca.SuggestedRanks(
        shared=1,
        local=0,
        suggested=None,
        support=0.5,
        shared_interval=(1, 2),
        local_interval=(0, 1),
        agreement=np.array([0.9, 0.2]),
        chance=np.full(2, 0.3),
        shared_scores=np.array([5.0, -1.0]),
        local_scores=np.array([1.0]),
        client_scores=np.ones((3, 1)),
        threshold=3.0,
        noise_variance=np.ones(3),
    )
