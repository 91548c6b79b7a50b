"""Two ranks, each on a mirror of its own, with steps in flight: the tokens of one rank, and operations in one order."""

from __future__ import annotations

import pytest

from tests.model_runner.conftest import Driver

from .ranks import run_ranks
from .runners import LLAMA, PROMPT, Ahead, load_driver, on_cpu
from .test_llama import mixed_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def turns(driver: Driver) -> list[list[int]]:
    """Two requests in turn: a request that samples is in one step at a time, and each stage has one of them."""
    ahead = Ahead(driver, num_ahead=1)
    first, second = ahead.start(PROMPT[:6]), ahead.start(PROMPT[:11])
    ahead.prompt(first)
    ahead.prompt(second)
    for _ in range(4):
        ahead.decode(first)
        ahead.decode(second)
    return ahead.finish(first, second)


def test_tensor_parallel_ranks_add_in_one_order(tmp_path):
    tokens, (first, second) = run_ranks(mixed_steps, tmp_path, tp=2)
    with on_cpu():
        assert tokens == mixed_steps(load_driver(LLAMA, None))
    assert first == second
    assert {name for name, _, _ in first} == {"all_reduce", "all_gather_single", "broadcast"}
    assert len(first) > 8 * 2 * LLAMA.num_layers


def test_pipeline_stages_send_in_the_order_in_which_the_next_one_receives(tmp_path):
    tokens, (first, second) = run_ranks(turns, tmp_path, pp=2)
    with on_cpu():
        assert tokens == turns(load_driver(LLAMA, None))
    assert [name for name, _, _ in first] == ["isend"] * 10
    assert [(shape, dtype) for _, shape, dtype in first] == [(shape, dtype) for _, shape, dtype in second]
    assert [name for name, _, _ in second] == ["recv"] * 10
