"""Units and means: standardization of the clients' samples by one exchange of sums."""

from jaxfed.core.clients.standardization import Standardization as Standardization
from jaxfed.preprocess.standardize import Standardize as Standardize
