"""What is asked of a fitted model: against NumPy, on arrays made by hand where that will do."""

import io
import json
import os
import zipfile

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxfed as jf
from jaxfed.core.store import arrays, saved

M, N, D = 3, 6, 5
REFUSED = r"^path: wanted a file that Solution\.save wrote, got \S*"


def frame(rng, rank):
    return np.linalg.qr(rng.normal(size=(D, rank)))[0]


@pytest.fixture(scope="module")
def model():
    """Samples of three clients, two shared components, and one local to each beside them."""
    rng = np.random.default_rng(0)
    shared = frame(rng, 2)
    local = []
    for _ in range(M):
        own = rng.normal(size=(D, 1))
        own -= shared @ (shared.T @ own)
        local.append(own / np.linalg.norm(own))
    samples = rng.normal(size=(M, N, D)).astype(np.float32)
    local = np.stack(local).astype(np.float32)
    return samples, jf.Personalized(jnp.asarray(shared, jnp.float32), jnp.asarray(local))


@pytest.fixture(scope="module")
def solution(model):
    clients = jf.Clients.from_samples(model[0])
    return jf.fit(jf.pca.OneShot(2, 1), clients, rounds=1, key=jax.random.key(0))


@pytest.mark.slow
def test_scores_reconstructions_and_anomalies_are_those_of_the_joint_basis(model):
    samples, result = model
    scores = jf.pca.transform(result, samples)
    restored = jf.pca.inverse_transform(result, scores)
    distances = jf.pca.anomaly_score(result, samples)
    for i in range(M):
        basis = np.concatenate([result.shared, result.local[i]], axis=1)
        np.testing.assert_allclose(scores[i], samples[i] @ basis, atol=1e-5)
        left = samples[i] - samples[i] @ basis @ basis.T
        np.testing.assert_allclose(samples[i] - restored[i], left, atol=1e-5)
        np.testing.assert_allclose(distances[i], (left**2).sum(1), atol=1e-5)
        np.testing.assert_array_equal(jf.pca.transform(result, samples[i], client=i), scores[i])
    ragged = jf.pca.transform(result, [x[: 2 + i] for i, x in enumerate(samples)])
    assert [x.shape for x in ragged] == [(2, 3), (3, 3), (4, 3)]
    np.testing.assert_allclose(ragged[1], scores[1, :3], atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("ask", [jf.pca.transform, jf.pca.inverse_transform, jf.pca.anomaly_score])
def test_numbers_that_are_not_finite_are_refused(model, ask, bad):
    samples, result = model
    given = samples if ask is not jf.pca.inverse_transform else samples[..., :3]
    given = np.where(np.arange(N)[:, None] == 2, bad, given)
    argument = "scores" if ask is jf.pca.inverse_transform else "samples"
    said = "wanted finite numbers, got NaN or infinity"
    with pytest.raises(ValueError, match=f"^{argument}: {said}"):
        ask(result, given)
    with pytest.raises(ValueError, match=rf"^{argument}\[0\]: {said}"):
        ask(result, list(given))
    with pytest.raises(ValueError, match=f"^{argument}: {said}"):
        ask(result, given[1], client=1)
    # Traced numbers are not known.
    assert not np.isfinite(jax.jit(lambda x: ask(result, x))(given)).all()


def test_the_variance_of_numbers_that_are_not_finite_is_refused(model):
    samples, result = model
    with pytest.raises(ValueError, match=r"^samples: wanted finite numbers"):
        jf.pca.explained_variance(result, samples * np.nan)
    total = jax.jit(lambda x: jf.pca.explained_variance(result, x).total)(samples * np.nan)
    assert np.isnan(total).all()


def test_components_around_shared_ones_are_whole_by_themselves(model):
    samples, _ = model
    rng = np.random.default_rng(1)
    around = jnp.asarray(np.stack([frame(rng, 2) for _ in range(M)]), jnp.float32)
    scores = jf.pca.transform(jf.Personalized(around[0], around), samples)
    np.testing.assert_array_equal(scores, jf.pca.transform(jf.Personalized(None, around), samples))
    assert scores.shape == (M, N, 2)


def test_where_nothing_is_local_a_table_needs_no_client(model):
    samples, result = model
    pooled = jf.Personalized(result.shared, None)
    np.testing.assert_allclose(
        jf.pca.transform(pooled, samples[0]), samples[0] @ result.shared, atol=1e-5
    )
    assert jf.pca.transform(pooled, samples).shape == (M, N, 2)
    with pytest.raises(ValueError, match="client: wanted the client"):
        jf.pca.transform(result, samples[0])


def test_variance_is_explained_as_numpy_explains_it(model):
    samples, result = model
    found = jf.pca.explained_variance(result, samples)
    moments = np.einsum("mnd,mne->mde", samples, samples) / N
    shared = np.einsum("dr,mde,er->r", result.shared, moments, result.shared) / M
    local = np.einsum("mdr,mde,mer->mr", result.local, moments, result.local)
    np.testing.assert_allclose(found.shared, shared, rtol=1e-5)
    np.testing.assert_allclose(found.local, local, rtol=1e-5)
    np.testing.assert_allclose(found.total, np.trace(moments, axis1=1, axis2=2), rtol=1e-5)


def test_a_newcomer_gets_the_best_components_beside_the_shared_ones(model):
    samples, result = model
    found = jf.pca.fit_local(result, samples[:2], 2)
    assert found.local.shape == (2, D, 2)
    for x, own in zip(samples, found.local, strict=False):
        rest = x - x @ result.shared @ result.shared.T
        vectors = np.linalg.eigh(rest.T @ rest)[1][:, -2:]
        np.testing.assert_allclose(own @ own.T, vectors @ vectors.T, atol=1e-4)
    with pytest.raises(ValueError, match="shared components"):
        jf.pca.fit_local(jf.Personalized(None, result.local), samples, 1)


def test_summary_and_printing_say_what_ran(solution):
    text = solution.summary()
    assert "OneShot(shared_rank=2, local_rank=1)" in text
    assert text.startswith("verdict    converged: ")
    assert f"{M}" in text and "sent" in text
    assert repr(solution).startswith("Solution(verdict: converged: ")
    assert solution._repr_html_().startswith("<table>")
    stacked = jf.stack([solution, solution])
    assert "Solution" in repr(stacked) and stacked._repr_html_() is None
    with pytest.raises(ValueError, match="summary: wanted the solution of one run"):
        stacked.summary()


def test_algorithms_and_clients_print_as_what_makes_them(model):
    assert (
        repr(jf.pca.PerPCA(2, 1, solver="gradient"))
        == "PerPCA(shared_rank=2, local_rank=1, solver='gradient')"
    )
    assert (
        repr(jf.pca.PerPCA(2, 1, solver="gradient", step_size=0.5))
        == "PerPCA(shared_rank=2, local_rank=1, solver='gradient', step_size=0.5)"
    )
    clients = jf.Clients.from_samples([x[: 4 + i] for i, x in enumerate(model[0])])
    assert repr(clients) == "Clients(3 clients: 4 to 6 samples of 5 features, float32)"
    shapes = jax.eval_shape(lambda x: x, clients)
    assert "Clients(" in repr(shapes)
    assert "PerPCA" in repr(
        jax.eval_shape(lambda x: x, jf.pca.PerPCA(2, 1, solver="gradient", step_size=0.5))
    )


def test_what_is_saved_is_loaded(solution, tmp_path):
    solution.save(tmp_path / "result.npz")
    found = jf.load(tmp_path / "result.npz")
    np.testing.assert_array_equal(found.result.shared, solution.result.shared)
    np.testing.assert_array_equal(found.result.local, solution.result.local)
    assert found.history.keys() == solution.history.keys()
    assert (found.rounds, found.status, found.clients) == (1, "converged", M)
    assert found.summary() == solution.summary()


def test_networks_are_loaded_into_what_they_are_like(solution, tmp_path):
    model = jf.models.Autoencoder(4, 2, key=jax.random.key(0))
    halves = jax.tree.map(lambda x: jnp.stack(M * [x.astype("bfloat16")]), model)
    result = jf.Personalized(model, {"half": halves})
    tree = type(solution)(**{**vars(solution), "result": result})
    tree.save(tmp_path / "result.npz")
    found = jf.load(tmp_path / "result.npz", like=result).result
    assert jax.tree.structure(found) == jax.tree.structure(result)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(result), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, float), np.asarray(b, float))
    by_path = jf.load(tmp_path / "result.npz").result.shared
    assert any("weight" in path for path in by_path)
    with pytest.raises(ValueError, match="like: wanted the arrays of shared"):
        jf.load(tmp_path / "result.npz", like=jf.Personalized(halves, halves))


