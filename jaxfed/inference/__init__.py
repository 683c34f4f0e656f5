"""Confidence: how sure components, angles, shares of energy and ranks are."""

from jaxfed import _names
from jaxfed.inference.bootstrap import Bootstrap as Bootstrap
from jaxfed.inference.bootstrap import Interval as Interval
from jaxfed.inference.bootstrap import bootstrap as bootstrap
from jaxfed.inference.components import Confidence as Confidence
from jaxfed.inference.components import confidence as confidence
from jaxfed.inference.membership import Membership as Membership
from jaxfed.inference.membership import membership as membership
from jaxfed.inference.resampled import Resampled as Resampled

__dir__ = _names.public_names(__name__)
