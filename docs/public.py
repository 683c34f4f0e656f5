"""The public names, in one place for the reference and for the test that they are documented."""

import inspect
from importlib import import_module
from types import ModuleType
from typing import Any

import jaxfed

SUBMODULES = (
    "jaxfed.deploy.flower",
    "jaxfed.deploy.processes",
    "jaxfed.deploy.worker",
    "jaxfed.manifolds.stiefel",
    "jaxfed.manifolds.grassmann",
)
MODULES = (
    "jaxfed",
    *(f"jaxfed.{name}" for name, place in jaxfed._PLACES.items() if ":" not in place),
    *SUBMODULES,
)

USERS = {
    "Fit a model": ("fit", "Clients", "Solution", "Status", "MultiStart"),
    "Use, save and load a model": ("personalize", "update", "load", "Saved", "to_xarray"),
    "Compare settings": ("sweep", "grid", "tune", "Tuned"),
    "Run within a compiled function": ("rollout",),
    "Options of a run": (
        *("Wire", "Checkpoint", "EarlyStopping", "Callback", "enable_compilation_cache"),
    ),
    "Plan a run": ("plan", "Plan", "shapes_of"),
    "Warnings and errors": ("EnergyWarning", "UnitsWarning", "DivergenceError", "ProcessError"),
    "Version": ("__version__",),
}
"""What users need of `jaxfed`, in the order in which they meet it."""

AUTHORS = {
    "The contract": ("Algorithm", "hyperparameter", "Personalized"),
    "Clients' data": ("Samples", "IncompleteSamples"),
    "Trees": ("stack",),
}
"""What only authors of algorithms need."""

PROVISIONAL = {
    *("jaxfed.contract", "jaxfed.reduction", "jaxfed.testing", "jaxfed.linalg"),
    *("jaxfed.nn", "jaxfed.models", "jaxfed.inference", "jaxfed.deploy.worker"),
    *(name for name in MODULES if name.startswith("jaxfed.manifolds")),
}
"""Modules that a minor version may change without keeping old names."""


def module_named(name: str) -> Any:
    """A public module, by its dotted name."""
    package, _, last = name.rpartition(".")
    return getattr(import_module(package), last) if package else import_module(name)


def public_names(name: str) -> dict[str, Any]:
    """What a module offers, by name, without modules."""
    module = module_named(name)
    found = {each: getattr(module, each) for each in dir(module)}
    if name == "jaxfed.contract":  # the rest of it has its place in the reference elsewhere
        found = {each: found[each] for each in found if not hasattr(jaxfed, each)}
        found = {each: found[each] for each in found if not hasattr(jaxfed.adjoint, each)}
    return {
        each: value
        for each, value in found.items()
        if not isinstance(value, ModuleType) and (each == "__version__" or each[0] != "_")
    }


def by_kind(name: str) -> dict[str, list[str]]:
    """A module's public names: algorithms, functions, other classes, and data."""
    kinds: dict[str, list[str]] = {"Algorithms": [], "Functions": [], "Classes": [], "Data": []}
    for each, value in public_names(name).items():
        if inspect.isclass(value):
            kind = "Algorithms" if issubclass(value, jaxfed.Algorithm) else "Classes"
        else:
            kind = "Functions" if callable(value) else "Data"
        kinds[kind].append(each)
    return {kind: names for kind, names in kinds.items() if names}


def first_sentence(value: Any) -> str:
    """The first paragraph of a docstring in one line; of data, which have none, their type."""
    if isinstance(value, ModuleType) or inspect.isclass(value) or inspect.isfunction(value):
        return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return f"a `{type(value).__name__}`"


def undocumented() -> list[str]:
    """Public names, and public methods of public classes, that say nothing of themselves."""
    missing = []
    for module in MODULES:
        for name, found in public_names(module).items():
            if not (inspect.isclass(found) or inspect.isfunction(found)):
                continue
            if not found.__doc__:
                missing.append(f"{module}.{name}")
            if not inspect.isclass(found):
                continue
            missing += [
                f"{module}.{name}.{method}"
                for method, value in vars(found).items()
                if not method.startswith("_")
                and inspect.isfunction(value)
                and not inspect.getdoc(getattr(found, method))
            ]
    return missing
