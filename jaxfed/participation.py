"""Which clients take part in each round: all, a random sample, or those of a mask."""

from jaxfed.core.contract.participation import Participation as Participation
from jaxfed.core.contract.participation import everybody as everybody
from jaxfed.core.contract.participation import mask as mask
from jaxfed.core.contract.participation import uniform as uniform
