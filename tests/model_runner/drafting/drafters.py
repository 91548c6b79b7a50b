"""Drafters that are always right or never, and check their calls; and drafts with programs and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from engine.launch.resolve import prepare
from engine.model_runner import load
from engine.model_runner.distributed.join_group import Place
from engine.model_runner.distributed.tp_group import SINGLE_RANK, TPGroup
from engine.model_runner.drafting.drafter import Drafter, DrafterParts
from engine.model_runner.drafting.feature_module import FeatureModule
from engine.model_runner.drafting.head_programs import HeadPrograms
from engine.model_runner.drafting.lag import Run
from engine.model_runner.input_batch import RELAYED, DraftRows, InputBatch
from engine.model_runner.load import load_model_runner
from engine.model_runner.recording.executor import StepFeatures
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import RUNNER_DRAFT, NewReq
from tests.model_runner.conftest import Driver, Request
from tests.model_runner.distributed.thread_group import on_ranks
from tests.model_runner.drafted_steps import drafted

NextToken = Callable[[Sequence[int]], int | None]


class TableDrafter:
    """Proposes the next token of a text (`right`), or another one; checks that each token is absorbed once.

    It keeps the tokens of each row from what it absorbs, as the tokens of a cached prefix come with the request.
    """

    def __init__(self, parts: DrafterParts, next_token: NextToken, *, right: bool) -> None:
        self._parts = parts
        self._next_token = next_token
        self._right = right
        self._tokens: dict[int, list[int]] = {}
        self.num_known = 0  # drafts that are tokens of a text

    def start(self, new_reqs: Sequence[NewReq]) -> None:
        for new in new_reqs:
            known = np.frombuffer(new.input_ids, dtype=np.int32).tolist()
            self._tokens[new.row] = known[: len(new.prefix_loc) // 4]

    def leave(self, rows: Any) -> None:
        for row in rows.tolist():
            self._tokens.pop(row, None)

    def share(self, rows: Any) -> None: ...

    def draft(self, asked: DraftRows) -> Any:
        last_ids = torch.from_numpy(asked.input_ids.copy())
        relayed = torch.from_numpy(np.flatnonzero(asked.input_ids == RELAYED))
        self._parts.relay.fill(last_ids, relayed, torch.from_numpy(asked.rows)[relayed])
        drafts: list[int] = []
        for row, position, count, last in zip(*map(list, asked[:3]), last_ids.tolist(), strict=True):
            tokens = self._tokens[row]
            assert len(tokens) == position
            tokens = [*tokens, last]
            for _ in range(count):
                token = self._next_token(tokens)
                self.num_known += token is not None
                token = 1 if token is None else token
                drafts.append(token if self._right else token - 1 if token else 1)
                tokens.append(token)
        assert len(asked.out_cache_loc) == len(drafts)
        return np.array(drafts, dtype=np.int32)

    def absorb(self, batch: InputBatch, features: StepFeatures, num_tokens: torch.Tensor | None) -> None:
        layout = batch.layout
        assert features.states.shape[0] == len(features.input_ids) == batch.num_tokens
        assert features.positions.tolist() == batch.positions.tolist()
        assert features.out_cache_loc.tolist() == batch.out_cache_loc.tolist()
        assert features.states.isfinite().all()
        ids, start = features.input_ids.tolist(), 0
        for idx, (row, prefix_len, length) in enumerate(
            zip(layout.rows.tolist(), layout.prefix_lens.tolist(), layout.extend_lens.tolist(), strict=True)
        ):
            valid = length if num_tokens is None else int(num_tokens[idx])
            assert len(self._tokens[row]) == prefix_len
            self._tokens[row] += ids[start : start + valid]
            start += length


@contextmanager
def drafting(next_token: NextToken, *, right: bool) -> Iterator[list[TableDrafter]]:
    """Models loaded with `--speculative mtp` have such a drafter."""
    made: list[TableDrafter] = []

    def drafter_of(config: Any, *_args: Any) -> Any:
        def make(parts: DrafterParts) -> TableDrafter:
            made.append(TableDrafter(parts, next_token, right=right))
            return made[-1]

        return make if config.scheduler.speculative == "mtp" else None

    def with_mtp(config: Any, source: Any, spec: Any) -> tuple[Any, Any]:
        return config, spec

    with (
        mock.patch.object(load, "drafter_of", drafter_of),
        mock.patch.object(prepare, "with_mtp", with_mtp),
    ):
        yield made


def feature_module(driver: Driver) -> FeatureModule:
    drafter = driver.runner.drafter
    assert isinstance(drafter, Drafter) and isinstance(drafter.module, FeatureModule)
    return drafter.module


def share(driver: Driver, *reqs: Request) -> None:
    """The drafter computes all tokens of requests."""
    drafter = driver.runner.drafter
    assert isinstance(drafter, Drafter)
    with torch.inference_mode():
        drafter.share(np.array([req.row for req in reqs]))


@contextmanager
def recorded_and_not(driver: Driver) -> Iterator[HeadPrograms]:
    """Each draft is computed by a program and without, with the same bits."""
    programs, made = feature_module(driver).programs, FeatureModule.logits
    assert programs is not None

    def both(self: FeatureModule, run: Run, *, first: bool) -> torch.Tensor:
        drafted, self.programs = self._drafted.clone(), None
        expected = made(self, run, first=first)
        self._drafted, self.programs = drafted, programs
        logits = made(self, run, first=first)
        assert torch.equal(logits, expected)
        assert int(programs._numbers[-1].sum()) == len(run.positions), "no tokens of earlier calls"
        return logits

    with mock.patch.object(FeatureModule, "logits", both):
        yield programs


def draft(driver: Driver, work: Sequence[tuple[Request, int]]) -> list[int]:
    """A step in which requests get so many drafts of the runner's; how many tokens each got."""
    plan = drafted(driver, [(req, [RUNNER_DRAFT] * count) for req, count in work])
    result = driver.runner.launch(plan).wait()
    counts: list[int] = [1] * len(work)
    if result.num_next_tokens:
        counts = np.frombuffer(result.num_next_tokens, dtype=np.int32).tolist()
    token_ids = np.frombuffer(result.next_token_ids, dtype=np.int32).tolist()
    for (req, _), count in zip(work, counts, strict=True):
        req.computed += count
        req.tokens += token_ids[:count]
        del token_ids[:count]
    assert not token_ids
    return counts


