"""`MediaFetcher`: images that requests name by `http(s):` and `file:` URLs, each only where the operator allows it.

A client chooses the URL, so a server that fetches any would let it into networks that only the server reaches. The host
must be listed; its name is resolved once, and all its addresses must be public; the connection goes to an address that
was checked, so another answer of the resolver changes nothing. Neither redirects nor proxies are followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import ssl
import stat
from typing import IO, TYPE_CHECKING, Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

from ...runtime.config.media_config import MediaConfig
from ...runtime.errors import QueueFullError, RequestError
from .sources import DATA_FORM, MAX_BYTES, ImageSource, image_of_bytes, refused, shown, too_large

if TYPE_CHECKING:
    import httptools

logger = logging.getLogger(__name__)

_LIMIT_S: Final = 10.0
_MAX_RUNNING: Final = 16
_MAX_URL: Final = 8192
_MAX_HEAD: Final = 65536
_READ: Final = 65536
_PORTS: Final = {"http": 80, "https": 443}
_SAFE: Final = "/%:@!$&'()*+,;=~"
_MAX_READ: Final = 2 * MAX_BYTES
"""Bytes of an answer, with the heads and lengths of its chunks."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_NOT_PUBLIC: Final = (
    ipaddress.IPv4Network("192.0.0.0/24"),  # metadata of Oracle's cloud; `is_global` of Python before 3.11.10
    ipaddress.IPv4Network("168.63.129.16/32"),  # the host of a machine in Azure
    ipaddress.IPv6Network("3fff::/20"),  # documentation
)
_FAILED: Final = "invalid_image_url"


class MediaFetcher:
    """See the module."""

    def __init__(self, config: MediaConfig) -> None:
        """Fetch what the settings allow."""
        self._hosts = config.media_hosts()
        self._folder = config.allowed_local_media_path
        self._num_running = 0
        self._tls: ssl.SSLContext | None = None

    async def fetched(self, source: ImageSource) -> ImageSource:
        """The source with its content; itself if it has no URL.

        Raises:
            RequestError: the URL is not allowed, or gives no content.
            QueueFullError: too many are being fetched.
        """
        if not source.url:
            return source
        if len(source.url) > _MAX_URL:
            raise _not(source, f"has {len(source.url):,} characters, the limit is {_MAX_URL:,}; {DATA_FORM}")
        try:
            source.url.encode()  # not half of a surrogate pair
            url = urlsplit(source.url)
            url.port  # noqa: B018  (raises)
        except ValueError as error:
            raise _not(source, f"is no valid URL: {error}; {DATA_FORM}") from None
        if url.scheme == "file":
            content = await asyncio.to_thread(self._read, source, url)
        else:
            self._check(source, url)
            if self._num_running >= _MAX_RUNNING:
                raise QueueFullError(f"{self._num_running} other images are being fetched; retry later", 1)
            self._num_running += 1
            try:
                async with asyncio.timeout(_LIMIT_S):
                    content = await self._download(source, url)
            except TimeoutError:
                text = f"could not be fetched from {url.hostname} within {_LIMIT_S:g} s; retry later"
                raise _not(source, text, _FAILED) from None
            finally:
                self._num_running -= 1
        # Not on the event loop: hashing 20 MB takes some 10 ms.
        return await asyncio.to_thread(image_of_bytes, content, source.param, source.detail)

    def _check(self, source: ImageSource, url: SplitResult) -> None:
        if not self._hosts:
            raise _not(
                source,
                f"is {shown(source.url)}, but this server fetches no URLs; {DATA_FORM}, or start the server with "
                f"--allowed-media-domains {url.hostname or 'example.org'}",
            )
        if "@" in url.netloc:
            raise _not(source, "has a user name, which is not sent to servers; leave it out of the URL")
        host, port = url.hostname or "", _port_of(url)
        listed = {each for name, each in self._hosts if name == host}
        if not listed:
            raise _not(
                source, f"is a URL of {shown(host)}, which is not in --allowed-media-domains; {DATA_FORM}"
            )
        if port not in listed and not (None in listed and port in _PORTS.values()):
            raise _not(
                source,
                f"has the port {port}, which is neither 80, 443 nor in --allowed-media-domains; {DATA_FORM}",
            )

    async def _download(self, source: ImageSource, url: SplitResult) -> bytes:
        host, port = url.hostname or "", _port_of(url)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise _not(source, f"names {shown(host)}, which has no address; correct it", _FAILED) from None
        addresses = [str(info[4][0]) for info in found]
        if not all(map(is_public, addresses)):
            logger.info("fetch_refused host=%s addresses=%s", host, addresses)
            raise _not(source, f"names {shown(host)}, which has an address that is not public; {DATA_FORM}")
        for address in dict.fromkeys(addresses):
            try:
                reader, writer = await asyncio.open_connection(
                    address,
                    port,
                    ssl=self._context() if url.scheme == "https" else None,
                    server_hostname=host if url.scheme == "https" else None,
                )
            except ssl.SSLError as error:
                raise _not(source, f"has no valid certificate: {error.reason}", _FAILED) from None
            except OSError:
                continue  # to the next address
            try:
                writer.write(_request(url))
                return await _body(source, reader)
            except OSError:
                raise _not(source, f"could not be fetched: {host} closed the connection", _FAILED) from None
            finally:
                writer.transport.abort()
        raise _not(source, f"could not be fetched: {host} accepts no connection on {port}", _FAILED)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _read(self, source: ImageSource, url: SplitResult) -> bytes:
        """The content of a file below the folder; runs on a thread.

        The path is resolved, and then opened folder by folder without following links: one that is put there meanwhile
        is an error.
        """
        if self._folder is None:
            raise _not(
                source,
                f"is {shown(source.url)}, but this server reads no files; {DATA_FORM}, or start the server with "
                "--allowed-local-media-path",
            )
        if url.netloc not in ("", "localhost"):
            raise _not(source, f"names the host {shown(url.netloc)}; file: URLs have none: file:///...")
        folder = os.path.realpath(self._folder)
        try:
            path = os.path.relpath(os.path.realpath(unquote(url.path)), folder)
            if not url.path.startswith("/") or path.split(os.sep)[0] in (os.pardir, os.curdir):
                raise _not(
                    source, f"is {shown(source.url)}, which is not below --allowed-local-media-path; move it"
                )
            with _opened(folder, path) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise _not(source, f"is {shown(source.url)}, which is no regular file")
                if status.st_size > MAX_BYTES:
                    raise too_large(source.param, status.st_size)
                content = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:  # a path with NUL
            cause = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise _not(source, f"is {shown(source.url)}, which cannot be read: {cause}", _FAILED) from None
        return content


