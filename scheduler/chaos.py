"""Faults on purpose (`--chaos`): running requests lose their place at random, so that tests meet it often.

vLLM had such a switch (`VLLM_TEST_ENABLE_ARTIFICIAL_PREEMPT`), SGLang has one (`SGLANG_TEST_RETRACT`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from ..runtime.config import ChaosSpec
from .req import Req


class Chaos(Protocol):
    """Asked once per pass."""

    def victim(self, reqs: Sequence[Req]) -> Req | None:
        """Who shall lose its place in this pass; usually nobody."""
        ...


class NoChaos:
    """No faults."""

    __slots__ = ()

    def victim(self, reqs: Sequence[Req]) -> Req | None:
        return None


class ChaosRetract:
    """With a probability per pass one random running request, up to a number of times."""

    __slots__ = ("_left", "_probability", "_random")

    def __init__(self, spec: ChaosSpec, seed: int) -> None:
        self._probability = spec.retract_probability
        self._left = spec.max_retractions
        self._random = random.Random(seed)

    def victim(self, reqs: Sequence[Req]) -> Req | None:
        if not reqs or not self._left or self._random.random() >= self._probability:
            return None
        self._left -= 1
        return self._random.choice(reqs)


def make_chaos(spec: ChaosSpec | None, seed: int) -> Chaos:
    """What `--chaos` asks for."""
    return NoChaos() if spec is None else ChaosRetract(spec, seed)
