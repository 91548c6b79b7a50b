from __future__ import annotations

import base64
import contextlib
import tracemalloc

import pytest

from engine.runtime.errors import RequestError
from engine.tokenizer_manager.media.sources import image_of_bytes, image_of_url

AT = "messages[0].content[0].image_url.url"
DATA = base64.b64encode(b"bytes>>>?").decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{DATA}",
        f"DATA:image/png;charset=utf-8;BASE64,{DATA}",
        f"data:;base64,{DATA.rstrip('=')}",
        f"data:image/png;base64,{DATA[:4]}\n {DATA[4:]}",
        "data:image/png;base64," + DATA.replace("+", "%2B").replace("=", "%3D"),
    ],
)
def test_the_bytes_of_a_data_url(url):
    image = image_of_url(url, AT)

    assert image.content == b"bytes>>>?" and image.param == AT


def test_keys_are_those_of_bytes_and_detail():
    keys = {
        image_of_bytes(content, AT, detail).key
        for content in (b"a", b"b")
        for detail in ("auto", "low", "high")
    }

    assert len(keys) == 6 and image_of_bytes(b"a", "other").key in keys


@pytest.mark.parametrize(
    ("url", "code", "cause"),
    [
        ("iVBORw0KGgo", "invalid_value", "is 'iVBORw0KGgo', which is no URL of an image"),
        ("", "invalid_value", "is '', which is no URL"),
        (
            "ftp://example.org/a.png",
            "invalid_value",
            "which is no URL of an image; send the image as a data:",
        ),
        ("data:image/png,abc", "invalid_value", "has ;base64, before the data"),
        ("data:image/png;base64", "invalid_value", "has ;base64, before the data"),
        ("data:image/png;base64,%%%", "invalid_value", "which is not base64"),
        ("data:image/png;base64,abcde", "invalid_value", "which is not base64"),
        ("data:image/png;base64,äöü", "invalid_value", "which is not base64"),
        ("data:video/mp4;base64,AAAA", "unsupported_media", "is a data: URL of video/mp4, but only images"),
        ("data:image/svg+xml;base64,AAAA", "unsupported_media", "image/svg+xml"),
        ("data:application/pdf;base64,AAAA", "unsupported_media", "application/pdf"),
    ],
)
def test_other_urls_are_refused_by_their_path(url, code, cause):
    with pytest.raises(RequestError) as error:
        image_of_url(url, AT)

    assert (error.value.status, error.value.code, error.value.param) == (400, code, AT)
    assert cause in error.value.message and error.value.message.startswith(AT)


@pytest.mark.parametrize("text", [";base64,%41%41", ";base64,aa aa", ";base64,%2B", ";", " "])
def test_a_hostile_url_takes_little_memory(text):
    head, comma, piece = text.rpartition(",")
    url = f"data:{head}{comma}{piece * ((1 << 20) // len(piece))}"
    tracemalloc.start()
    with contextlib.suppress(RequestError):
        image_of_url(url, AT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 8 << 20


def test_too_many_bytes_are_refused():
    with pytest.raises(
        RequestError, match=r"has 20,971,521 bytes, the limit of an image is 20,971,520"
    ) as error:
        image_of_bytes(bytes((20 << 20) + 1), AT)

    assert error.value.status == 413