def is_public(address: str) -> bool:
    """Whether an address is one of the open network; one that contains an IPv4 address, if that is."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(ip.packed[-4:])
        if inner is not None:
            return is_public(str(inner))
        if ip.is_site_local:
            return False
    if any(ip in network for network in _NOT_PUBLIC):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


def _port_of(url: SplitResult) -> int:
    return _PORTS[url.scheme] if url.port is None else url.port


def _request(url: SplitResult) -> bytes:
    target = quote(url.path or "/", _SAFE) + (f"?{quote(url.query, _SAFE + '?')}" if url.query else "")
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    if _port_of(url) != _PORTS[url.scheme]:
        host = f"{host}:{url.port}"
    head = (f"GET {target} HTTP/1.1", f"Host: {host}", "User-Agent: engine", "Accept: image/*")
    return "\r\n".join([*head, "Accept-Encoding: identity", "Connection: close", "", ""]).encode("ascii")


async def _body(source: ImageSource, reader: asyncio.StreamReader) -> bytes:
    """The body of the response; a body that no length ends lasts until the connection is closed."""
    import httptools

    response = _Response()
    parser = response.parser = httptools.HttpResponseParser(response)
    num_read = 0
    while not response.is_complete:
        data = await reader.read(_READ)
        if not data:
            break
        num_read += len(data)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not response.is_complete:
                raise _not(source, "could not be fetched: the answer is not HTTP", _FAILED) from None
        if response.status:
            _check_head(source, response)
        elif num_read > _MAX_HEAD:
            raise _not(source, "could not be fetched: the head of the answer has no end", _FAILED)
        if num_read > _MAX_READ:
            raise too_large(source.param, num_read)
    if not response.is_complete and (not response.status or response.has_length):
        raise _not(source, "could not be fetched: the answer is cut off; retry later", _FAILED)
    return bytes(response.body)


def _check_head(source: ImageSource, response: _Response) -> None:
    if 300 <= response.status < 400:
        raise _not(
            source, f"is redirected ({response.status}), which is not followed; send the last URL", _FAILED
        )
    if response.status != 200:
        raise _not(source, f"could not be fetched: its server answers {response.status}", _FAILED)
    if (num_bytes := max(response.num_bytes, response.stated_bytes)) > MAX_BYTES:
        raise too_large(source.param, num_bytes)


class _Response:
    """A response as `httptools` reads it, without its interim heads (1xx).

    Attributes:
        body: until now; not a list of chunks, which a server may make of two bytes each.
        status: 0: its head is not complete.
        stated_bytes: of the body, as the head says.
        has_length: the head says where the body ends; else it ends with the connection.
    """

    parser: httptools.HttpResponseParser

    def __init__(self) -> None:
        self.body = bytearray()
        self.status = self.num_bytes = self.stated_bytes = 0
        self.has_length = self.is_complete = False

    def on_message_begin(self) -> None:
        self.has_length, self.stated_bytes = False, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length" and value.isdigit():
            self.stated_bytes = int(value)
        self.has_length = self.has_length or name in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        self.status = status if status >= 200 else 0

    def on_body(self, body: bytes) -> None:
        self.num_bytes += len(body)
        if self.num_bytes <= MAX_BYTES:
            self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = self.status > 0


def _opened(folder: str, path: str) -> IO[bytes]:
    """A file, opened from `folder` on without links.

    Raises:
        OSError: there is no such file, or a part of the path is a link.
    """
    *folders, name = path.split(os.sep)
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for each in folders:
            below = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        # O_NONBLOCK: opening a pipe waits for its writer.
        return open(
            name,
            "rb",
            opener=lambda each, flags: os.open(each, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at),
        )
    finally:
        os.close(at)


def _not(source: ImageSource, text: str, code: str = "unsupported_value") -> RequestError:
    return refused(source.param, text, code)
