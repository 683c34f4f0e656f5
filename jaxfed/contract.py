"""The contract for authors of algorithms, its optional parts, and checks of arguments.

`jf.Algorithm`, `jf.Personalized`, `jf.hyperparameter` and `jf.adjoint.Bases` can also be imported
from here.
"""

from jaxfed._checks import check_count as check_count
from jaxfed._checks import check_factor as check_factor
from jaxfed._checks import check_flag as check_flag
from jaxfed._checks import check_instance as check_instance
from jaxfed._checks import check_name as check_name
from jaxfed._checks import check_positive as check_positive
from jaxfed._checks import refuse as refuse
from jaxfed.core.contract.algorithm import Algorithm as Algorithm
from jaxfed.core.contract.algorithm import ClientsLike as ClientsLike
from jaxfed.core.contract.algorithm import Diagnostics as Diagnostics
from jaxfed.core.contract.algorithm import OneExchange as OneExchange
from jaxfed.core.contract.algorithm import Personalized as Personalized
from jaxfed.core.contract.algorithm import hyperparameter as hyperparameter
from jaxfed.core.contract.algorithm import without_batches as without_batches
from jaxfed.core.contract.bases import Bases as Bases
from jaxfed.core.contract.wrapper import Wrapper as Wrapper
