"""Output rows for the detokenizer, and the stop rules that say when a token ends a request."""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec.structs import replace

from ...runtime.messages import (
    BatchTokenOutput,
    Finish,
    FinishKind,
    GenerateRequest,
    TextOptions,
    TokenOutput,
    Usage,
)
from ...runtime.sampling_params import SamplingParams
from ...runtime.transport.message_base import Logprobs
from ..arrays import TOKEN_ID_BYTES, BoolArray, IntArray
from .req import Req
from .row_states import RowStates

_NOTHING_ALLOWED: Final = (
    "allowed_token_ids leaves no token that the grammar, bad_words and min_tokens allow as the next one; "
    "allow more"
)
_NO_LOGPROBS = Logprobs(b"")


class StopRules:
    """Stop tokens and length limits. The detokenizer finds stop strings, because only there text exists."""

    def __init__(self, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._is_eos: BoolArray = np.zeros(vocab_size, dtype=np.bool_)
        self._is_eos[[token for token in eos_token_ids if 0 <= token < vocab_size]] = True

    def may_finish(
        self, states: RowStates, rows: IntArray, token_ids: IntArray, lengths: IntArray
    ) -> BoolArray:
        """[n] the rows that may end with their new token or need a check on the host. The other rows do not end.

        Args:
            states: lengths and stop flags of the rows.
            rows: [n] the rows.
            token_ids: [n] the new tokens, each below the vocabulary size.
            lengths: [n] sequence lengths with the new tokens.
        """
        at_limit = lengths > states.max_kv_len[rows]
        result: BoolArray = at_limit | self.at_eos(states, rows, token_ids) | states.needs_host_check[rows]
        return result

    def at_eos(self, states: RowStates, rows: IntArray, token_ids: IntArray) -> BoolArray:
        """[n] whether the new token ([n], below the vocabulary size) is an EOS token that ends the row's output."""
        result: BoolArray = self._is_eos[token_ids] & ~states.ignore_eos[rows]
        return result

    def finish(self, req: Req, token_id: int) -> Finish | None:
        """The `Finish` if a request ends with its newest token, which `output_len` counts; STOP wins over LENGTH."""
        sampling = req.sampling
        if req.allowed_ids is not None and token_id not in req.allowed_ids:
            return Finish(FinishKind.ERROR, message=_NOTHING_ALLOWED, status=400, code="invalid_value")
        if req.output_len > sampling.min_new_tokens:
            is_eos = not sampling.ignore_eos and token_id in self._eos_token_ids
            if is_eos or token_id in sampling.stop_token_ids:
                return Finish(FinishKind.STOP, matched=token_id)
        if req.output_len >= req.max_new_tokens:
            return Finish(FinishKind.LENGTH)
        return None


class Answers:
    """Rows for the detokenizer, in order, until the event loop takes them."""

    def __init__(self) -> None:
        self._messages: list[BatchTokenOutput] = []

    def rows(self, rows: list[TokenOutput]) -> None:
        """Add output rows, at most one per request."""
        if rows:
            self._messages.append(BatchTokenOutput(rows))

    def take(self) -> list[BatchTokenOutput]:
        """All rows since the last call."""
        messages, self._messages = self._messages, []
        return messages


def output_row(
    req: Req,
    token_ids: bytes = b"",
    finish: Finish | None = None,
    logprobs: Logprobs | None = None,
    vector: bytes = b"",
) -> TokenOutput:
    """An output row of a request. The first one carries the text options and the log-probabilities of the prompt."""
    options = prompt_logprobs = None
    if not req.answered:
        req.answered = True
        sampling = req.sampling
        options = text_options(sampling, req.delivered_ids, req.keep_special_ids)
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = joined(req.prompt_logprobs)
            req.prompt_logprobs = []
    return TokenOutput(req.rid, token_ids, req.usage(), finish, options, logprobs, prompt_logprobs, vector)


def progress_row(req: Req, processed_tokens: int) -> TokenOutput:
    """A row that says how many tokens of the prompt have KV; it may come before the first output row."""
    usage = replace(req.usage(), processed_tokens=processed_tokens)
    return TokenOutput(req.rid, b"", usage)


def text_options(
    sampling: SamplingParams, delivered_ids: bytes = b"", keep_special_ids: tuple[int, ...] = ()
) -> TextOptions:
    """Make the options of the detokenizer, with the tokens whose text the client already has."""
    return TextOptions(
        stop=sampling.stop,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        delivered_ids=delivered_ids,
        keep_special_ids=keep_special_ids,
        stop_regex=sampling.stop_regex,
        repetition_detection=sampling.repetition_detection,
    )


def refusal_row(message: GenerateRequest, reason: str, status: int) -> TokenOutput:
    """The only row of a request that is refused at arrival. The message's fields may have values of any type.

    The row has default text options: it carries no text, and options of a wrong type would make it undecodable.
    """
    input_ids: object = message.input_ids
    num_bytes = len(input_ids) if isinstance(input_ids, bytes) else 0
    finish = Finish(FinishKind.ERROR, message=reason, status=status)
    return TokenOutput(message.rid, b"", Usage(num_bytes // TOKEN_ID_BYTES, 0), finish, TextOptions())


def joined(parts: list[Logprobs]) -> Logprobs:
    """Log-probabilities of consecutive runs of tokens as one run."""
    if not parts:
        return _NO_LOGPROBS
    return Logprobs(
        token_logprobs=b"".join(part.token_logprobs for part in parts),
        top_ids=b"".join(part.top_ids for part in parts),
        top_logprobs=b"".join(part.top_logprobs for part in parts),
        top_k=parts[0].top_k,
        ranks=b"".join(part.ranks for part in parts),
        chosen_ids=parts[0].chosen_ids,
        chosen=b"".join(part.chosen for part in parts),
    )
