"""Temporary: goes once every algorithm is ported."""
from jaxfed.core.reduction import Gather as Stack
from jaxfed.core.reduction import Gram, Max, Mean, Sum
from jaxfed.core.reduction import Part as Aggregation
