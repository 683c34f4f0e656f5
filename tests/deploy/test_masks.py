"""What hides messages on separate machines: masks by key agreement, drop-out, noise."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf
from tests.examples import draw_samples

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict

from jaxfed.deploy import exchange, masked, masks, remote
from jaxfed.deploy import federation as federations
from jaxfed.deploy.exchange import RefusedError
from jaxfed.deploy.messages import Packet, message_of, packet_of
from tests.deploy.federation import Federation, check_equal

ALGORITHM = jf.pca.SubspaceIteration(2)
BITS, BOUND = 24, 100.0
SGD = optax.sgd(0.1)
HIDDEN = jf.Wire(jf.channel.secure_sum(5, bits=BITS, bound=BOUND), jf.channel.lossless())
OPEN = jf.Wire(jf.channel.lossless(), jf.channel.lossless())


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(exchange, "PAUSE", 0.0)


class Overheard(Federation):
    """A federation, and what each client sent as it was before and after the masks."""

    def __init__(self, *arguments, lost=(), **options):
        super().__init__(*arguments, trouble=self.answer, **options)
        self.lost, self.kinds = lost, []

    def answer(self, node, message, answer):
        packet = packet_of(message)
        self.kinds.append((packet.words["kind"], node))
        key = packet.words["kind"], packet.words.get("round", 0), node - 100
        return [] if key in self.lost else [answer]


@pytest.fixture
def unmasked(monkeypatch):
    """The payloads before the masks, by the clients' order of sending."""
    seen, real = [], masked.NodeMasks.masked

    def noted(self, channel, payload, *shares):
        seen.append((channel.numbers(payload), jf.channel.to_bytes(payload)))
        return real(self, channel, payload, *shares)

    monkeypatch.setattr(masked.NodeMasks, "masked", noted)
    return seen


def test_shares_give_a_secret_back_from_the_threshold_on():
    secret = masks.Keys.draw().masking
    shares = masks.split_secret(secret, 4, [0, 2, 5, 7, 9])
    assert masks.join_shares([shares[i] for i in (9, 0, 5, 2)]) == secret
    # Fewer shares give random bytes, of which one in 256 has a padding that can be removed.
    with contextlib.suppress(ValueError):
        assert masks.join_shares([shares[i] for i in (9, 0, 5)]) != secret


def test_agreed_secrets_are_those_of_two():
    one, other, third = masks.Keys.draw(), masks.Keys.draw(), masks.Keys.draw()
    agreed = masks.agree(one.masking, other.public[1], "x")
    assert agreed == masks.agree(other.masking, one.public[1], "x")
    assert agreed != masks.agree(third.masking, one.public[1], "x")
    assert agreed != masks.agree(one.masking, other.public[1], "y")
    encrypted = masks.encrypt(agreed, b"share")
    assert masks.decrypt(agreed, encrypted) == b"share"
    with pytest.raises(ValueError, match="changed"):
        masks.decrypt(agreed, encrypted[:-5] + b"AAAA=")


@pytest.mark.slow
def test_the_server_sees_sums_alone(tmp_path, unmasked, caplog):
    caplog.set_level("INFO", "jaxfed.deploy")
    clients = draw_samples()
    federation = Overheard(tmp_path, ALGORITHM, clients, channel=HIDDEN)
    saved = federation.run(2)
    solution = federation.fit(2)
    np.testing.assert_array_equal(saved.result.shared, solution.result.shared)
    # Objectives are hidden too; bits are those of the messages.
    assert saved.history.keys() == solution.history.keys() - {"objective"} | {"present"}
    assert "nan" not in saved.summary() and saved.status == "round_limit"
    (remark,) = saved.remarks
    assert remark.startswith("Clients sent no objectives")
    assert "round 2 of 2: 5 clients" in caplog.text
    assert ", objective" not in caplog.text and "nan" not in caplog.text
    np.testing.assert_array_equal(saved.history["bits_up"], solution.history["bits_up"])
    received = b"".join(federation.grid.seen)
    assert len(unmasked) == 10
    # No machine keeps the secrets of a round that is over.
    assert not list((tmp_path / "nodes").glob("*/client-*/masks/*.json"))
    for _, plain in unmasked:
        assert len(plain) == 12 * BITS // 8 and plain not in received
    # The same search finds them where there are no masks.
    bare = Federation(tmp_path / "open", ALGORITHM, clients, channel=OPEN)
    sent = []

    def trouble(node, message, answer):
        packet = packet_of(answer)
        sent.extend(packet.parts[:1] if packet.words["kind"] == "round" else [])
        return [answer]

    bare.grid.trouble = trouble
    bare.run(1)
    received = b"".join(bare.grid.seen)
    assert sent and all(plain in received for plain in sent)


