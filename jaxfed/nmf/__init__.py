"""Non-negative matrix factorization (NMF) of clients' samples."""

from jaxfed import _names
from jaxfed.nmf.fitted import annotate as annotate
from jaxfed.nmf.fitted import complete as complete
from jaxfed.nmf.fitted import transform as transform
from jaxfed.nmf.inmf import INMF as INMF

__dir__ = _names.public_names(__name__)
