from __future__ import annotations

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from transformers.image_transforms import convert_to_rgb

from engine.tokenizer_manager.media.decode import BadImage, decode_image

from .image_files import MODES, file_of, picture, png_of

MAX_PIXELS = 1_000_000


@pytest.mark.parametrize("name", MODES)
def test_pixels_are_those_that_transformers_reads(name):
    mode, kind, options = MODES[name]
    content = file_of(picture(37, 23, mode), kind, **options)

    found = decode_image(content, MAX_PIXELS)

    import io

    image = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(content)))
    assert np.array_equal(np.asarray(found), convert_to_rgb(image, return_numpy=True))
    assert found.mode == "RGB" and found.size == (37, 23)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_exif_says(orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    image = picture(16, 8)

    found = decode_image(file_of(image, "PNG", exif=exif), MAX_PIXELS)

    methods = PIL.Image.Transpose
    turn = {
        2: methods.FLIP_LEFT_RIGHT,
        3: methods.ROTATE_180,
        4: methods.FLIP_TOP_BOTTOM,
        5: methods.TRANSPOSE,
        6: methods.ROTATE_270,
        7: methods.TRANSVERSE,
        8: methods.ROTATE_90,
    }
    expected = image if orientation == 1 else image.transpose(turn[orientation])
    assert np.array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP", "PNG"])
def test_the_first_frame_counts(kind):
    frames = [PIL.Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    options = {"lossless": True} if kind == "WEBP" else {}

    found = decode_image(
        file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options), MAX_PIXELS
    )

    assert found.getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("content", "code", "cause"),
    [
        (b"", "invalid_image", "is empty"),
        (b"hello world", "invalid_image", "is not an image: it begins with b'hello wo'"),
        (b"<svg xmlns=''/>", "unsupported_media", "is an SVG file"),
        (b"\n <?xml version='1.0'?>", "unsupported_media", "an XML or SVG file"),
        (b"%PDF-1.7", "unsupported_media", "is a PDF file"),
        (b"\0\0\0\x20ftypisom", "unsupported_media", "a video or audio file (MP4)"),
        (b"\0\0\0\x20ftypheic", "unsupported_media", "is a HEIC image"),
        (b"RIFF....WAVEfmt ", "unsupported_media", "audio (WAV)"),
        (b"\x1a\x45\xdf\xa3", "unsupported_media", "a video (Matroska or WebM)"),
        (png_of(50_000, 50_000), "image_too_large", "has 50,000 x 50,000 pixels, 2,500,000,000 in all"),
        (png_of(1001, 1000), "image_too_large", "the limit is 1,000,000; scale it down"),
        (b"\x89PNG\r\n\x1a\nxxxx", "invalid_image", "is a damaged PNG image"),
    ],
)
def test_what_is_no_image_is_named(content, code, cause):
    with pytest.raises(BadImage) as error:
        decode_image(content, MAX_PIXELS)

    assert error.value.code == code and cause in str(error.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_a_file_that_is_cut_off_is_refused(kind):
    content = file_of(picture(64, 64), kind)

    with pytest.raises(BadImage) as error:
        decode_image(content[: len(content) * 3 // 4], MAX_PIXELS)

    assert error.value.code == "invalid_image" and (
        "cut off" in str(error.value) or "damaged" in str(error.value)
    )


def test_only_the_plugin_of_the_first_bytes_reads_an_image(monkeypatch):
    used: list[str] = []
    open_image = PIL.Image.open

    def open_noted(file, formats):
        used.extend(formats)
        return open_image(file, formats=formats)

    monkeypatch.setattr(PIL.Image, "open", open_noted)
    for kind in ("PNG", "WEBP", "GIF"):
        decode_image(file_of(picture(8, 8), kind), MAX_PIXELS)

    assert used == ["PNG", "WEBP", "GIF"]


@pytest.mark.parametrize("content", [png_of(0, 5), b"GIF89a\0\0\0\0\0\0\0,\0\0\0\0\0\0\0\0\0\x02\0;"])
def test_an_image_without_pixels_is_refused(content):
    with pytest.raises(BadImage) as error:
        decode_image(content, MAX_PIXELS)

    assert error.value.code == "invalid_image"


def test_many_pixels_in_a_few_bytes_are_refused():
    with pytest.raises(BadImage, match="pixels a byte"):
        decode_image(png_of(6000, 6000), 50_000_000)
