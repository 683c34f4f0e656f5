"""Ways to map clients: all at once, in blocks, one by one, or spread over devices.

All backends compute the same numbers up to the order of floating-point sums, because clients are
identified by id and never by position.
"""

from jaxfed.core.backends.backend import Backend as Backend
from jaxfed.core.backends.backend import Work as Work
from jaxfed.core.backends.devices import pmap as pmap
from jaxfed.core.backends.devices import shard as shard
from jaxfed.core.backends.one_device import OneDevice as OneDevice
from jaxfed.core.backends.one_device import auto as auto
from jaxfed.core.backends.one_device import chunked as chunked
from jaxfed.core.backends.one_device import separate as separate
from jaxfed.core.backends.one_device import vmap as vmap
