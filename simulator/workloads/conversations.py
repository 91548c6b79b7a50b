"""Conversations: turns that share a growing history, as chat clients send them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..sim_request import Segment, SimRequest, Workload, answer_ids, segment_ids


class Turn(NamedTuple):
    """One question and the model's answer, as token counts."""

    question_len: int
    answer_len: int


class Script(NamedTuple):
    """The course of a conversation.

    Attributes:
        system: its first segment; shared with other conversations.
        turns: at least one.
        max_new_tokens: the client's limit; longer answers are cut there.
        tenant: the tenant that sends it.
    """

    system: Segment
    turns: tuple[Turn, ...]
    max_new_tokens: int
    tenant: str = ""


class _Conversation:
    """An open conversation; its history is stored as segments, since thousands are open at a time."""

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

    The client is open-loop: a turn arrives its thinking time after the turn before, answered or not. A closed loop
    would slow down with the engine and hide its delays.

    Args:
        scripts: conversations in the order of their start; may be endless.
        starts_s: their start times, ascending.
        think_s: seconds between a turn and the next one.
        num_requests: the number of requests.
        first_segment_id: ids from here on are used for questions.
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
