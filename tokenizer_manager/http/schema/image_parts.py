"""Parts of messages that are images, in the forms of the APIs, and their limit in a request."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ....runtime.config.answer_config import RequestLimits
from ....runtime.config.media_config import ImageDetail
from ....runtime.errors import RequestError
from ...media.sources import ImageSource, bytes_of_base64, image_of_bytes, image_of_url
from .cache_fields import BREAKPOINTS
from .field_policy import Notes, policy_of
from .values import Body, convert, optional_text, refused, show

_DETAILS: Final = ("auto", "low", "high")
_MAX_SCHEME: Final = 8
_CHAT_PART: Final = policy_of(
    (), ("id", "uuid", *BREAKPOINTS), {"image_url": policy_of(("url", "detail"), ("uuid",))}
)
_INPUT_IMAGE: Final = policy_of(("image_url", "detail", "file_id"), ("id", *BREAKPOINTS))
_BLOCK: Final = policy_of((), ("cache_control",), {"source": policy_of(("data", "url"), ("media_type",))})


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

    def input_image(self, part: Body, at: str, notes: Notes) -> dict[str, Any] | None:
        """A part of a response's input; None: it is no image.

        Raises:
            RequestError: it is an image that cannot be used.
        """
        if part.get("type") != "input_image":
            return None
        notes.check(_INPUT_IMAGE, part, at)
        if part.get("file_id"):
            raise refused(
                f"{at}.file_id", "is set, but this server keeps no files; send image_url", "unsupported_value"
            )
        url = _required(part, "image_url", at)
        self.count(at)
        detail = optional_text(part.get("detail"), f"{at}.detail")
        return image_part(image_of_url(url, f"{at}.image_url", detail_of(detail, f"{at}.detail")))

    def anthropic_block(self, block: Body, at: str, notes: Notes) -> dict[str, Any] | None:
        """A block of Anthropic's messages; None: it is no image.

        Raises:
            RequestError: it is an image that cannot be used.
        """
        if block.get("type") != "image":
            return None
        notes.check(_BLOCK, block, at)
        source, place = convert(block.get("source") or {}, dict[str, Any], f"{at}.source"), f"{at}.source"
        self.count(at)
        match source.get("type"):
            case "base64":
                data = _required(source, "data", place)
                return image_part(image_of_bytes(bytes_of_base64(data, f"{place}.data"), f"{place}.data"))
            case "url":
                return image_part(image_of_url(_required(source, "url", place), f"{place}.url"))
            case kind:
                raise refused(
                    f"{place}.type", f"is {show(kind)}, but it must be base64 or url", "invalid_value"
                )

    def ollama(self, value: object, at: str) -> list[dict[str, Any]]:
        """The images of a message of Ollama's API: a list of files in base64.

        Raises:
            RequestError: one cannot be used.
        """
        texts = convert(value, list[str], at)
        return [image_part(self._of_text(text, f"{at}[{number}]")) for number, text in enumerate(texts)]

    def image_data(self, value: object, at: str) -> tuple[ImageSource, ...]:
        """The images of SGLang's API: one or a list, each in base64, or a URL, or an object with `url` and `detail`.

        Raises:
            RequestError: one cannot be used.
        """
        places = (
            {f"{at}[{number}]": each for number, each in enumerate(value)}
            if isinstance(value, list)
            else {at: value}
        )
        return tuple(self._of_value(each, place) for place, each in places.items())

    def _of_value(self, value: object, at: str) -> ImageSource:
        if isinstance(value, str):
            return self._of_text(value, at)
        given = convert(value, ImageUrl, at)
        return self._of_text(given.url, f"{at}.url", detail_of(given.detail, f"{at}.detail"))

    def _of_text(self, text: str, at: str, detail: ImageDetail = "auto") -> ImageSource:
        """An image in base64 or with a URL, by the colon, which base64 has not."""
        self.count(at)
        if ":" in text[:_MAX_SCHEME]:
            return image_of_url(text, at, detail)
        return image_of_bytes(bytes_of_base64(text, at), at, detail)

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


def _required(part: Body, key: str, at: str) -> str:
    if part.get(key) is None:
        raise refused(f"{at}.{key}", "is missing; an image must have it", "missing_field")
    return convert(part[key], str, f"{at}.{key}")


def image_part(source: ImageSource) -> dict[str, Any]:
    """An image as a part of a conversation."""
    return {"type": "image", "source": source}


def detail_of(value: str | None, at: str) -> ImageDetail:
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
