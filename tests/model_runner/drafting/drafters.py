"""A drafter that knows the answers, or never proposes the right token; and one that checks how it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from engine.launch.resolve import prepare
from engine.model_runner import load
from engine.model_runner.drafting.drafter import DrafterParts
from engine.model_runner.input_batch import RELAYED, DraftRows, InputBatch
from engine.model_runner.recording.executor import StepFeatures
from engine.runtime.step_plan import NewReq

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

        return make if config.speculative == "mtp" else None

    def with_mtp(config: Any, source: Any, spec: Any) -> tuple[Any, Any]:
        return config, spec

    with (
        mock.patch.object(load, "drafter_of", drafter_of),
        mock.patch.object(prepare, "with_mtp", with_mtp),
    ):
        yield made
