"""Paged attention against dense float64 attention over random page tables, lengths and head shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.attention.torch_native import TorchNativeAttention, group_by_length
from tests.model_runner.attention.paged_batches import (
    Pages,
    assert_close,
    batches,
    seeing_batches,
    spec_of,
    whole_texts,
)
from tests.selection import examples

FP8 = torch.float8_e4m3fn


def native(*args: Any, **kwargs: Any) -> Pages:
    return Pages(*args, **kwargs, backend=TorchNativeAttention)


@settings(max_examples=examples(100), deadline=None)
@given(
    batch=batches(),
    heads=st.sampled_from([(1, 1, 8), (3, 1, 16), (9, 3, 64), (4, 4, 32), (8, 2, 40)]),
    page_size=st.sampled_from([1, 4, 16]),
    dtypes=st.sampled_from(
        [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8)]
    ),
    window=st.none() | st.sampled_from([1, 2, 7, 64, 100, 256, 257, 599, 2000]),
    layer_id=st.sampled_from([0, 1, 1]),
    seed=st.integers(0, 1000),
)
def test_is_dense_attention(batch, heads, page_size, dtypes, window, layer_id, seed):
    lens, extend_lens = batch
    pages = native(spec_of(*heads, window=window), page_size, lens, dtypes[0], seed, kv_dtype=dtypes[1])
    ours, expected = pages.run(extend_lens, layer_id)
    assert_close(ours, expected, dtypes[0])


@settings(max_examples=examples(50), deadline=None)
@given(
    lens=whole_texts(),
    heads=st.sampled_from([(12, 12, 32), (3, 3, 64), (4, 2, 8)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.none() | st.sampled_from([1, 3, 17, 129, 601, 2001]),
    layer_id=st.sampled_from([0, 1, 1]),
    seed=st.integers(0, 1000),
)
def test_in_an_encoder_a_token_sees_those_after_it(lens, heads, dtype, window, layer_id, seed):
    pages = native(spec_of(*heads, window=window, causal=False), 4, lens, dtype, seed)
    ours, expected = pages.run(lens, layer_id)
    assert_close(ours, expected, dtype)


@settings(max_examples=examples(40), deadline=None)
@given(
    batch=seeing_batches(),
    heads=st.sampled_from([(3, 1, 16), (4, 2, 8)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.none() | st.sampled_from([1, 7, 64, 300]),
    layer_id=st.sampled_from([0, 1, 1]),
    only_in_windows=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_tokens_of_an_image_see_all_of_it(batch, heads, dtype, window, layer_id, only_in_windows, seed):
    lens, extend_lens, images = batch
    pages = native(spec_of(*heads, window=window, only_in_windows=only_in_windows), 4, lens, dtype, seed)
    pages.images = images
    ours, expected = pages.run(extend_lens, layer_id)
    assert_close(ours, expected, dtype)


def test_writes_only_the_new_slots_of_its_layer():
    pages = native(spec_of(4, 2, 8), 4, [7, 9, 3], torch.float32, seed=0)
    pages.run([7, 1, 1])
    assert pages.pool.k[0].isnan().all()
    written = ~pages.pool.k[1].isnan().all(dim=-1).all(dim=-1)
    assert written.nonzero()[:, 0].tolist() == sorted(torch.cat(pages.slots).tolist())
    assert torch.equal(pages.pool.v[1][pages.slots[0]], pages.values[0])


def test_a_window_reads_no_token_before_it():
    pages = native(spec_of(4, 2, 8, window=50), 4, [300, 200, 90], torch.float32, seed=2)
    for idx, seen in enumerate([100 + 49, 50, 50]):
        pages.keys[idx][:-seen] = torch.nan
        pages.values[idx][:-seen] = torch.nan
    ours, _ = pages.run([100, 1, 1])
    assert all(out.isfinite().all() for out in ours)


def test_a_request_with_nan_does_not_touch_its_neighbors():
    pages = native(spec_of(4, 2, 8), 4, [200, 30, 90], torch.float32, seed=1)
    pages.keys[0][5] = torch.nan
    pages.values[0][6] = torch.inf
    ours, expected = pages.run([1, 1, 1])
    assert ours[0].isnan().any()
    torch.testing.assert_close(
        torch.stack(ours[1:]).double(), torch.stack(expected[1:]), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("lens", "groups"),
    [
        ([], []),
        ([5], [[0]]),
        ([100, 90, 110, 80], [[0, 1, 2, 3]]),
        ([2000, 10, 2000, 20], [[0, 2], [1, 3]]),
        ([3000, 2500, 1], [[0, 1], [2]]),
    ],
)
def test_decodes_are_grouped_by_length(lens, groups):
    assert [group.tolist() for group in group_by_length(np.array(lens, dtype=np.int64))] == groups


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=64))
def test_every_decode_is_in_one_group_and_padding_is_bounded(lens):
    array = np.array(lens, dtype=np.int64)
    groups = group_by_length(array)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lens)))
    for group in groups:
        assert array[group].max() * len(group) - array[group].sum() <= 1024
