"""`Agents`: sessions of coding agents in a closed loop: a turn comes some time after the answer of the turn before.

Each agent works through one session after the other. The prompt of a session's first turn is a system prompt with tools
of 12,000 tokens, which all agents of a kind share, and a task; each later turn adds the model's call and a tool's
result. Lengths are those of published traces of agents: 33 turns in the median, about 2,200 tokens more with each turn,
a tool that takes 5 s in the median and 80 s at the 99th percentile, prompts of up to 80,000 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..runtime.errors import ConfigError
from .generated_workloads import Arrival, Conversation, Lengths, Script, Turn, stream
from .sim_request import Segment, SimRequest, Workload

_TURNS: Final = Lengths(33, 0.8, 2, 400)
_TASK: Final = Lengths(600, 1.0, 20, 8000)
RESULT: Final = Lengths(1400, 0.9, 20, 20_000)
_CALL: Final = Lengths(200, 0.8, 8, 2000)
_MAX_NEW_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Parameters of `agents`.

    Attributes:
        num_agents: at work at a time.
        scale: factor of all lengths, for small models and pools.
        num_kinds, tools_len: kinds of agents, and the length of their system prompts.
        tool_s, tool_sigma: median and sigma of the log-normal seconds between an answer and the next turn.
        max_context: the longest prompt; in place of a longer one a new session begins.
        max_model_len: tokens of a prompt and its answer that the engine holds, not scaled; bounds prompts, too.
    """

    num_agents: int = 16
    scale: float = 1.0
    num_kinds: int = 3
    tools_len: int = 12_000
    tool_s: float = 5.2
    tool_sigma: float = 1.18
    max_context: int = 80_000
    max_model_len: int = 1 << 30

    def requests(self, arrival: Arrival) -> Workload:
        """The first turns; the others follow the answers. Agents begin within the time of a tool.

        The requests of an agent are a function of the seed and its number, so equal for all policies.
        """
        if self.num_agents < 1:
            raise ConfigError(f"--num-agents is {self.num_agents}, but it must be at least 1")
        counts = [
            arrival.num_requests // self.num_agents + (idx < arrival.num_requests % self.num_agents)
            for idx in range(self.num_agents)
        ]
        firsts = [
            first
            for idx, count in enumerate(counts)
            if (first := _Agent(self, arrival.seed, idx, count).next_turn(0.0)) is not None
        ]
        return iter(sorted(firsts, key=lambda request: request.arrival_s))


class _Agent:
    """One agent."""

    def __init__(self, workload: Agents, seed: int, number: int, num_requests: int) -> None:
        rng = np.random.default_rng((seed, number))
        self._workload, self._number, self._num_left = workload, number, num_requests
        self._pauses_s: Iterator[float] = stream(
            lambda: rng.lognormal(math.log(workload.tool_s), workload.tool_sigma, 64)
        )
        self._lengths = [each.draws(rng) for each in (_TURNS, _TASK, RESULT, _CALL)]
        self._num_segments = 0
        self._conversation = self._begin()

    def next_turn(self, answered_s: float) -> SimRequest | None:
        """The request after an answer; None: the agent has made all of its requests."""
        if not self._num_left:
            return None
        self._num_left -= 1
        if self._conversation.is_over:
            self._conversation = self._begin()
        rid = f"a{self._number}-{self._num_left}"
        request = self._conversation.ask(rid, answered_s + next(self._pauses_s), self._segment_id())
        return request._replace(next_turn=self.next_turn)

    def _segment_id(self) -> int:
        self._num_segments += 1
        return self._workload.num_kinds + self._num_segments * self._workload.num_agents + self._number

    def _begin(self) -> Conversation:
        """A new session, cut where its prompt gets too long."""
        workload, scaled = self._workload, self._scaled
        num_turns, tasks, results, calls = self._lengths
        system = Segment(self._number % workload.num_kinds, scaled(workload.tools_len))
        turns = [Turn(scaled(next(tasks)), scaled(next(calls)))]
        context = system.length + sum(turns[0])
        longest = min(scaled(workload.max_context), workload.max_model_len - scaled(_MAX_NEW_TOKENS))
        for _ in range(next(num_turns) - 1):
            turn = Turn(scaled(next(results)), scaled(next(calls)))
            if context + turn.question_len > longest:
                break
            turns.append(turn)
            context += sum(turn)
        return Conversation(Script(system, tuple(turns), scaled(_MAX_NEW_TOKENS), f"agent-{self._number}"))

    def _scaled(self, length: int) -> int:
        return max(1, round(length * self._workload.scale))