def test_other_files_are_refused(solution, tmp_path):
    path = tmp_path / "result.npz"
    np.savez(path, shared=np.ones(3))
    with pytest.raises(ValueError, match=REFUSED):
        jf.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=REFUSED):
        jf.load(path)
    np.savez_compressed(path, shared=np.zeros(10**6))
    with pytest.raises(ValueError, match=f"{REFUSED} .wanted entries of at most"):
        jf.load(path)
    solution.save(path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            if name != "shared.npy":
                archive.writestr(name, content)
    with pytest.raises(ValueError, match=REFUSED):
        jf.load(path)


def test_entities_seen_later_are_represented(model):
    rng = np.random.default_rng(2)
    views = [rng.normal(size=(8, 3)).astype(np.float32) for _ in range(2)]
    local = rng.normal(size=(2, 3, 2)).astype(np.float32)
    result = jf.Personalized(jnp.ones((4, 2)), jnp.asarray(local))
    scores = jf.gcca.transform(result, jf.gcca.Views.from_arrays(views))
    for j in range(2):
        np.testing.assert_allclose(scores[j], views[j] @ local[j] / 2, rtol=1e-5)
    with pytest.raises(ValueError, match="fitted"):
        jf.gcca.transform(model[1], jf.gcca.Views.from_arrays(views[:1]))


CONTENT = "wanted the content that was written"
EDITS = {
    "a history of two axes": ({}, {"history_objective": np.ones((1, 2))}, CONTENT),
    "histories of two lengths": ({}, {"history_objective": np.ones(2)}, CONTENT),
    "words": ({}, {"shared": np.array(["a"])}, CONTENT),
    "other clients": ({"clients": 2}, {}, CONTENT),
    "more participants": ({}, {"history_participants": np.array([4])}, CONTENT),
    "pickled objects": ({}, {"shared": np.array([{}], object)}, "allow_pickle"),
    "whole numbers": ({"types": {"shared": "int32"}}, {}, CONTENT),
    "other bytes": ({"types": {"shared": "bfloat16"}}, {}, CONTENT),
    "NaN": ({}, {"shared": np.full((D, 2), np.nan, np.float32)}, CONTENT),
    "no frame": ({}, {"shared": np.ones((D, 2), np.float32)}, CONTENT),
    "frames of zeros": ({}, {"local": np.zeros((M, D, 1), np.float32)}, CONTENT),
    "another shape": ({}, {"shared": np.ones((2, D), np.float32)}, CONTENT),
    "another digest": ({}, {"digest": np.asarray("0")}, CONTENT),
    "a layout of before": ({"format": ["jaxfed.solution", -5]}, {}, "wanted format"),
    "a later layout": ({"format": ["jaxfed.solution", 2]}, {}, "wanted format"),
    "no number of a layout": ({"format": ["jaxfed.solution", np.nan]}, {}, "wanted format"),
    "a truth value": ({"format": ["jaxfed.solution", True]}, {}, CONTENT),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_files_are_refused(name, solution, tmp_path):
    changed, edited, message = EDITS[name]
    arrays = solution.entries() | edited
    header = json.loads(str(arrays["header"]))
    types = {key: str(x.dtype) for key, x in edited.items()} | changed.get("types", {})
    header |= changed | {"types": header["types"] | types}
    np.savez(tmp_path / "result.npz", **arrays | {"header": np.asarray(json.dumps(header))})
    with pytest.raises(ValueError, match=f"{REFUSED}.*{message}") as error:
        jf.load(tmp_path / "result.npz")
    assert str(error.value).isprintable()


ESCAPE = "\x1b[2J"  # empties a terminal
LIES = {
    "clients beyond number": ({"clients": 10**18}, "clients: wanted a whole number from 1"),
    "no client": ({"clients": 0}, "clients: wanted a whole number of at least 1"),
    "rounds below zero": ({"rounds": -1}, "rounds: wanted a whole number of at least 0"),
    "a part of a round": ({"rounds": 1.0}, "rounds: wanted a whole number"),
    "an algorithm": ({"algorithm": f"PCA{ESCAPE}"}, "can be printed"),
    "a status": ({"status": f"converged{ESCAPE}"}, "status: wanted one of"),
    "a version": ({"versions": {"jax": ESCAPE}}, "can be printed"),
    "a package": ({"versions": {ESCAPE: "1"}}, "can be printed"),
    "a version that is no text": ({"versions": {"jax": 1}}, "can be printed"),
    "a remark": ({"remarks": [ESCAPE]}, "can be printed"),
    "a remark that is no text": ({"remarks": [1]}, "can be printed"),
}


def forge(path, solution, header):
    """A file with its digest, whatever its header says."""
    solution.save(path)
    known, content = arrays.read(path, saved.KIND)
    arrays.write(path, saved.KIND, known | header, content)


@pytest.mark.parametrize("name", LIES)
def test_forged_headers_are_refused(name, solution, tmp_path):
    changed, message = LIES[name]
    forge(tmp_path / "result.npz", solution, changed)
    with pytest.raises(ValueError, match=f"{REFUSED}.*{message}") as error:
        jf.load(tmp_path / "result.npz")
    assert str(error.value).isprintable()


ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    ATOMS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3)
)


