"""Workloads from files, see `traces`: timed traces as they are, conversations at random times.

Texts are not tokenized, so that no model is needed: `CHARS_PER_TOKEN` characters count as a token, which holds for
English and vocabularies of 32k to 128k within 20 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from ..runtime.errors import ConfigError
from .generated_workloads import Arrival, Exponential, Script, Turn, arrivals, interleave
from .sim_request import Segment, SimRequest, Workload, prompt_ids
from .trace_files import Exchange, TimedRequest, TraceOptions, conversations, kind_of, timed_requests

CHARS_PER_TOKEN: Final = 4.0
DEFAULT_LIMIT: Final = 2048
"""The client's limit if the file has none; a longer answer has its own length as limit."""
MAX_HISTORY_TOKENS: Final = 8192
"""A conversation ends before its history gets longer."""
_UNIQUE_IDS: Final = 1 << 28  # segment ids from here on are for blocks without a hash id


def file_requests(path: Path, arrival: Arrival, options: TraceOptions = TraceOptions()) -> Workload:  # noqa: B008
    """The requests of a file, of the kind that its first row shows.

    Args:
        path: of the file.
        arrival: for conversations: number and times of requests. For a trace, `num_requests` bounds the number.
        options: how a trace is read.

    Raises:
        ConfigError: no such file, another kind, or a row that cannot be read, with its number.
    """
    kind = kind_of(path)
    options.check(kind, path)
    return _trace(path, arrival.num_requests, options) if kind.is_timed else _conversations(path, arrival)


def _trace(path: Path, num_requests: int, options: TraceOptions) -> Workload:
    for idx, request in enumerate(itertools.islice(timed_requests(path, options), num_requests)):
        yield SimRequest(
            rid=f"r{idx}",
            arrival_s=request.arrival_s,
            input_ids=prompt_ids(_segments(request, idx)),
            output_len=request.output_len,
            max_new_tokens=max(request.output_len, DEFAULT_LIMIT),
        )


def _segments(request: TimedRequest, idx: int) -> list[Segment]:
    return [
        Segment(_UNIQUE_IDS + idx if hash_id is None else hash_id, length)
        for hash_id, length in request.blocks
    ]


def _conversations(path: Path, arrival: Arrival) -> Workload:
    scripts = [turns for each in conversations(path) if (turns := _turns(each))]
    if not scripts:
        raise ConfigError(f"{path} has no conversation with a question and an answer")
    rng = np.random.default_rng(arrival.seed)
    mean_turns = sum(map(len, scripts)) / len(scripts)
    starts_s = arrivals(arrival.rate / mean_turns, arrival.burstiness, rng)
    think_s = Exponential(20.0).draws(rng)
    return interleave(_shuffled(scripts, rng), starts_s, think_s, arrival.num_requests, 1)


def _shuffled(scripts: list[tuple[Turn, ...]], rng: np.random.Generator) -> Iterator[Script]:
    """All conversations in random order, repeated without end; the system prompt is empty."""
    while True:
        for idx in rng.permutation(len(scripts)).tolist():
            yield Script(
                Segment(0, 0), scripts[idx], max(DEFAULT_LIMIT, *(t.answer_len for t in scripts[idx]))
            )


def _turns(recorded: Iterable[Exchange]) -> tuple[Turn, ...]:
    """The lengths of the turns, until the history is too long."""
    turns: list[Turn] = []
    history = 0
    for question, answer in recorded:
        turn = Turn(_estimated_len(question), _estimated_len(answer))
        history += turn.question_len + turn.answer_len
        if history > MAX_HISTORY_TOKENS:
            break
        turns.append(turn)
    return tuple(turns)


def _estimated_len(text: str) -> int:
    return max(1, round(len(text) / CHARS_PER_TOKEN))
