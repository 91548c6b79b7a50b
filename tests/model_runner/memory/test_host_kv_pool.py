"""Pages that go to the host come back as they were, and the pages around them stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.memory import host_kv_pool
from engine.model_runner.memory.host_kv_pool import HostKVPool
from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.memory.kv_pool import KVPool
from tests.selection import examples

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 3, 2, 8
NUM_PAGES, NUM_HOST_PAGES = 20, 24

page_sets = st.lists(st.integers(1, NUM_PAGES), min_size=1, max_size=NUM_PAGES, unique=True)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int8])


def make_pool(page_size: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> KVPool:
    """A pool of random bytes, among them patterns that are not numbers: copies must not care."""
    pool = KVPool(
        num_layers=NUM_LAYERS,
        num_pages=NUM_PAGES,
        page_size=page_size,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device(device),
    )
    generator = torch.Generator().manual_seed(seed)
    for view in (*pool.page_views, *pool.scale_views):
        view.view(torch.uint8).copy_(
            torch.randint(0, 256, view.view(torch.uint8).shape, dtype=torch.uint8, generator=generator)
        )
    return pool


def bytes_of(pool: KVPool) -> np.ndarray:
    """[2L, pages, bytes of a page and layer], with those of their scales behind them."""
    views = [np.stack([view.cpu().view(torch.uint8).flatten(1).numpy() for view in pool.page_views])]
    if pool.scale_views:
        views.append(np.stack([view.view(torch.uint8).flatten(1).numpy() for view in pool.scale_views]))
    return np.concatenate(views, axis=2)


def round_trip(pool: KVPool, host: HostKVPool, pages: list[int], host_pages: list[int]) -> None:
    """Out, overwritten, and back to other pages: pages[0] comes back to pages[-1] and so on."""
    before = bytes_of(pool)
    there, back = np.array(pages), np.array(pages[::-1])
    host.copy_out(there, np.array(host_pages))
    for view in (*pool.page_views, *pool.scale_views):
        view[pages] = 7
    host.copy_in(np.array(host_pages), back)

    after = bytes_of(pool)
    np.testing.assert_array_equal(after[:, back], before[:, there])
    others = np.setdiff1d(np.arange(NUM_PAGES + 1), pages)
    np.testing.assert_array_equal(after[:, others], before[:, others])


@settings(max_examples=examples(100))
@given(
    data=st.data(),
    pages=page_sets,
    page_size=st.sampled_from([1, 4, 16]),
    dtype=dtypes,
    staged_pages=st.integers(1, NUM_PAGES),
    seed=st.integers(0, 9),
)
def test_a_round_trip_leaves_every_byte(data, pages, page_size, dtype, staged_pages, seed):
    pool = make_pool(page_size, dtype, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_kv_pool, "_STAGED_BYTES", staged_pages * pool.page_bytes)
        host = HostKVPool(pool, NUM_HOST_PAGES, InputBuffers(torch.device("cpu")))
    ids = st.lists(st.integers(0, NUM_HOST_PAGES - 1), min_size=len(pages), max_size=len(pages), unique=True)
    round_trip(pool, host, pages, data.draw(ids))


@settings(max_examples=examples(100))
@given(first=page_sets, second=page_sets, page_size=st.sampled_from([1, 4]))
def test_requests_that_are_swapped_out_one_after_the_other_stay_apart(first, second, page_size):
    """The second takes the same pages of the device while the first is away."""
    pool = make_pool(page_size, torch.float32, 0)
    host = HostKVPool(pool, 2 * NUM_PAGES, InputBuffers(torch.device("cpu")))
    first_host, second_host = np.arange(len(first)), NUM_PAGES + np.arange(len(second))
    of_first = bytes_of(pool)[:, first]
    host.copy_out(np.array(first), first_host)
    for view in pool.page_views:
        view.view(torch.uint8).bitwise_xor_(0x5A)
    of_second = bytes_of(pool)[:, second]
    host.copy_out(np.array(second), second_host)

    host.copy_in(second_host, np.array(second))
    np.testing.assert_array_equal(bytes_of(pool)[:, second], of_second)
    host.copy_in(first_host, np.array(first))
    np.testing.assert_array_equal(bytes_of(pool)[:, first], of_first)


@settings(max_examples=examples(100))
@given(data=st.data(), page_size=st.sampled_from([1, 4, 16]), dtype=dtypes)
def test_copies_move_whole_pages_in_all_layers(data, page_size, dtype):
    pool = make_pool(page_size, dtype, 1)
    targets = data.draw(st.lists(st.integers(1, NUM_PAGES), min_size=1, max_size=NUM_PAGES - 1, unique=True))
    others = sorted({*range(1, NUM_PAGES + 1)} - {*targets})
    sources = data.draw(st.lists(st.sampled_from(others), min_size=len(targets), max_size=len(targets)))
    before = bytes_of(pool)

    pool.copy_pages(torch.tensor(sources), torch.tensor(targets))

    before[:, targets] = before[:, sources]
    np.testing.assert_array_equal(bytes_of(pool), before)


def test_memory_is_what_the_pages_need():
    pool = make_pool(16, torch.bfloat16, 0)
    host = HostKVPool(pool, NUM_HOST_PAGES, InputBuffers(torch.device("cpu")))
    page_bytes = 2 * NUM_LAYERS * 16 * NUM_HEADS * HEAD_DIM * 2
    assert (pool.page_bytes, pool.num_bytes) == (page_bytes, (NUM_PAGES + 1) * page_bytes)
    assert host.num_bytes == NUM_HOST_PAGES * page_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_between_gpu_and_pinned_memory(dtype):
    pool = make_pool(16, dtype, 0, "cuda")
    host = HostKVPool(pool, NUM_HOST_PAGES, InputBuffers(torch.device("cuda")))
    assert all(pages.is_pinned() for pages in host.pages)
    round_trip(pool, host, [*range(1, NUM_PAGES + 1)], [*range(3, 3 + NUM_PAGES)])
    round_trip(pool, host, [5, 2, 9], [20, 0, 7])
