"""Tests of `scheduler/policy/base.py`."""

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.policy.base import OrderedIndex

from .model import make_req


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_stays_sorted_through_any_changes(changes):
    index, expected = OrderedIndex(), {}
    for seq, (key, takes_out) in enumerate(changes):
        req = make_req(seq)
        index.add(req, key)
        expected[seq] = (key, req)
        if takes_out:
            gone = expected.pop(min(expected))[1]
            index.remove(gone)

        by_key = sorted(expected.items(), key=lambda item: (item[1][0], item[0]))
        assert [each.seq for each in index] == [seq for seq, _ in by_key]
        assert len(index) == len(expected)
        assert not expected or index.first is by_key[0][1][1]
