"""Runs on several machines, with Flower (`flower`) or as processes of a cluster (`processes`).

A process that hands its messages to a resident worker (`worker`) need not import JAX.
"""

from typing import TYPE_CHECKING

from jaxfed import _names

if TYPE_CHECKING:
    from jaxfed.deploy import flower as flower
    from jaxfed.deploy import processes as processes
    from jaxfed.deploy import worker as worker

__all__ = ["flower", "processes", "worker"]

if not TYPE_CHECKING:
    __getattr__ = _names.lazy_names(__name__, {name: f"{__name__}.{name}" for name in __all__})

__dir__ = _names.public_names(__name__)
