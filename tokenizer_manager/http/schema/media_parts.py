"""Parts of a message with an image, sound, video or file: refused by name, since only text is served.

This holds for every model: of a multimodal one the engine serves the language model only.
"""

from __future__ import annotations

from typing import Final

from ....runtime.errors import RequestError
from .json_body import show

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


def check_is_no_media(kind: object, at: str) -> None:
    """Check that a part of this type is not a medium.

    Raises:
        RequestError: it is one; names the field.
    """
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        raise RequestError(
            f"{at}.type is {show(kind)}, {ONLY_TEXT}", param=f"{at}.type", code="unsupported_value"
        )
