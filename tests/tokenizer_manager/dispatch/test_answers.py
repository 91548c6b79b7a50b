"""Several answers as one."""

from __future__ import annotations

from engine.runtime.messages import AdapterDone, PinDone
from engine.tokenizer_manager.dispatch.answers import merged


def test_a_pinned_prefix_is_as_long_as_where_most_of_it_is_cached():
    nowhere, most = PinDone(1, 0, 64, "none of it is cached"), PinDone(1, 48, 64, "the rest is not cached")
    assert merged([nowhere, most]) == merged([most, nowhere]) == most


def test_an_adapter_that_one_scheduler_could_not_load_is_not_loaded():
    assert merged([AdapterDone(3), AdapterDone(3, "no such file")]).error == "no such file"  # type: ignore[union-attr]
    assert merged([AdapterDone(3), AdapterDone(3)]) == AdapterDone(3)
