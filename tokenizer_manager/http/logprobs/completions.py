"""Log-probabilities in the shape of completions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ....models.tokenizer.tokenizer import Tokenizer
from ....runtime.messages import Finish
from .entries import TokenLogprob
from .placement import AnswerPlacement, prompt_offsets


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a completions choice: parallel lists; a prompt's first token has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionLogprobsBuilder:
    """Turns entries into the completions API's shape, chunk after chunk of one choice.

    `text_offset` counts characters of the returned text, echoed prompt included: where a token is in the text, the text
    from its offset on begins with it. A character that several tokens share belongs to the first of them.
    """

    def __init__(self, tokenizer: Tokenizer, placement: AnswerPlacement) -> None:
        """Begin a choice; `placement`: of its answer, without the echo."""
        self._tokenizer = tokenizer
        self._placement = placement
        self._echo_len = 0

    def prompt(
        self, echo: str, token_ids: Sequence[int], entries: Sequence[TokenLogprob], *, skipped: bool
    ) -> CompletionLogprobs:
        """The chunk of the echoed prompt, once, before the answer's.

        Args:
            echo: the prompt's text.
            token_ids: its tokens; the first one has no log-probability.
            entries: of the others.
            skipped: control tokens are not in the text; otherwise those that the client wrote are.
        """
        chunk = CompletionLogprobs([], [], [], [])
        offsets = prompt_offsets(echo, token_ids, self._tokenizer, skipped=skipped)
        self._add(chunk, token_ids[0], None, offsets[0])
        for entry, offset in zip(entries, offsets[1:], strict=True):
            self._add(chunk, entry.token_id, entry, offset)
        self._echo_len = len(echo)
        return chunk

    def answer(
        self,
        entries: Sequence[TokenLogprob],
        text: str,
        finish: Finish | None,
        chunk: CompletionLogprobs | None = None,
    ) -> CompletionLogprobs | None:
        """The chunk of a row of the answer, after `chunk` if that is given; None without one and without a token."""
        for entry, offset in self._placement.add(entries, text, finish):
            chunk = chunk or CompletionLogprobs([], [], [], [])
            self._add(chunk, entry.token_id, entry, self._echo_len + offset)
        return chunk

    def _add(self, chunk: CompletionLogprobs, token_id: int, entry: TokenLogprob | None, offset: int) -> None:
        token = self._token(token_id)
        chunk.tokens.append(token)
        chunk.token_logprobs.append(None if entry is None else entry.logprob)
        chunk.text_offset.append(offset)
        top = None
        if entry is not None:
            top = {self._token(each): value for each, value in entry.top}
            top.setdefault(token, entry.logprob)  # OpenAI lists the sampled token too
        chunk.top_logprobs.append(top)

    def _token(self, token_id: int) -> str:
        r"""A token as text; one that is not valid UTF-8 in OpenAI's form, `bytes:\xe2\x80`."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
