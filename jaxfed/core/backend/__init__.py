"""How clients are mapped, and how what they send is reduced: one after the other, at once, spread.

Every backend computes the same numbers up to the order of floating-point sums, because clients
are told apart by their ids and never by their places.
"""

from jaxfed import _names
from jaxfed.core.backend.base import AXIS as AXIS
from jaxfed.core.backend.base import Backend as Backend
from jaxfed.core.backend.base import Device as Device
from jaxfed.core.backend.base import collect as collect
from jaxfed.core.backend.here import auto as auto
from jaxfed.core.backend.here import chunked as chunked
from jaxfed.core.backend.here import separate as separate
from jaxfed.core.backend.here import vmap as vmap
from jaxfed.core.backend.spread import pmap as pmap
from jaxfed.core.backend.spread import shard as shard

__dir__ = _names.public_names(__name__)
