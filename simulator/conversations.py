"""Conversations: turns that share a growing history, as chat clients send it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .sim_request import Segment, SimRequest, Workload, answer_ids, segment_ids


class Turn(NamedTuple):
    """One question and the answer the model would give to it, in tokens."""

    question_len: int
    answer_len: int


class Script(NamedTuple):
    """How a conversation will go.

    Attributes:
        system: what it begins with; shared with other conversations.
        turns: at least one.
        max_new_tokens: the client's limit; longer answers are cut there.
        tenant: whose it is.
    """

    system: Segment
    turns: tuple[Turn, ...]
    max_new_tokens: int
    tenant: str = ""


class _Conversation:
    """One that goes on; its history is kept as segments, since thousands are open at a time."""

    __slots__ = ("history", "next_turn", "script")

    def __init__(self, script: Script) -> None:
        self.script = script
        self.history: list[tuple[Segment, int]] = []  # question, length of its answer
        self.next_turn = 0

    def ask(self, rid: str, now_s: float, segment_id: int) -> SimRequest:
        script = self.script
        turn = script.turns[self.next_turn]
        self.next_turn += 1
        output_len = min(turn.answer_len, script.max_new_tokens)
        question = Segment(segment_id, turn.question_len)
        parts = [segment_ids(script.system)]
        for earlier, answer_len in self.history:
            parts.append(segment_ids(earlier))
            parts.append(answer_ids(answer_len))
        parts.append(segment_ids(question))
        self.history.append((question, output_len))
        return SimRequest(rid, now_s, b"".join(parts), output_len, script.max_new_tokens, script.tenant)

    @property
    def is_over(self) -> bool:
        return self.next_turn == len(self.script.turns)


def interleave(
    scripts: Iterable[Script],
    starts_s: Iterator[float],
    think_s: Iterator[float],
    num_requests: int,
    first_segment_id: int,
) -> Workload:
    """The requests of many conversations, by arrival.

    The client is open-loop: a turn comes its thinking time after the one before, whether that has been answered or not.
    A closed loop would slow down with the engine and hide how bad it is.

    Args:
        scripts: conversations in the order in which they start; may be endless.
        starts_s: when they start, ascending.
        think_s: seconds between a turn and the next one.
        num_requests: when to stop.
        first_segment_id: ids from here on are free for questions.
    """
    opened = zip(scripts, starts_s, strict=False)
    upcoming = next(opened, None)
    waiting: list[tuple[float, int, _Conversation]] = []
    num_started = 0
    for idx in range(num_requests):
        if upcoming is not None and (not waiting or upcoming[1] <= waiting[0][0]):
            script, now_s = upcoming
            conversation, seq = _Conversation(script), num_started
            num_started += 1
            upcoming = next(opened, None)
        elif waiting:
            now_s, seq, conversation = heapq.heappop(waiting)
        else:
            return
        yield conversation.ask(f"r{idx}", now_s, first_segment_id + idx)
        if not conversation.is_over:
            heapq.heappush(waiting, (now_s + next(think_s), seq, conversation))
