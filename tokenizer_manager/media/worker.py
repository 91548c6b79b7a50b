"""The process that decodes images, see `JobProcess`: a file's bytes to tiles in a file.

Pillow is imported here only.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

import msgspec

from ...launch.child.socket_dir import image_name
from ...models.spec.vision_spec import ImageProcessing, VisionFamily
from ...runtime.transport.message_base import Message
from ..job_process import serve_jobs

NO_PILLOW: Final = "this server has no Pillow, the extra vision; on its machine, run: pip install pillow"
_MEMORY_BYTES: Final = 2 << 30  # of address space
_BEING_WRITTEN: Final = f"{image_name(bytes(32))}.new"
"""One name for all images: a process that is killed leaves one file at most, which the next one overwrites."""


class PrepareImage(Message, frozen=True):
    """Decode an image and write its tiles into a file.

    Attributes:
        content: the bytes of the image file.
        family, processing: of the model.
        splits: into several tiles, if the image is larger than one.
        max_pixels: most pixels of the image.
        folder: of the file.
    """

    content: bytes
    family: VisionFamily
    processing: ImageProcessing
    splits: bool
    max_pixels: int
    folder: str


class PreparedImage(Message, frozen=True):
    """The tiles of an image.

    Attributes:
        digest: 32 bytes, of the processor's version and the tiles.
        path: the file with the tiles.
        shape: (tiles, height, width, 3).
        rows, columns: see `Processor.tiles_of`.
    """

    digest: bytes
    path: str
    shape: tuple[int, int, int, int]
    rows: int
    columns: int


class ImageRefused(Message, frozen=True):
    """Why there are no tiles: code, text that begins with a verb, and status of the error."""

    code: str
    text: str
    status: int = 400


ImageReply = PreparedImage | ImageRefused


def main() -> None:
    """Answer jobs until the standard input is closed."""
    serve_jobs("engine: images", _MEMORY_BYTES, _answer)


def _answer(message: bytes) -> bytes:
    job = msgspec.msgpack.decode(message, type=PrepareImage)
    reply: ImageReply
    try:
        reply = prepare(job)
    except ImportError:
        reply = ImageRefused("unsupported_value", f"cannot be read: {NO_PILLOW}")
    except OSError as error:  # of the file with the tiles
        reply = ImageRefused(
            "no_room", f"cannot be stored by this server: {error.strerror}; retry later", 503
        )
    except MemoryError:
        reply = ImageRefused("image_too_large", "takes too much memory to decode; scale it down")
    return msgspec.msgpack.encode(reply)


def prepare(job: PrepareImage) -> ImageReply:
    """Do a job.

    Raises:
        ImportError: Pillow is missing.
        MemoryError: there is too little memory.
    """
    import PIL.Image  # noqa: F401  (before the image is blamed)

    from .decode import BadImage, decode_image
    from .processors.families import PROCESSORS

    try:
        image = decode_image(job.content, job.max_pixels)
        processor = PROCESSORS[job.family]
        tiles, rows, columns = processor.tiles_of(image, job.processing, splits=job.splits)
    except BadImage as error:
        return ImageRefused(error.code, str(error))
    num, height, width, colors = tiles.shape
    digest = hashlib.sha256(processor.VERSION + repr((tiles.shape, rows, columns)).encode())
    digest.update(tiles.data)
    path = Path(job.folder, image_name(digest.digest()))
    new = path.with_name(_BEING_WRITTEN)
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(tiles.data)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    return PreparedImage(digest.digest(), str(path), (num, height, width, colors), rows, columns)


if __name__ == "__main__":
    main()
