"""`ImageSource`: an image as a request has it, before it is decoded; and the parts of messages that have one."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Final, Literal

import msgspec

from ...runtime.errors import RequestError

Detail = Literal["auto", "low", "high"]

_MAX_BYTES: Final = 20 << 20
_ONLY_DATA: Final = "images come as data: URLs, such as data:image/png;base64,iVBORw0..."
_MAX_SHOWN: Final = 40
_MAX_HEAD: Final = 1024
_ESCAPES: Final = {"%2B": "+", "%2F": "/", "%3D": "=", "%0A": "", "%0D": "", "%20": ""}
_KINDS: Final = ("video/", "audio/", "text/", "application/pdf", "image/svg")


class ImageSource(msgspec.Struct, frozen=True):
    """The bytes of an image file.

    Attributes:
        content: not yet looked at.
        param: the path of its part in the request, for errors.
        detail: "low": one tile; else as the model's processor does it.
        key: 32 bytes; equal for equal contents and details.
    """

    content: bytes
    param: str
    detail: Detail
    key: bytes


def image_of_bytes(content: bytes, param: str, detail: Detail = "auto") -> ImageSource:
    """An image.

    Raises:
        RequestError: it has too many bytes.
    """
    if len(content) > _MAX_BYTES:
        raise RequestError(
            f"{param} has {len(content):,} bytes, the limit of an image is {_MAX_BYTES:,}; scale it down",
            param=param,
            code="image_too_large",
            status=413,
        )
    return ImageSource(content, param, detail, hashlib.sha256(detail.encode() + content).digest())


def image_of_url(url: str, param: str, detail: Detail = "auto") -> ImageSource:
    """The image in a `data:` URL.

    Raises:
        RequestError: it is another URL, or not base64.
    """
    scheme, separator, rest = url.partition(":")
    scheme = scheme.lower()
    if not separator or scheme != "data":
        shown = _shown(url)
        if scheme in ("http", "https"):
            raise _refused(
                param, f"is {shown}, but this server fetches no URLs; {_ONLY_DATA}", "unsupported_value"
            )
        raise _refused(param, f"is {shown}, but {_ONLY_DATA}", "invalid_value")
    head, comma, data = rest.partition(",")
    kind, *parameters = (each.strip().lower() for each in head[:_MAX_HEAD].split(";"))
    if kind.startswith(_KINDS):
        raise _refused(param, f"is a data: URL of {kind}, but only images are supported", "unsupported_media")
    if not comma or "base64" not in parameters:
        raise _refused(
            param, f"is {_shown(url)}, but a data: URL has ;base64, before the data", "invalid_value"
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
        raise _refused(
            param, f"is {_shown(text)}, which is not base64; send the file in base64", "invalid_value"
        ) from None


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


def _refused(param: str, text: str, code: str) -> RequestError:
    return RequestError(f"{param} {text}", param=param, code=code)
