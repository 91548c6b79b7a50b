"""Workloads from files: request traces in the style of Mooncake's, conversations in the style of ShareGPT's.

Mooncake (JSON Lines; FAST 2025, "Mooncake: Trading More Storage for Less Computation"): one request per line,

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` in ms, ascending; `hash_ids`, one per 512 prompt tokens, are equal if two prompts are equal up to the end of
the block. Without them no prefix is shared.

ShareGPT (one JSON array): `[{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}]`.
Texts are not tokenized, so that no model is needed: `CHARS_PER_TOKEN` characters count as a token, which holds for
English and vocabularies of 32k to 128k within 20 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ..runtime.errors import ConfigError
from .arrivals import Exponential, arrivals
from .conversations import Script, Turn, interleave
from .generated import Arrival
from .sim_request import Segment, SimRequest, Workload, prompt_ids

BLOCK_TOKENS: Final = 512
CHARS_PER_TOKEN: Final = 4.0
DEFAULT_LIMIT: Final = 2048
"""The client's limit if the file has none; a longer answer has its own length as limit."""
MAX_HISTORY_TOKENS: Final = 8192
"""A conversation ends before its history gets longer."""
_UNIQUE_IDS: Final = 1 << 28  # segment ids from here on are for requests without hash ids
_QUESTIONERS: Final = frozenset({"human", "user"})
_ANSWERERS: Final = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})


class _TraceLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class _Message(msgspec.Struct):
    sender: str = msgspec.field(name="from", default="")
    value: str = ""


class _Recorded(msgspec.Struct):
    conversations: list[_Message] = []


def file_requests(path: Path, arrival: Arrival, *, time_scale: float = 1.0) -> Workload:
    """The requests of a file of either style, detected by its first character.

    Args:
        arrival: for conversations: number and times of requests. For a trace, `num_requests` bounds the number.
        time_scale: a trace's times are divided by it: 2 doubles the rate.

    Raises:
        ConfigError: no such file, neither style, or a line that cannot be read, with its number.
    """
    if not time_scale > 0:
        raise ConfigError(f"--time-scale is {time_scale:g}, but it must be above 0")
    if is_trace(path):
        return _trace(path, arrival.num_requests, time_scale)
    return _conversations(path, arrival)


def is_trace(path: Path) -> bool:
    """Whether a file is a trace, and not conversations.

    Raises:
        ConfigError: no such file, or neither.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4096).lstrip()
    except OSError as error:
        raise ConfigError(f"cannot read the workload {path}: {error.strerror}") from None
    if not head.startswith((b"[", b"{")):
        raise ConfigError(
            f"{path} is no workload: it must be a trace (JSON Lines with timestamp, input_length, output_length) or "
            f"conversations (a JSON array, ShareGPT style)"
        )
    return head.startswith(b"{")


def _trace(path: Path, num_requests: int, time_scale: float) -> Workload:
    decoder = msgspec.json.Decoder(_TraceLine, strict=False)
    start_ms = last_ms = -1.0
    count = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if count == num_requests:
                return
            if not line.strip():
                continue
            try:
                entry = decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}:{number}: not a line of a trace: {error}") from None
            if entry.input_length < 1 or entry.output_length < 0:
                raise ConfigError(
                    f"{path}:{number}: input_length is {entry.input_length} and output_length {entry.output_length}, "
                    f"but they must be at least 1 and 0"
                )
            if entry.timestamp < last_ms:
                raise ConfigError(
                    f"{path}:{number}: timestamp {entry.timestamp:g} is before the one above; sort the trace by it"
                )
            last_ms = entry.timestamp
            if not count:
                start_ms = last_ms
            output_len = max(entry.output_length, 1)
            yield SimRequest(
                rid=f"r{count}",
                arrival_s=(entry.timestamp - start_ms) / 1e3 / time_scale,
                input_ids=prompt_ids(_blocks(entry, count)),
                output_len=output_len,
                max_new_tokens=max(output_len, DEFAULT_LIMIT),
            )
            count += 1
    if not count:
        raise ConfigError(f"{path} has no requests")


def _blocks(entry: _TraceLine, idx: int) -> list[Segment]:
    if not entry.hash_ids:
        return [Segment(_UNIQUE_IDS + idx, entry.input_length)]
    blocks: list[Segment] = []
    left = entry.input_length
    for hash_id in entry.hash_ids:
        if left <= 0:
            break
        blocks.append(Segment(hash_id, min(left, BLOCK_TOKENS)))
        left -= BLOCK_TOKENS
    if left > 0:
        blocks.append(Segment(_UNIQUE_IDS + idx, left))
    return blocks


def _conversations(path: Path, arrival: Arrival) -> Workload:
    try:
        recorded = msgspec.json.decode(path.read_bytes(), type=list[_Recorded], strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a JSON array of conversations: {error}") from None
    scripts = [turns for each in recorded if (turns := _turns(each))]
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


def _turns(recorded: _Recorded) -> tuple[Turn, ...]:
    """Pairs of question and answer, until the history is too long; messages out of turn are skipped."""
    turns: list[Turn] = []
    history = 0
    question_len: int | None = None
    for message in recorded.conversations:
        if message.sender in _QUESTIONERS:
            question_len = _estimated_len(message.value)
        elif message.sender in _ANSWERERS and question_len is not None:
            turn = Turn(question_len, _estimated_len(message.value))
            history += turn.question_len + turn.answer_len
            if history > MAX_HISTORY_TOKENS:
                break
            turns.append(turn)
            question_len = None
    return tuple(turns)


def _estimated_len(text: str) -> int:
    return max(1, round(len(text) / CHARS_PER_TOKEN))
