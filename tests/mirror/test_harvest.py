"""Servers of real models on the mirror launch the variants of `benchmarks/gpu/variants.json`."""

from __future__ import annotations

import pytest

from benchmarks.gpu.variants import read_variants

from .harvest import SERVERS, harvest


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("server", SERVERS)
def test_the_list_has_the_variants_of_a_server(server):
    """If not: `python -m tests.mirror.harvest`."""
    known = [variant.identity for variant in read_variants() if server in variant.servers]
    found = [variant.identity for variant in harvest(SERVERS[server])]
    assert [each for each in found if each not in known] == []
    assert len(found) == len(known)
