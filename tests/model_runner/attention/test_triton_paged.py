"""Triton's attention against dense float64 attention, over random page tables, lengths, head shapes and precisions.

Without a driver the kernels run in Triton's interpreter, on the CPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.model_runner.attention.triton_paged import TritonAttention
from engine.model_runner.kernels.triton import attention_decode, attention_tiles, extend_cut
from engine.model_runner.kernels.triton.attention_tiles import AttentionInputs
from engine.model_runner.ops.rotation import LayerKV
from tests.conftest import HAS_NVIDIA_DRIVER
from tests.model_runner.attention.paged_batches import (
    Pages,
    assert_close,
    batches,
    seeing_batches,
    spec_of,
)
from tests.selection import examples
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

DEVICE = torch.device("cuda" if HAS_NVIDIA_DRIVER else "cpu")
FP8 = torch.float8_e4m3fn
SCORES = attention_tiles.Scores(256**-0.5)
HEADS = [(1, 1, 16), (3, 1, 40), (4, 4, 32), (9, 3, 64), (14, 2, 80), (8, 2, 96), (4, 2, 128), (2, 1, 256)]
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, FP8),
    (torch.float32, torch.bfloat16),
]


def paged(*args: Any, **kwargs: Any) -> Pages:
    return Pages(*args, **kwargs, backend=TritonAttention, device=DEVICE)


def check_step(batch, heads, page_size, dtypes, window, layer_id, seed):
    lens, extend_lens = batch
    pages = paged(spec_of(*heads, window=window), page_size, lens, dtypes[0], seed, kv_dtype=dtypes[1])
    ours, expected = pages.run(extend_lens, layer_id)
    assert_close(ours, expected, dtypes[0])


def arguments(batch: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    return {
        "batch": batch,
        "heads": st.sampled_from(HEADS),
        "page_size": st.sampled_from([1, 16, 64, 128]),
        "dtypes": st.sampled_from(DTYPES),
        "window": st.none() | st.sampled_from([1, 2, 50, 64, 100, 1000]),
        "layer_id": st.sampled_from([0, 1, 1]),
        "seed": st.integers(0, 1000),
    }


@settings(max_examples=examples(9))
@given(**arguments(batches(max_len=90, max_extends=2, max_decodes=3)))
def test_is_dense_attention(batch, heads, page_size, dtypes, window, layer_id, seed):
    check_step(batch, heads, page_size, dtypes, window, layer_id, seed)


@settings(max_examples=examples(4))
@example(
    ([90], [90], [[(3, 88)]]), (3, 1, 40), DTYPES[0], None, 1, False, 0
)  # blocks of queries end within the image
@example(([90], [90], [[(3, 88)]]), (3, 1, 40), DTYPES[0], 50, 0, True, 0)
@given(
    batch=seeing_batches(max_len=90),
    heads=st.sampled_from([(3, 1, 40), (4, 4, 32), (2, 1, 256)]),
    dtypes=st.sampled_from(DTYPES),
    window=st.none() | st.sampled_from([1, 50, 64]),
    layer_id=st.sampled_from([0, 1, 1]),
    only_in_windows=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_tokens_of_an_image_see_all_of_it(batch, heads, dtypes, window, layer_id, only_in_windows, seed):
    lens, extend_lens, images = batch
    pages = paged(
        spec_of(*heads, window=window, only_in_windows=only_in_windows),
        16,
        lens,
        dtypes[0],
        seed,
        kv_dtype=dtypes[1],
    )
    pages.images = images
    ours, expected = pages.run(extend_lens, layer_id)
    assert_close(ours, expected, dtypes[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=20)
@given(**arguments(batches()))
def test_is_dense_attention_of_long_texts_too(batch, heads, page_size, dtypes, window, layer_id, seed):
    check_step(batch, heads, page_size, dtypes, window, layer_id, seed)


@settings(max_examples=examples(6))
@given(
    lens=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    heads=st.sampled_from(HEADS),
    dtypes=st.sampled_from(DTYPES),
    window=st.none() | st.sampled_from([1, 70]),
    num_padding=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_a_step_planned_on_the_device_is_the_same(lens, heads, dtypes, window, num_padding, seed):
    pages = paged(spec_of(*heads, window=window), 16, lens, dtypes[0], seed, kv_dtype=dtypes[1])
    ours, expected = pages.decode(num_padding=num_padding)
    assert_close([ours], [expected], dtypes[0])
    planned = pages.bound().plan_step(pages.layout([1] * len(lens))).forward(1, pages.q)
    torch.testing.assert_close(
        planned, ours, atol=2e-2, rtol=2e-2
    )  # cut in other places, as the batch is another


@pytest.mark.skipif(HAS_NVIDIA_DRIVER, reason="looks into Triton's interpreter")
def test_launches_of_decodes_depend_on_shapes_only(monkeypatch):
    """All that a CUDA graph keeps: kernels, grids, and numbers that are handed over by value."""
    from triton.runtime.interpreter import InterpretedFunction

    launches: list[Any] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        values = [value for value in (*args, *kwargs.values()) if not isinstance(value, torch.Tensor)]
        launches.append((self.fn.__name__, grid, values))

    monkeypatch.setattr(InterpretedFunction, "run", note)
    seen = []
    for lens in ([1, 1, 1], [700, 3, 90]):
        pages = paged(spec_of(4, 2, 16, window=64), 16, [700, 700, 700], torch.bfloat16, seed=0)
        step = pages.bound().decode_step(
            torch.tensor([0, 1, 2], device=DEVICE), torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        )
        q = torch.zeros((3, 4, 16), dtype=torch.bfloat16, device=DEVICE)
        for layer_id in (0, 1):
            step.forward(layer_id, q)
        seen.append(list(launches))
        launches.clear()
    assert [name for name, _, _ in seen[0]] == 2 * ["_plan_kernel"] + 2 * [
        "_attend_kernel",
        "_combine_kernel",
    ]
    assert seen[0] == seen[1]


@pytest.mark.gpu
def test_a_recorded_step_is_replayed_with_other_lengths():
    pages = paged(spec_of(8, 2, 128, window=100), 16, [700, 300, 90], torch.bfloat16, seed=0)
    expected = pages.fill([1, 1, 1])
    rows = torch.from_numpy(pages.rows).to(DEVICE)
    seq_lens = torch.ones(3, dtype=torch.int32, device=DEVICE)
    backend = pages.bound()
    q = pages.q.contiguous()
    backend.decode_step(rows, seq_lens).forward(1, q)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.decode_step(rows, seq_lens).forward(1, q)
    seq_lens.copy_(torch.tensor(pages.lens))
    graph.replay()
    assert_close([out], [torch.cat(expected)], torch.bfloat16)


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    pages = paged(spec_of(8, 2, 128), 16, [700, 300, 90], torch.bfloat16, seed=0)
    pages.fill([100, 1, 1])
    backend = pages.bound()
    backend.plan_step(pages.layout([100, 1, 1])).forward(1, pages.q)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.plan_step(pages.layout([100, 1, 1])).forward(1, pages.q)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_empty_batch_is_nothing():
    pages = paged(spec_of(4, 2, 16), 4, [3], torch.float32, seed=0)
    pages.lens, pages.rows = [], pages.rows[:0]
    step = pages.bound().plan_step(pages.layout([]))
    assert step.forward(0, torch.empty(0, 4, 16, device=DEVICE)).shape == (0, 64)


def test_a_window_reads_no_token_before_it():
    pages = paged(spec_of(4, 2, 16, window=50), 4, [300, 200, 90], torch.float32, seed=2)
    for idx, seen in enumerate([100 + 49, 50, 50]):
        pages.keys[idx][:-seen] = torch.nan
        pages.values[idx][:-seen] = torch.nan
    ours, _ = pages.run([100, 1, 1])
    assert all(out.isfinite().all() for out in ours)


def test_a_request_with_nan_does_not_touch_its_neighbors():
    pages = paged(spec_of(4, 2, 16), 4, [200, 30, 90, 40], torch.float32, seed=1)
    pages.keys[1][5] = torch.nan
    pages.values[1][6] = torch.inf
    ours, expected = pages.run([100, 1, 1, 1])
    assert ours[1].isnan().any()
    for idx in (0, 2, 3):
        torch.testing.assert_close(ours[idx].double(), expected[idx], atol=2e-6, rtol=2e-6)


# ---------------------------------------------------------------- how decodes are cut


def cut(lens: list[int], *, num_sms: int, window: int | None = None, heads: int = 2) -> np.ndarray:
    """(request, row, first key, behind the last, parts) of each item that has work."""
    shape = attention_tiles.HeadShape(heads, 1, 128, 16)
    rows = torch.arange(len(lens), device=DEVICE) + 7
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    plan = attention_decode.plan_decodes(shape, rows, seq_lens, [window], torch.bfloat16, num_sms)[window]
    items = plan.items.cpu().numpy()
    used = int((items[:, 0] >= 0).sum())
    assert (items[:used, 0] >= 0).all()
    spans = plan.spans.cpu().numpy()
    assert (spans[:, 2] == 1).all()
    for request, (first, parts, _) in enumerate(spans):
        assert (items[first : first + parts, 0] == request).all()
        assert (items[first : first + parts, 4] == parts).all()
    assert spans[:, 1].sum() == used
    return items[:used, :5]


@given(
    lens=st.lists(st.integers(1, 3000) | st.sampled_from([1, 64, 65, 100_000]), min_size=1, max_size=12),
    num_sms=st.sampled_from([1, 8, 40]),
    window=st.none() | st.sampled_from([1, 64, 500]),
)
@settings(max_examples=examples(15))
def test_items_cover_the_keys_that_are_seen_once(lens, num_sms, window):
    items = cut(lens, num_sms=num_sms, window=window)
    for request, length in enumerate(lens):
        mine = items[items[:, 0] == request]
        first = 0 if window is None else max(0, length - window)
        assert (mine[:, 1] == request + 7).all()
        assert mine[0, 2] == first
        assert mine[-1, 3] == length
        assert (mine[1:, 2] == mine[:-1, 3]).all()
        assert (mine[:, 2] < mine[:, 3]).all()
        assert (mine[1:, 2] % 64 == 0).all()


def test_one_long_request_is_shared_out_among_all_multiprocessors():
    items = cut([64_000], num_sms=132, heads=8)
    assert len(items) == 33  # times 8 heads: two programs for each
    assert (items[:, 3] - items[:, 2]).max() <= 64_000 / 33 + 64


def test_a_long_request_among_short_ones_gets_most_of_the_items():
    items = cut([100_000] + [200] * 63, num_sms=132, heads=8)
    assert (items[:, 0] == 0).sum() == 28  # of 33, by its share of all keys
    assert len(items) <= 64 + 33


def test_many_requests_of_the_same_length_are_not_cut():
    assert (cut([768] * 200, num_sms=132, heads=8)[:, 4] == 1).all()


def test_more_requests_than_one_look_of_the_planner():
    lens = [1 + 37 * idx % 500 for idx in range(300)]
    items = cut(lens, num_sms=8)
    assert sorted(set(items[:, 0].tolist())) == list(range(300))
    assert (items[:, 3] - items[:, 2]).sum() == sum(lens)


# ---------------------------------------------------------------- how prompts are cut


@settings(max_examples=examples(100))
@given(
    lens=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 300)), min_size=1, max_size=5),
    tokens_per_block=st.sampled_from([1, 9, 42, 128]),
    window=st.none() | st.sampled_from([1, 100, 1000]),
    wanted=st.sampled_from([1, 16, 132]),
)
def test_blocks_hold_every_new_token_with_all_its_keys_once(lens, tokens_per_block, window, wanted):
    prefix_lens, extend_lens = np.array(lens, dtype=np.int64).T
    starts = np.cumsum(extend_lens) - extend_lens
    rows = np.arange(len(lens)) * 3
    blocks, spans, num_parts = extend_cut.cut_extends(
        starts, rows, prefix_lens, extend_lens, tokens_per_block, window, wanted
    )
    keys: dict[int, list[tuple[int, int, int]]] = {}
    for token, count, position, row, begin, end, goes_to, _ in blocks.tolist():
        assert 1 <= count <= tokens_per_block
        assert begin < end
        for idx in range(count):
            request = row // 3
            assert token + idx - starts[request] == position + idx - prefix_lens[request]
            keys.setdefault(token + idx, []).append((begin, end, goes_to + idx if goes_to >= 0 else -1))
    assert sorted(keys) == list(range(extend_lens.sum()))
    positions = [int(prefix) + idx for prefix, new in lens for idx in range(new)]
    taken = []
    for token, parts in keys.items():
        parts.sort()
        position = positions[token]
        assert parts[0][0] <= (0 if window is None else max(0, position - window + 1))
        assert parts[-1][1] > position
        assert all(one[1] == next_one[0] for one, next_one in itertools.pairwise(parts))
        if len(parts) == 1:
            assert parts[0][2] == -1
            assert not len(spans) or spans[token, 1] == 1
        else:
            first, count, apart = spans[token].tolist()
            assert [goes_to for _, _, goes_to in parts] == [first + idx * apart for idx in range(count)]
            taken += [goes_to for _, _, goes_to in parts]
    assert sorted(taken) == list(range(num_parts))


def test_blocks_with_the_most_keys_start_first():
    one, three = np.array([1]), np.array([3])
    blocks, spans, _ = extend_cut.cut_extends(0 * one, three, 0 * one, 100 * one, 32, None, 1)
    assert blocks[:, 2].tolist() == [96, 64, 32, 0]
    assert len(spans) == 0


def test_a_short_question_behind_a_long_conversation_fills_the_gpu():
    one = np.array([1])
    blocks, _, num_parts = extend_cut.cut_extends(0 * one, one, 10_000 * one, 50 * one, 32, None, 17)
    assert len(blocks) == 16  # times 8 KV heads, on 132 multiprocessors
    assert num_parts == 8 * 50
    assert (blocks[:, 5] - blocks[:, 4]).max() <= 1280


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("window", [None, 300])
def test_parts_of_prompts_are_put_together(window):
    lens, extend_lens = [700, 520, 3], [2, 9, 1]
    pages = paged(spec_of(7, 1, 64, window=window), 16, lens, torch.bfloat16, seed=0)
    assert len(pages.bound().plan_step(pages.layout(extend_lens)).extends[1].spans) == 2 + 9
    ours, expected = pages.run(extend_lens)
    assert_close(ours, expected, torch.bfloat16)


# ---------------------------------------------------------------- float8


@pytest.mark.parametrize("by_hand", [True, False])
def test_every_float8_number_is_read_as_it_is(by_hand):
    """Of attention to a single key the result is its value."""
    shape = attention_tiles.HeadShape(1, 1, 256, 1)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8).view(1, 1, 256)
    codes = torch.where(codes.float().isnan(), torch.zeros(1, device=DEVICE), codes.float()).to(FP8)
    table = torch.zeros((1, 4), dtype=torch.int32, device=DEVICE)
    row, one = (
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        torch.ones(1, dtype=torch.int32, device=DEVICE),
    )
    plan = attention_decode.plan_decodes(shape, row, one, [None], FP8, 4)[None]
    out = torch.empty((1, 256), device=DEVICE)
    q = torch.zeros((1, 1, 256), device=DEVICE)
    inputs = AttentionInputs(shape, q, LayerKV(codes, codes), table, out, SCORES, by_hand)
    attention_decode.attend_decode(inputs, plan)
    assert torch.equal(out, codes.float().view(1, 256))


def test_slots_beyond_two_billion_numbers_are_found():
    """On the CPU only the pages in use are ever backed by memory."""
    shape = attention_tiles.HeadShape(1, 1, 256, 1)
    num_slots = (1 << 31) // 256 + 8
    pool = torch.empty((num_slots, 1, 256), dtype=torch.float16, device=DEVICE)
    pool[-1] = 3.0
    table = torch.full((1, 4), num_slots - 1, dtype=torch.int32, device=DEVICE)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    plan = attention_decode.plan_decodes(
        shape, torch.zeros(1, dtype=torch.int64, device=DEVICE), one, [None], torch.float16, 4
    )
    out = torch.empty((1, 256), dtype=torch.float16, device=DEVICE)
    q = torch.zeros((1, 1, 256), dtype=torch.float16, device=DEVICE)
    inputs = AttentionInputs(shape, q, LayerKV(pool, pool), table, out, SCORES, by_hand=True)
    attention_decode.attend_decode(inputs, plan[None])
    assert bool((out == 3).all())
