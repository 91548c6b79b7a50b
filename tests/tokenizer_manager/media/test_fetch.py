"""Images by URL: what is fetched, from where, and what is refused (SSRF)."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.config.media_config import MediaConfig
from engine.runtime.errors import ConfigError, QueueFullError, RequestError
from engine.tokenizer_manager.media import fetch
from engine.tokenizer_manager.media.fetch import MediaFetcher, is_public
from engine.tokenizer_manager.media.sources import MAX_BYTES, ImageSource, image_of_bytes, image_of_url
from tests.e2e.certificate import write_tls_files

AT = "messages[0].content[0].image_url.url"
PUBLIC = "93.184.216.34"
IMAGE = b"\x89PNG and so on"


def reply_of(content: bytes, *, head: bytes = b"", status: bytes = b"200 OK") -> bytes:
    head = head or b"Content-Length: %d\r\n" % len(content)
    return b"HTTP/1.1 " + status + b"\r\nContent-Type: text/plain\r\n" + head + b"\r\n" + content


class Net:
    """Names, and a server that has all addresses.

    Attributes:
        names: the addresses of each; one answer for each question.
        reply: of the server, which then closes the connection.
        connected: address and port of each connection.
        requests: heads that the server has received.
        writers: of the client's connections.
    """

    def __init__(self) -> None:
        self.names: dict[str, list[list[str]]] = {"example.org": [[PUBLIC]]}
        self.reply = reply_of(IMAGE)
        self.connected: list[tuple[str, int]] = []
        self.requests: list[bytes] = []
        self.server_names: list[str | None] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.tls: ssl.SSLContext | None = None
        self.silent = False

    def getaddrinfo(self, host: str, port: int, *_args: Any, **_kwargs: Any) -> list[Any]:
        answers = self.names.get(host)
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    async def fetch(self, fetcher: MediaFetcher, url: str, connect: Callable[..., Any]) -> ImageSource:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, ssl=self.tls)
        own_port = server.sockets[0].getsockname()[1]

        async def open_connection(address: str, port: int, **kwargs: Any) -> Any:
            self.connected.append((address, port))
            self.server_names.append(kwargs.get("server_hostname"))
            reader, writer = await connect("127.0.0.1", own_port, **kwargs)
            self.writers.append(writer)
            return reader, writer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "open_connection", open_connection)
            async with server:
                return await fetcher.fetched(image_of_url(url, AT, "low"))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            if not self.silent:
                writer.write(self.reply)
                await writer.drain()
            else:
                await reader.read()  # until the client leaves
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


Fetch = Callable[..., ImageSource]


@pytest.fixture
def net(monkeypatch) -> Net:
    net = Net()
    monkeypatch.setattr(socket, "getaddrinfo", net.getaddrinfo)
    return net


@pytest.fixture
def fetched(net: Net) -> Fetch:
    """Fetches a URL with these hosts allowed."""
    connect = asyncio.open_connection

    def run(url: str, *hosts: str, **settings: Any) -> ImageSource:
        config = MediaConfig(allowed_media_domains=hosts or ("example.org",), **settings)
        return asyncio.run(net.fetch(MediaFetcher(config), url, connect))

    return run


def refused(fetched: Fetch, url: str, *hosts: str, **settings: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        fetched(url, *hosts, **settings)
    assert error.value.param == AT and str(error.value).startswith(AT) and 400 <= error.value.status < 500
    return error.value


def test_an_image_is_fetched_from_the_checked_address(net, fetched):
    image = fetched("http://Example.org/a b/ö.png?x=1&y=ä#part")

    assert image == image_of_bytes(IMAGE, AT, "low")
    assert net.connected == [(PUBLIC, 80)]
    assert net.requests[0].startswith(b"GET /a%20b/%C3%B6.png?x=1&y=%C3%A4 HTTP/1.1\r\nHost: example.org\r\n")
    assert b"\r\nAccept-Encoding: identity\r\nConnection: close\r\n" in net.requests[0]


@pytest.mark.parametrize(
    "reply",
    [
        reply_of(b"4\r\nabcd\r\n2\r\nef\r\n0\r\n\r\n", head=b"Transfer-Encoding: chunked\r\n"),
        reply_of(b"abcdef", head=b"X-No-Length: 1\r\n"),
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + reply_of(b"abcdef"),
    ],
)
def test_forms_of_answers(net, fetched, reply):
    net.reply = reply

    assert fetched("http://example.org").content == b"abcdef"


def test_https_has_the_name_in_sni_and_checks_the_certificate(net, fetched, tmp_path, monkeypatch):
    files = write_tls_files(tmp_path)
    net.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    net.tls.load_cert_chain(files.certificate, files.key)
    net.names["localhost"] = [[PUBLIC]]

    assert "certificate" in str(refused(fetched, "https://localhost/a.png", "localhost"))
    monkeypatch.setenv("SSL_CERT_FILE", str(files.certificate))

    assert fetched("https://localhost/a.png", "localhost").content == IMAGE
    assert net.connected[-1] == (PUBLIC, 443) and net.server_names[-1] == "localhost"
    assert "certificate" in str(refused(fetched, "https://example.org/a.png")), "of another name"


ADDRESSES = {
    "127.0.0.1": "127.0.0.1",
    "[::1]": "::1",
    "0x7f000001": "127.0.0.1",
    "2130706433": "127.0.0.1",
    "169.254.169.254": "169.254.169.254",
    "[::ffff:10.0.0.1]": "::ffff:10.0.0.1",
    "[2002:7f00:1::]": "2002:7f00:1::",
    "internal.example": "10.1.2.3",
    "localhost": "127.0.0.1",
}


@pytest.mark.parametrize("host", ADDRESSES)
def test_addresses_that_are_not_public_are_refused_even_if_listed(net, fetched, host):
    net.names[host.strip("[]")] = [[ADDRESSES[host]]]

    assert "which is not in --allowed-media-domains" in str(refused(fetched, f"http://{host}/"))
    error = refused(fetched, f"http://{host}/", host)

    assert "has an address that is not public" in error.message and not net.connected
    if not host[0].isdigit() and host[0] != "[":
        assert ADDRESSES[host] not in error.message, "clients learn no addresses"


def test_a_name_with_a_public_and_a_private_address_is_refused(net, fetched):
    net.names["example.org"] = [[PUBLIC, "192.168.0.1"]]

    assert "has an address that is not public" in str(refused(fetched, "http://example.org/"))
    assert not net.connected


def test_a_name_that_changes_after_the_check_changes_nothing(net, fetched):
    net.names["example.org"] = [[PUBLIC], ["127.0.0.1"]]

    assert fetched("http://example.org/").content == IMAGE
    assert net.connected == [(PUBLIC, 80)] and len(net.names["example.org"]) == 1


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("http://example.org:22/", "has the port 22"),
        ("https://example.org:0/", "has the port 0"),
        ("http://example.org:8080/", "has the port 8080"),
        ("http://user:word@example.org/", "has a user name"),
        ("http://example.org\\@other/", "has a user name"),
        ("http://other/", "'other', which is not in --allowed-media-domains"),
        ("http://sub.example.org/", "is not in --allowed-media-domains"),
        ("http://example.org./", "is not in --allowed-media-domains"),
        ("http:///a.png", "is not in --allowed-media-domains"),
        ("http://example.org:x/", "is no valid URL"),
        ("http://[::1/", "is no valid URL"),
        ("http://example.org/\ud800.png", "is no valid URL"),
        ("http://example.org/" + "a" * 9000, "has 9,019 characters, the limit is 8,192"),
        ("file:///etc/passwd", "start the server with --allowed-local-media-path"),
    ],
)
def test_urls_that_are_not_allowed(net, fetched, url, cause):
    assert cause in str(refused(fetched, url)) and not net.connected


def test_a_listed_port_is_the_only_one(net, fetched):
    assert fetched("http://example.org:8080/", "a.example, example.org:8080").content == IMAGE
    assert net.connected == [("93.184.216.34", 8080)] and b"Host: example.org:8080\r\n" in net.requests[0]

    assert "has the port 80" in str(refused(fetched, "http://example.org/", "example.org:8080"))


ANSWERS = {
    "redirect": (
        reply_of(b"", status=b"302 Found", head=b"Location: http://127.0.0.1/\r\n"),
        "invalid_image_url",
        "is redirected (302)",
    ),
    "404": (reply_of(b"x", status=b"404 Not Found"), "invalid_image_url", "its server answers 404"),
    "large": (
        reply_of(b"", head=b"Content-Length: %d\r\n" % (MAX_BYTES + 1)),
        "image_too_large",
        f"has {MAX_BYTES + 1:,} bytes",
    ),
    "large at last": (
        reply_of(b"x" * (MAX_BYTES + 1), head=b"X-No-Length: 1\r\n"),
        "image_too_large",
        "bytes, the limit of an image is",
    ),
    "cut off": (reply_of(b"abc", head=b"Content-Length: 4\r\n"), "invalid_image_url", "is cut off"),
    "cut chunk": (
        reply_of(b"4\r\nabcd\r\n", head=b"Transfer-Encoding: chunked\r\n"),
        "invalid_image_url",
        "is cut off",
    ),
    "nothing": (b"", "invalid_image_url", "is cut off"),
    "ssh": (b"SSH-2.0-OpenSSH_9.9\r\n", "invalid_image_url", "is not HTTP"),
    "upgrade": (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
        "invalid_image_url",
        "is not HTTP",
    ),
    "long head": (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, "invalid_image_url", "has no end"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_that_are_no_content(net, fetched, answer):
    net.reply, code, cause = ANSWERS[answer]

    error = refused(fetched, "http://example.org/a.png")

    assert error.code == code and cause in error.message and len(net.connected) == 1
    assert net.writers[0].transport.is_closing()


@pytest.mark.parametrize(
    "body",
    [b"1;" + b"x" * 3000 + b"\r\na\r\n0\r\n\r\n", b"1\r\na\r\n0\r\n" + b"X: y\r\n" * 500 + b"\r\n"],
    ids=["extension", "trailers"],
)
def test_bytes_around_the_content_are_bounded_too(net, fetched, monkeypatch, body):
    net.reply = reply_of(body, head=b"Transfer-Encoding: chunked\r\n")
    assert fetched("http://example.org/").content == b"a"
    monkeypatch.setattr(fetch, "_MAX_READ", 2000)

    assert refused(fetched, "http://example.org/").code == "image_too_large"


def test_small_chunks_cost_no_more_memory_than_their_bytes(net, fetched):
    num_chunks = 50_000
    net.reply = reply_of(b"2\r\nab\r\n" * num_chunks + b"0\r\n\r\n", head=b"Transfer-Encoding: chunked\r\n")
    tracemalloc.start()
    try:
        assert len(fetched("http://example.org/").content) == 2 * num_chunks
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(net.reply) + 20 * num_chunks


def test_servers_that_cannot_be_reached(net, fetched, monkeypatch):
    assert "has no address" in str(refused(fetched, "http://unknown/", "unknown"))
    monkeypatch.setattr(fetch, "_LIMIT_S", 0.05)
    net.silent = True
    assert "within 0.05 s" in str(refused(fetched, "http://example.org/"))


def test_the_next_address_is_tried_and_all_are_named_as_one(net, fetched, monkeypatch):
    net.names["example.org"] = [[PUBLIC, "93.184.216.35"]]
    attempts: list[str] = []

    async def fail(address: str, *_args: Any, **_kwargs: Any) -> Any:
        attempts.append(address)
        raise ConnectionRefusedError

    with pytest.raises(RequestError, match="example.org accepts no connection on 80"):
        asyncio.run(
            net.fetch(
                MediaFetcher(MediaConfig(allowed_media_domains=("example.org",))), "http://example.org", fail
            )
        )
    assert len(attempts) == 2 and [address for address, _ in net.connected] == [PUBLIC, "93.184.216.35"]


def test_without_the_flag_nothing_is_fetched(net):
    with pytest.raises(RequestError, match=r"fetches no URLs; .*--allowed-media-domains example.org"):
        asyncio.run(MediaFetcher(MediaConfig()).fetched(image_of_url("https://example.org/a", AT)))


def test_more_than_some_at_a_time_are_refused_until_one_ends(net, monkeypatch):
    monkeypatch.setattr(fetch, "_MAX_RUNNING", 1)
    monkeypatch.setattr(fetch, "_LIMIT_S", 60.0)
    fetcher = MediaFetcher(MediaConfig(allowed_media_domains=("example.org",)))
    connect = asyncio.open_connection

    async def run() -> ImageSource:
        net.silent = True
        first = asyncio.create_task(net.fetch(fetcher, "http://example.org/", connect))
        while not net.requests:
            await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="1 other images are being fetched"):
            await fetcher.fetched(image_of_url("http://example.org/", AT))
        first.cancel()  # its client has left
        with pytest.raises(asyncio.CancelledError):
            await first
        assert net.writers[0].transport.is_closing()
        net.silent = False
        source: ImageSource = await net.fetch(fetcher, "http://example.org/", connect)
        return source

    assert asyncio.run(run()).content == IMAGE


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (PUBLIC, True),
        ("2606:2800:220:1::1", True),
        (f"::ffff:{PUBLIC}", True),
        (f"64:ff9b::{PUBLIC}", True),
        ("64:ff9b::10.0.0.1", False),
        ("::127.0.0.1", False),
        ("0.0.0.0", False),
        ("100.64.0.1", False),
        ("192.0.0.192", False),
        ("168.63.129.16", False),
        ("64:ff9b:1::a00:1", False),
        ("2001:0:4136:e378::1", False),
        ("3fff::1", False),
        ("::ffff:192.0.0.192", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("ff02::1", False),
        ("fe80::1%lo", False),
        ("fc00::1", False),
        ("fec0::1", False),
        ("2002:a00:1::", False),
    ],
)
def test_public_addresses(address, expected):
    assert is_public(address) is expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with images, and files beside it that links lead to."""
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    (folder / "a b.png").write_bytes(IMAGE)
    (folder / "sub" / "c.png").write_bytes(b"c")
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    (folder / "inner").symlink_to(folder / "sub")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize(
    ("path", "content"),
    [("a%20b.png", IMAGE), ("sub/c.png", b"c"), ("inner/c.png", b"c"), ("sub/../sub/c.png", b"c")],
)
def test_files_below_the_folder_are_read(fetched, folder, path, content):
    num_open = len(os.listdir("/dev/fd"))
    for url in (f"file://{folder}/{path}", f"file://localhost{folder}/{path}"):
        assert fetched(url, allowed_local_media_path=str(folder)).content == content
    assert len(os.listdir("/dev/fd")) == num_open


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("../secret", "is not below --allowed-local-media-path"),
        ("%2e%2e/secret", "is not below"),
        ("link", "is not below"),
        ("up/secret", "is not below"),
        ("", "is not below"),
        ("sub", "cannot be read: Is a directory"),
        ("pipe", "is no regular file"),
        ("missing.png", "cannot be read: No such file"),
        ("a%00b", "cannot be read"),
    ],
)
def test_other_files_are_refused(fetched, folder, path, cause):
    error = refused(fetched, f"file://{folder}/{path}", allowed_local_media_path=str(folder))

    assert cause in error.message and "secret" not in error.message.replace("/secret", "")