@pytest.mark.slow
def test_a_client_says_on_its_own_machine_that_its_message_is_clipped(tmp_path, caplog):
    samples = np.asarray(draw_samples().data.values).copy()
    samples[4] *= 1e-3  # its messages are small
    plain = Federation(tmp_path / "plain", ALGORITHM, jf.Clients.from_samples(samples))
    messages = []

    def trouble(node, message, answer):
        packet = packet_of(answer)
        if packet.words["kind"] == "round":
            messages.append(np.abs(np.frombuffer(packet.parts[0], np.float32)))
        return [answer]

    plain.grid.trouble = trouble
    plain.run(1)
    # One number of one client is beyond the bound.
    bound = float(np.mean(np.sort(np.ravel(messages))[-2:]))
    wire = jf.Wire(jf.channel.secure_sum(5, bits=BITS, bound=bound), jf.channel.lossless())
    federation = Federation(tmp_path / "low", ALGORITHM, plain.clients, channel=wire)
    answers = []
    federation.grid.trouble = lambda node, message, answer: answers.append(answer) or [answer]
    federation.run(1)
    [warned] = [line for line in caplog.messages if "clipped" in line]
    assert "clipped 1 of 12 numbers of its message" in warned
    said = [packet_of(answer).words for answer in answers]
    assert all(words.keys() <= {"kind", "id", "broken", "question"} for words in said[-5:])
    caplog.clear()
    Federation(tmp_path / "high", ALGORITHM, plain.clients, channel=HIDDEN).run(1)
    assert "clipped" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("deadline", [None, 0.01])
def test_a_client_in_other_units_is_left_out(tmp_path, caplog, deadline):
    """It would clip its numbers, and turn the shared part without a word to anybody else."""
    samples = np.asarray(draw_samples().data.values).copy()
    samples[3] *= 1e3
    clients = jf.Clients.from_samples(samples)
    federation = Federation(tmp_path, ALGORITHM, clients, channel=HIDDEN)
    if deadline is None:
        with pytest.raises(RefusedError, match="client 3 refuses: more than a tenth of the numb"):
            federation.run(2)
    else:
        saved = federation.run(2, deadline=deadline, patience=1.0)
        assert saved.history["present"].tolist() == 2 * [[True, True, True, False, True]]
    # How many is for its own log.
    assert "of 12 numbers exceed the channel's bound" in caplog.text


class Infinite(jf.pca.SubspaceIteration):
    def client_step(self, key, downlink, local, data):
        uplink, local, diagnostics = super().client_step(key, downlink, local, data)
        return jax.tree.map(lambda x: x / 0, uplink), local, diagnostics


@pytest.mark.slow
def test_masks_do_not_hide_that_a_message_is_not_finite(tmp_path):
    federation = Federation(tmp_path, Infinite(2), draw_samples(), channel=HIDDEN)
    for run in (federation.run, federation.fit):
        with pytest.raises(FloatingPointError, match="message is not finite in round 1"):
            run(2)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [12, 32])
def test_numbers_at_the_bound_are_counted(bits):
    channel = jf.channel.secure_sum(3, bits=bits, bound=1.0).unmasked()
    context = jf.channel.Context(jnp.int32(0), jnp.float32(0.5), jax.random.key(7), jnp.int32(1))
    message = jnp.asarray([0.3, -2.5, 1.9, 5.0, -1.0])  # halved by the weight
    payload, _ = channel.bind(context).encode(jax.random.key(0), message, None)
    assert channel.clipped(payload) == 2


def test_every_weighted_part_is_a_mean_over_those_who_are_left():
    x = np.ones(3, np.float32)
    parts = [
        jf.reduction.Mean(x),
        jf.reduction.Sum(x),
        jf.reduction.Symmetric({"a": x, "b": x}),
        jf.reduction.Symmetric(x, weighted=False),
    ]
    assert masked.means_of(parts) == (True, False, True, True, False)


