"""Drafts on the CPU: a step that checks them has the logits of as many decodes, to the last bit.

So in bfloat16, too, speculation changes no answer: near ties fall as they would without it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from engine.model_runner.kernels.blocks.native_blocks import NO_TILES, TILES_FROM, NativeBlockLinear
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.runtime.step_plan import MAX_DRAFT_STEP_TOKENS
from tests.model_runner.conftest import Driver, Request, SeeingExecutor, TinyModel, int32

NUM_DRAFTS = 8
LENGTHS = (2, 50, 56, 60, 63, 64, 65, 118, 120, 124, 127, 128, 129, 190, 250, 256)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    "llama in blocks": {"head_dim": 16, "hidden_size": 96, "intermediate_size": 160},
    "qwen3": {"head_dim": 32, "num_attention_heads": 5, "num_key_value_heads": 1},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.fixture(autouse=True)
def compiled():
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))


@pytest.fixture
def make(make_tiny_model: Callable[..., TinyModel], make_driver: Callable[..., Driver]) -> Any:
    def make_one(shape: str, **options: Any) -> Driver:
        tiny = make_tiny_model(shape.split(maxsplit=1)[0], dtype="bfloat16", **SHAPES[shape])
        options = {"page_size": 16, "max_model_len": 512, **options}
        return make_driver(tiny.spec, tiny.folder, dtype="bfloat16", **options)

    return make_one


class Seen(SeeingExecutor):
    """The logits of each step, and how many steps were recorded."""

    def take(self) -> Tensor:
        """[T, V] of the steps since the last call."""
        logits = torch.cat(self.logits)
        self.logits.clear()
        return logits


def begin(driver: Driver, prompts: Sequence[list[int]]) -> list[Request]:
    """Requests with their first tokens, each prompt computed alone."""
    reqs = [driver.start(prompt) for prompt in prompts]
    for req in reqs:
        driver.step([(req, len(req.tokens))])
    return reqs


def check_drafts(driver: Driver, work: Sequence[tuple[Request, list[int]]]) -> None:
    """A step in which each request decodes with these drafts."""
    plan = driver.plan([(req, 1 + len(drafts)) for req, drafts in work])
    plan = replace(
        plan,
        samples=bytes([1] * len(work)),
        num_drafts=int32(len(drafts) for _, drafts in work),
        draft_ids=int32(draft for _, drafts in work for draft in drafts),
    )
    assert not driver.runner.launch(plan).wait().errors


def prompt_of(length: int) -> list[int]:
    return [(7 * n + n * n // 5) % 90 + 3 for n in range(length)]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("shape", ["llama", "qwen3", "gemma3_text"])
def test_logits_are_those_of_decodes(make, shape, options, recorded):
    driver = make(shape, **options)
    if not recorded:
        driver.run_eagerly()
    seen = Seen(driver)
    for length in LENGTHS:
        prompt = prompt_of(length)
        (req,) = begin(driver, [prompt])
        seen.take()
        for _ in range(NUM_DRAFTS + 1):
            driver.step([(req, 1)])
        expected = seen.take()
        (again,) = begin(driver, [prompt])
        seen.take()
        check_drafts(driver, [(again, req.output[1 : NUM_DRAFTS + 1])])
        assert torch.equal(seen.take(), expected), length
        for each in (req, again):
            driver.finish(each)
    assert seen.num_recorded == (len(LENGTHS) * (NUM_DRAFTS + 2) if recorded else 0)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("counts", [(8, 0, 5, 1), (0, 2), (0, 0, 3), (4, 0, 0, 0), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"deterministic": True}], ids=str)
def test_so_they_are_among_others(make, options, counts):
    """Whose prefixes are their own: what requests share is read for all at once, if that is not switched off."""
    driver = make("llama", **options)
    seen = Seen(driver)
    prompts = [prompt_of(length)[::-1] for length in (40, 126, 200, 64)][: len(counts)]
    expected, drafts = [], []
    for prompt in prompts:
        (req,) = begin(driver, [prompt])
        seen.take()
        for _ in range(NUM_DRAFTS + 1):
            driver.step([(req, 1)])
        expected.append(seen.take())
        drafts.append(req.output[1 : NUM_DRAFTS + 1])
        driver.finish(req)
    reqs = begin(driver, prompts)
    seen.take()
    check_drafts(driver, [(r, d[:n]) for r, d, n in zip(reqs, drafts, counts, strict=True)])
    rows = [each[: n + 1] for each, n in zip(expected, counts, strict=True)]
    assert torch.equal(seen.take(), torch.cat(rows))


def test_so_they_are_in_steps_of_more_tokens_than_there_are_decodes(make):
    """From many tokens on, weights in blocks are multiplied in another way; drafts must not get there alone."""
    driver = make("llama in blocks", speculative="ngram", quantization="int8")
    seen = Seen(driver)
    prompts = [prompt_of(length) for length in (40, 17, 90, 64, 23, 70, 8)]
    expected, drafts = [], []
    for prompt in prompts:
        (req,) = begin(driver, [prompt])
        seen.take()
        for _ in range(NUM_DRAFTS + 1):
            driver.step([(req, 1)])
        expected.append(seen.take())
        drafts.append(req.output[1 : NUM_DRAFTS + 1])
        driver.finish(req)
    reqs = begin(driver, prompts)
    seen.take()
    check_drafts(driver, list(zip(reqs, drafts, strict=True)))
    logits = seen.take()
    assert TILES_FROM <= len(logits) <= MAX_DRAFT_STEP_TOKENS
    assert torch.equal(logits, torch.cat(expected))


def products() -> list[NativeBlockLinear]:
    """All that there are in this process."""
    # By type(): isinstance() would ask each of a million objects for its __class__ (7 s).
    return [each for each in gc.get_objects() if type(each) is NativeBlockLinear]


@pytest.mark.slow
def test_only_speculation_asks_for_that(make):
    """Without it, many decodes at once have the faster product; in a fixed order nobody has."""
    found = {}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "drafts": {"speculative": "ngram"},
        "fixed": {"deterministic": True},
    }
    for name, options in ways.items():
        others = products()  # of tests before this one
        driver = make("llama in blocks", quantization="int8", **options)
        own = [each for each in products() if not any(each is other for other in others)]
        found[name] = {each.tiles_from for each in own}
        del driver, own
        gc.collect()
    assert found == {"plain": {TILES_FROM}, "drafts": {MAX_DRAFT_STEP_TOKENS + 1}, "fixed": {NO_TILES}}
