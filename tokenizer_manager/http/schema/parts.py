"""Texts of messages, tool results and items: which parts are read, and what becomes of the others.

One rule in all APIs. A part of a user's message or of the instructions that is no text is refused. A part or an item
that a tool, the model or the client itself put into the history is left out with a warning instead: a client never
removes it, so a refusal would end its session.
"""

from __future__ import annotations

import json
from typing import Final

from ....runtime.errors import RequestError
from ...conversation.conversation import TEXT_SEPARATOR
from .field_policy import Notes
from .values import Body, convert, objects, refused, shortened, show

_TEXTS: Final = {
    **dict.fromkeys(("text", "input_text", "output_text", "summary_text", "reasoning_text"), "text"),
    "refusal": "refusal",
}
"""Type of a text part, in the APIs of OpenAI and Anthropic -> its field with the text."""
REASONING: Final = {"thinking": ("thinking",), "reasoning": ("text", "reasoning")}
"""Type of a part with reasoning -> its fields that may have the text."""
MEDIA_PARTS: Final = frozenset(
    {
        "audio",
        "audio_url",
        "document",
        "file",
        "image",
        "image_file",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "input_video",
        "video",
        "video_url",
    }
)
"""The `type` of such parts, in the APIs of OpenAI, Anthropic and vLLM."""
ONLY_TEXT: Final = (
    "but the engine serves only the text of this model; leave it out, or describe the contents in words"
)
ONLY_IMAGES: Final = "but of other media only images are read, in messages of the user; leave it out"
_MAX_SHOWN: Final = 60


def text_of(value: object, at: str, notes: Notes | None = None) -> str:
    """A text, or the texts of a list of parts, joined by newlines.

    Args:
        value: a string, or a list of objects with `type` and `text`.
        at: its path.
        notes: takes warnings about parts that are left out; None: they are refused.

    Raises:
        RequestError: it is something else, or a part is refused; names the part.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refused(at, f"is {show(value)}, but it must be a string or a list of parts", "invalid_type")
    texts = []
    for place, part in objects(value, at):
        text = part_text(part, place)
        if text is None:
            refuse_or_note(part, place, notes)
        else:
            texts.append(text)
    return TEXT_SEPARATOR.join(texts)


def result_text(value: object, at: str, notes: Notes) -> str:
    """The result of a tool as text: values that are neither text nor parts are JSON.

    The model reads `[image left out]` in the place of a part that is no text.

    Raises:
        RequestError: a text part has no text.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list) or not all(isinstance(each, dict) and "type" in each for each in value):
        return json.dumps(value, ensure_ascii=False)
    texts = []
    for place, part in objects(value, at):
        text = part_text(part, place)
        if text is None:
            left_out(part.get("type"), place, notes)
            text = f"[{shortened(str(part.get('type')), _MAX_SHOWN)} left out]"
        texts.append(text)
    return TEXT_SEPARATOR.join(texts)


def part_text(part: Body, at: str) -> str | None:
    """The text of a text part, which may leave out its type; None for other parts.

    Raises:
        RequestError: its text is missing or no string.
    """
    kind = part.get("type")
    if kind is None and "text" in part:
        kind = "text"
    if not isinstance(kind, str) or kind not in _TEXTS:
        return None
    key = _TEXTS[kind]
    if key not in part:
        raise refused(f"{at}.{key}", "is missing; the part must have it", "missing_field")
    return convert(part[key], str, f"{at}.{key}")


def reasoning_text(part: Body, at: str) -> str | None:
    """The text of a part with reasoning; None for other parts.

    Raises:
        RequestError: its text is no string.
    """
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in REASONING:
        return None
    key = next((key for key in REASONING[kind] if key in part), REASONING[kind][0])
    return convert(part.get(key, ""), str, f"{at}.{key}")


def refuse_or_note(part: Body, at: str, notes: Notes | None, rule: str = ONLY_TEXT) -> None:
    """Leave out a part that cannot be read, with a warning; or refuse it, without `notes`.

    Args:
        rule: about media.

    Raises:
        RequestError: it is refused.
    """
    kind = part.get("type")
    if notes is not None and isinstance(kind, str):
        left_out(kind, at, notes)
        return
    is_media = isinstance(kind, str) and kind in MEDIA_PARTS
    rule = rule if is_media else 'but only "text" can be read here; this model takes text'
    raise RequestError(f"{at}.type is {show(kind)}, {rule}", param=f"{at}.type", code="unsupported_value")


def left_out(kind: object, at: str, notes: Notes, why: str = "this server cannot read it") -> None:
    """Warn that a part or an item is left out."""
    notes.warn(f"{at} ({shortened(str(kind), _MAX_SHOWN)}) was left out: {why}")
