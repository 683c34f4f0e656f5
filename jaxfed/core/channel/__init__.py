"""What messages go through: `lossless`, compressors, memory around them, noise and masks."""

from jaxfed import _names
from jaxfed.core.channel.base import Channel as Channel
from jaxfed.core.channel.base import Channels as Channels
from jaxfed.core.channel.base import Context as Context
from jaxfed.core.channel.base import Link as Link
from jaxfed.core.channel.base import Ways as Ways
from jaxfed.core.channel.base import bits as bits
from jaxfed.core.channel.base import fixed_bits as fixed_bits
from jaxfed.core.channel.base import from_bytes as from_bytes
from jaxfed.core.channel.base import lossless as lossless
from jaxfed.core.channel.base import straight_through as straight_through
from jaxfed.core.channel.base import to_bytes as to_bytes
from jaxfed.core.channel.base import variable_bytes as variable_bytes
from jaxfed.core.channel.base import varies as varies
from jaxfed.core.channel.base import ways as ways
from jaxfed.core.channel.compression import cast as cast
from jaxfed.core.channel.compression import chain as chain
from jaxfed.core.channel.compressor import Compressor as Compressor
from jaxfed.core.channel.compressor import Payload as Payload
from jaxfed.core.channel.memory import difference as difference
from jaxfed.core.channel.memory import error_feedback as error_feedback
from jaxfed.core.channel.noise import gaussian as gaussian
from jaxfed.core.channel.quantization import quantize as quantize
from jaxfed.core.channel.quantization import sign as sign
from jaxfed.core.channel.secure import secure_sum as secure_sum
from jaxfed.core.channel.sparsification import random_k as random_k
from jaxfed.core.channel.sparsification import top_k as top_k

__dir__ = _names.public_names(__name__)