@pytest.mark.slow
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_whatever_a_header_says_is_refused_or_true(data, solution, tmp_path_factory):
    """One value of it, at any depth, is another."""
    entries = solution.entries()
    header = json.loads(str(entries["header"]))
    part = header
    while True:
        key = data.draw(st.sampled_from(sorted(part)))
        if not isinstance(part[key], dict) or data.draw(st.booleans()):
            break
        part = part[key]
    part[key] = data.draw(VALUES)
    path = tmp_path_factory.getbasetemp() / "forged.npz"
    if data.draw(st.booleans()):
        forge(path, solution, header)
    else:
        np.savez(path, **entries | {"header": np.asarray(json.dumps(header))})
    try:
        found = jf.load(path)
    except ValueError as error:
        assert "wanted a file that Solution.save wrote" in str(error)
        return
    assert 0 <= found.rounds < 2**31 and 1 <= found.clients < 2**31
    assert hasattr(jf.Status, found.status)
    for text in (found.algorithm, *found.versions, *found.versions.values()):
        assert text.isprintable()
    assert all(line.isprintable() for line in found.summary().splitlines())
    for part, wanted in zip(found.result, solution.result, strict=True):
        if part is not None:  # a header may say that there is none
            np.testing.assert_array_equal(part, wanted)


