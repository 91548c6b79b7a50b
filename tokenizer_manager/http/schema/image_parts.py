"""Parts of messages that are images, in the forms of the APIs, and their limit in a request."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ....runtime.config.answer_config import RequestLimits
from ....runtime.errors import RequestError
from ...media.sources import Detail, ImageSource, image_of_url
from .cache_fields import BREAKPOINTS
from .field_policy import Notes, policy_of
from .values import Body, convert, refused, show

_DETAILS: Final = ("auto", "low", "high")
_CHAT_PART: Final = policy_of(
    (), ("id", "uuid", *BREAKPOINTS), {"image_url": policy_of(("url", "detail"), ("uuid",))}
)


class ImageUrl(msgspec.Struct):
    """`image_url` of a part of a chat completion."""

    url: str
    detail: str | None = None


class RequestImages:
    """The images of one request while it is read."""

    def __init__(self, limits: RequestLimits) -> None:
        """Begin."""
        self._max_images = limits.max_images
        self._count = 0

    def chat_part(self, part: Body, at: str, notes: Notes) -> dict[str, Any] | None:
        """A part of a chat completion for the template; None: it is no image.

        Raises:
            RequestError: it is an image that cannot be used.
        """
        if part.get("type") != "image_url":
            return None
        notes.check(_CHAT_PART, part, at)
        value, place = part.get("image_url"), f"{at}.image_url"
        if value is None:
            raise refused(place, "is missing; the part must have it", "missing_field")
        given = ImageUrl(value) if isinstance(value, str) else convert(value, ImageUrl, place)
        where = place if isinstance(value, str) else f"{place}.url"
        self.count(place)
        return image_part(image_of_url(given.url, where, detail_of(given.detail, f"{place}.detail")))

    def count(self, at: str) -> None:
        """Count an image.

        Raises:
            RequestError: it is one too many.
        """
        self._count += 1
        if self._count > self._max_images:
            raise RequestError(
                f"{at} is image {self._count} of the request, the limit is {self._max_images}; send fewer images, or "
                f"start the server with a higher one: --limit-mm-per-prompt '{{\"image\": {self._count}}}'",
                param=at,
                code="too_many_images",
            )


def image_part(source: ImageSource) -> dict[str, Any]:
    """An image as a part of a conversation."""
    return {"type": "image", "source": source}


def detail_of(value: str | None, at: str) -> Detail:
    """The detail of an image.

    Raises:
        RequestError: it is unknown.
    """
    for detail in _DETAILS:
        if value == detail:
            return detail
    if value is None:
        return "auto"
    raise refused(at, f"is {show(value)}, but it must be one of {', '.join(_DETAILS)}", "invalid_value")
