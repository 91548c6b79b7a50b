"""`Detokenizer`: rows of token ids to rows of text, with the text state of every live request.

Pure: messages in, messages out; `process.py` and `LLM` connect it to sockets or to a thread. A request's state is
created by its first row and dropped with its last. The scheduler sends a finished row for every request, so no state
remains.
"""

from __future__ import annotations

import logging
import struct
from typing import assert_never

from msgspec.structs import replace

from ..runtime.linear_regex import LinearRegex
from ..runtime.messages import (
    REPETITION,
    BatchTextOutput,
    BatchTokenOutput,
    DetokenizerInput,
    Finish,
    FinishKind,
    TextOptions,
    TextOutput,
    TokenOutput,
)
from ..runtime.scheduler_report import SchedulerReport
from .incremental import IncrementalDecoder, TokenTable
from .repetition import RepetitionCheck
from .stop_strings import StopMatcher

logger = logging.getLogger(__name__)

_INT32_BYTES = 4


class Detokenizer:
    """The text states of one scheduler's requests.

    Attributes:
        num_live_reqs: requests that have a state here, for leak checks.
    """

    def __init__(self, table: TokenTable, *, after_restart: bool = False) -> None:
        """Start without requests.

        Args:
            table: of the model's tokens.
            after_restart: it replaces one that was lost. Rows of requests with a first row sent to the lost one are
                dropped: the tokenizer manager resubmits those requests under other ids.
        """
        self._table = table
        self._joins_late = after_restart
        self._texts: dict[str, _RequestText] = {}
        self._answered: set[str] = set()  # finished here; the scheduler's finished row has not arrived yet

    @property
    def num_live_reqs(self) -> int:
        """Requests that have a state here."""
        return len(self._texts) + len(self._answered)

    def handle(self, message: DetokenizerInput) -> BatchTextOutput | SchedulerReport | None:
        """The message to the tokenizer manager that a message of the scheduler causes; None if there is none."""
        match message:
            case BatchTokenOutput():
                batch = self.process(message)
                return batch if batch.outputs else None
            case SchedulerReport():
                return replace(message, detokenizer_reqs=self.num_live_reqs)
            case _:
                assert_never(message)

    def process(self, batch: BatchTokenOutput) -> BatchTextOutput:
        """One step's rows as text, in order, without those of requests already finished here."""
        rows = [self._process_row(row) for row in batch.outputs]
        return BatchTextOutput([row for row in rows if row is not None])

    def _process_row(self, row: TokenOutput) -> TextOutput | None:
        if row.rid in self._answered:
            if row.finish is not None:
                self._answered.remove(row.rid)
            return None
        if row.usage.processed_tokens is not None:
            return _text_row(row, "")
        if self._joins_late and row.options is None and row.rid not in self._texts:
            return None
        try:
            printed = self._text_of(row).print_row(row)
        except Exception:  # an error in one request must not end the others
            logger.error("detokenizing failed rid=%s", row.rid, exc_info=True)
            printed = _failed_row(row)
        if printed.finish is not None:
            self._texts.pop(row.rid, None)
            if row.finish is None:
                self._answered.add(row.rid)
                return replace(printed, ended_by_detokenizer=True)
        return printed

    def _text_of(self, row: TokenOutput) -> _RequestText:
        text = self._texts.get(row.rid)
        if text is None:
            if row.options is None and row.finish is None:
                raise LookupError("a row came for a request without a first row")
            # A request that ends before its first token may have only a finished row without options.
            text = self._texts[row.rid] = _RequestText(self._table, row.options or TextOptions())
        return text


