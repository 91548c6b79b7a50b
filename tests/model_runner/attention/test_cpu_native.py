"""Our CPU kernels' attention against dense float64 attention, with and without prefixes that requests share."""

from __future__ import annotations

import ctypes
import functools
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.model_runner.attention.backend import BatchLayout
from engine.model_runner.attention.cpu_native import CpuNativeAttention
from engine.model_runner.kernels.cpu.compiler import ISAS, runnable_isas
from engine.model_runner.memory.io_buffers import InputBuffers
from tests.model_runner.attention.paged_batches import (
    Pages,
    assert_close,
    batches,
    seeing_batches,
    spec_of,
    whole_texts,
)
from tests.model_runner.kernels.cpu.conftest import COMPILES, COMPILES_FOR_GUEST, best_library, library_of
from tests.model_runner.kernels.cpu.guest import CPUS, GuestLibrary
from tests.selection import examples

__all__ = ["best_library"]  # fixture

BF16, F32, INT8 = torch.bfloat16, torch.float32, torch.int8
SLOWDOWN = 6 if "ENGINE_TEST_SANITIZE" in os.environ else 1


# The best level always, and what is emulated of it where the CPU lacks it; the others compile in slow runs.
_BEST = runnable_isas()[0]
_LEVELS = [
    isa if isa == _BEST else pytest.param(isa, marks=COMPILES_FOR_GUEST if isa in CPUS else COMPILES)
    for isa in ISAS
]
_EMULATED = (
    "emulated" if _BEST in ("avx512_bf16", "avx512_vnni") else pytest.param("emulated", marks=COMPILES)
)


@pytest.fixture(params=[*_LEVELS, _EMULATED])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Compiled kernels, level by level, and with AMX's tiles in plain C++."""
    if request.param == "emulated":
        return library_of("avx512_bf16", "-DEMULATE_AMX")
    return library_of(request.param)


def pages_of(kernels: Any, *args: Any, **kwargs: Any) -> Pages:
    backend: Any = functools.partial(CpuNativeAttention, library=kernels)
    return Pages(*args, **kwargs, backend=backend)