def test_an_array_is_no_larger_than_its_entry(solution, tmp_path):
    """What a header claims is compared with the bytes that are there, before room is made."""
    entry = io.BytesIO()
    claimed = {"descr": "<f4", "fortran_order": False, "shape": (10**10, 100)}
    np.lib.format.write_array_header_1_0(entry, claimed)
    entry.write(bytes(40))
    entries = solution.entries()
    del entries["shared"]
    np.savez(tmp_path / "result.npz", **entries)
    with zipfile.ZipFile(tmp_path / "result.npz", "a") as archive:
        archive.writestr("shared.npy", entry.getvalue())
    with pytest.raises(ValueError, match=REFUSED):
        jf.load(tmp_path / "result.npz")


def test_files_that_hurt_are_refused(solution, tmp_path):
    deep = "[" * 100_000
    np.savez(tmp_path / "deep.npz", header=np.asarray(deep))
    solution.save(tmp_path / "result.npz")
    content = bytearray((tmp_path / "result.npz").read_bytes())
    for flag in (8, 6):  # of encryption, in the list of entries and before the entry
        place = content.index(b"PK\x01\x02" if flag == 8 else b"PK\x03\x04") + flag
        content[place] |= 1
    (tmp_path / "locked.npz").write_bytes(content)
    # A list whose entries are all one and the same takes many times the file's bytes.
    with zipfile.ZipFile(tmp_path / "many.npz", "w") as archive:
        archive.writestr("a.npy", bytes(10_000))
        for name in "bcd":
            again = zipfile.ZipInfo(f"{name}.npy")
            again.file_size = again.compress_size = 10_000
            again.header_offset = again.CRC = 0
            archive.filelist.append(again)
    for name in ("deep", "locked", "many"):
        with pytest.raises(ValueError, match=REFUSED):
            jf.load(tmp_path / f"{name}.npz")
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(ValueError, match=rf"{REFUSED}pipe\.npz \(wanted a regular file"):
        jf.load(tmp_path / "pipe.npz")


def test_principal_axes_span_the_same_and_have_uncorrelated_scores():
    rng = np.random.default_rng(0)
    samples = [rng.normal(size=(n, 6)) @ rng.normal(size=(6, 6)) for n in (2, 9)]
    basis = np.linalg.qr(rng.normal(size=(6, 3)))[0]
    axes = jf.pca.principal_axes(basis, samples)
    np.testing.assert_allclose(axes @ axes.T, basis @ basis.T, atol=1e-12)
    scatter = axes.T @ sum(y.T @ y / len(y) for y in samples) @ axes
    np.testing.assert_allclose(scatter, np.diag(np.diag(scatter)), atol=1e-10)
    assert np.all(np.diff(np.diag(scatter)) < 0)
    assert np.all(axes[np.abs(axes).argmax(axis=0), range(3)] > 0)
    for given, message in (
        ((np.ones(6), samples), "basis: "),
        ((basis, samples[0]), "samples: wanted a list"),
        ((basis, [samples[0], np.ones((2, 5))]), r"samples\[1\]: "),
    ):
        with pytest.raises(ValueError, match=message):
            jf.pca.principal_axes(*given)