@pytest.mark.slow
def test_a_client_drops_out_after_the_masks_are_agreed(tmp_path, unmasked, monkeypatch):
    sums = []
    real = remote.masked_sum

    def noted(*arguments, **options):
        sums.append(real(*arguments, **options))
        return sums[-1]

    monkeypatch.setattr(remote, "masked_sum", noted)
    federation = Overheard(
        tmp_path, ALGORITHM, draw_samples(), channel=HIDDEN, lost={("round", 2, 3)}
    )
    saved = federation.run(3, deadline=0.01, patience=5.0)
    np.testing.assert_array_equal(saved.history["participants"], [5, 4, 5])
    order = [node for kind, node in federation.kinds if kind == "round"]
    for number, (heard, total, _) in enumerate(sums):
        sent = {order[i] - 100: unmasked[i][0] for i in range(5 * number, 5 * number + 5)}
        assert heard == [i for i in range(5) if (number, i) != (1, 3)]
        exact = sum((sent[i] for i in heard), np.zeros_like(total))
        np.testing.assert_array_equal((exact - total) % 2**BITS, 0)
    # Means are over those who are left: as without masks, but for the rounding.
    table = np.ones((3, 5), bool)
    table[1, 3] = False
    near = jf.fit(
        ALGORITHM,
        draw_samples(),
        rounds=3,
        key=jax.random.key(3),
        participation=jf.participation.mask(table),
    )
    projectors = [np.asarray(x @ x.T) for x in (saved.result.shared, near.result.shared)]
    np.testing.assert_allclose(*projectors, atol=1e-3)


@pytest.mark.slow
def test_fewer_than_the_threshold_are_refused(tmp_path):
    lost = {("round", 1, i) for i in (1, 2)}
    federation = Overheard(tmp_path, ALGORITHM, draw_samples(), channel=HIDDEN, lost=lost)
    with pytest.raises(TimeoutError, match="round 1: wanted answers of at least 4 clients, got 3"):
        federation.run(2, deadline=0.01, patience=0.1)


@pytest.mark.slow
def test_a_client_tells_one_share_of_each_and_forgets_the_others(tmp_path):
    federation, told = Federation(tmp_path, ALGORITHM, draw_samples(), channel=HIDDEN), []

    def ask(node, packet, survivors):
        app, config = federation.grid.nodes[node]
        changed = packet._replace(words={**packet.words, "survivors": survivors})
        message = message_of(changed, 0, "unmasking")
        return packet_of(app(message, Context(1, 0, dict(config), RecordDict(), {})))

    def trouble(node, message, answer):
        asked, said = packet_of(message), packet_of(answer)
        if asked.words["kind"] == "unmask" and node == 102:
            assert ask(node, asked, [0, 1, 2, 3, 4]) == said  # as after a lost answer
            for survivors in ([0, 1, 2, 3], [0, 1]):
                refused = ask(node, asked, survivors).words
                assert refused == {"kind": "refusal", "code": "asked"}
            (path,) = (tmp_path / "nodes").glob("*/client-2/masks/*.json")
            assert json.loads(path.read_text()).keys() == {"unmask"}
            told.append(said)
        return [answer]

    federation.grid.trouble = trouble
    federation.run(2)
    assert len(told) == 2


@pytest.mark.slow
def test_a_client_tells_nothing_of_too_few(tmp_path):
    def trouble(node, message, answer):
        asked = packet_of(message)
        if asked.words["kind"] != "unmask":
            return [answer]
        app, config = federation.grid.nodes[node]
        changed = asked._replace(words={**asked.words, "survivors": [0, 1, 2]})
        path = next((tmp_path / "nodes").glob(f"*/client-{node - 100}/masks/*.json"))
        path.write_text(before[node])
        few = message_of(changed, 0, "unmasking")
        said = packet_of(app(few, Context(1, 0, dict(config), RecordDict(), {})))
        assert said.words == {"kind": "refusal", "code": "question"}
        refused.append(node)
        return [answer]

    before, refused = {}, []
    federation = Federation(tmp_path, ALGORITHM, draw_samples(), channel=HIDDEN)

    def noting(node, message, answer):
        if packet_of(message).words["kind"] == "round":
            path = next((tmp_path / "nodes").glob(f"*/client-{node - 100}/masks/*.json"))
            before[node] = path.read_text()
        return trouble(node, message, answer)

    federation.grid.trouble = noting
    federation.run(1)
    assert len(refused) == 5


@pytest.mark.slow
def test_noise_is_drawn_where_nobody_else_has_the_key(tmp_path):
    noisy = jf.Wire(jf.channel.gaussian(1.0, 0.5), jf.channel.lossless())
    clients = draw_samples()
    one = Federation(tmp_path / "one", ALGORITHM, clients, channel=noisy).run(1)
    other = Federation(tmp_path / "other", ALGORITHM, clients, channel=noisy).run(1)
    # Of one key that the server has, the same noise would come.
    assert not np.array_equal(one.result.shared, other.result.shared)
    lossless = Federation(tmp_path / "open", ALGORITHM, clients, channel=OPEN)
    check_equal(lossless, lossless.run(1), lossless.fit(1))


