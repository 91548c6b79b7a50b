"""`decode_image`: the bytes of an image file to RGB pixels. Runs in the worker only: the bytes come from anywhere.

The format is that of the first bytes; a media type that the client states does not matter. The header is read first,
and the number of pixels bounded before any is decoded.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS: Final = "PNG, JPEG, WebP, GIF, BMP and TIFF"
_LARGE_PIXELS: Final = 4_000_000
_MAX_PIXELS_PER_BYTE: Final = 10_000
"""Most pixels a byte of images above `_LARGE_PIXELS`; more than what deflate makes of a single color."""

_IMAGES: Final = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
)
_OTHERS: Final = (
    (b"%PDF", "a PDF file"),
    (b"<svg", "an SVG file"),
    (b"<?xml", "an XML or SVG file"),
    (b"\x1a\x45\xdf\xa3", "a video (Matroska or WebM)"),
    (b"OggS", "an Ogg file (audio or video)"),
    (b"ID3", "audio (MP3)"),
    (b"fLaC", "audio (FLAC)"),
    (b"II+\x00", "a BigTIFF file"),
    (b"MM\x00+", "a BigTIFF file"),
)
_BRANDS: Final = {
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"mif1": "HEIC",
    b"msf1": "HEIC",
    b"avif": "AVIF",
    b"avis": "AVIF",
}


class BadImage(Exception):
    """The bytes cannot be used; the text is for the client, and begins with a verb.

    Attributes:
        code: of the error.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def decode_image(content: bytes, max_pixels: int) -> Image:
    """The image, RGB with 8 bits each: the first frame or page, turned as EXIF says, transparent pixels over white.

    As `Idefics3ImageProcessorPil` and the other processors of transformers read a `PIL.Image`.

    Raises:
        BadImage: it is no image of `FORMATS`, is damaged, or has more than `max_pixels`.
        MemoryError: it does not fit into the memory of the process.
    """
    import PIL.Image
    import PIL.ImageOps

    PIL.Image.MAX_IMAGE_PIXELS = None  # the bound is `max_pixels`
    kind = format_of(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged metadata
            image = PIL.Image.open(io.BytesIO(content), formats=[kind])
            _check_size(*image.size, len(content), max_pixels)
            image.load()
            return _over_white(PIL.ImageOps.exif_transpose(image))
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # of any class: the bytes come from anywhere
        text = str(error)
        if "truncated" in text or "Truncated" in text:
            raise BadImage(
                "invalid_image", f"is a {kind} image that is cut off; send the whole file"
            ) from None
        raise BadImage(
            "invalid_image", f"is a damaged {kind} image ({_short(text, error)}); send another file"
        ) from None


def format_of(content: bytes) -> str:
    """The format by the first bytes, as Pillow names it.

    Raises:
        BadImage: it is none of `FORMATS`; other kinds are named.
    """
    for magic, name in _IMAGES:
        if content.startswith(magic):
            return name
    if content[:4] == b"RIFF":
        kind = content[8:12]
        if kind == b"WEBP":
            return "WEBP"
        other = {b"WAVE": "audio (WAV)", b"AVI ": "a video (AVI)"}.get(kind, "a RIFF file")
    elif content[4:8] == b"ftyp":
        brand = _BRANDS.get(content[8:12])
        other = "a video or audio file (MP4)" if brand is None else f"a {brand} image"
    else:
        start = content[:64].lstrip().lower()
        other = next((name for magic, name in _OTHERS if start.startswith(magic.lower())), "")
    if other:
        raise BadImage(
            "unsupported_media", f"is {other}, but only {FORMATS} images are supported; convert it"
        )
    if not content:
        raise BadImage("invalid_image", f"is empty; send a {FORMATS} image")
    raise BadImage(
        "invalid_image", f"is not an image: it begins with {content[:8]!r}; send a {FORMATS} image"
    )


def _check_size(width: int, height: int, num_bytes: int, max_pixels: int) -> None:
    pixels = width * height
    if pixels > max_pixels:
        raise BadImage(
            "image_too_large",
            f"has {width:,} x {height:,} pixels, {pixels:,} in all, the limit is {max_pixels:,}; scale it down",
        )
    if pixels > max(_LARGE_PIXELS, _MAX_PIXELS_PER_BYTE * num_bytes):
        raise BadImage(
            "image_too_large",
            f"has {width:,} x {height:,} pixels in {num_bytes:,} bytes, the limit is {_MAX_PIXELS_PER_BYTE:,} pixels a "
            "byte; scale it down",
        )


def _over_white(image: Image) -> Image:
    import PIL.Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
    return PIL.Image.alpha_composite(white, image).convert("RGB")


def _short(text: str, error: Exception) -> str:
    return " ".join(text.split())[:80] or type(error).__name__