@settings(
    max_examples=examples(60 // SLOWDOWN),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    batch=batches(),
    heads=st.sampled_from(
        [(1, 1, 16), (3, 1, 16), (9, 3, 64), (4, 4, 32), (8, 2, 48), (5, 1, 80), (2, 1, 128)]
    ),
    page_size=st.sampled_from([1, 4, 16]),
    dtypes=st.sampled_from([(BF16, BF16), (F32, F32), (BF16, INT8), (F32, INT8)]),
    window=st.none() | st.sampled_from([1, 2, 7, 64, 100, 256, 257, 599, 2000]),
    layer_id=st.sampled_from([0, 1, 1]),
    seed=st.integers(0, 1000),
)
def test_is_dense_attention(library, batch, heads, page_size, dtypes, window, layer_id, seed):
    (lens, extend_lens), (dtype, kv_dtype) = batch, dtypes
    spec = spec_of(*heads, window=window)
    pages = pages_of(library, spec, page_size, lens, dtype, seed, kv_dtype=kv_dtype)
    ours, expected = pages.run(extend_lens, layer_id)
    check(ours, expected, dtypes)


@settings(
    max_examples=examples(40 // SLOWDOWN),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    lens=whole_texts(),
    heads=st.sampled_from([(12, 12, 32), (3, 3, 64), (4, 2, 16), (2, 1, 128)]),
    page_size=st.sampled_from([1, 16]),
    dtype=st.sampled_from([BF16, F32]),
    window=st.none() | st.sampled_from([1, 3, 17, 129, 601, 2001]),
    layer_id=st.sampled_from([0, 1, 1]),
    fixed_order=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_in_an_encoder_a_token_sees_those_after_it(
    library, lens, heads, page_size, dtype, window, layer_id, fixed_order, seed
):
    spec = spec_of(*heads, window=window, causal=False)
    backend: Any = functools.partial(CpuNativeAttention, library=library, fixed_order=fixed_order)
    pages = Pages(spec, page_size, lens, dtype, seed, backend=backend)
    ours, expected = pages.run(lens, layer_id)
    check(ours, expected, (dtype, dtype))


@settings(
    max_examples=examples(16 // SLOWDOWN),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    batch=seeing_batches(),
    heads=st.sampled_from([(3, 1, 16), (4, 2, 64), (2, 1, 256)]),
    dtypes=st.sampled_from([(BF16, BF16), (F32, F32), (BF16, INT8)]),
    window=st.none() | st.sampled_from([1, 7, 64, 300]),
    layer_id=st.sampled_from([0, 1, 1]),
    fixed_order=st.booleans(),
    only_in_windows=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_tokens_of_an_image_see_all_of_it(
    library, batch, heads, dtypes, window, layer_id, only_in_windows, fixed_order, seed
):
    (lens, extend_lens, images), (dtype, kv_dtype) = batch, dtypes
    backend: Any = functools.partial(CpuNativeAttention, library=library, fixed_order=fixed_order)
    spec = spec_of(*heads, window=window, only_in_windows=only_in_windows)
    pages = Pages(spec, 16, lens, dtype, seed, backend=backend, kv_dtype=kv_dtype)
    pages.images = images
    ours, expected = pages.run(extend_lens, layer_id)
    check(ours, expected, dtypes)


def check(ours: list[torch.Tensor], expected: list[torch.Tensor], dtypes: tuple[torch.dtype, ...]) -> None:
    if dtypes != (F32, INT8):
        assert_close(ours, expected, dtypes[0])
        return
    for got, want in zip(ours, expected, strict=True):  # queries and weights of decodes are cut to 15 bits
        torch.testing.assert_close(got.double(), want, atol=5e-4, rtol=5e-4)


class Step(ctypes.Structure):
    """`Step` of attention_plan.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("slots", "items", "tokens", "partials")),
        *(
            (name, ctypes.c_void_p)
            for name in ("seen_from", "seen_to", "blocks", "packed", "merges", "results")
        ),
        *((name, ctypes.c_int64) for name in ("num_tiles", "num_items", "num_merges", "num_blocks")),
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "group", "head_dim")),
    ]


def int64s_at(address: int, count: int) -> Any:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)), (count,))


def items_of(plan: int) -> Any:
    """[n, 9]: the columns of `Item` in attention_plan.h."""
    step = Step.from_address(plan)
    return int64s_at(step.items, 9 * step.num_items).reshape(-1, 9)


def share(pages: Pages, members: list[int], stop: int) -> None:
    """Let the members have the first one's slots, keys and values up to there."""
    first = members[0]
    for other in members[1:]:
        pages.table[pages.rows[other], :stop] = pages.table[pages.rows[first], :stop]
        pages.slots[other][:stop] = pages.slots[first][:stop]
        pages.keys[other][:stop] = pages.keys[first][:stop]
        pages.values[other][:stop] = pages.values[first][:stop]


@settings(
    max_examples=examples(30 // SLOWDOWN),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    own_lens=st.lists(st.integers(1, 200), min_size=2, max_size=12),
    common=st.integers(0, 70),
    more=st.integers(0, 60),
    heads=st.sampled_from([(9, 3, 64), (1, 1, 16), (8, 2, 48)]),
    page_size=st.sampled_from([1, 16]),
    dtype=st.sampled_from([BF16, F32]),
    window=st.none() | st.sampled_from([100]),
    seed=st.integers(0, 1000),
)
def test_a_shared_prefix_changes_nothing(
    library, own_lens, common, more, heads, page_size, dtype, window, seed
):
    """All share `common` pages, the first half `more` behind them, and one has a long prompt in the same step."""
    one, two = common * page_size, (common + more) * page_size
    half = len(own_lens) // 2
    lens = [150] + [length + (two if idx < half else one) for idx, length in enumerate(own_lens)]
    pages = pages_of(library, spec_of(*heads, window=window), page_size, lens, dtype, seed)
    share(pages, list(range(1, len(lens))), one)
    share(pages, list(range(1, half + 1)), two)
    ours, expected = pages.run([140] + [1] * len(own_lens))
    assert_close(ours, expected, dtype)


def test_more_share_a_prefix_than_one_item_takes(best_library):
    """Heads in groups of nine leave room for 32 requests in an item."""
    lens = [64 + 1 + n % 3 for n in range(40)]
    pages = pages_of(best_library, spec_of(9, 1, 16), 16, lens, F32, 0)
    share(pages, list(range(40)), 64)
    ours, expected = pages.run([1] * 40)
    assert_close(ours, expected, F32)


def test_queries_that_are_not_the_plan_s_are_refused(best_library):
    pages = pages_of(best_library, spec_of(2, 1, 16), 4, [40, 9], F32, 0)
    pages.fill([1, 1])
    step = pages.bound().plan_step(pages.layout([1, 1]))
    for q in (pages.q[:1], pages.q.bfloat16(), pages.q[:, :1]):
        with pytest.raises(AssertionError, match="queries are"):
            step.forward(1, q)


def test_a_prefix_is_read_once_for_all_who_share_it(best_library):
    """Shown by what is planned: the keys of all items together are the prefix once and what each has of its own."""
    pages = pages_of(best_library, spec_of(9, 3, 64), 16, [1040 + n for n in range(8)], BF16, 0)
    share(pages, list(range(8)), 1024)
    step: Any = pages.bound().plan_step(pages.layout([1] * 8))
    items = items_of(step.plans.of_layer[0])
    tiles, streams = items[items[:, 0] == 1], items[items[:, 0] == 0]
    assert int((tiles[:, 3] - tiles[:, 2]).sum()) == 1024 * 3  # of each KV head
    assert int((streams[:, 3] - streams[:, 2]).sum()) == sum(16 + n for n in range(8))


def test_what_several_items_read_is_packed_once_before_them(best_library):
    pages = pages_of(best_library, spec_of(9, 3, 64, window=100), 16, [1000, 90, 300], BF16, 0)
    step: Any = pages.bound().plan_step(pages.layout([400, 90, 1]))
    for layer_id, start in ((0, 0), (1, 1000 - 400 - 99)):
        plan = step.plans.of_layer[layer_id]
        blocks = int64s_at(Step.from_address(plan).blocks, 3 * Step.from_address(plan).num_blocks).reshape(
            -1, 3
        )
        row = pages.rows[0] * pages.table.shape[1]
        keys = np.concatenate([table - row + np.arange(begin, end) for table, begin, end in blocks])
        assert (keys == np.arange(start, 1000)).all()
        for is_tile, table, first_key, stop, _, _, _, packed_to, packed in items_of(plan).tolist():
            if is_tile and table == row:
                assert packed_to >= stop
                assert (
                    blocks[packed + first_key // 64 : packed + (stop - 1) // 64 + 1, 0] - row
                    == np.arange(first_key // 64 * 64, stop, 64)
                ).all()
            else:
                assert packed_to == 0  # one item reads it


@pytest.mark.parametrize("kv_dtype", [BF16, INT8])
@pytest.mark.parametrize("fixed_order", [False, True])
def test_what_prompts_share_is_packed_once_and_changes_no_bits(library, kv_dtype, fixed_order):
    """In whole blocks. Two share more than the others; one shares nothing, and one is a decode."""
    lens, new = [560, 330, 700, 90, 420], np.array([32, 7, 40, 90, 1])
    spec = spec_of(9, 3, 64)
    pages = pages_of(library, spec, 16, lens, BF16, 0, kv_dtype=kv_dtype)
    share(pages, [0, 1, 2, 4], 240)
    share(pages, [0, 2], 512)
    expected = pages.fill(new.tolist())
    backend: Any = functools.partial(CpuNativeAttention, library=library, fixed_order=fixed_order)
    backend = backend(spec, pages.pool, pages.table, InputBuffers(torch.device("cpu")))
    layout = BatchLayout(pages.rows, np.array(lens) - new, new, 4)
    step = backend.plan_step(layout)
    plan = step.plans.of_layer[1]
    if not isinstance(library, GuestLibrary):  # its plans are in the memory of the emulator
        packed = {int(item[4]): int(item[7]) for item in items_of(plan) if item[0]}  # by the first token
        firsts = np.cumsum(new) - new
        assert [packed.get(first, 0) for first in firsts] == [512, 192, 512, 0, 192 * fixed_order]
        assert Step.from_address(plan).num_blocks in (512 // 64, 512 // 64 + 192 // 64)
    together = step.forward(1, pages.q.contiguous()).split(new.tolist())
    assert_close(list(together), expected, BF16)
    for idx, queries in enumerate(pages.q.contiguous().split(new.tolist())):
        alone = BatchLayout(pages.rows[[idx]], layout.prefix_lens[[idx]], new[[idx]], int(idx < 4))
        assert torch.equal(backend.plan_step(alone).forward(1, queries), together[idx])


def test_of_a_long_prefix_a_part_is_packed(best_library):
    """As much as fits the memory for it; items pack the rest themselves."""
    pages = pages_of(best_library, spec_of(32, 16, 256), 16, [2100], BF16, 0)
    ours, expected = pages.run([150])
    assert_close(ours, expected, BF16)
    step: Any = pages.bound().plan_step(pages.layout([150]))
    items = items_of(step.plans.of_layer[0])
    assert (items[:, 7] % 64 == 0).all() and (items[:, 7] > 0).all() and (items[:, 7] < 2100).all()


@pytest.mark.parametrize("kv_dtype", [BF16, INT8])
@pytest.mark.parametrize("grows", [True, False])
def test_scores_may_grow_from_block_to_block(library, kv_dtype, grows):
    """What a row has so far is then scaled anew, many times over; and what comes behind may weigh nothing."""
    pages = pages_of(library, spec_of(9, 3, 64), 16, [700, 400], BF16, 0, kv_dtype=kv_dtype)
    for keys in pages.keys:
        factors = torch.linspace(0, 60, len(keys))
        keys.mul_((factors if grows else factors.flip(0))[:, None, None])
    ours, expected = pages.run([600, 1])
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)


def test_denormal_numbers_are_left_to_others(best_library):
    pages = pages_of(best_library, spec_of(4, 2, 16), 4, [70, 20], F32, 0)
    pages.run([60, 1])
    assert (torch.tensor([1e-39]) * 0.5).item() > 0


@pytest.mark.parametrize("kv_dtype", [BF16, INT8])
def test_bits_of_a_decode_do_not_depend_on_the_batch(library, kv_dtype):
    lens = [5, 129, 700, 300]
    pages = pages_of(library, spec_of(9, 3, 64), 16, lens, BF16, 3, kv_dtype=kv_dtype)
    together, _ = pages.run([1] * 4)
    for idx, length in enumerate(lens):
        layout = BatchLayout(pages.rows[[idx]], np.array([length - 1]), np.array([1]), 0)
        alone = pages.bound().plan_step(layout).forward(1, pages.q[[idx]].contiguous())
        assert torch.equal(alone, together[idx])


# Borders of blocks (64) and pieces (128) are near, or lie within the drafts.
STARTS = st.integers(0, 20) | st.integers(55, 68) | st.integers(115, 132) | st.integers(245, 420)


@settings(
    max_examples=examples(60 // SLOWDOWN),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    requests=st.lists(st.tuples(STARTS, st.sampled_from([0, 1, 2, 8, 8, 17, 40])), min_size=1, max_size=5),
    shared=st.sampled_from([0, 0, 64, 96, 528]),
    heads=st.sampled_from([(9, 3, 64), (1, 1, 16), (8, 2, 48), (5, 1, 80)]),
    page_size=st.sampled_from([1, 16]),
    dtypes=st.sampled_from([(BF16, BF16), (BF16, BF16), (F32, F32), (BF16, INT8), (F32, INT8)]),
    window=st.none() | st.sampled_from([1, 7, 64, 100, 257]),
    seed=st.integers(0, 1000),
)
def test_tokens_of_a_draft_step_have_the_bits_of_decodes(
    library, requests, shared, heads, page_size, dtypes, window, seed
):
    """Of as many decodes, one after the other, in the same company; a shared prefix is shared by all of them."""
    starts, num_drafts = np.array(requests).T
    starts += shared
    num_new = num_drafts + 1
    dtype, kv_dtype = dtypes
    spec = spec_of(*heads, window=window)
    pages = pages_of(library, spec, page_size, (starts + num_new).tolist(), dtype, seed, kv_dtype=kv_dtype)
    share(pages, list(range(len(starts))), shared)
    expected = pages.fill(num_new.tolist())
    backend, q = pages.bound(), pages.q.contiguous()
    out = backend.plan_step(BatchLayout(pages.rows, starts, num_new, len(starts), num_drafts)).forward(1, q)
    check(list(out.split(num_new.tolist())), expected, dtypes)
    for n in range(max(num_new)):
        done = np.minimum(n, num_drafts)  # who has no more decodes its last token again
        tokens = np.cumsum(num_new) - num_new + done
        plain = BatchLayout(pages.rows, starts + done, np.ones_like(starts), 0)
        assert torch.equal(backend.plan_step(plain).forward(1, q[tokens]), out[tokens])


def test_tokens_of_a_draft_step_read_a_piece_together(best_library):
    pages = pages_of(best_library, spec_of(9, 3, 64, window=100), 16, [300, 40], BF16, 0)
    layout = BatchLayout(pages.rows, np.array([291, 39]), np.array([9, 1]), 1, np.array([8, 0]))
    step: Any = pages.bound().plan_step(layout)

    def streams(layer_id: int) -> list[tuple[int, int, int]]:
        items = items_of(step.plans.of_layer[layer_id])
        assert not items[:, 0].any()
        return [(start, stop, last - first) for _, _, start, stop, first, last, *_ in items.tolist()]

    assert streams(0) == [(0, 128, 9), (128, 256, 9), (256, 300, 9), (0, 40, 1)]
    windows = [(start, 256, 1) for start in range(192, 201)]  # blocks of keys begin where a window does
    assert streams(1) == [*windows, (256, 300, 9), (0, 40, 1)]


def test_bits_do_not_depend_on_the_number_of_threads(best_library):
    pages = pages_of(best_library, spec_of(9, 3, 64), 16, [400, 900, 500, 10], BF16, 3)
    before = torch.get_num_threads()
    outs = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            pages.fill([300, 1, 1, 1])
            torch.manual_seed(0)
            q = torch.randn(303, 9, 64).to(BF16)
            outs.append(pages.bound().plan_step(pages.layout([300, 1, 1, 1])).forward(1, q))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_large_scores_do_not_overflow(library, dtype):
    pages = pages_of(library, spec_of(4, 2, 32), 4, [70, 200], dtype, 0)
    for keys in pages.keys:
        keys.mul_(300)  # scores of thousands: float32 knows them to a few ten-thousandths, and so the weights
    ours, expected = pages.run([60, 1])
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-2 if dtype == BF16 else 1e-3, rtol=1e-2)


def test_a_window_reads_no_token_before_it(library):
    pages = pages_of(library, spec_of(4, 2, 16, window=50), 4, [300, 200, 90], F32, seed=2)
    for idx, seen in enumerate([100 + 49, 50, 50]):
        pages.keys[idx][:-seen] = torch.nan
        pages.values[idx][:-seen] = torch.nan
    ours, _ = pages.run([100, 1, 1])
    assert all(out.isfinite().all() for out in ours)


@pytest.mark.parametrize("kv_dtype", [F32, INT8])
@pytest.mark.parametrize("new", [1, 90])
@pytest.mark.parametrize(("key", "value"), [(torch.nan, 0.0), (0.0, torch.nan), (0.0, -torch.inf)])
def test_a_request_with_nan_does_not_touch_its_neighbors(library, kv_dtype, new, key, value):
    pages = pages_of(library, spec_of(4, 2, 16), 4, [200, 30, 90], F32, seed=1, kv_dtype=kv_dtype)
    pages.keys[0][5, 0, 3] = key
    pages.values[0][6, 1, 2] = value
    ours, expected = pages.run([new, 1, 1])
    wrong = ours[0].view(new, 4, 16)
    if key == key:
        assert (~wrong[:, 2:, 2].isfinite()).all()
    else:
        assert wrong[:, :2].isnan().all() and wrong[:, 2:].isfinite().all()
    check(ours[1:], expected[1:], (F32, kv_dtype))


def test_a_query_with_nan_stays_visible_among_integers(library):
    pages = pages_of(library, spec_of(4, 2, 16), 4, [20, 30], BF16, seed=1, kv_dtype=INT8)
    _, expected = pages.run([1, 1])
    pages.q[0, 1, 3], pages.q[0, 3, 15] = torch.nan, torch.inf
    out = pages.bound().plan_step(pages.layout([1, 1])).forward(1, pages.q).view(2, 4, 16)
    assert out[0, 1].isnan().all() and out[0, 3].isnan().all() and out[0, [0, 2]].isfinite().all()
    assert_close([out[1:].flatten(1)], expected[1:], BF16)


def test_steps_follow_each_other_and_a_token_that_is_first_sees_itself_only(best_library):
    spec = spec_of(2, 1, 16)
    pages = pages_of(best_library, spec, 4, [1, 40], F32, 0)
    backend = pages.bound()
    for extend_lens in ([1, 40], [1, 1], [1, 3]):
        expected = pages.fill(extend_lens)
        out = backend.plan_step(pages.layout(extend_lens)).forward(1, pages.q)
        assert_close(list(out.split(extend_lens)), expected, F32)
        assert torch.equal(out[0].view(2, 16)[0], pages.values[0][0, 0])


def test_reasons_against():
    def reasons(head_dim: int, device: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> list[str]:
        return CpuNativeAttention.reasons_against(
            spec_of(2, 1, head_dim), torch.device(device), dtype, kv_dtype
        )

    assert reasons(64, "meta", BF16, BF16) == ["runs on CPUs only, not on meta"]
    found = reasons(40, "cpu", torch.float16, torch.float8_e4m3fn)
    assert len(found) == 3
    assert "40 is not a multiple of 16" in found[2]


# ---------------------------------------------------------------- who shares what


def table_of(rows: list[list[int]], page_size: int) -> Any:
    width = max(map(len, rows))
    pages = np.array([row + [0] * (width - len(row)) for row in rows])
    return (pages[:, :, None] * page_size + np.arange(page_size)).reshape(len(rows), -1).astype(np.int32)


def shared_prefixes(library: Any, table: Any, lens: Any, page_size: int) -> list[tuple[list[int], int, int]]:
    """(members, start, stop) of what decodes of these lengths have in common, read off the items."""
    plan = library.new_attention_plan(
        table.ctypes.data, table.shape[1], page_size, 1, 1, 16, 0, 0, 1, 0, 0.25, 0.0
    )
    columns = np.stack((np.arange(len(lens)), np.asarray(lens) - 1, np.ones(len(lens), dtype=np.int64)))
    library.plan_attention(plan, *(column.ctypes.data for column in columns), None, None, len(lens))
    items = items_of(plan)
    tokens = int64s_at(Step.from_address(plan).tokens, int(items[:, 5].max()))
    members: dict[tuple[int, int, int], list[int]] = {}  # an item holds some of them
    for _, row, start, stop, first, last, *_ in items[items[:, 0] == 1].tolist():
        members.setdefault((row, start, stop), []).extend(tokens[first:last].tolist())
    found: list[tuple[list[int], int, int]] = []
    for (_, start, stop), who in members.items():
        if found and found[-1][0] == who and found[-1][2] == start:  # pieces of one prefix
            start = found.pop()[1]
        found.append((who, start, stop))
    library.free_attention_plan(plan)
    return found


@pytest.mark.parametrize(
    ("rows", "lens", "expected"),
    [
        ([[1, 2], [3, 4]], [128, 128], []),
        ([[1, 2, 3], [1, 2, 4]], [192, 192], [([0, 1], 0, 128)]),
        ([[1, 2, 3], [1, 2, 3]], [192, 140], [([0, 1], 0, 128)]),  # whole pages only
        ([[1, 2, 3], [1, 2, 3]], [192, 60], []),
        (
            [[1, 2, 5, 6], [1, 2, 5, 7], [9], [1, 2, 8]],
            [256, 256, 64, 192],
            [([0, 1, 3], 0, 128), ([0, 1], 128, 192)],
        ),
        ([[1, 4], [2, 3], [1, 5], [2, 6]], [128] * 4, [([0, 2], 0, 64), ([1, 3], 0, 64)]),
    ],
)
def test_shared_prefixes(best_library, rows, lens, expected):
    found = shared_prefixes(best_library, table_of(rows, 64), np.array(lens) + 1, 64)
    assert found == expected


def test_a_short_common_beginning_is_left_to_those_who_share_more(best_library):
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 9, 9, 9, 9]]
    assert shared_prefixes(best_library, table_of(rows, 16), [81, 81, 81], 16) == [([0, 1], 0, 80)]


@pytest.mark.parametrize(("page_size", "num", "step"), [(16, 600, 16), (64, 400, 64), (1, 300, 1)])
def test_many_requests_of_different_lengths_that_begin_alike(best_library, page_size, num, step):
    """As many groups within each other as there are lengths, but none for less than what is worth an item."""
    lens = np.arange(1, num + 1) * step
    table = np.tile(np.arange(num * step + 1, dtype=np.int32), (num, 1))
    found = shared_prefixes(best_library, table, lens + 1, page_size)
    assert all(stop - start >= 64 for _, start, stop in found)
    assert len(found) <= num * step // 64
    covered = np.zeros(num, dtype=int)
    for members, start, stop in found:
        assert (covered[members] == start).all() and len(members) > 1
        covered[members] = stop
    assert (covered <= lens).all()
    assert (lens - covered)[:-1].max() < 128  # what is left to read alone


def test_a_step_may_be_repeated_with_other_requests(best_library):
    pages = pages_of(best_library, spec_of(9, 3, 64, window=100), 16, [1100 + n for n in range(5)], BF16, 0)
    share(pages, list(range(5)), 1024)
    for layer_id in (0, 1):
        pages.run([1] * 5, layer_id)
    backend, calls = pages.bound(), []

    def keep(name: str) -> Any:
        def call(*args: Any) -> None:
            calls.append((getattr(best_library, name), args))
            getattr(best_library, name)(*args)

        return call

    backend._library = SimpleNamespace(
        new_attention_plan=best_library.new_attention_plan,
        free_attention_plan=best_library.free_attention_plan,
        plan_attention=keep("plan_attention"),
        attend=keep("attend"),
    )
    rows, lens = torch.from_numpy(pages.rows), torch.tensor([9, 200, 3, 0, 0])
    q, num_new = pages.q.contiguous(), torch.tensor([1, 3, 1, 0, 0])
    step = backend.repeatable_step(rows, lens, num_new)
    outs = [step.forward(layer_id, q) for layer_id in (0, 1)]
    lens.copy_(torch.tensor(pages.lens) - 1)
    num_new.fill_(1)
    q.mul_(2)
    for function, args in calls:
        function(*args)
    layout = pages.layout([1] * 5)
    for layer_id, out in enumerate(outs):
        assert torch.equal(out, pages.bound().plan_step(layout).forward(layer_id, q))
