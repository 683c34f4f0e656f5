"""Privacy of persons and of clients, and attacks on messages.

`release_moments` protects each person behind a client's data, once for all that is computed from
it. `jaxfed.generative.GradientNoise` protects them in the training of networks, and
`training_guarantee` accounts for it. `jaxfed.channel.gaussian` protects a whole client in every
message, and `epsilon` and `spent` account for it. The attacks show what messages without noise
reveal.
"""

from jaxfed import _names
from jaxfed.core.clients.guarantee import Guarantee
from jaxfed.privacy.accounting import epsilon, noise_multiplier, spent
from jaxfed.privacy.attacks import (
    client_matrix,
    first_message_attack,
    linear_attack,
    minimum_norm,
    norm_leak,
    outside_span,
    public_guess,
    relative_error,
    restart_attack,
)
from jaxfed.privacy.audit import audit
from jaxfed.privacy.expected import expected_error, persons_needed
from jaxfed.privacy.ledger import Ledger
from jaxfed.privacy.moments import release_moments
from jaxfed.privacy.once import release_once
from jaxfed.privacy.statement import statement
from jaxfed.privacy.training import training_guarantee, training_noise
from jaxfed.privacy.transcript import Transcript, record
from jaxfed.privacy.units import ReleasedUnits, release_units

__all__ = [
    "Guarantee",
    "Ledger",
    "ReleasedUnits",
    "Transcript",
    "audit",
    "client_matrix",
    "epsilon",
    "expected_error",
    "first_message_attack",
    "linear_attack",
    "minimum_norm",
    "noise_multiplier",
    "norm_leak",
    "outside_span",
    "persons_needed",
    "public_guess",
    "record",
    "relative_error",
    "release_moments",
    "release_once",
    "release_units",
    "restart_attack",
    "spent",
    "statement",
    "training_guarantee",
    "training_noise",
]
__dir__ = _names.public_names(__name__)
