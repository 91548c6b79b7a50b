"""`--kv-cache-dtype fp8` and `int8`: half the memory, nearly the same logits, and pages that move as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.model_runner.memory.kv_pool import KVPool
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import RowUpdate
from tests.model_runner.conftest import Driver, TinyModel, int32

PROMPT = [(11 * n + 5) % 96 for n in range(40)]
ALL = SamplingParams(temperature=0.0, seed=0, max_new_tokens=64, logprobs=0, prompt_logprobs=0)


@pytest.fixture
def make(make_driver: Callable[..., Driver], make_tiny_llama: Callable[..., TinyModel]) -> Any:
    tiny = make_tiny_llama(dtype="bfloat16")

    def made(**options: Any) -> Driver:
        return make_driver(tiny.spec, tiny.folder, dtype="bfloat16", **options)

    return made


def prompt_logprobs(driver: Driver, chunk: int, unpack: Any) -> torch.Tensor:
    """Of the prompt's tokens from the second on, computed in chunks, so that later ones read what is in the pool."""
    req = driver.start(PROMPT, ALL)
    parts = []
    while req.computed < len(PROMPT):
        result = driver.step([(req, min(chunk, len(PROMPT) - req.computed))])
        assert not result.errors
        parts += [torch.from_numpy(unpack(packed)[0].copy()) for packed in result.prompt_logprobs.values()]
    return torch.cat(parts)


@pytest.mark.parametrize(("kv_cache_dtype", "mean", "most"), [("fp8", 0.15, 0.8), ("int8", 0.05, 0.3)])
def test_log_probabilities_are_near_those_of_a_bfloat16_pool(make, unpack, kv_cache_dtype, mean, most):
    """A number of fp8 is off by 3 % of itself, one of int8 by 0.4 % of the largest of its head; layers add to it."""
    plain = prompt_logprobs(make(), 8, unpack)
    small = prompt_logprobs(make(kv_cache_dtype=kv_cache_dtype), 8, unpack)

    difference = (plain - small).abs()
    assert 0.0 < difference.mean() < mean * plain.std()
    assert difference.max() < most * plain.std()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_tokens_are_the_same_however_a_prompt_is_cut(make, kv_cache_dtype):
    """A chunk's own tokens come from the pool, too: what is computed at once has seen the same 8 bits."""
    driver = make(kv_cache_dtype=kv_cache_dtype)
    whole = driver.generate([PROMPT], num=8)
    assert driver.generate([PROMPT], num=8, chunk=7) == whole


def test_the_pool_takes_half_the_memory(make):
    plain, small = make().runner.kv_pool, make(kv_cache_dtype="fp8").runner.kv_pool
    assert small.k[0].dtype == torch.float8_e4m3fn
    assert plain.page_bytes == 2 * small.page_bytes


def test_a_pool_of_int8_has_a_scale_of_each_token_and_head(make):
    pool = make(kv_cache_dtype="int8").runner.kv_pool
    num_numbers = sum(part.numel() for part in (*pool.k, *pool.v))
    num_heads = num_numbers // pool.k[0].shape[2]
    assert {part.dtype for part in (*pool.k, *pool.v)} == {torch.int8}
    assert pool.num_bytes == num_numbers + 4 * num_heads
    assert pool.page_bytes == pool.num_bytes * pool.page_size // len(pool.k[0])


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_swapped_and_copied_pages_are_the_same_bytes(make, kv_cache_dtype):
    driver = make(kv_cache_dtype=kv_cache_dtype, num_host_pages=32)
    alone = driver.generate([PROMPT], num=10)[0]
    req = driver.start(PROMPT)
    while len(req.output) < 4:
        driver.step([(req, len(req.tokens) - req.computed)])

    host_pages = list(range(len(req.pages)))
    moved = [driver.pages.pop() for _ in req.pages]
    copies = [driver.pages.pop() for _ in req.pages]
    driver.step([], swap_outs=[*zip(req.pages, host_pages, strict=True)])
    poison(driver.runner.kv_pool, req.pages)
    driver.step([], swap_ins=[*zip(host_pages, moved, strict=True)])
    driver.step([], page_copies=[*zip(moved, copies, strict=True)])
    poison(driver.runner.kv_pool, moved)
    req.pages = copies
    update = RowUpdate(req.row, 0, int32(driver.slots(copies, 0, req.computed)))
    driver.step([(req, 1)], row_updates=(update,))
    while len(req.output) < 10:
        driver.step([(req, 1)])

    assert req.output == alone


def poison(pool: KVPool, pages: list[int]) -> None:
    for view in pool.page_views:
        view[pages] = 0x7F  # NaN
    for view in pool.scale_views:
        view[pages] = torch.nan