def test_noise_in_gradients_is_drawn_there_too_and_losses_stay(tmp_path):
    noise = jf.generative.GradientNoise(1.0, 0.5)
    model = {"w": jax.numpy.zeros(3)}
    algorithm = jf.generative.FedAvg(
        model,
        lambda m, x, key: ((x[:, :3] - m["w"]) ** 2).mean(),
        SGD,
        batch_size=2,
        local_steps=1,
        gradient_noise=noise,
    )
    federation = Federation(tmp_path, algorithm, draw_samples())
    saved = federation.run(2)
    known = federation.fit(2)
    # Of the key that the server has, the same noise would come.
    found, known = (np.asarray(jax.tree.leaves(x.result.shared)[0]) for x in (saved, known))
    assert found.shape == known.shape and not np.allclose(found, known)
    assert "objective" not in saved.history
    with pytest.raises(ValueError, match="tol: wanted None"):
        Federation(tmp_path / "tol", algorithm, draw_samples()).run(2, tol=0.1)


def noisy_sum(sharers):
    noise = jf.channel.gaussian(1e-3, 1e3, clients=sharers)  # of deviation 1, and nothing else
    hidden = jf.channel.secure_sum(5, bits=32, bound=1000.0, inner=noise)
    return jf.Wire(hidden, jf.channel.lossless())


@pytest.mark.slow
def test_noise_that_is_shared_is_that_of_those_who_are_left(tmp_path, monkeypatch):
    """At least what is stated, whoever drops out; else the run does not begin."""
    sums, real = [], remote.masked_sum

    def noted(*arguments, **options):
        sums.append(real(*arguments, **options))
        return sums[-1]

    monkeypatch.setattr(remote, "masked_sum", noted)
    clients, algorithm = draw_samples(), jf.pca.SubspaceIteration(6)
    lost = {("round", number, client) for number in range(1, 17) for client in (number % 5,)}
    wire = noisy_sum(4)
    federation = Overheard(tmp_path, algorithm, clients, channel=wire, lost=lost)
    federation.run(16, deadline=0.01, patience=5.0)
    levels = wire.up.levels
    found = []
    for survivors, total, _ in sums:
        assert len(survivors) == 4
        found.append(total.view(np.int32) * (1000.0 / levels))
    np.testing.assert_allclose(np.std(found), 1.0, rtol=0.15)
    with pytest.raises(ValueError, match=r"at_least: wanted as many as share .* 4, got 3"):
        federation.run(2, out="few", deadline=0.01, at_least=3)
    bare = jf.Wire(jf.channel.gaussian(1e-3, 1e3, clients=5), jf.channel.lossless())
    federation = Overheard(tmp_path / "bare", algorithm, clients, channel=bare, lost=lost)
    with pytest.raises(TimeoutError, match="round 1: wanted answers of at least 5 clients, got 4"):
        federation.run(2, deadline=0.01, patience=0.1)


@pytest.mark.slow
def test_a_client_refuses_a_sum_with_less_noise(tmp_path, caplog, monkeypatch):
    """Even if the server would accept it."""
    monkeypatch.setattr(federations.Federation, "threshold", 3)
    federation = Federation(tmp_path, ALGORITHM, draw_samples(), channel=noisy_sum(5))
    with pytest.raises(ValueError, match="shares of round 1: client 4 refuses"):
        federation.run(1)
    assert "masks: wanted a threshold from 5 to 5, got 3" in caplog.text


def test_a_client_refuses_to_be_summed_alone(tmp_path):
    """A server may name any size and any threshold; the channel of the machine names its own."""
    said = []

    def trouble(node, message, answer):
        asked = packet_of(message)
        if asked.words["kind"] == "keys" and node == 101:
            app, config = federation.grid.nodes[node]
            publics = list(packet_of(answer).parts)
            for size in (1, 5):
                run = {**asked.words["run"], "size": size}
                alone = {"kind": "shares", "members": [1], "threshold": 1, "run": run}
                question = message_of(Packet({**asked.words, **alone}, publics), 0, "shares")
                reply = app(question, Context(1, 0, dict(config), RecordDict(), {}))
                said.append(packet_of(reply).words["code"])
        return [answer]

    federation = Federation(tmp_path, ALGORITHM, draw_samples(), channel=HIDDEN, trouble=trouble)
    federation.run(1)
    assert said[:2] == ["check", "question"]
