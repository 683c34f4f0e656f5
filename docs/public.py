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
    *(
        f"jaxfed.{name}"
        for name, place in jaxfed._PLACES.items()
        if ":" not in place
    ),
    *SUBMODULES,
)


def module_named(name: str) -> Any:
    """A public module, by its dotted name."""
    package, _, last = name.rpartition(".")
    return (
        getattr(import_module(package), last)
        if package
        else import_module(name)
    )


def public_names(name: str) -> dict[str, Any]:
    """What a module offers, by name, without modules."""
    module = module_named(name)
    found = {each: getattr(module, each) for each in dir(module)}
    if (
        name == "jaxfed.contract"
    ):  # the rest of it has its place in the reference elsewhere
        found = {
            each: found[each] for each in found if not hasattr(jaxfed, each)
        }
        found = {
            each: found[each]
            for each in found
            if not hasattr(jaxfed.adjoint, each)
        }
    return {
        each: value
        for each, value in found.items()
        if not isinstance(value, ModuleType)
    }


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
