"""Masks of grammars with a real model: each token is allowed, however the scheduler makes its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.model_runner.model_runner import UnmaskedTokens
from engine.runtime.config.engine_config import CacheConfig, SchedulerConfig
from engine.runtime.messages import BatchTokenOutput, GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import TokenMasks
from engine.scheduler.journal.recorder import Recorder
from engine.scheduler.pipeline import Pipeline
from engine.scheduler.scheduler import Scheduler
from tests.model_runner.conftest import Driver, SeeingExecutor
from tests.scheduler.grammar.toy_matcher import FixedMasks, ToyGrammar, ToyMatchers

NUM_REQS = 6


@pytest.fixture
def make_tiny_driver(
    make_driver: Callable[..., Driver], make_tiny_llama: Callable[..., Any]
) -> Callable[[], Driver]:
    """The same model behind a new driver; its vocabulary is larger than that of the toy grammars."""
    tiny = make_tiny_llama(vocab_size=131)
    return lambda: make_driver(tiny.spec, tiny.folder)


def grammar_of(n: int) -> ToyGrammar | None:
    if n % 3 == 2:
        return None
    return ToyGrammar(seed=n, length=(25, 90)[n % 2], eos=(2,), forced=((2, 5), (9, 20)))


def outputs(driver: Driver, *, overlapped: bool = False, **settings: Any) -> dict[str, list[int]]:
    """The tokens of some requests with and without grammars, greedy and with noise."""
    matchers = ToyMatchers()
    scheduler = Scheduler(
        SchedulerConfig(chunked_prefill_size=64, overlap=overlapped, **settings),
        CacheConfig(),
        driver.capacity,
        frozenset([2]),
        matchers=matchers,
    )
    now_s = [1.0]
    pipeline = Pipeline(scheduler, driver.runner, Recorder(), lambda: now_s[0], overlap=overlapped)
    found: dict[str, list[int]] = {}
    for n in range(NUM_REQS):
        rid, grammar = f"r{n}", grammar_of(n)
        if grammar is not None:
            matchers.grammars[rid] = grammar
        found[rid] = []
        sampling = SamplingParams(
            temperature=float(n % 2), seed=n, max_new_tokens=40, ignore_eos=True, logit_bias={5: 4.0, 6: 4.0}
        )
        prompt = np.array([3 + n, 9, 5, 6, 5, 6, 5, 6], dtype=np.int32).tobytes()
        use = None if grammar is None else grammar.use
        pipeline.handle(GenerateRequest(rid, prompt, sampling, grammar=use))
    while pipeline.advance(lambda: False):
        for message in scheduler.take_outputs():
            assert isinstance(message, BatchTokenOutput)
            for row in message.outputs:
                found[row.rid] += np.frombuffer(row.token_ids, dtype=np.int32).tolist()
                assert row.finish is None or not row.finish.message
    pipeline.idle()
    report = scheduler.report(0.0)
    assert (report.totals.accepted_draft_tokens > 20) == (not overlapped)
    return found


def test_each_token_is_allowed_and_the_same_in_all_kinds_of_steps(make_tiny_driver):
    plain = outputs(make_tiny_driver(), overlapped=True)  # no drafts, no multi-step decodes
    for n in range(NUM_REQS):
        grammar, tokens = grammar_of(n), plain[f"r{n}"]
        assert len(tokens) == (40 if grammar is None else min(40, grammar.length))
        if grammar is not None:
            assert all(token in grammar.allowed(tokens[:k]) for k, token in enumerate(tokens))
    kinds: dict[str, dict[str, Any]] = {
        "forced tokens": {},
        "multi-step": {"multi_step_ms": 1e9},
        "n-gram": {"speculative": "ngram"},
        "retractions": {"chaos": "retract=0.3:20"},
    }
    for kind, settings in kinds.items():
        assert outputs(make_tiny_driver(), **settings) == plain, kind


class Asked:
    """A `GetMasks` that allows one token, and notes how many batches were computed when it was asked."""

    def __init__(self, executor: SeeingExecutor, token_id: int) -> None:
        self.executor = executor
        self.allowed = token_id
        self.notes: list[str] = []

    def __call__(self) -> TokenMasks:
        self.notes.append(f"all masks after batch {len(self.executor.batches)}")
        bits = np.zeros((1, 160), dtype=np.uint8)
        bits[0, self.allowed] = 1
        return TokenMasks(np.array([0]), np.packbits(bits, axis=1, bitorder="little").view(np.int32))

    def before(self) -> TokenMasks | None:
        self.notes.append(f"before, after batch {len(self.executor.batches)}")
        return None

    def drafted(self, draft_ids: bytes) -> None:
        raise AssertionError("there is no drafter")

    def unmasked(self, token_ids: npt.NDArray[np.int64]) -> None:
        self.notes.append("unmasked")

    def after(self, token_ids: npt.NDArray[np.int64]) -> TokenMasks:
        assert token_ids.shape == (1,)
        self.notes.append("after")
        return self()


def test_masks_are_asked_for_after_the_forward_pass_and_only_to_sample(make_tiny_driver):
    driver = make_tiny_driver()
    executor = SeeingExecutor(driver)
    masks = Asked(executor, 77)
    req = driver.start([3, 4, 5, 6, 7, 8])
    result = driver.runner.launch(driver.plan([(req, 4)]), masks=masks).wait()
    assert not result.next_token_ids and not masks.notes
    req.computed = 4
    result = driver.runner.launch(driver.plan([(req, 2)]), masks=masks).wait()
    assert np.frombuffer(result.next_token_ids, dtype=np.int32).tolist() == [77]
    assert masks.notes == ["before, after batch 2", "after", "all masks after batch 2"]


class Told(FixedMasks):
    """A `GetMasks` with masks before sampling, that notes what it is told."""

    def __init__(self, masks: TokenMasks | None) -> None:
        super().__init__(masks, self.note)
        self.told: list[list[int]] = []

    def note(self, token_ids: npt.NDArray[np.int64]) -> None:
        self.told.append(token_ids.tolist())


def test_the_likeliest_tokens_without_masks_are_told(make_tiny_driver):
    """Those of the rows with a mask, also where another token is sampled."""
    driver, alone = make_tiny_driver(), make_tiny_driver()
    prompts = [[3, 4, 5], [9, 8], [7]]
    free = []
    for prompt in prompts:
        req = alone.start(prompt)
        alone.step([(req, len(prompt))])
        free.append(req.output[0])
    bits = np.zeros((2, 160), dtype=np.uint8)
    bits[0, 40] = bits[1, 41] = 1
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    masks = Told(TokenMasks(np.array([0, 2]), packed))

    reqs = [driver.start(prompt) for prompt in prompts]
    plan = driver.plan([(req, len(req.tokens)) for req in reqs])
    result = driver.runner.launch(plan, masks=masks).wait()

    assert np.frombuffer(result.next_token_ids, dtype=np.int32).tolist() == [40, free[1], 41]
    assert masks.told == [[free[0], free[2]]]


def test_a_device_that_is_not_done_tells_when_it_is():
    """Without a GPU: the result of the fetched tokens, of which those of the rows with a mask are told."""
    masks = Told(None)
    unmasked = UnmaskedTokens(torch.tensor([7, 8, 9]), np.array([0, 2]), masks)
    assert not masks.told
    unmasked.pass_on()
    assert masks.told == [[7, 9]]