def check_two_ranks(config: EngineConfig, folder: Path, spec: ModelSpec, capacity: Capacity) -> None:
    """Two ranks make the drafts of one, and the same answer."""
    source = ModelSource("hf", str(folder), "test")

    def life(group: TPGroup = SINGLE_RANK) -> tuple[list[list[int]], list[int]]:
        """The drafts of some steps, and the answer."""
        runner = load_model_runner(config, source, spec, capacity, Place(group, None))
        drafter, drafts = runner.drafter, list[Any]()
        assert isinstance(drafter, Drafter)
        made = drafter.draft

        def noting(asked: DraftRows) -> Any:
            drafts.append(made(asked))
            return drafts[-1]

        drafter.draft = noting  # type: ignore[method-assign]
        driver, text = Driver(runner, capacity), [5, 17, 40, 23, 8, 61, 33, 17, 40, 12, 71, 9, 30, 44, 21]
        req = driver.start(text, SamplingParams(temperature=1.0, seed=5, max_new_tokens=64))
        driver.step([(req, 8)])
        driver.step([(req, len(text) - 8)])
        for count in (3, 3, 0, 0, 3, 3):
            draft(driver, [(req, count)])
        return [each.tolist() for each in drafts], req.output

    expected = life()
    assert len(expected[0]) == 4
    assert on_ranks(2, life) == [expected, expected]