def test_a_file_that_is_too_large_is_refused_with_its_size(fetched, folder):
    with open(folder / "large.png", "wb") as file:
        file.truncate(3 * MAX_BYTES)  # without blocks on the disk
    error = refused(fetched, f"file://{folder}/large.png", allowed_local_media_path=str(folder))

    assert error.code == "image_too_large" and f"has {3 * MAX_BYTES:,} bytes" in error.message


def test_a_link_that_appears_after_the_check_is_not_followed(fetched, folder, monkeypatch):
    monkeypatch.setattr(os.path, "realpath", os.path.normpath)
    for path in ("link", "up/secret"):
        error = refused(fetched, f"file://{folder}/{path}", allowed_local_media_path=str(folder))
        assert "cannot be read" in error.message


def test_file_urls_have_no_host(fetched, folder):
    error = refused(fetched, f"file://other{folder}/sub/c.png", allowed_local_media_path=str(folder))

    assert "names the host 'other'" in error.message


@pytest.mark.parametrize(
    "entry",
    ["https://a.org", "*.a.org", "a.org/b", "me@a.org", "a.org:x", "a.org:0", "", "a.org,,b.org", "[::g]"],
)
def test_entries_that_are_no_hosts_are_refused_at_start(entry):
    with pytest.raises(ConfigError, match="must be the exact name of a host"):
        MediaConfig(allowed_media_domains=(entry,))


def test_hosts_of_the_setting():
    config = MediaConfig(allowed_media_domains=("A.org, b.org:81", "[::1]:82", "c_d.org"))

    assert config.media_hosts() == {("a.org", None), ("b.org", 81), ("::1", 82), ("c_d.org", None)}
    with pytest.raises(ConfigError, match="must be an absolute path"):
        MediaConfig(allowed_local_media_path="images")
