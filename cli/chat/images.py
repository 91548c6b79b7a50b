"""Images of a question: files named by `--image`, `/image` or a pasted path, as parts of a chat message."""

from __future__ import annotations

import base64
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from ...runtime.errors import RequestError
from .session import Content, Part

MAX_IMAGE_BYTES: Final = 20 << 20
_PATH: Final = re.compile(
    r"""'[^'\n]+\.(?:png|jpe?g|webp|gif|bmp|tiff?)'|"[^"\n]+\.(?:png|jpe?g|webp|gif|bmp|tiff?)"|"""
    r"""(?<!\S)(?:\\.|[^\s\\'"])+\.(?:png|jpe?g|webp|gif|bmp|tiff?)(?!\S)""",
    re.IGNORECASE,
)
"""A path with the suffix of an image, in quotes, or with backslashes before spaces, as terminals paste it."""


def image_of_file(path: Path) -> Part:
    """The image in a file, as a part of a message.

    Raises:
        RequestError: it cannot be read, is too large, or is no image.
    """
    from ...tokenizer_manager.media.decode import BadImage, format_of

    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may have no end
            raise RequestError(f"{path} is no regular file; name an image file")
        if status.st_size > MAX_IMAGE_BYTES:
            raise RequestError(
                f"{path} has {status.st_size:,} bytes; an image has {MAX_IMAGE_BYTES:,} at most"
            )
        content = path.read_bytes()
        kind = format_of(content)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None
    except BadImage as error:
        raise RequestError(f"{path} {error}") from None
    data = base64.b64encode(content).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind.lower()};base64,{data}"}}


def pasted_images(line: str) -> tuple[list[Path], str]:
    """The image files that a line names by their paths, and the line without them."""
    paths: list[Path] = []

    def take(found: re.Match[str]) -> str:
        text = found[0]
        text = text[1:-1] if text[0] in "'\"" else re.sub(r"\\(.)", r"\1", text)
        path = Path(unquote(text[7:]) if text.startswith("file:///") else text).expanduser()
        try:
            exists = path.is_file()
        except (OSError, ValueError):  # too long, for example
            exists = False
        if not exists:
            return found[0]
        paths.append(path)
        return ""

    rest = _PATH.sub(take, line)
    return paths, " ".join(rest.split(" ")).strip() if paths else line


def content_of(text: str, images: Sequence[Part]) -> Content:
    """A question with images, which come first."""
    return [*images, {"type": "text", "text": text}] if images else text
