"""Runs on several machines: with Flower (`flower`), or as processes of a cluster (`processes`)."""

from jaxfed import _names
from jaxfed.deploy import flower as flower
from jaxfed.deploy import processes as processes

__all__ = ["flower", "processes"]

__dir__ = _names.public_names(__name__)
