"""Rows of clients: against a search for each of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxfed._rows import rows_by_name, rows_of_each


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.booleans())
def test_each_client_has_its_rows_in_order(names, is_sorted):
    names = np.asarray(sorted(names) if is_sorted else names)
    known, codes = np.unique(names, return_inverse=True)
    every = np.arange(len(names))
    for code, rows in enumerate(rows_of_each(codes)):
        np.testing.assert_array_equal(every[rows], np.flatnonzero(codes == code))
        assert isinstance(rows, slice) == bool((np.diff(codes) >= 0).all())
    found = rows_by_name(names.astype(str))
    # Client 2 comes before client 10.
    assert list(found) == [str(name) for name in known]
    for name, rows in found.items():
        np.testing.assert_array_equal(every[rows], np.flatnonzero(names.astype(str) == name))
