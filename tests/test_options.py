"""Options that are passed on are refused by their names, with the name that was meant."""

import importlib
import inspect
import pkgutil

import jax
import numpy as np
import optax
import pytest

import jaxfed as jf
from tests.generative.training import autoencoder

KEY = jax.random.key(0)
CLIENTS = jf.Clients.from_samples(np.random.default_rng(0).normal(size=(4, 8, 5)))
RUN = {"rounds": 1, "key": KEY}


def solved():
    return jf.fit(jf.pca.PerPCA(1, 1, solver="gradient"), CLIENTS, **RUN)


def tuned(**options):
    algorithm, adam = jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.1), optax.adam(0.1)
    return jf.tune(
        algorithm, CLIENTS, sum, adam, names=["step_size"], rounds=1, steps=1, key=KEY, **options
    )


Adaptive = jf.generative.AdaptiveTraining
# Each public function that passes options on: a call, an option that is close to one, and that one.
CALLS = {
    "report.write": (
        lambda **x: jf.report.write("a", None, CLIENTS, **x),
        "features",
        "feature_names",
    ),
    "data.read_folder": (lambda **x: jf.data.read_folder("a", **x), "decimals", "decimal"),
    "data.read_views": (lambda **x: jf.data.read_views("a", **x), "decimals", "decimal"),
    "data.read_client": (lambda **x: jf.data.read_client("a", **x), "decimals", "decimal"),
    "inference.confidence": (
        lambda **x: jf.inference.confidence(None, CLIENTS, key=KEY, **x),
        "resample",
        "resamples",
    ),
    "privacy.release_once": (
        lambda **x: jf.privacy.release_once("a", CLIENTS, **x),
        "epsilons",
        "epsilon",
    ),
    "pca.split_half": (lambda **x: jf.pca.split_half([], CLIENTS, **RUN, **x), "tols", "tol"),
    "sweep": (
        lambda **x: jf.sweep(jf.pca.Pooled(1), CLIENTS, keys=KEY, rounds=1, **x),
        "metric",
        "metrics",
    ),
    "tune": (tuned, "warmstart", "warm_start"),
    "update": (lambda **x: jf.update(solved(), CLIENTS, **RUN, **x), "call_backs", "callbacks"),
    "generative.AdaptiveTraining.autoencoder": (
        lambda **x: Adaptive.autoencoder(autoencoder(), **x),
        "localsteps",
        "local_steps",
    ),
    "generative.AdaptiveTraining.diffusion": (
        lambda **x: Adaptive.diffusion(autoencoder(), **x),
        "batchsize",
        "batch_size",
    ),
}


def public():
    """Public functions, classes and their public methods, by name."""
    homes = {
        f"{module.name}.": importlib.import_module(f"jaxfed.{module.name}")
        for module in pkgutil.iter_modules(jf.__path__)
        if not module.name.startswith("_") and module.name not in ("cli", "core")
    }
    for place, home in {"": jf, **homes}.items():
        for name in dir(home):
            found = getattr(home, name)
            if not getattr(found, "__module__", "").startswith("jaxfed"):
                continue
            if inspect.isclass(found) and "__init__" in vars(found):
                yield place + name, found.__init__
            elif inspect.isfunction(found):
                yield place + name, found
            if inspect.isclass(found):
                for method, part in inspect.getmembers(found, callable):
                    if not method.startswith("_") and hasattr(part, "__module__"):
                        yield f"{place}{name}.{method}", part


def passes_on(function):
    if not (function.__module__ or "").startswith("jaxfed"):
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(each.kind == each.VAR_KEYWORD for each in parameters)


def test_every_function_that_passes_options_on_is_listed():
    assert {name for name, function in public() if passes_on(function)} == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_option_is_refused_with_the_nearest_name(name):
    call, given, meant = CALLS[name]
    with pytest.raises(ValueError, match=rf"^{given}: no such option; did you mean {meant}\?$"):
        call(**{given: None})
    with pytest.raises(ValueError, match=r"^zzz: no such option; the options are \w+, \w+"):
        call(zzz=None)
