"""Channels for messages: `lossless`, compressors, memory around them, noise and masks."""

from jaxfed.core.wire.channel import Channel as Channel
from jaxfed.core.wire.channel import Context as Context
from jaxfed.core.wire.channel import bits as bits
from jaxfed.core.wire.channel import from_bytes as from_bytes
from jaxfed.core.wire.channel import lossless as lossless
from jaxfed.core.wire.channel import straight_through as straight_through
from jaxfed.core.wire.channel import to_bytes as to_bytes
from jaxfed.core.wire.compression import cast as cast
from jaxfed.core.wire.compression import chain as chain
from jaxfed.core.wire.compressor import Compressor as Compressor
from jaxfed.core.wire.compressor import Payload as Payload
from jaxfed.core.wire.memory import difference as difference
from jaxfed.core.wire.memory import error_feedback as error_feedback
from jaxfed.core.wire.noise import gaussian as gaussian
from jaxfed.core.wire.quantization import quantize as quantize
from jaxfed.core.wire.quantization import sign as sign
from jaxfed.core.wire.secure import secure_sum as secure_sum
from jaxfed.core.wire.sparsification import random_k as random_k
from jaxfed.core.wire.sparsification import top_k as top_k
