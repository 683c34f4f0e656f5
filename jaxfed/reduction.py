"""Reductions of the clients' messages: means, sums, maxima, mean products, and gathering.

An algorithm wraps each part of its message in one of these classes; a bare array is a mean. The
server receives the same structure, reduced.
"""

from jaxfed.core.contract.groups import Groups as Groups
from jaxfed.core.contract.reduction import Additive as Additive
from jaxfed.core.contract.reduction import Gather as Gather
from jaxfed.core.contract.reduction import Gram as Gram
from jaxfed.core.contract.reduction import Max as Max
from jaxfed.core.contract.reduction import Mean as Mean
from jaxfed.core.contract.reduction import Part as Part
from jaxfed.core.contract.reduction import Reduction as Reduction
from jaxfed.core.contract.reduction import Sum as Sum
from jaxfed.core.contract.reduction import Symmetric as Symmetric
from jaxfed.core.contract.reduction import combined as combined
from jaxfed.core.contract.reduction import over_clients as over_clients
