"""`Load`: requests of every kind that run at the same time, and what came of each, to the last field."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Self

import httpx

from tests.e2e.serving import DEADLINE_S, EngineServe

NUM_TOKENS: Final = 200
EARLY_TOKENS: Final = 20
"""After so many tokens of each stream a fault comes; with `SLOW` steps the rest takes seconds on any machine."""

_LONG: Final = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
KINDS: Final[Mapping[str, dict[str, Any]]] = {
    "greedy": _LONG | {"prompt": "one two three", "temperature": 0, "stream": True},
    "sampled with logprobs": _LONG
    | {"prompt": "a request waits", "temperature": 1.0, "seed": 3, "logprobs": 2, "stream": True},
    "two answers in many scripts": _LONG
    | {"prompt": "Größe 東京 привет", "temperature": 1.3, "seed": 5, "n": 2, "stream": True},
    "with penalties": _LONG
    | {
        "prompt": "the quick brown fox",
        "temperature": 0.7,
        "seed": 7,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.5,
        "stream": True,
    },
    "until its minimum": {
        "prompt": "five six",
        "temperature": 1.0,
        "seed": 11,
        "max_tokens": 2 * NUM_TOKENS,
        "min_tokens": NUM_TOKENS,
        "stream": True,
    },
    "best of three, not streamed": _LONG
    | {"prompt": "nine ten", "temperature": 1.0, "seed": 9, "best_of": 3},
    "greedy, not streamed": _LONG | {"prompt": "jumps over", "temperature": 0, "logprobs": 0},
}


@dataclass
class Answer:
    """What a client got.

    Attributes:
        texts, tokens, logprobs, finish_reasons: of each choice.
        usage: as told at the end.
        error: an error event, or the body of a refusal.
        complete: it ended as answers end.
    """

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    complete: bool = False

    def add(self, body: dict[str, Any]) -> None:
        """Take in the body of an answer, or of a part of one."""
        if "error" in body:
            self.error = body["error"]
            return
        self.usage = body.get("usage") or self.usage
        for choice in body["choices"]:
            idx = choice["index"]
            self.texts[idx] = self.texts.get(idx, "") + choice["text"]
            if choice.get("logprobs"):
                self.tokens.setdefault(idx, []).extend(choice["logprobs"]["tokens"])
                self.logprobs.setdefault(idx, []).extend(choice["logprobs"]["token_logprobs"])
            if choice["finish_reason"]:
                self.finish_reasons[idx] = choice["finish_reason"]

    def assert_equals(self, other: Answer) -> None:
        """All of it; log-probabilities up to the last bits, which depend on what is computed together."""
        assert (self.complete, self.error) == (other.complete, other.error)
        assert self.texts == other.texts
        assert self.tokens == other.tokens
        assert self.finish_reasons == other.finish_reasons
        # What the prefix cache had at the time is not the request's.
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert self.usage[name] == other.usage[name]
        assert self.logprobs.keys() == other.logprobs.keys()
        for idx, values in self.logprobs.items():
            for mine, theirs in zip(values, other.logprobs[idx], strict=True):
                assert abs(mine - theirs) < 1e-3


class Load:
    """Sends requests at once. A context manager that waits for them."""

    def __init__(self, engine: EngineServe, bodies: Sequence[dict[str, Any]]) -> None:
        self._engine = engine
        self._bodies = bodies
        self._threads = ThreadPoolExecutor(len(bodies))
        self._early = [threading.Event() for body in bodies if body.get("stream")]
        self._answers: list[Future[Answer]] = []

    def __enter__(self) -> Self:
        streams = iter(self._early)
        for body in self._bodies:
            early = next(streams) if body.get("stream") else threading.Event()
            self._answers.append(self._threads.submit(self._run, body, early))
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._threads.shutdown()

    def wait_until_they_run(self) -> None:
        """Return when each stream has begun and none can be near its end."""
        for early in self._early:
            assert early.wait(DEADLINE_S), self._engine.log

    def failures(self) -> list[BaseException | None]:
        """What kept clients from an answer; waits for it."""
        return [answer.exception(2 * DEADLINE_S) for answer in self._answers]

    def answers(self) -> list[Answer]:
        """What came of each; waits for it."""
        return [answer.result(2 * DEADLINE_S) for answer in self._answers]

    def _run(self, body: dict[str, Any], early: threading.Event) -> Answer:
        answer = Answer()
        url = f"{self._engine.url}/v1/completions"
        if not body.get("stream"):
            response = httpx.post(url, json=body, timeout=DEADLINE_S)
            answer.add(response.json())
            answer.complete = response.status_code == 200
            return answer
        body = body | {"stream_options": {"include_usage": True}}
        num_events = 0
        with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    answer.complete = True
                elif line.startswith("data: "):
                    answer.add(json.loads(line.removeprefix("data: ")))
                    num_events += 1
                    if num_events == EARLY_TOKENS:
                        early.set()
        return answer


def answers_of(engine: EngineServe, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """What these requests are answered when nothing happens."""
    with Load(engine, bodies) as load:
        return load.answers()
