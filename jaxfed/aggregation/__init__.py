"""Aggregates that a minority of faulty or malicious clients cannot move far.

`Robust(algorithm, rule, groups=...)` is the algorithm with its means replaced: clients are divided
into groups, the server receives the mean of each group, and a rule combines these means. A rule
that tolerates a share of bad groups tolerates as many bad clients as there are such groups.
`client_influence` shows which client moved a result most.
"""

from jaxfed import _names
from jaxfed.aggregation.far import far_clients as far_clients
from jaxfed.aggregation.influence import client_influence as client_influence
from jaxfed.aggregation.robust import Robust as Robust
from jaxfed.aggregation.rules import Rule as Rule
from jaxfed.aggregation.rules import biweight as biweight
from jaxfed.aggregation.rules import centred_clipping as centred_clipping
from jaxfed.aggregation.rules import coordinate_median as coordinate_median
from jaxfed.aggregation.rules import geometric_median as geometric_median
from jaxfed.aggregation.rules import trimmed_mean as trimmed_mean

__dir__ = _names.public_names(__name__)
