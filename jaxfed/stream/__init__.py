"""Second moments of data streams, which add new samples and forget old ones."""

from jaxfed import _names
from jaxfed.stream.forgetting import Forgetting as Forgetting

__dir__ = _names.public_names(__name__)
