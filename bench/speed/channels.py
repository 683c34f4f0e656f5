"""Time encoding and decoding relative to copying the same array.

    python -m bench.speed.channels

One array of four million numbers in single precision goes through a channel and back. The last
column is the rate of encoding and decoding together, relative to that of a plain copy, both by the
clock.
"""

import jax

import jaxfed as jf
from bench.common import machine, table, turns

SIZE = 2**22
CHANNELS = {
    "quantize(3)": jf.channel.quantize(3),
    "quantize(4)": jf.channel.quantize(4),
    "quantize(8)": jf.channel.quantize(8),
    "quantize(levels=2)": jf.channel.quantize(levels=2),
    "sign()": jf.channel.sign(),
    'cast("bfloat16")': jf.channel.cast("bfloat16"),
}


def main() -> None:
    print(machine())
    key = jax.random.key(0)
    x = jax.random.normal(key, (SIZE,))
    copy = jax.jit(lambda x: x + 0)
    rows = []
    for name, channel in CHANNELS.items():
        encode = jax.jit(lambda key, x, channel=channel: channel.encode(key, x, ())[0])
        payload = jax.block_until_ready(encode(key, x))
        decode = jax.jit(channel.decode)
        took = turns(
            {
                "copy": lambda: copy(x),
                "encode": lambda encode=encode: encode(key, x),
                "decode": lambda decode=decode, payload=payload: decode(payload),
            }
        )
        wall = {way: took[way]["wall"] for way in took}
        rows.append(
            {
                "channel": name,
                "bits an entry": jf.channel.bits(payload) / SIZE,
                "copy / encode": wall["copy"] / wall["encode"],
                "copy / decode": wall["copy"] / wall["decode"],
                "copy / both": wall["copy"] / (wall["encode"] + wall["decode"]),
            }
        )
    print(table(rows))


if __name__ == "__main__":
    main()
