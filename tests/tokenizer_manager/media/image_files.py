"""Image files of all kinds, made with Pillow."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import PIL.Image

MODES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "png 1": ("1", "PNG", {}),
    "png gray": ("L", "PNG", {}),
    "png gray alpha": ("LA", "PNG", {}),
    "png palette": ("P", "PNG", {}),
    "png palette transparent": ("P", "PNG", {"transparency": 3}),
    "png gray transparent": ("L", "PNG", {"transparency": 7}),
    "png rgb": ("RGB", "PNG", {}),
    "png rgba": ("RGBA", "PNG", {}),
    "png 16 bits": ("I;16", "PNG", {}),
    "jpeg gray": ("L", "JPEG", {}),
    "jpeg": ("RGB", "JPEG", {"quality": 80}),
    "jpeg progressive": ("RGB", "JPEG", {"progressive": True}),
    "jpeg cmyk": ("CMYK", "JPEG", {}),
    "webp": ("RGB", "WEBP", {"quality": 60}),
    "webp alpha": ("RGBA", "WEBP", {"lossless": True}),
    "gif": ("P", "GIF", {}),
    "gif transparent": ("P", "GIF", {"transparency": 5}),
    "bmp": ("RGB", "BMP", {}),
    "bmp gray": ("L", "BMP", {}),
    "tiff": ("RGB", "TIFF", {}),
    "tiff lzw": ("RGB", "TIFF", {"compression": "tiff_lzw"}),
    "tiff cmyk": ("CMYK", "TIFF", {}),
    "tiff float": ("F", "TIFF", {}),
    "tiff lab": ("LAB", "TIFF", {}),
}
"""Name -> mode, format and options of a file."""


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> PIL.Image.Image:
    """A picture with edges and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    channels = [(x * (3 + i) + y * (7 - i) + rng.integers(0, 40, (height, width))) % 256 for i in range(4)]
    if mode == "I;16":
        return PIL.Image.fromarray((channels[0] * 200).astype(np.uint16))
    if mode == "F":
        return PIL.Image.fromarray(channels[0].astype(np.float32))
    if mode == "P":
        return picture(width, height).quantize(64)
    bands = len(PIL.Image.new(mode, (1, 1)).getbands())
    if mode == "1":
        return PIL.Image.fromarray(channels[0] > 128)
    array = np.stack(channels[:bands], -1).astype(np.uint8)
    return PIL.Image.frombytes(mode, (width, height), array.tobytes())


def file_of(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_of(width: int, height: int, data: bytes = b"", bits: int = 1) -> bytes:
    """A gray PNG with this header; `data` is compressed pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")
        )

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([bits, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
