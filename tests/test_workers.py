"""How tests are shared out among workers: `conftest.py` names the groups, xdist goes by the ends of node ids."""

from __future__ import annotations

import pytest


def test_tests_that_belong_together_go_to_one_worker(request):
    loadgroup = request.config.getoption("loadgroup", False)  # xdist says so to its workers
    for item in request.session.items:
        path = item.nodeid.split("::")[0]
        together = "processes" if item.get_closest_marker("real_process") else path

        assert [mark.args for mark in item.iter_markers("xdist_group")] == [(together,)]
        # Without this end xdist gives every test to whoever is free, and says nothing.
        assert item.nodeid.endswith(f"@{together}") or not loadgroup


def test_the_longest_group_begins_first(request):
    if not request.config.getoption("loadgroup", False):
        pytest.skip("one process runs all tests in the order of their files")
    alone = [item.get_closest_marker("real_process") is None for item in request.session.items]

    assert alone == sorted(alone)
