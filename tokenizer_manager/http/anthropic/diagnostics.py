"""Diagnostics of the Messages API: which part of a prompt differs from the prompt of an earlier message.

A request with `diagnostics` leaves digests of its parts in `RecentItems`, for the API key that sent it. A later request
that names its message is compared with them, as the template gets both: a breakpoint that has moved is no difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

import msgspec

from ...generation import Generation
from ..recent_items import RecentItems
from .wire import CacheMissReason, Diagnostics, DiagnosticsFields

_DIGEST_BYTES: Final = 12


class PromptParts(msgspec.Struct, frozen=True):
    """Digests of the parts of a prompt.

    Attributes:
        id: of the message that answers it.
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


def parts_of(generation: Generation, message_id: str, num_messages: int | None = None) -> PromptParts:
    """The parts of a generation's prompt; `num_messages`: those that count, None for all."""
    conversation, scheduling = generation.request.conversation, generation.scheduling
    assert conversation is not None
    system = [each for each in conversation.messages[:1] if each["role"] == "system"]
    messages = conversation.messages[len(system) :][:num_messages]
    return PromptParts(
        id=message_id,
        model=scheduling.served_as,
        system=_digest(system),
        tools=_digest(conversation.tools),
        num_messages=len(messages),
        messages=_digest(messages),
        prompt_len=len(generation.choices[0].prompt_ids),
    )


def diagnose(
    fields: DiagnosticsFields, generation: Generation, message_id: str, recent: RecentItems, page_size: int
) -> Callable[[int], Diagnostics | None]:
    """Keep the parts of a prompt, and compare them with those of the message that the request names.

    Returns:
        the diagnostics by the number of cached tokens; None: nothing to report.
    """
    owner = generation.scheduling.owner
    recent.keep([parts_of(generation, message_id)], owner)
    if not fields.previous_message_id:
        return lambda cached: None
    found = recent.find(fields.previous_message_id, owner)
    try:
        before = msgspec.convert(found, PromptParts)
    except msgspec.ValidationError:  # None, or an item of another API
        return lambda cached: Diagnostics(CacheMissReason("previous_message_not_found"))
    now = parts_of(generation, message_id, before.num_messages)
    for part in ("model", "system", "tools", "messages"):
        if getattr(now, part) != getattr(before, part):
            kind = f"{part}_changed"
            return lambda cached: Diagnostics(CacheMissReason(kind, max(before.prompt_len - cached, 0)))
    # The prompts begin alike. Only whole pages are cached, and not the last token.
    expected = (before.prompt_len - 1) // page_size * page_size
    return lambda cached: None if cached >= expected else Diagnostics(CacheMissReason("unavailable"))


def _digest(parts: object) -> str:
    data = msgspec.json.encode(parts, enc_hook=repr)
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
