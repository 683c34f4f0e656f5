"""What the server's machine writes of a run with masks: no message as it was before them."""

import base64
import time
from itertools import chain

import numpy as np
import pytest

import jaxfed as jf
from tests.examples import draw_samples

pytest.importorskip("flwr")
from jaxfed.deploy.app import write_app
from jaxfed.deploy.local import FlowerOptions, LocalFederation
from jaxfed.deploy.messages import packet_of
from tests.deploy.federation import Federation
from tests.deploy.test_engine import CLIENTS, configs, finish
from tests.deploy.test_masks import ALGORITHM, OPEN, unmasked  # noqa: F401

pytestmark = pytest.mark.timeout(900)
HIDDEN = jf.Wire(jf.channel.secure_sum(CLIENTS, bits=24, bound=100.0), jf.channel.lossless())
WIDTH = 12  # bytes that are looked for together: fewer are found by chance


def forms(message, numbers):
    """How a few entries of a message would look, wherever and however somebody wrote them.

    Args:
        message: its bytes.
        numbers: its entries.
    """
    found = set()
    for start in (0, len(message) // 2, len(message) - WIDTH - 2):
        part = message[start : start + WIDTH]
        found |= {part, part.hex().encode(), part.hex().upper().encode()}
        for shift in range(3):  # where a text of four letters for three bytes may begin
            part = message[start + shift : start + shift + WIDTH]
            found |= {base64.b64encode(part), base64.urlsafe_b64encode(part)}
    for number in (numbers[0], numbers[len(numbers) // 2], numbers[-1]):
        found |= {str(number).encode(), repr(number.item()).encode(), f"{number:.5e}".encode()}
    return {form for form in found if len(form) >= 7}  # of digits, too


def told(text, messages):
    """Which messages are in a text, by their positions."""
    return {i for i, m in enumerate(messages) if any(form in text for form in forms(*m))}


WAYS = {
    "bytes": lambda message, numbers: b"x" + message,
    "hexadecimal": lambda message, numbers: message.hex().encode(),
    "base64": lambda message, numbers: base64.b64encode(b"xy" + message),
    "Python": lambda message, numbers: str(message).encode() + str(numbers.tolist()).encode(),
    "NumPy": lambda message, numbers: repr(numbers).encode(),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_search_finds_what_is_there(way):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=12).astype(np.float32) for _ in range(3)]
    messages = [(array.tobytes(), array) for array in arrays]
    text = rng.bytes(10**6)
    assert not told(text, messages)
    assert told(text + WAYS[way](*messages[1]) + text, messages) == {1}


@pytest.fixture
def messages(tmp_path, unmasked):  # noqa: F811
    """The first round's, as they are before rounding and before masks, from one process."""
    clients = draw_samples().take(np.arange(CLIENTS))
    Federation(tmp_path / "hidden", ALGORITHM, clients, channel=HIDDEN).run(1)
    found = [(plain, numbers) for numbers, plain in unmasked]

    def trouble(node, message, answer):
        packet = packet_of(answer)
        if packet.words["kind"] == "round":
            plain = bytes(packet.parts[0])
            found.append((plain, np.frombuffer(plain, np.float32)))
        return [answer]

    Federation(tmp_path / "open", ALGORITHM, clients, channel=OPEN, trouble=trouble).run(1)
    assert len(found) == 2 * CLIENTS
    return found


def write(app, channel):
    """An app of one round."""
    write_app(app, "SubspaceIteration", {"rank": 2}, clients=CLIENTS, rounds=1, key=3)
    code = app / "federation" / "app.py"
    text = code.read_text()
    for before, after in (
        ("\nchannel = jf.channel.lossless()\n", f"\nchannel = {channel}\n"),
        ('precision = "double"', 'precision = "single"'),  # as in this process
        (".astype(float)", ""),
    ):
        assert before in text
        text = text.replace(before, after)
    code.write_text(text)


@pytest.mark.slow
def test_the_server_writes_no_unmasked_message(tmp_path, environment, messages):
    nodes = configs(tmp_path, draw_samples().take(np.arange(CLIENTS)))
    environment |= {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "FLWR_LOG_LEVEL": "DEBUG",
    }
    found = {}
    database = ("--database", str(tmp_path / "flower" / "superlink.db"))
    options = FlowerOptions(link=("--insecure", *database))
    with LocalFederation(
        tmp_path / "flower", nodes, options=options, environment=environment
    ) as local:
        local.start()
        for name, channel in (
            (
                "hidden",
                f"jf.Wire(jf.channel.secure_sum({CLIENTS}, bits=24, bound=100.0), "
                "jf.channel.lossless())",
            ),
            ("open", "jf.Wire(jf.channel.lossless(), jf.channel.lossless())"),
        ):
            write(app := tmp_path / "apps" / name, channel)
            run, end = local.begin(app, {"out": str(app / "out")}), time.monotonic() + 300
            found[name] = set()
            # Flower's state while it runs: what was delivered, it may remove.
            while not (app / "out" / "solution.npz").exists() and time.monotonic() < end:
                for path in local.folder.glob("superlink.db*"):
                    found[name] |= told(path.read_bytes(), messages)
                time.sleep(0.1)
            finish(local, run, app / "out", 1)
            said = local.output(run)
            assert "round 1 of 1" in said and "DEBUG" in local.log("superlink").read_text()
            left = chain(
                local.folder.glob("superlink*"),
                (app / "out").rglob("*"),
                (local.folder / "flwr").rglob("*"),
            )
            for text in (said.encode(), *(p.read_bytes() for p in left if p.is_file())):
                found[name] |= told(text, messages)
    assert found["hidden"] == set()
    # Without masks they are there: the later half, which are not rounded.
    assert found["open"] == set(range(CLIENTS, 2 * CLIENTS))
