"""Steps in which requests decode with drafts, made without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from engine.runtime.step_plan import StepPlan
from tests.model_runner.conftest import Driver, Request, int32


def drafted(driver: Driver, work: Sequence[tuple[Request, list[int]]]) -> StepPlan:
    """A step in which each request decodes with these drafts."""
    plan = driver.plan([(req, 1 + len(drafts)) for req, drafts in work])
    return replace(
        plan,
        samples=bytes([1] * len(work)),
        num_drafts=int32(len(drafts) for _, drafts in work),
        draft_ids=int32(draft for _, drafts in work for draft in drafts),
    )


def step_with_drafts(driver: Driver, work: Sequence[tuple[Request, list[int]]]) -> list[int]:
    """Make such a step; how many tokens each request got."""
    result = driver.runner.launch(drafted(driver, work)).wait()
    counts: list[int] = np.frombuffer(result.num_next_tokens, dtype=np.int32).tolist()
    token_ids = np.frombuffer(result.next_token_ids, dtype=np.int32).tolist()
    assert len(counts) == len(work) and sum(counts) == len(token_ids)
    for (req, drafts), count in zip(work, counts, strict=True):
        run, token_ids = token_ids[:count], token_ids[count:]
        assert run[:-1] == drafts[: count - 1]
        req.computed += count
        req.tokens += run
    return counts
