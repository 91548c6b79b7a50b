"""`Drafter`: which tokens its module computes and when, also where the device has no memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.model_runner.attention.backend import BatchLayout
from engine.model_runner.drafting.drafter import Drafter, DrafterParts
from engine.model_runner.drafting.lag import Lag, Run
from engine.model_runner.input_batch import DraftRows, InputBatch
from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.recording.executor import StepFeatures
from engine.runtime.step_plan import NewReq

ROW = np.array([1])


class Module:
    """Notes the positions that it computes; has no memory for the next call if told so."""

    keeps_drafts = True

    def __init__(self) -> None:
        self.computed: list[int] = []
        self.has_memory = True

    def start(self, row: int, prefix_loc: Any) -> None: ...

    def keep(self, batch: Any, states: Any, valid: Any) -> None: ...

    def wait(self, tokens: Any) -> None: ...

    def compute(self, run: Run, states: Any = None) -> None:
        if not self.has_memory:
            self.has_memory = True
            raise torch.OutOfMemoryError("no memory")
        self.computed += run.positions.tolist()

    def logits(self, run: Run, *, first: bool) -> torch.Tensor:
        self.compute(run)
        return torch.zeros(len(run.rows), 5)


@pytest.fixture
def module() -> Module:
    return Module()


@pytest.fixture
def drafter(module: Module) -> Drafter:
    """A request with 20 tokens of a cached prefix is in row 1."""
    sampler = SimpleNamespace(sample=lambda logits, _: SimpleNamespace(token_ids=logits.argmax(-1)))
    builder = SimpleNamespace(draft_sampling=lambda rows, positions: None)
    parts = SimpleNamespace(buffers=InputBuffers(torch.device("cpu")), sampler=sampler, builder=builder)
    drafter = Drafter(module, Lag(3, 4, torch.from_numpy), cast(DrafterParts, parts))
    start(drafter, 20)
    return drafter


def start(drafter: Drafter, prefix_len: int) -> None:
    prefix_loc = np.arange(prefix_len, dtype=np.int32).tobytes()
    drafter.start([cast(NewReq, SimpleNamespace(row=1, prefix_loc=prefix_loc, input_ids=prefix_loc))])


def decode(drafter: Drafter, position: int, num_drafts: int = 0) -> None:
    """A step whose drafts are all right."""
    places, length = np.arange(position, position + 1 + num_drafts), 1 + num_drafts
    layout = BatchLayout(ROW, places[:1], np.array([length]), int(length > 1), np.array([num_drafts]))
    batch = SimpleNamespace(
        layout=layout, token_rows=ROW.repeat(length), positions=places, out_cache_loc=places
    )
    features = SimpleNamespace(input_ids=torch.full((length,), 7), states=torch.zeros(length, 1))
    num_tokens = torch.tensor([length]) if num_drafts else None
    drafter.absorb(cast(InputBatch, batch), cast(StepFeatures, features), num_tokens)


def draft(drafter: Drafter, position: int) -> None:
    places = np.array([position, position + 1])
    drafter.draft(DraftRows(ROW, places[:1], np.array([2]), places, np.array([7])))


def test_tokens_wait_until_there_is_memory_to_compute_them(drafter, module):
    decode(drafter, 20)
    module.has_memory = False
    with pytest.raises(torch.OutOfMemoryError):
        drafter.leave(ROW)
    drafter.leave(ROW)
    drafter.leave(ROW)
    assert module.computed == [20]


def test_the_tokens_before_drafts_that_found_no_memory_still_wait(drafter, module):
    decode(drafter, 20)
    module.has_memory = False
    with pytest.raises(torch.OutOfMemoryError):
        draft(drafter, 21)
    drafter.leave(ROW)
    assert module.computed == [20]


def test_the_drafts_of_a_dropped_step_are_not_those_of_the_next_request(drafter, module):
    """The step after the drafts 21 and 22 has no memory, and the row gets a request with a longer prefix."""
    draft(drafter, 20)
    drafter.leave(ROW)
    module.computed.clear()
    start(drafter, 21)
    decode(drafter, 21)
    drafter.leave(ROW)
    assert module.computed == [21]


def test_right_drafts_are_not_computed_again(drafter, module):
    draft(drafter, 20)
    assert module.computed == [20, 21]
    decode(drafter, 20, num_drafts=2)
    drafter.leave(ROW)
    assert module.computed == [20, 21, 22]


def test_more_tokens_than_may_wait_are_computed_at_once(drafter, module):
    """The grammar forced them."""
    decode(drafter, 20, num_drafts=3)
    assert not module.computed
    decode(drafter, 24, num_drafts=4)
    assert module.computed == list(range(20, 29))


def test_tokens_wait_over_pages_and_are_computed_before_they_are_shared(drafter, module):
    for position in range(20, 50):
        decode(drafter, position)
    assert not module.computed
    drafter.share(ROW)
    assert module.computed == list(range(20, 50))


def test_without_memory_for_what_waits_a_step_is_not_taken(drafter, module):
    """The same step comes again."""
    for position in range(20, 52):
        decode(drafter, position)
    module.has_memory = False
    with pytest.raises(torch.OutOfMemoryError):
        decode(drafter, 52)
    decode(drafter, 52)
    assert module.computed == list(range(20, 36))
    draft(drafter, 53)
    assert module.computed[:-1] == list(range(20, 54))


def test_one_token_of_a_prompt_does_not_wait(drafter, module):
    """Its page may be replaced by a shared one before the next step."""
    ids = np.arange(22, dtype=np.int32).tobytes()
    drafter.leave(ROW)
    drafter.start([cast(NewReq, SimpleNamespace(row=1, prefix_loc=ids[:80], input_ids=ids))])
    for position in (20, 21, 22):
        decode(drafter, position)
    assert module.computed == [20, 21]
