"""The bound of FA3's splits against its own, re-implemented, and against what the device chooses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model_runner.attention.fa3_splits import PARTIAL_BYTES, SplitShape, max_splits

MIB = 1 << 20
LLAMA_8B = SplitShape(32, 8, 128, None, 132)


def own_bound(query_lens: list[int], key_lens: list[int], shape: SplitShape) -> int:
    """`get_num_splits` of hopper/flash_api.cpp: as if the longest request were alone."""
    rows = max(query_lens) * shape.num_heads // shape.num_kv_heads
    blocks = shape.num_kv_heads * math.ceil(rows / shape.block_rows)
    key_blocks = math.ceil(max(key_lens) / shape.block_keys)
    if blocks >= 0.8 * shape.num_sms or key_blocks <= 4:
        return 1
    waves = [blocks * (splits + 1) / shape.num_sms for splits in range(min(128, shape.num_sms, key_blocks))]
    efficiency = [wave / math.ceil(wave) for wave in waves]
    return next(n + 1 for n, each in enumerate(efficiency) if each >= 0.85 * max(efficiency))


def chosen(query_lens: list[int], key_lens: list[int], shape: SplitShape) -> int:
    """The most splits of any request by hopper/flash_prepare_scheduler.cu, without a bound."""
    group = shape.num_heads // shape.num_kv_heads
    keys = [math.ceil(length / shape.block_keys) for length in key_lens]
    total = sum(
        math.ceil(length * group / shape.block_rows) * n for length, n in zip(query_lens, keys, strict=True)
    )
    single = np.float32
    each = math.ceil(
        single(single(single(total) * single(1.1)) * single(shape.num_kv_heads)) / single(shape.num_sms)
    )
    return max(max(1, math.ceil(n / each)) for n in keys)


def partial_bytes(splits: int, query_lens: list[int], shape: SplitShape) -> int:
    """What `mha_fwd` allocates."""
    return 0 if splits == 1 else splits * shape.num_heads * sum(query_lens) * shape.head_dim * 4


def bound(query_lens: list[int], key_lens: list[int], shape: SplitShape) -> int:
    return max_splits(np.array(query_lens), np.array(key_lens), shape)


@pytest.mark.parametrize(
    ("num", "query_len", "prefix_len", "own_mib"),
    [(256, 32, 2000, 1900), (512, 32, 2000, 3800), (64, 128, 2000, 500)],
)
def test_steps_of_many_short_extends_took_gigabytes_and_take_nothing(num, query_len, prefix_len, own_mib):
    queries, keys = [query_len] * num, [prefix_len + query_len] * num

    own = partial_bytes(own_bound(queries, keys, LLAMA_8B), queries, LLAMA_8B)
    assert own == pytest.approx(own_mib * MIB, rel=0.1)
    assert chosen(queries, keys, LLAMA_8B) == bound(queries, keys, LLAMA_8B) == 1


def test_a_long_context_beside_short_ones_is_split_as_far_as_memory_goes():
    queries, keys = [32] * 64, [32_768, *[1000] * 63]
    assert bound(queries, keys, LLAMA_8B) == chosen(queries, keys, LLAMA_8B) == 6

    many, longest = [32] * 256, [131_072, *[32] * 255]
    assert chosen(many, longest, LLAMA_8B) > 10
    assert partial_bytes(bound(many, longest, LLAMA_8B), many, LLAMA_8B) == PARTIAL_BYTES


@pytest.mark.parametrize(
    ("shape", "context"),
    [
        (LLAMA_8B, 32_768),
        (SplitShape(4, 1, 128, None, 132), 131_072),
        (SplitShape(4, 1, 256, None, 132), 4096),
    ],
)
def test_one_decode_of_a_long_context_is_split_as_far_as_it_was(shape, context):
    assert bound([1], [context], shape) >= own_bound([1], [context], shape) > 8


def test_whole_quotients_are_rounded_as_on_the_device():
    """360 blocks with a tenth to spare are 3 for each of 132 multiprocessors; in float64 they were a little more."""
    shape = SplitShape(9, 3, 64, None, 132)
    assert bound([1, 1, 257, 257], [1025, 10_241, 257, 257], shape) == 27


def test_what_is_not_split():
    assert bound([1], [512], LLAMA_8B) == own_bound([1], [512], LLAMA_8B) == 1
    assert bound([1], [100_000], LLAMA_8B._replace(window=256)) == 1
    assert bound([1] * 993, [100_000] * 993, LLAMA_8B) == 1
    assert bound([], [], LLAMA_8B) == 1


@given(
    lens=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40_000)), min_size=1, max_size=64),
    heads=st.sampled_from([(32, 8, 128), (9, 3, 64), (8, 1, 256), (32, 32, 96)]),
)
def test_the_device_has_what_it_chooses_unless_memory_is_short(lens, heads):
    num_heads, num_kv_heads, head_dim = heads
    shape = SplitShape(num_heads, num_kv_heads, head_dim, None, 132)
    queries, keys = [query for query, _ in lens], [query + prefix for query, prefix in lens]
    splits = bound(queries, keys, shape)

    assert partial_bytes(splits, queries, shape) <= PARTIAL_BYTES
    if splits > 1:
        assert (
            splits == chosen(queries, keys, shape)
            or partial_bytes(splits + 1, queries, shape) > PARTIAL_BYTES
        )
