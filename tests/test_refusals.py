"""Whatever a public function is given, it refuses in the words of its own arguments."""

import importlib
import inspect
import pkgutil
import re
import warnings

import jaxfed as jf

# For authors of algorithms, channels and reductions: their arguments are arrays of known kinds,
# often traced, and a check would cost each call.
UNCHECKED = {
    "channel.bits",
    "channel.from_bytes",
    "channel.straight_through",
    "contract.ClientsLike",
    "contract.check_count",
    "contract.check_factor",
    "contract.check_flag",
    "contract.check_instance",
    "contract.check_name",
    "contract.check_positive",
    "contract.hyperparameter",
    "contract.without_batches",
    "hyperparameter",
    "manifolds.grassmann.retraction",
    "manifolds.stiefel.retraction",  # says `retraction`, as algorithms call the argument
    "models.reconstruction_loss",
    "reduction.combined",
    "reduction.over_clients",
}


class Wrong:
    """What no function takes."""


def public():
    """Public functions, and classes with a constructor of their own, by name."""
    homes = {
        f"{module.name}.": importlib.import_module(f"jaxfed.{module.name}")
        for module in pkgutil.iter_modules(jf.__path__)
        if not module.name.startswith("_") and module.name not in ("cli", "core", "multi_start")
    }
    homes["manifolds.stiefel."] = jf.manifolds.stiefel
    homes["manifolds.grassmann."] = jf.manifolds.grassmann
    for place, home in {"": jf, **homes}.items():
        for name in dir(home):
            found = getattr(home, name)
            if not getattr(found, "__module__", "").startswith("jaxfed"):
                continue
            if inspect.isfunction(found):
                yield place + name, found
            elif inspect.isclass(found) and "__init__" in vars(found):
                if inspect.isabstract(found) or issubclass(found, Exception):
                    continue
                yield place + name, found


def test_wrong_arguments_are_refused_by_their_names():
    """All arguments are wrong at once, so whichever is looked at first must be refused."""
    faults = []
    for name, function in dict(public()).items():
        parameters = inspect.signature(function).parameters
        needed = [
            x for x in parameters.values() if x.default is x.empty and x.kind != x.VAR_KEYWORD
        ]
        if not needed or name in UNCHECKED:
            continue
        for wrong in (Wrong(), None, "wrong"):
            named = {x.name: wrong for x in needed if x.kind == x.KEYWORD_ONLY}
            placed = [wrong] * (len(needed) - len(named))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    function(*placed, **named)
            except (ImportError, FileNotFoundError):
                pass  # of a path or of a package that is missing
            except ValueError as error:
                if re.match(r"\w*", str(error))[0] not in parameters:
                    faults.append(f"{name}: {error}")
            except Exception as error:
                if type(error).__name__ != "TypeCheckError":  # accepted, which is not at issue here
                    faults.append(f"{name}: {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)


def test_what_is_not_checked_exists():
    assert {name for name, _ in public()} >= UNCHECKED
