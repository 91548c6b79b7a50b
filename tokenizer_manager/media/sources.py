"""`ImageSource`: an image as a request has it, before it is decoded; and the parts of messages that have one."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Final

import msgspec

from ...runtime.config.media_config import ImageDetail
from ...runtime.errors import RequestError

MAX_BYTES: Final = 20 << 20
"""Most bytes of an image file."""
DATA_FORM: Final = "send the image as a data: URL, such as data:image/png;base64,iVBORw0..."
_MAX_SHOWN: Final = 40
_MAX_HEAD: Final = 1024
_ESCAPES: Final = {"%2B": "+", "%2F": "/", "%3D": "=", "%0A": "", "%0D": "", "%20": ""}
_KINDS: Final = ("video/", "audio/", "text/", "application/pdf", "image/svg")


class ImageSource(msgspec.Struct, frozen=True):
    """The bytes of an image file, or its URL.

    Attributes:
        content: not yet looked at; empty if there is a URL.
        param: the path of its part in the request, for errors.
        detail: "low": one tile; else as the model's processor does it.
        key: 32 bytes; equal for equal contents and details.
        url: of `http(s):` or `file:`, not yet looked at; see `MediaFetcher`.
    """

    content: bytes
    param: str
    detail: ImageDetail
    key: bytes
    url: str = ""


def image_of_bytes(content: bytes, param: str, detail: ImageDetail = "auto") -> ImageSource:
    """An image.

    Raises:
        RequestError: it has too many bytes.
    """
    if len(content) > MAX_BYTES:
        raise too_large(param, len(content))
    return ImageSource(content, param, detail, hashlib.sha256(detail.encode() + content).digest())


def image_of_url(url: str, param: str, detail: ImageDetail = "auto") -> ImageSource:
    """The image of a URL; that of a `data:` URL has its content.

    Raises:
        RequestError: it is another URL, or not base64.
    """
    scheme, separator, rest = url.partition(":")
    scheme = scheme.lower()
    if separator and scheme in ("http", "https", "file"):
        return ImageSource(b"", param, detail, b"", url)
    if not separator or scheme != "data":
        raise refused(param, f"is {shown(url)}, which is no URL of an image; {DATA_FORM}", "invalid_value")
    head, comma, data = rest.partition(",")
    kind, *parameters = (each.strip().lower() for each in head[:_MAX_HEAD].split(";"))
    if kind.startswith(_KINDS):
        raise refused(param, f"is a data: URL of {kind}, but only images are supported", "unsupported_media")
    if not comma or "base64" not in parameters:
        raise refused(
            param, f"is {shown(url)}, but a data: URL has ;base64, before the data", "invalid_value"
        )
    return image_of_bytes(bytes_of_base64(data, param), param, detail)


def bytes_of_base64(text: str, param: str) -> bytes:
    """The bytes; a text that was percent-encoded or has line breaks, too.

    Nothing is split or decoded piece by piece: a hostile text must not cost seconds and a hundred times its memory.

    Raises:
        RequestError: it is not base64.
    """
    if "%" in text:
        for escape, char in _ESCAPES.items():
            text = text.replace(escape, char).replace(escape.lower(), char)
    for space in " \n\r\t":
        text = text.replace(space, "")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise refused(
            param, f"is {shown(text)}, which is not base64; send the file in base64", "invalid_value"
        ) from None


def too_large(param: str, num_bytes: int) -> RequestError:
    """The error for a file of so many bytes."""
    return RequestError(
        f"{param} has {num_bytes:,} bytes, the limit of an image is {MAX_BYTES:,}; scale it down",
        param=param,
        code="image_too_large",
        status=413,
    )


def shown(text: str) -> str:
    """The beginning of a client's text, in quotes."""
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


def refused(param: str, text: str, code: str) -> RequestError:
    """The error for the part at `param`; `text` begins with a verb."""
    return RequestError(f"{param} {text}", param=param, code=code)
