"""`turn_without_end`: whether an answer ends where the chat template ends a turn.

A chat is rendered with an answer in it, and the text after the answer is tokenized. If it has none of the tokens that
end an answer, the model runs to the limit of every request: the files of the model do not belong together, or the
template was changed without the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...models.tokenizer.tokenizer import Tokenizer
from ...runtime.errors import RequestError
from .chat_template import ChatTemplate

_ANSWER: Final = "zq answer zq"
_CHAT: Final = ({"role": "user", "content": "zq question zq"}, {"role": "assistant", "content": _ANSWER})
_MAX_SHOWN_CHARS: Final = 40


def turn_without_end(template: ChatTemplate, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> str:
    """Why answers do not end with the turn, and after "; " what to do; "" if they do, or if nothing is known.

    Args:
        template: of the model.
        tokenizer: of the model.
        eos_token_ids: the tokens that end an answer.
    """
    try:
        rendered = template.render(_CHAT, add_generation_prompt=False)
    except RequestError:
        return ""
    _, found, after = rendered.rpartition(_ANSWER)
    after = after.strip()
    if not found or not after:
        return ""  # a template for one turn, or of a kind that shows no end
    ids = tokenizer.encode(after, add_special_tokens=False)
    if not ids or not set(ids).isdisjoint(eos_token_ids):
        return ""
    shown = after if len(after) <= _MAX_SHOWN_CHARS else after[:_MAX_SHOWN_CHARS] + "..."
    token = tokenizer.token_bytes(ids[0]).decode("utf-8", "replace")
    if tokenizer.is_special(ids[0]):
        return (
            f"the chat template ends a turn with {token!r}, which is no end token of the model: answers run to the "
            f"limit; add {ids[0]} to eos_token_id in generation_config.json, or send stop: [{token!r}]"
        )
    return (
        f"the chat template ends a turn with {shown!r}, which is no single token of the tokenizer: answers run to the "
        f"limit; use the tokenizer that belongs to the template, or send stop: [{shown!r}]"
    )
