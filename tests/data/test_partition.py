"""Splits over clients: every sample at most once, sizes and classes as asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfed.data import (
    partition_by_class,
    partition_dirichlet,
    partition_iid,
    partition_sizes,
    train_test_split,
)


def labelled(classes=5, each=24):
    labels = np.repeat(np.arange(classes), each)
    samples = np.stack([np.arange(len(labels)), labels], axis=1).astype(np.float32)
    return samples, labels


def check_consistent(part, samples, labels, clients):
    assert len(part.samples) == len(part.labels) == len(part.indices) == clients
    for x, y, i in zip(part.samples, part.labels, part.indices, strict=True):
        assert len(i) > 0
        np.testing.assert_array_equal(x, samples[i])
        np.testing.assert_array_equal(y, labels[i])
    used = np.concatenate(part.indices)
    assert len(np.unique(used)) == len(used)
    return used


@given(seed=st.integers(0, 100), clients=st.integers(1, 12), per=st.integers(1, 5))
def test_by_class_gives_each_client_its_number_of_classes(seed, clients, per):
    samples, labels = labelled()
    part = partition_by_class(samples, labels, clients, per, key=jax.random.key(seed))
    used = check_consistent(part, samples, labels, clients)
    owned = [set(y.tolist()) for y in part.labels]
    assert all(len(classes) == per for classes in owned)
    owners = [sum(c in classes for classes in owned) for c in range(5)]
    assert max(owners) - min(owners) <= 1
    assert len(used) == 24 * np.count_nonzero(owners)  # whole classes are shared out


@given(seed=st.integers(0, 100), sizes=st.lists(st.integers(2, 12), min_size=1, max_size=8))
def test_by_class_respects_sizes(seed, sizes):
    samples, labels = labelled()
    part = partition_by_class(samples, labels, len(sizes), 2, sizes=sizes, key=jax.random.key(seed))
    check_consistent(part, samples, labels, len(sizes))
    assert [len(x) for x in part.samples] == sizes
    for y in part.labels:
        counts = np.bincount(y, minlength=5)
        assert np.ptp(counts[counts > 0]) <= 1


def test_by_class_draws_from_the_classes_asked_for():
    samples, labels = labelled()
    part = partition_by_class(samples, labels, 6, 1, key=jax.random.key(0), classes=[4, 1, 2])
    used = check_consistent(part, samples, labels, 6)
    np.testing.assert_array_equal(np.unique(labels[used]), [1, 2, 4])
    assert sorted(len(np.unique(own)) for own in part.labels) == [1] * 6


@given(
    seed=st.integers(0, 100),
    clients=st.integers(1, 20),
    alpha=st.sampled_from([1e-9, 0.01, 0.5, 10.0, 1e9]),
    least=st.integers(1, 6),
)
def test_dirichlet_uses_every_sample_once(seed, clients, alpha, least):
    samples, labels = labelled()
    part = partition_dirichlet(
        samples, labels, clients, alpha, key=jax.random.key(seed), min_samples=least
    )
    used = check_consistent(part, samples, labels, clients)
    assert len(used) == len(samples)
    assert min(len(x) for x in part.samples) >= least


def test_dirichlet_concentrates_as_alpha_falls(key):
    samples, labels = labelled(classes=4, each=500)

    def purity(alpha):
        part = partition_dirichlet(samples, labels, 10, alpha, key=key)
        return np.mean([np.bincount(y).max() / len(y) for y in part.labels])

    skewed, mixed = purity(0.05), purity(1000.0)
    assert skewed > 0.7
    assert mixed < 0.35


@given(seed=st.integers(0, 100), clients=st.integers(1, 120))
def test_iid_uses_every_sample_once_in_equal_parts(seed, clients):
    samples, labels = labelled()
    part = partition_iid(samples, labels, clients, key=jax.random.key(seed))
    used = check_consistent(part, samples, labels, clients)
    assert len(used) == 120
    assert np.ptp([len(x) for x in part.samples]) <= 1


def test_iid_takes_sizes_and_needs_no_labels(key):
    samples, _ = labelled()
    part = partition_iid(samples, None, 3, sizes=(1, 50, 7), key=key)
    assert [len(x) for x in part.samples] == [1, 50, 7]
    assert part.labels == []


def test_keys_decide_and_jax_arrays_are_taken(key):
    samples, labels = labelled()
    first = partition_by_class(samples, labels, 4, 2, key=key)
    again = partition_by_class(jnp.asarray(samples), jnp.asarray(labels), 4, 2, key=key)
    other = partition_by_class(samples, labels, 4, 2, key=jax.random.key(1))
    for a, b in zip(first.indices, again.indices, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(not np.array_equal(a, b) for a, b in zip(first.indices, other.indices, strict=True))


def test_labels_may_be_text(key):
    samples, labels = labelled()
    names = np.array(["ant", "bee", "cat", "dog", "elk"])[labels]
    part = partition_by_class(samples, names, 5, 1, key=key)
    assert sorted(y[0] for y in part.labels) == ["ant", "bee", "cat", "dog", "elk"]


@given(
    seed=st.integers(0, 100),
    clients=st.integers(1, 30),
    skew=st.floats(0, 50),
    spare=st.integers(0, 500),
    least=st.integers(1, 5),
)
def test_sizes_add_up(seed, clients, skew, spare, least):
    total = least * clients + spare
    sizes = partition_sizes(total, clients, skew, key=jax.random.key(seed), min_samples=least)
    assert sizes.shape == (clients,)
    assert sizes.sum() == total
    assert sizes.min() >= least


def test_skew_makes_sizes_unequal(key):
    assert np.ptp(partition_sizes(1003, 10, key=key)) == 1
    assert np.ptp(partition_sizes(1003, 10, 1.5, key=key)) > 100


@given(
    seed=st.integers(0, 100),
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=6),
    fraction=st.floats(0.01, 0.99),
)
def test_split_keeps_every_sample_on_one_side(seed, lengths, fraction):
    arrays = [np.arange(n)[:, None] for n in lengths]
    train, test = train_test_split(arrays, fraction, key=jax.random.key(seed))
    for a, left, right in zip(arrays, train, test, strict=True):
        assert len(left) >= 1
        assert len(right) == min(max(round(fraction * len(a)), 1), len(a) - 1)
        np.testing.assert_array_equal(np.sort(np.concatenate([left, right]), axis=0), a)


def test_split_by_counts_and_alike_for_labels(key):
    samples = jax.random.normal(key, (3, 10, 2))
    labels = [np.asarray(x[:, 0]) for x in samples]
    train, test = train_test_split(samples, (1, 5, 9), key=key)
    assert [len(x) for x in test] == [1, 5, 9]
    assert [len(x) for x in train] == [9, 5, 1]
    _, test_labels = train_test_split(labels, (1, 5, 9), key=key)
    for x, y in zip(test, test_labels, strict=True):
        np.testing.assert_array_equal(x[:, 0], y)


SAMPLES, LABELS = labelled()
KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition_iid(SAMPLES, LABELS[:-1], 2, key=KEY), "labels: wanted 120"),
        (
            lambda: partition_iid(SAMPLES, None, 121, key=KEY),
            "clients: wanted .* 1 to 120",
        ),
        (lambda: partition_iid(SAMPLES, None, 0, key=KEY), "clients: wanted"),
        (
            lambda: partition_iid(SAMPLES, None, 2, sizes=61, key=KEY),
            "sizes: .* got 122",
        ),
        (
            lambda: partition_iid(SAMPLES, None, 2, sizes=[3], key=KEY),
            "sizes: wanted one .* or 2",
        ),
        (
            lambda: partition_iid(SAMPLES, None, 2, sizes=[3, 0], key=KEY),
            "sizes: wanted .* got 0",
        ),
        (lambda: partition_iid(np.zeros(()), None, 1, key=KEY), "leading axis"),
        (
            lambda: partition_iid(SAMPLES, None, 2, key=jax.random.split(KEY)),
            "key: wanted one random key",
        ),
        (
            lambda: partition_by_class(SAMPLES, np.zeros(()), 2, 1, key=KEY),
            "labels: wanted 120",
        ),
        (
            lambda: partition_by_class(*labelled(3), 4, 1, key=KEY, classes=range(5)),
            "classes: wanted those that have samples, got 3, 4; the labels are 0, 1, 2",
        ),
        (
            lambda: partition_by_class(*labelled(3), 4, 1, key=KEY, classes=[0, 1, 1]),
            r"classes: wanted a list of different classes, got \[0, 1, 1\]",
        ),
        (
            lambda: partition_by_class(*labelled(3), 4, 3, key=KEY, classes=[0, 1]),
            "classes_per_client: wanted a whole number from 1 to 2, got 3",
        ),
        (
            lambda: partition_by_class(SAMPLES, LABELS, 2, 6, key=KEY),
            "classes_per_client.*1 to 5",
        ),
        (lambda: partition_by_class(SAMPLES, LABELS, 2, 0, key=KEY), "classes_per_client"),
        (
            lambda: partition_by_class(SAMPLES, LABELS, 5, 1, sizes=25, key=KEY),
            "has 24 samples, but its 1 clients need 25",
        ),
        (
            lambda: partition_by_class(SAMPLES, LABELS, 5, 3, sizes=2, key=KEY),
            "at least classes_per_client = 3",
        ),
        (
            lambda: partition_by_class(SAMPLES, LABELS, 120, 2, key=KEY),
            "has 24 samples, but its 48 clients need 48",
        ),
        (lambda: partition_dirichlet(SAMPLES, LABELS, 2, 0.0, key=KEY), "alpha: wanted"),
        (
            lambda: partition_dirichlet(SAMPLES, LABELS, 2, -1.0, key=KEY),
            "alpha: wanted",
        ),
        (
            lambda: partition_dirichlet(SAMPLES, LABELS, 7, 1.0, min_samples=20, key=KEY),
            "need 140, but there are 120",
        ),
        (
            lambda: partition_dirichlet(SAMPLES, LABELS, 7, 1.0, min_samples=0, key=KEY),
            "min_samples",
        ),
        (lambda: partition_sizes(10, 11, key=KEY), "need 11, but there are 10"),
        (lambda: partition_sizes(10, 0, key=KEY), "clients"),
        (lambda: partition_sizes(10, 2, -1.0, key=KEY), "skew"),
        (lambda: train_test_split([SAMPLES], 1.0, key=KEY), "between 0 and 1"),
        (lambda: train_test_split([SAMPLES], 0.0, key=KEY), "between 0 and 1"),
        (lambda: train_test_split([SAMPLES], 120, key=KEY), "cannot hold out 120"),
        (lambda: train_test_split([SAMPLES, SAMPLES[:1]], 0.5, key=KEY), "client 1 has 1 samples"),
        (
            lambda: train_test_split([SAMPLES], [1, 2], key=KEY),
            "test: wanted one",
        ),
        (lambda: train_test_split([], 0.5, key=KEY), "arrays: wanted a list of clients, "),
    ],
)
def test_impossible_splits_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
