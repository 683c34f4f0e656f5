"""Write files as CIFAR's authors did: pickles of Python 2, instruction by instruction."""

import struct

import numpy as np


def pickled(value):
    """The instructions of a value in the published files, which Python 2 wrote; none of Python 3's
    protocols gives the same.
    """
    match value:
        case bytes() if len(value) < 256:
            return b"U" + bytes([len(value)]) + value
        case bytes():
            return b"T" + struct.pack("<i", len(value)) + value
        case int() if 0 <= value < 256:
            return b"K" + bytes([value])
        case int() if 0 <= value < 2**16:
            return b"M" + struct.pack("<H", value)
        case int():
            return b"J" + struct.pack("<i", value)
        case list():
            return b"](" + b"".join(map(pickled, value)) + b"e"
        case dict():
            return b"}(" + b"".join(pickled(part) for pair in value.items() for part in pair) + b"u"
        case np.ndarray():
            return array_of(value.shape, value.tobytes())
    raise TypeError(value)


def array_of(shape, elements, *, make=b"numpy.core.multiarray\n_reconstruct", order=b"\x89"):
    """The instructions of an array."""
    state = b"(K\x03U\x01|NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00tb"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R" + state
    empty = b"c" + make + b"\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x0c"
    sizes = b"(" + b"".join(map(pickled, shape)) + b"t"
    return empty + b"(K\x01" + sizes + kind + order + pickled(elements) + b"tb"


def batch(value, protocol=2):
    """A file of them."""
    return b"\x80" + bytes([protocol]) + pickled(value) + b"."
