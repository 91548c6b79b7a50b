"""Bodies in another encoding: each is refused with its name, or read; none is taken for bad JSON."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib

import pytest

from ..conftest import Serve
from ..fake_engine import say_all
from .test_any_input import VALID

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "é"}, ensure_ascii=False)
DATA = BODY.encode()


@pytest.mark.parametrize("path", VALID)
def test_a_compressed_body_is_415_on_every_endpoint(serve: Serve, path: str):
    content = gzip.compress(json.dumps(VALID[path]).encode())
    reply = serve(say_all("x")).client.post(path, content=content, headers={"Content-Encoding": "gzip"})

    assert reply.status_code == 415
    assert "Content-Encoding is gzip, which this server does not decode" in reply.text


@pytest.mark.parametrize(
    "encoding", ["gzip", "GZIP", "deflate", "br", "zstd", "gzip, br", "x-unknown", "\xff"]
)
@pytest.mark.parametrize("content", [DATA, gzip.compress(DATA, mtime=0), zlib.compress(DATA), b""])
def test_any_other_encoding_is_named_even_if_the_body_is_plain(serve: Serve, encoding: str, content: bytes):
    headers = {b"Content-Encoding": encoding.encode("latin-1")}
    reply = serve(say_all("x")).client.post(PATH, content=content, headers=headers)

    assert reply.status_code == 415
    error = reply.json()["error"]
    assert error["code"] == "unsupported_encoding"
    assert "Content-Encoding is " in error["message"]


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": ""}, {"Content-Encoding": "Identity"}])
def test_a_plain_body_may_say_so(serve: Serve, headers: dict[str, str]):
    assert serve(say_all("x")).client.post(PATH, content=DATA, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("content", "name"), [(gzip.compress(DATA, mtime=0), "gzip"), (b"\x28\xb5\x2f\xfd\x00", "zstd")]
)
def test_a_compressed_body_without_the_header_is_named(serve: Serve, content: bytes, name: str):
    reply = serve(say_all("x")).client.post(PATH, content=content)

    assert reply.status_code == 415
    assert f"the body is {name}, without a Content-Encoding" in reply.json()["error"]["message"]


def test_a_byte_order_mark_of_utf_8_is_allowed(serve: Serve):
    served = serve(say_all("x"))

    assert served.client.post(PATH, content=codecs.BOM_UTF8 + DATA).status_code == 200
    assert bytes(served.engine.next_request().input_ids)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_another_unicode_encoding_is_named(serve: Serve, encoding: str):
    reply = serve(say_all("x")).client.post(PATH, content=BODY.encode(encoding))

    assert reply.status_code == 400
    name = encoding.upper()
    assert f"it begins with the byte order mark of {name}; send UTF-8" in reply.json()["error"]["message"]
