"""The part of a prompt that differs from the prompt of an earlier answer, for diagnostics of messages and responses.

A request leaves digests of its parts in `RecentItems`, for the API key that sent it. A later request that names its
answer is compared with them, as the template gets both: a breakpoint that has moved is no difference.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from ..generation import Generation
from .recent_items import RecentItems

_DIGEST_BYTES: Final = 12


class PromptParts(msgspec.Struct, frozen=True):
    """Digests of the parts of a prompt.

    Attributes:
        id: of the answer.
        num_messages: without the instructions.
        messages: a digest of all of them.
        prompt_len: its tokens.
    """

    id: str
    model: str
    system: str
    tools: str
    num_messages: int
    messages: str
    prompt_len: int


class Comparison(msgspec.Struct, frozen=True):
    """A prompt beside an earlier one.

    Attributes:
        changed: the first part that differs: model, system, tools or messages; "": it begins as the earlier one.
        prompt_len: tokens of the earlier one.
    """

    changed: str
    prompt_len: int

    def is_reused(self, cached_tokens: int, page_size: int) -> bool:
        """Whether all was cached that can be. Only whole pages are, and not the last token."""
        return cached_tokens >= (self.prompt_len - 1) // page_size * page_size

    def missed_tokens(self, cached_tokens: int) -> int:
        """Tokens of the earlier prompt that were not cached for this one."""
        return max(self.prompt_len - cached_tokens, 0)


def parts_of(generation: Generation, answer_id: str, num_messages: int | None = None) -> PromptParts:
    """The parts of a generation's prompt; `num_messages`: those that count, None for all."""
    conversation, scheduling = generation.request.conversation, generation.scheduling
    assert conversation is not None
    system = [each for each in conversation.messages[:1] if each["role"] == "system"]
    messages = conversation.messages[len(system) :][:num_messages]
    return PromptParts(
        id=answer_id,
        model=scheduling.served_as,
        system=_digest(system),
        tools=_digest(conversation.tools),
        num_messages=len(messages),
        messages=_digest(messages),
        prompt_len=len(generation.choices[0].prompt_ids),
    )


def compare(
    generation: Generation, answer_id: str, earlier_id: str | None, recent: RecentItems
) -> Comparison | None:
    """Keep the parts of a prompt, and compare them with those of an earlier answer; None: it is not known."""
    owner = generation.scheduling.owner
    recent.keep([parts_of(generation, answer_id)], owner)
    if not earlier_id:
        return None
    try:
        before = msgspec.convert(recent.find(earlier_id, owner), PromptParts)
    except msgspec.ValidationError:  # None, or an item of another kind
        return None
    now = parts_of(generation, answer_id, before.num_messages)
    parts = ("model", "system", "tools", "messages")
    changed = next((part for part in parts if getattr(now, part) != getattr(before, part)), "")
    return Comparison(changed, before.prompt_len)


def _digest(parts: object) -> str:
    data = msgspec.json.encode(parts, enc_hook=repr)
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
