"""Who takes part in each round: everybody, a random sample, or clients by a mask."""

from jaxfed.core.contract.participation import Participation as Participation
from jaxfed.core.contract.participation import everybody as everybody
from jaxfed.core.contract.participation import mask as mask
from jaxfed.core.contract.participation import uniform as uniform
