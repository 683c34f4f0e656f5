"""The checks of arguments that everything above the linear algebra shares."""

from typing import Any

import numpy as np
import optax

from jaxfed._checks import LARGEST as LARGEST
from jaxfed._checks import check_callable as check_callable
from jaxfed._checks import check_count as check_count
from jaxfed._checks import check_factor as check_factor
from jaxfed._checks import check_flag as check_flag
from jaxfed._checks import check_instance as check_instance
from jaxfed._checks import check_list as check_list
from jaxfed._checks import check_name as check_name
from jaxfed._checks import check_number as check_number
from jaxfed._checks import check_positive as check_positive
from jaxfed._checks import check_text as check_text
from jaxfed._checks import check_texts as check_texts
from jaxfed._checks import check_whole as check_whole
from jaxfed._checks import checked_array as checked_array
from jaxfed._checks import checked_dtype as checked_dtype
from jaxfed._checks import checked_key as checked_key
from jaxfed._checks import checked_labels as checked_labels
from jaxfed._checks import checked_path as checked_path
from jaxfed._checks import checked_table as checked_table
from jaxfed._checks import counts_of as counts_of
from jaxfed._checks import host_array as host_array
from jaxfed._checks import is_list as is_list
from jaxfed._checks import is_real as is_real
from jaxfed._checks import is_whole as is_whole
from jaxfed._checks import refuse as refuse
from jaxfed._checks import shown as shown


def check_optimizer(argument: str, given: object) -> None:
    """Check that a value is an Optax optimizer.

    Raises:
        ValueError: if it is not.
    """
    check_instance(argument, given, optax.GradientTransformation, "an optax.GradientTransformation")


def checked_weights(weights: Any, clients: int) -> np.ndarray:
    """The clients' weights, of any scale, as numbers on the host.

    Raises:
        ValueError: if they are not one finite, non-negative number for each of so many clients.
    """
    wanted = f"{clients} numbers, one per client"
    raw = host_array("weights", weights, wanted)
    if not is_real(raw.dtype) or raw.shape != (clients,):
        raise refuse("weights", wanted, weights)
    raw = raw.astype(float)
    if not np.isfinite(raw).all() or (raw < 0).any():
        raise ValueError("weights: wanted finite, non-negative numbers, not all of them zero")
    return raw
