"""Privacy: guarantees of noise (`accounting`) and attacks on messages without it (`attacks`)."""

from jaxfed import _names
from jaxfed.privacy.accounting import epsilon as epsilon
from jaxfed.privacy.accounting import noise_multiplier as noise_multiplier
from jaxfed.privacy.accounting import spent as spent
from jaxfed.privacy.attacks import client_matrix as client_matrix
from jaxfed.privacy.attacks import first_message_attack as first_message_attack
from jaxfed.privacy.attacks import linear_attack as linear_attack
from jaxfed.privacy.attacks import minimum_norm as minimum_norm
from jaxfed.privacy.attacks import norm_leak as norm_leak
from jaxfed.privacy.attacks import outside_span as outside_span
from jaxfed.privacy.attacks import public_guess as public_guess
from jaxfed.privacy.attacks import relative_error as relative_error
from jaxfed.privacy.attacks import restart_attack as restart_attack
from jaxfed.privacy.transcript import Transcript as Transcript
from jaxfed.privacy.transcript import record as record

__dir__ = _names.public_names(__name__)
