"""`GenerationOutput` and `GenerationChunk`: what `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ..grammar.answer_report import GrammarReport, GuidedAnswer, Truncated
from ..models.tokenizer.tokenizer import Tokenizer
from ..runtime.grammar_use import GrammarUse
from ..runtime.messages import Finish, FinishKind, TextOutput, Usage
from ..runtime.transport.message_base import Logprobs
from ..tokenizer_manager.conversation.deltas import CallArguments, CallBegin, CallEnd, Content, Reasoning
from ..tokenizer_manager.conversation.parsing.output_parser import OutputParser

TOKEN_DTYPE: Final = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one token, and of the likeliest tokens at its position (token id -> logprob)."""

    token_id: int
    token: str
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an answer, or while streaming a piece of one.

    Attributes:
        index: counts the calls of an answer from 0; pieces of one call have the same.
        id, name: of the call; "" in all but its first piece.
        arguments: JSON; the pieces, joined, are the whole.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """New text of one prompt while streaming.

    Attributes:
        index: position of the prompt in the list that was passed; 0 for a single one.
        text: new text that is final: whole characters, without a possible beginning of a stop string.
        token_ids: new tokens; their text may come in a later chunk.
        usage: totals so far.
        finish_reason: set in the last chunk of a prompt: `stop`, `length`, `tool_calls`, `abort` or `error`.
        error: the reason, for `abort` and `error`.
        logprobs: of `token_ids`, when asked for.
        reasoning: new text of the reasoning of a chat.
        tool_calls: new pieces of the tool calls of a chat.
    """

    index: int
    text: str
    token_ids: list[int]
    usage: Usage
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class GenerationOutput:
    """The answer to one prompt.

    Attributes:
        text: the generated text.
        token_ids: the generated tokens.
        prompt_token_ids: the prompt's tokens, as the model received them.
        finish_reason: `stop`, `length`, `tool_calls`, `abort` or `error`.
        stop: the stop string or token id that ended it, or None.
        usage: prompt, cached and generated tokens; queueing time.
        error: the reason, for `abort` and `error`.
        seed: the seed that reproduces the answer.
        logprobs: of the generated tokens, when asked for.
        prompt_logprobs: of the prompt's tokens from the second on, when asked for.
        request_id: for `LLM.why`.
        reasoning: of a chat, if the model reasons.
        tool_calls: of a chat.
        grammar: how hard the grammar had to push; None without one.
        truncated: where a JSON answer was cut and completed, because of `max_tokens`; None if it was not.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stop: str | int | None
    usage: Usage
    seed: int
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    request_id: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    grammar: GrammarReport | None = None
    truncated: Truncated | None = None

    def __repr__(self) -> str:
        """The text, how it ended, and counts; token ids and logprobs would fill the screen of a notebook."""
        usage, rare = self.usage, ("stop", "error", "reasoning", "tool_calls", "truncated")
        shown = {
            "text": self.text,
            "finish_reason": self.finish_reason,
            **{name: value for name in rare if (value := getattr(self, name)) not in (None, "", ())},
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "request_id": self.request_id,
        }
        return f"GenerationOutput({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class OutputBuilder:
    """Collects the rows of one prompt."""

    def __init__(
        self,
        rid: str,
        prompt_token_ids: list[int],
        seed: int,
        tokenizer: Tokenizer,
        parser: OutputParser | None = None,
        grammar: GrammarUse | None = None,
    ) -> None:
        """Begin an answer; `parser`: of its text, None: it is all content; `grammar`: of its request."""
        self._guided = GuidedAnswer(grammar) if grammar is not None else None
        self._parser = parser
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._num_ended_calls = 0
        self._rid = rid
        self._prompt_token_ids = prompt_token_ids
        self._seed = seed
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._usage: Usage | None = None
        self._finish: Finish | None = None

    @property
    def finished(self) -> bool:
        """Whether the last row has arrived."""
        return self._finish is not None

    def add(self, row: TextOutput, index: int) -> GenerationChunk:
        """Add a row; returns it as a chunk."""
        token_ids = decode_token_ids(row.token_ids)
        logprobs = _decode_logprobs(row.logprobs, token_ids, self._tokenizer)
        text, reasoning, calls = self._parse(row)
        self._texts.append(text)
        self._token_ids += token_ids
        if logprobs is not None:
            self._logprobs = (self._logprobs or []) + logprobs
        if row.prompt_logprobs is not None:
            self._prompt_logprobs = _decode_logprobs(
                row.prompt_logprobs,
                self._prompt_token_ids[len(self._prompt_token_ids) - row.prompt_logprobs.num_tokens :],
                self._tokenizer,
            )
        self._usage, self._finish = row.usage, row.finish
        if self._guided is not None:
            self._guided.read(row.token_ids, row.usage.grammar, row.usage.completion_tokens, row.finish)
        return GenerationChunk(
            index=index,
            text=text,
            token_ids=token_ids,
            usage=row.usage,
            finish_reason=self._finish_reason(),
            error=_error(row.finish),
            logprobs=logprobs,
            reasoning=reasoning,
            tool_calls=calls,
        )

    def _parse(self, row: TextOutput) -> tuple[str, str, tuple[ToolCall, ...]]:
        """New content, reasoning and pieces of calls."""
        if self._parser is None:
            return row.text, "", ()
        content, reasoning, pieces = "", "", []
        for delta in self._parser.feed(row.text, row.finish is not None):
            match delta:
                case Reasoning(text):
                    reasoning += text
                case Content(text):
                    content += text
                case CallBegin(call, id_, name):
                    pieces.append(ToolCall(call, id_, name, ""))
                    self._calls.append(pieces[-1])
                case CallArguments(call, text):
                    pieces.append(ToolCall(call, "", "", text))
                    known = self._calls[call]
                    self._calls[call] = replace(known, arguments=known.arguments + text)
                case CallEnd():
                    self._num_ended_calls += 1
        self._reasoning.append(reasoning)
        return content, reasoning, tuple(pieces)

    def _finish_reason(self) -> str | None:
        if self._finish is None:
            return None
        if self._finish.kind is FinishKind.STOP and 0 < len(self._calls) == self._num_ended_calls:
            return "tool_calls"
        return self._finish.kind.value

    def build(self) -> GenerationOutput:
        """The complete answer, once `finished`."""
        finish_reason = self._finish_reason()
        assert self._finish is not None and self._usage is not None and finish_reason is not None
        return GenerationOutput(
            text="".join(self._texts),
            token_ids=self._token_ids,
            prompt_token_ids=self._prompt_token_ids,
            finish_reason=finish_reason,
            stop=self._finish.matched,
            usage=self._usage,
            seed=self._seed,
            error=_error(self._finish),
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            request_id=self._rid,
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
            grammar=None if self._guided is None else self._guided.report(self._tokenizer),
            truncated=None if self._guided is None else self._guided.truncated(self._tokenizer),
        )


def encode_token_ids(token_ids: list[int]) -> bytes:
    """Token ids in the encoding of messages."""
    return np.array(token_ids, dtype=TOKEN_DTYPE).tobytes()


def decode_token_ids(data: bytes) -> list[int]:
    """The inverse of `encode_token_ids`."""
    token_ids: list[int] = np.frombuffer(data, dtype=TOKEN_DTYPE).tolist()
    return token_ids


def _error(finish: Finish | None) -> str | None:
    if finish is None or finish.kind in (FinishKind.STOP, FinishKind.LENGTH):
        return None
    return finish.message


def _decode_logprobs(
    logprobs: Logprobs | None, token_ids: list[int], tokenizer: Tokenizer
) -> list[TokenLogprob] | None:
    if logprobs is None:
        return None
    own = np.frombuffer(logprobs.token_logprobs, dtype="<f4").tolist()
    shape = (len(own), logprobs.top_k)
    top_ids = np.frombuffer(logprobs.top_ids, dtype=TOKEN_DTYPE).reshape(shape).tolist()
    top_values = np.frombuffer(logprobs.top_logprobs, dtype="<f4").reshape(shape).tolist()
    chosen_ids = np.frombuffer(logprobs.chosen_ids, dtype=TOKEN_DTYPE).tolist()
    chosen = np.frombuffer(logprobs.chosen, dtype="<f4").reshape(len(own), len(chosen_ids)).tolist()
    return [
        TokenLogprob(
            token_id,
            tokenizer.token_bytes(token_id).decode(errors="replace"),
            value,
            dict(zip(ids + chosen_ids, values + further, strict=True)),
        )
        for token_id, value, ids, values, further in zip(
            token_ids, own, top_ids, top_values, chosen, strict=True
        )
    ]
