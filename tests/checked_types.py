"""Checks the package's annotations while the tests run, by jaxtyping and beartype.

Pytest's option `--jaxtyping-packages` in `pyproject.toml` names the package that is checked, and
`after_the_call` as its type checker.
"""

from typing import Any

from beartype import BeartypeConf, beartype

# An int passes for a float, as it does for type checkers that read the source.
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def after_the_call(stub):
    """Check a function's arguments and result when it has returned, and not before it runs.

    A function that refuses a wrong argument does so with its own `ValueError`, as for users. One
    that accepts what its annotations exclude fails the test.

    Args:
        stub: a function of the same signature, made by jaxtyping: one for the arguments alone, and
            one for the arguments and the result, which it takes as an argument `ret0`.
    """
    if "ret0" not in stub.__code__.co_varnames or "return" not in stub.__annotations__:
        return stub
    # beartype understands `Self` only where it decorates the whole class.
    stub.__annotations__ = {
        name: Any if "typing.Self" in repr(hint) else hint
        for name, hint in stub.__annotations__.items()
    }
    check = None

    def called(*arguments, **keywords):
        # Made at the first call: they take long to make, and a worker calls a part of the package.
        nonlocal check
        check = check or _checked(stub)
        return check(*arguments, **keywords)

    return called
