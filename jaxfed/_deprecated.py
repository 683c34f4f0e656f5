"""Old public names, which keep working for one release and say what they are called now."""

import warnings


def renamed_argument(old: str, new: str) -> None:
    """Warn that an argument has another name now."""
    warnings.warn(
        f"{old} is now {new}; the old name goes in the next release",
        DeprecationWarning,
        stacklevel=3,
    )
