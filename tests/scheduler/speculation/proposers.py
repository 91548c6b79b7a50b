"""A proposer with the interface of `NgramProposer` that is right as often as it should be, from never to always."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from engine.scheduler.speculation import speculation
from engine.scheduler.speculation.step_costs import StepCosts

RIGHT = {"oracle": 1.0, "adversary": 0.0, "random": 0.7}
"""Names of proposers, and the share of right drafts."""
NextToken = Callable[[Sequence[int]], int | None]


class Proposer:
    """Proposes the tokens of `next_token`, None after the last one, or with probability 1 - `right` another token."""

    method = 1

    def __init__(self, next_token: NextToken, token_ids: Iterable[int], right: float) -> None:
        self._tokens = [int(token) for token in token_ids]
        self._next_token = next_token
        self._right = right
        self._random = random.Random(len(self._tokens))

    def __len__(self) -> int:
        return len(self._tokens)

    def observe(self, token_ids: Iterable[int]) -> None:
        self._tokens += token_ids

    def chances(self, count: int) -> list[float]:
        return [0.99] * len(self._rest(count))

    def drafts(self, count: int) -> list[int]:
        rest = self._rest(count)
        return [token if self._random.random() < self._right else token - 1 if token else 1 for token in rest]

    def _rest(self, count: int) -> list[int]:
        rest: list[int] = []
        while len(rest) < count and (token := self._next_token([*self._tokens, *rest])) is not None:
            rest.append(token)
        return rest


@contextmanager
def free_drafts() -> Iterator[None]:
    """Drafts cost nothing, so that each step has as many as there may be."""
    with (
        mock.patch.object(StepCosts, "knows_plain", return_value=True),
        mock.patch.object(StepCosts, "intervals", lambda self, num_reqs, last: np.ones(last - num_reqs + 1)),
    ):
        yield


@contextmanager
def proposing(next_token: NextToken, right: float) -> Iterator[None]:
    """All requests have such a proposer, and drafts cost nothing."""

    def make(token_ids: Any, *_rest: Any) -> Proposer:
        return Proposer(next_token, token_ids, right)

    with mock.patch.object(speculation, "NgramProposer", make), free_drafts():
        yield