class _RequestText:
    """The text of one request: decoder, stop strings with the text they hold back, and what else may end it."""

    __slots__ = ("_decoder", "_keeps_stop", "_regexes", "_repetition", "_stops", "_strings", "_table")

    def __init__(self, table: TokenTable, options: TextOptions) -> None:
        self._decoder = IncrementalDecoder(
            table,
            skip_special_tokens=options.skip_special_tokens,
            keep_special_ids=options.keep_special_ids,
        )
        self._table = table
        self._strings = options.stop
        self._keeps_stop = options.include_stop_str_in_output
        self._stops: StopMatcher | None = None
        self._regexes = [LinearRegex(pattern) for pattern in options.stop_regex]
        self._repetition = RepetitionCheck.of(options.repetition_detection)
        if options.stop or self._regexes or self._repetition is not None:
            self._stops = StopMatcher(options.stop, include_match=options.include_stop_str_in_output)
        if options.delivered_ids:
            self._catch_up(options.delivered_ids)

    def _catch_up(self, delivered_ids: bytes) -> None:
        """Restore the text that was held back after these tokens; the rest of their text has been sent."""
        token_ids = _ids_of(delivered_ids)
        text = self._decoder.push(token_ids)
        if self._stops is not None:
            self._stops.push(text)
        for regex in self._regexes:
            regex.push(text)
        if self._repetition is not None:
            self._repetition.push(token_ids)

    def print_row(self, row: TokenOutput) -> TextOutput:
        """One row as text. It is finished if the scheduler's row is, or if a stop string is complete."""
        token_ids = _ids_of(row.token_ids)
        if self._stops is not None and any(map(self._special_stop, token_ids)):
            return self._print_with_stops(row, token_ids, self._stops)
        if _ends_with_stop_token(row.finish, token_ids):
            token_ids = token_ids[:-1]  # it ends the text and is not part of it
        if self._stops is None:
            text = self._decoder.push(token_ids)
            if row.finish is not None:
                text += self._decoder.flush()
            return _text_row(row, text)
        return self._print_with_stops(row, token_ids, self._stops)

    def _special_stop(self, token_id: int) -> str | None:
        """The stop string that this control token is, if it is one: it ends the text whether it is printed or not."""
        if not self._table.is_special(token_id):
            return None
        text = self._table.token_bytes(token_id).decode(errors="replace")
        return text if text in self._strings else None

    def _print_with_stops(
        self, row: TokenOutput, token_ids: tuple[int, ...], stops: StopMatcher
    ) -> TextOutput:
        """Token by token, because the token that completes a stop string is the last one that counts."""
        text = ""
        for i, token_id in enumerate(token_ids):
            special = None if self._decoder.prints(token_id) else self._special_stop(token_id)
            new_text = self._decoder.push((token_id,)) if special is None else self._decoder.flush()
            new_text, ended_by = self._cut_at_regex(new_text)
            released, matched = stops.push(new_text)
            text += released
            if matched is None and ended_by is None and self._repetition is not None:
                ended_by = REPETITION if self._repetition.push((token_id,)) else None
            if matched is None and ended_by is not None:
                rest = self._decoder.flush() if ended_by == REPETITION else ""
                return _stopped_row(row, text + stops.flush() + rest, ended_by, num_tokens=i + 1)
            if matched is None and special is not None:
                text += stops.flush() + (special if self._keeps_stop else "")
                matched = special
            if matched is not None:
                return _stopped_row(row, text, matched, num_tokens=i + 1)
        if row.finish is not None:
            new_text, ended_by = self._cut_at_regex(self._decoder.flush())
            released, matched = stops.push(new_text)
            text += released
            if matched is None and ended_by is not None:
                text, matched = text + stops.flush(), ended_by
            if matched is not None:
                return _stopped_row(row, text, matched, num_tokens=len(token_ids))
            text += stops.flush()
        return _text_row(row, text)

    def _cut_at_regex(self, text: str) -> tuple[str, str | None]:
        """New text up to the first match of a regular expression, and that expression."""
        ends = [(end, regex.pattern) for regex in self._regexes if (end := regex.push(text)) is not None]
        if not ends:
            return text, None
        end, pattern = min(ends)
        return text[:end], pattern


def _ids_of(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // _INT32_BYTES}i", data)


def _ends_with_stop_token(finish: Finish | None, token_ids: tuple[int, ...]) -> bool:
    return finish is not None and finish.kind is FinishKind.STOP and token_ids[-1:] == (finish.matched,)


def _text_row(row: TokenOutput, text: str) -> TextOutput:
    return TextOutput(
        rid=row.rid,
        text=text,
        token_ids=row.token_ids,
        usage=row.usage,
        finish=row.finish,
        logprobs=row.logprobs,
        prompt_logprobs=row.prompt_logprobs,
        vector=row.vector,
    )


def _stopped_row(row: TokenOutput, text: str, matched: str, num_tokens: int) -> TextOutput:
    """The row cut after its first `num_tokens` tokens, the last of which completed a stop string."""
    num_surplus = len(row.token_ids) // _INT32_BYTES - num_tokens
    return TextOutput(
        rid=row.rid,
        text=text,
        token_ids=row.token_ids[: num_tokens * _INT32_BYTES],
        usage=replace(row.usage, completion_tokens=row.usage.completion_tokens - num_surplus),
        finish=Finish(FinishKind.STOP, matched=matched),
        logprobs=None if row.logprobs is None else row.logprobs.first(num_tokens),
        prompt_logprobs=row.prompt_logprobs,
    )


def _failed_row(row: TokenOutput) -> TextOutput:
    message = "the text of this request could not be decoded; see the server's log"
    finish = Finish(FinishKind.ERROR, message=message)
    return TextOutput(rid=row.rid, text="", token_ids=b"", usage=row.usage, finish=finish)
