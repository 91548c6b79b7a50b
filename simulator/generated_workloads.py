"""Generated workloads: chat, rag, batch, and requests of given lengths. Every workload is a function of the seed.

    chat   16 system prompts of 400 tokens, then 1 to 12 turns (3 in the mean) with questions of 60 tokens (sigma 1) and
           answers of 150 (sigma 0.8); each turn contains the history of its conversation
    rag    instructions of 200 tokens, one of 2,000 documents of 3,000 tokens (sigma 0.6) by popularity (Zipf 1.0), a
           question of 30; answers of 80 (sigma 0.6)
    batch  instructions of 100 tokens and an item of 500 (sigma 0.8), all at once; answers of 150 (sigma 0.7)

Lengths are medians of log-normal distributions; they are chosen, not measured, and the options of `engine simulate`
change them. Clients limit answers to 512, 1,024 or 2,048 tokens, independent of the answer's length; the scheduler
has only this limit in advance. Random values are drawn in blocks, because single draws are slow.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..runtime.errors import ConfigError
from .sim_request import Segment, SimRequest, Workload, answer_ids, prompt_ids, segment_ids

_BLOCK: Final = 4096


class Lengths(NamedTuple):
    """A log-normal distribution of lengths, cut at both ends: most are short, a few are long.

    Attributes:
        median: of the uncut distribution.
        sigma: of the logarithm; the mean is median · exp(sigma² / 2).
        low, high: bounds.
    """

    median: float
    sigma: float
    low: int
    high: int

    def draws(self, rng: np.random.Generator) -> Iterator[int]:
        """An endless stream."""
        mean, low, high = math.log(self.median), self.low, self.high
        return stream(lambda: np.clip(rng.lognormal(mean, self.sigma, _BLOCK), low, high).astype(np.int64))


class Exponential(NamedTuple):
    """An exponential distribution of seconds."""

    mean_s: float

    def draws(self, rng: np.random.Generator) -> Iterator[float]:
        """An endless stream."""
        return stream(lambda: rng.exponential(self.mean_s, _BLOCK))


def choices(rng: np.random.Generator, values: list[int], weights: list[float]) -> Iterator[int]:
    """An endless stream of values, drawn with these weights."""
    shares = np.array(weights) / sum(weights)
    table = np.array(values)
    return stream(lambda: table[rng.choice(len(table), _BLOCK, p=shares)])


def popularity(rng: np.random.Generator, count: int, exponent: float) -> Iterator[int]:
    """An endless stream of 0..count-1, where the k-th is drawn with weight 1 / k^exponent (Zipf)."""
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    bounds = np.cumsum(weights / weights.sum())
    return stream(lambda: np.minimum(np.searchsorted(bounds, rng.random(_BLOCK)), count - 1))


def arrivals(rate: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """An endless stream of arrival times, the first at 0: gaps are gamma-distributed around 1 / rate.

    Args:
        rate: mean arrivals per second; infinity: all at 0.
        burstiness: 1 is a Poisson process, below 1 burstier, above 1 more even.

    Raises:
        ConfigError: rate or burstiness is not above 0.
    """
    if not rate > 0:
        raise ConfigError(f"--rate is {rate:g}, but it must be above 0 ('inf' lets all arrive at once)")
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise ConfigError(f"--burstiness is {burstiness:g}, but it must be above 0; 1 is a Poisson process")
    return _sums(rate, burstiness, rng)


def _sums(rate: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    now_s = 0.0
    yield now_s
    if math.isinf(rate):
        while True:
            yield now_s
    for gap_s in stream(lambda: rng.gamma(burstiness, 1.0 / (rate * burstiness), _BLOCK)):
        now_s += gap_s
        yield now_s


def stream(draw: Callable[[], npt.NDArray[Any]]) -> Iterator[Any]:
    """The values of one block of draws after the other, without end."""
    while True:
        yield from draw().tolist()


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


class Conversation:
    """An open conversation; its history is stored as segments, since thousands are open at a time.

    Attributes:
        history: the turns so far: the question, and the length of its answer.
    """

    __slots__ = ("history", "next_turn", "script")

    def __init__(self, script: Script) -> None:
        self.script = script
        self.history: list[tuple[Segment, int]] = []
        self.next_turn = 0

    def ask(self, rid: str, now_s: float, segment_id: int) -> SimRequest:
        """The request of the next turn; its question gets this id."""
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
        """Whether all turns have been asked."""
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
    waiting: list[tuple[float, int, Conversation]] = []
    num_started = 0
    for idx in range(num_requests):
        if upcoming is not None and (not waiting or upcoming[1] <= waiting[0][0]):
            script, now_s = upcoming
            conversation, seq = Conversation(script), num_started
            num_started += 1
            upcoming = next(opened, None)
        elif waiting:
            now_s, seq, conversation = heapq.heappop(waiting)
        else:
            return
        yield conversation.ask(f"r{idx}", now_s, first_segment_id + idx)
        if not conversation.is_over:
            heapq.heappush(waiting, (now_s + next(think_s), seq, conversation))


_CHAT_QUESTION: Final = Lengths(60, 1.0, 4, 4000)
_CHAT_ANSWER: Final = Lengths(150, 0.8, 1, 4000)
_RAG_DOCUMENT: Final = Lengths(3000, 0.6, 200, 20_000)
_RAG_QUESTION: Final = Lengths(30, 0.6, 4, 400)
_RAG_ANSWER: Final = Lengths(80, 0.6, 1, 1000)
_BATCH_ITEM: Final = Lengths(500, 0.8, 10, 8000)
_BATCH_ANSWER: Final = Lengths(150, 0.7, 1, 2000)
_THINKING: Final = Exponential(20.0)
_LIMITS: Final = [512, 1024, 2048]
_LIMIT_WEIGHTS: Final = [0.3, 0.5, 0.2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The number of requests and their arrival times.

    Attributes:
        num_requests: of the run.
        rate: mean requests per second, all replicas together; infinity: all at once.
        burstiness: see `arrivals`.
        seed: of all random draws.
    """

    num_requests: int = 1000
    rate: float = 10.0
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ConfigError(f"--num-requests is {self.num_requests}, but it must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"--workload-seed is {self.seed}, but it must be 0 or more")
        arrivals(self.rate, self.burstiness, np.random.default_rng(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Parameters of `chat`."""

    question: Lengths = _CHAT_QUESTION
    answer: Lengths = _CHAT_ANSWER
    mean_turns: float = 3.0
    max_turns: int = 12
    think: Exponential = _THINKING
    num_systems: int = 16
    system_len: int = 400

    def requests(self, arrival: Arrival) -> Workload:
        """The requests; tenants are the owners of the system prompts."""
        rng = np.random.default_rng(arrival.seed)
        # Each conversation has several requests, so fewer conversations start than requests arrive.
        starts_s = arrivals(arrival.rate / self.mean_turns, arrival.burstiness, rng)
        think_s = self.think.draws(rng)
        return interleave(self._scripts(rng), starts_s, think_s, arrival.num_requests, self.num_systems)

    def _scripts(self, rng: np.random.Generator) -> Iterator[Script]:
        questions, answers = self.question.draws(rng), self.answer.draws(rng)
        limits = choices(rng, _LIMITS, _LIMIT_WEIGHTS)
        counts = range(1, self.max_turns + 1)
        goes_on = 1.0 - 1.0 / self.mean_turns
        num_turns = choices(rng, list(counts), [goes_on**count for count in counts])
        for system in popularity(rng, self.num_systems, 1.0):
            turns = tuple(Turn(next(questions), next(answers)) for _ in range(next(num_turns)))
            yield Script(Segment(system, self.system_len), turns, next(limits), f"app-{system}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rag:
    """Parameters of `rag`."""

    document: Lengths = _RAG_DOCUMENT
    question: Lengths = _RAG_QUESTION
    answer: Lengths = _RAG_ANSWER
    instructions_len: int = 200
    num_documents: int = 2000
    exponent: float = 1.0

    def requests(self, arrival: Arrival) -> Workload:
        """The requests."""
        rng = np.random.default_rng(arrival.seed)
        document_lens = self.document.draws(rng)
        documents = [Segment(1 + idx, next(document_lens)) for idx in range(self.num_documents)]
        instructions = Segment(0, self.instructions_len)
        picks = popularity(rng, self.num_documents, self.exponent)
        questions, answers = self.question.draws(rng), self.answer.draws(rng)
        limits = choices(rng, _LIMITS, _LIMIT_WEIGHTS)
        moments_s = arrivals(arrival.rate, arrival.burstiness, rng)
        for idx in range(arrival.num_requests):
            question = Segment(1 + self.num_documents + idx, next(questions))
            limit = next(limits)
            yield SimRequest(
                rid=f"r{idx}",
                arrival_s=next(moments_s),
                input_ids=prompt_ids([instructions, documents[next(picks)], question]),
                output_len=min(next(answers), limit),
                max_new_tokens=limit,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Parameters of `batch`."""

    item: Lengths = _BATCH_ITEM
    answer: Lengths = _BATCH_ANSWER
    instructions_len: int = 100

    def requests(self, arrival: Arrival) -> Workload:
        """The requests; all arrive at once, for any rate."""
        rng = np.random.default_rng(arrival.seed)
        items, answers = self.item.draws(rng), self.answer.draws(rng)
        limits = choices(rng, _LIMITS, _LIMIT_WEIGHTS)
        for idx in range(arrival.num_requests):
            prompt = prompt_ids([Segment(0, self.instructions_len), Segment(1 + idx, next(items))])
            limit = next(limits)
            yield SimRequest(f"r{idx}", 0.0, prompt, min(next(answers), limit), limit)


GENERATED: Final[dict[str, Chat | Rag | Batch]] = {"chat": Chat(), "rag": Rag(), "batch": Batch()}


def given_lengths(prompt_lens: Sequence[int], output_lens: Sequence[int], arrival: Arrival) -> Workload:
    """Requests of exactly these lengths without shared prefixes; the lists repeat as often as needed.

    The client's limits equal the lengths, as in a benchmark, so the scheduler has the lengths in advance.

    Raises:
        ConfigError: no lengths, or one below 1.
    """
    for flag, lens in (("--prompt-lens", prompt_lens), ("--output-lens", output_lens)):
        if not lens or min(lens) < 1:
            raise ConfigError(f"{flag} is {','.join(map(str, lens))!r}, but it must be lengths of 1 or more")
    moments_s = arrivals(arrival.rate, arrival.burstiness, np.random.default_rng(arrival.seed))
    return (
        SimRequest(
            rid=f"r{idx}",
            arrival_s=next(moments_s),
            input_ids=prompt_ids([Segment(idx, prompt_lens[idx % len(prompt_lens)])]),
            output_len=output_lens[idx % len(output_lens)],
            max_new_tokens=output_lens[idx % len(output_lens)],
        )
        for idx in range(arrival.num_requests)
    )


def with_medians(
    workload: Chat | Rag | Batch, prompt_len: int | None, output_len: int | None
) -> Chat | Rag | Batch:
    """The same workload with other median lengths of the variable part of prompts, and of answers.

    Raises:
        ConfigError: a length below 1.
    """
    for flag, value in (("--prompt-len", prompt_len), ("--output-len", output_len)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} is {value}, but it must be at least 1")
    if output_len is not None:
        workload = replace(workload, answer=_around(workload.answer, output_len))
    if prompt_len is not None:
        match workload:
            case Chat():
                workload = replace(workload, question=_around(workload.question, prompt_len))
            case Rag():
                workload = replace(workload, document=_around(workload.document, prompt_len))
            case Batch():
                workload = replace(workload, item=_around(workload.item, prompt_len))
    return workload


def _around(lengths: Lengths, median: int) -> Lengths:
    return Lengths(median, lengths.sigma, min(lengths.low, median), max(lengths.high, math.ceil(8 * median)))
