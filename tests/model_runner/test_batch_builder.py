"""What a plan becomes on the host, without a model, a KV pool or a slot table: building a batch needs none of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.model_runner.batch_builder import BatchBuilder
from engine.model_runner.input_batch import RELAYED, InputBatch
from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.request_states import RequestStates, TokenRelay
from engine.model_runner.sampling.token_counts import TokenCounts
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import ForwardMode, NewReq, StepPlan
from tests.model_runner.conftest import GREEDY, int32

PROMPTS = {4: [10, 11, 12, 13, 14], 1: [20, 21, 22]}
"""Row -> its prompt."""


@pytest.fixture
def builder() -> BatchBuilder:
    states, buffers = RequestStates(6, 96), InputBuffers(torch.device("cpu"))
    for row, prompt in PROMPTS.items():
        asks = SamplingParams(temperature=0.0, prompt_logprobs=1) if row == 1 else GREEDY
        states.add(NewReq(f"r{row}", row, int32(prompt), len(prompt), b"", asks))
    return BatchBuilder(
        states=states,
        counts=TokenCounts(96, buffers),
        relay=TokenRelay(6, torch.device("cpu")),
        eos_token_ids=(2,),
        buffers=buffers,
    )


def plan(work: list[tuple[int, int, int, bool]], **changes: Any) -> StepPlan:
    """`work`: row, computed and scheduled tokens, and whether it samples; slots count from 100."""
    rows, computed, scheduled, samples = zip(*work, strict=True)
    step = StepPlan(
        step_id=1,
        mode=ForwardMode.MIXED,
        rows=int32(rows),
        num_computed_tokens=int32(computed),
        num_scheduled_tokens=int32(scheduled),
        out_cache_loc=int32(range(100, 100 + sum(scheduled))),
        samples=bytes(samples),
        total_num_scheduled_tokens=sum(scheduled),
    )
    return replace(step, **changes)


def lists(batch: InputBatch) -> dict[str, Any]:
    """Its arrays as lists, those of the layout included."""
    found = {}
    for part in (batch, batch.layout):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            found[field.name] = value.tolist() if isinstance(value, np.ndarray) else value
    del found["layout"]
    return found


def test_decodes_read_all_their_tokens_and_the_relay_has_what_the_host_does_not_know(builder):
    batch = builder.build(plan([(4, 4, 1, True), (1, 7, 1, True)]))
    assert batch.samples_all
    assert batch.layout.rows.tolist() == batch.token_rows.tolist() == [4, 1]
    assert batch.input_ids.tolist() == [14, RELAYED], "the last one of a prompt, and a sampled one"
    assert batch.positions.tolist() == batch.layout.prefix_lens.tolist() == [4, 7]
    assert batch.out_cache_loc.tolist() == [100, 101]
    assert batch.sampled_idx.tolist() == [0, 1] and not len(batch.cut_idx)


def test_chunks_beside_decodes(builder):
    batch = builder.build(plan([(4, 1, 3, False), (1, 3, 1, True)]))
    assert not batch.samples_all
    assert batch.token_rows.tolist() == [4, 4, 4, 1]
    assert batch.positions.tolist() == [1, 2, 3, 3]
    assert batch.input_ids.tolist() == [11, 12, 13, RELAYED]
    assert batch.logits_indices is not None and batch.logits_indices.tolist() == [2, 3]
    assert batch.sample_indices is not None and batch.sample_indices.tolist() == [1]
    assert (batch.cut_indices.tolist(), batch.cut_idx.tolist()) == ([0], [0])
    assert batch.layout.num_extends == 1


def test_tokens_before_the_last_of_a_prompt_are_read_where_it_wants_log_probabilities(builder):
    batch = builder.build(plan([(1, 0, 3, True)]))
    assert not batch.samples_all and batch.logits_indices is None
    (span,) = batch.prompt_spans
    assert (span.start, span.targets.tolist(), span.top_k) == (0, [21, 22], 1)


def test_drafts_are_input_tokens_after_the_last_one(builder):
    drafts = {"num_drafts": int32([2, 0]), "draft_ids": int32([30, 31])}
    batch = builder.build(plan([(4, 9, 3, True), (1, 5, 1, True)], **drafts))
    assert batch.samples_all and batch.drafts is not None
    assert batch.input_ids.tolist() == [RELAYED, 30, 31, RELAYED]
    assert batch.drafts.expected.tolist() == [30, 31, -1, -1]
    assert batch.layout.num_drafts is not None and batch.layout.num_drafts.tolist() == [2, 0]


def test_a_round_of_a_burst_is_the_batch_of_its_plan(builder):
    burst = plan(
        [(4, 4, 1, True), (1, 7, 1, True)], out_cache_loc=int32([100, 101, 50, 60, 51, 61]), num_rounds=3
    )
    batch = builder.build(burst.round(0))
    for number in (1, 2):
        batch = builder.next_round(batch, burst, number)
        assert lists(batch) == lists(builder.build(burst.round(number)))


def test_positions_of_images_have_axes_and_later_ones_a_constant_less(builder):
    """A prompt a b [2 x 3 image] c: the image counts as 3 positions instead of 6, see M-RoPE."""
    axes = [[0, 1, *[2] * 6, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    media, rope = int32([2, 6, 40]), int32(np.concatenate(axes))
    prompt = [30, 31, *[9] * 6, 32]
    builder.states.add(
        NewReq("seeing", 2, int32([*prompt, 33]), len(prompt), b"", GREEDY, media=media, rope=rope)
    )

    batch = builder.build(plan([(2, 1, 4, False), (4, 4, 1, True)]))
    assert batch.positions.tolist() == [1, 2, 3, 4, 4]
    assert batch.rope_positions.tolist() == [[1, 2, 2, 2, 4], [1, 2, 2, 2, 4], [1, 2, 3, 4, 4]]
    alike = builder.build(plan([(2, 0, 3, False)]))
    assert alike.rope_positions.tolist() == [0, 1, 2] and alike.images is not None
    after = builder.build(plan([(2, 8, 2, True), (1, 3, 1, True)]))
    assert after.rope_positions.tolist() == [5, 6, 3], "the second one is an output of before a retraction"
    decodes = builder.build(plan([(2, 12, 1, True), (1, 3, 1, True)], num_rounds=2))
    assert decodes.rope_positions.tolist() == [9, 3] and decodes.samples_all
    assert builder.build(plan([(4, 0, 5, True), (1, 3, 1, True)])).rope_positions is None
    second = plan([(2, 12, 1, True), (1, 3, 1, True)], num_rounds=2, out_cache_loc=int32([5, 6, 7, 8]))
    assert builder.next_round(decodes, second, 1).rope_positions.tolist() == [10, 4]
    builder.states.remove(2)
    builder.states.add(NewReq("text", 2, int32(prompt), len(prompt), b"", GREEDY))
    assert builder.build(plan([(2, 12, 1, True)])).rope_positions is None
