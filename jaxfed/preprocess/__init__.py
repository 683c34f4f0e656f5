"""Preprocessing of clients' samples: scales, means and missing entries."""

from jaxfed import _names
from jaxfed.core.clients.imputation import Imputation as Imputation
from jaxfed.core.clients.standardization import Standardization as Standardization
from jaxfed.preprocess.impute import Impute as Impute
from jaxfed.preprocess.standardize import Standardize as Standardize

__all__ = ["Imputation", "Impute", "Standardization", "Standardize"]
__dir__ = _names.public_names(__name__)
