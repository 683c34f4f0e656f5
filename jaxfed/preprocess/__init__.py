"""Units and means: standardizes clients' samples by sums over clients."""

from jaxfed import _names
from jaxfed.core.clients.standardization import Standardization as Standardization
from jaxfed.preprocess.standardize import Standardize as Standardize

__all__ = ["Standardization", "Standardize"]
__dir__ = _names.public_names(__name__)
