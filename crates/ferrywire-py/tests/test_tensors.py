"""Dictionaries of arrays, shared by one and fetched by another."""

from __future__ import annotations

import re

import pytest
from conftest import LIMIT, Pair

import ferrywire as fw

np = pytest.importorskip("numpy", reason="needs numpy")


def test_arrays_arrive_with_their_shapes_and_types(pair: Pair):
    state = {"a.weight": np.random.default_rng(1).random((3, 5)), "step": np.array(7), "none": np.zeros((0, 2), np.int8)}
    shared = fw.share(pair.far, state)
    assert shared.nbytes == 3 * 5 * 8 + 8
    got = fw.fetch(pair.near, pair.to_far, shared.describe(), timeout=LIMIT)
    assert list(got) == list(state)
    for name, array in state.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape) and (got[name] == array).all()
    state["step"][...] = 8
    assert fw.fetch(pair.near, pair.to_far, shared.describe(), into=got) == got and got["step"] == 8
    shared.close()
    with pytest.raises(fw.AccessRefused):
        fw.fetch(pair.near, pair.to_far, shared.describe(), timeout=LIMIT)


def test_what_does_not_match_is_named(pair: Pair):
    with fw.share(pair.far, {"a": np.zeros(3), "b": np.zeros(4, np.float32)}) as shared:
        told = shared.describe()
        for into, why in (
            ({"a": np.zeros(3)}, "into: the peer has ['b'] that are missing there, and has no []"),
            ({"a": np.zeros(2), "b": np.zeros(4, np.float32)}, "tensor 'a': shape [2] of float64 here, shape [3]"),
            ({"a": np.zeros(3), "b": np.zeros(4)}, "tensor 'b': shape [4] of float64 here, shape [4] of float32 at"),
        ):
            with pytest.raises(fw.UsageError, match=re.escape(why)):
                fw.fetch(pair.near, pair.to_far, told, into=into)
    with pytest.raises(fw.UsageError, match="tensor 'a': memory: not contiguous"):
        fw.share(pair.far, {"a": np.zeros((3, 3)).T})
    with pytest.raises(fw.UsageError, match="description: version 99"):
        fw.fetch(pair.near, pair.to_far, b'{"version": 99}')
