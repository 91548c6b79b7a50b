"""`Upload`: the multipart body of `POST /v1/files`, parsed while it arrives; the file goes to the disk."""

from __future__ import annotations

import asyncio
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ....runtime.errors import RequestError
from ...state.files import NewFile
from ..exchange import Exchange
from ..schema.values import refused, show

_MAX_FIELD_BYTES: Final = 1024
_MAX_PARTS: Final = 16
_MAX_HEADER_BYTES: Final = 8192
"""The most of the headers of a part."""
_BUFFER_BYTES: Final = 1 << 20
FORM_BYTES: Final = 64 << 10
"""Room for the fields around the file."""


class Upload:
    """A form with one file.

    Attributes:
        fields: the other fields by name.
        filename: of the file, as the client names it; None before its part.
    """

    def __init__(self, content_type: bytes, file: NewFile) -> None:
        """Prepare for a body.

        Args:
            content_type: of the request.
            file: entered; gets the content.

        Raises:
            RequestError: 415, it is no form.
        """
        kind, options = parse_options_header(content_type.decode("latin-1"))
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise RequestError(
                f"the Content-Type is {show(kind.decode('latin-1'))}, but a file is sent as multipart/form-data with a "
                f"boundary, as OpenAI's clients send it",
                code="unsupported_media_type",
                status=415,
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._file = file
        self._num_parts = 0
        self._header_bytes = 0
        self._ended = False
        self._header = b""
        self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._is_file = False
        self._field = bytearray()
        self._buffer = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": self._on_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _invalid(str(error)) from None

    async def receive(self, exchange: Exchange, max_file_bytes: int) -> None:
        """Read the body, write its file and sync it.

        Raises:
            RequestError: it is no form with one file, or too large.
            ClientGone: the client disconnected.
        """
        async for part in exchange.body_parts(max_file_bytes + FORM_BYTES, "--max-file-mb"):
            try:
                self._parser.write(part)
            except FormParserError as error:
                raise _invalid(str(error)) from None
            if len(self._buffer) >= _BUFFER_BYTES:
                await self._flush()
        if not self._ended:
            raise _invalid("its last boundary is missing")
        if self.filename is None:
            raise refused("file", "is missing; send the lines of the requests as this part of the form")
        await self._flush()
        if self._file.num_bytes > max_file_bytes:
            raise RequestError(
                f"the file has {self._file.num_bytes:,} bytes, the limit is {max_file_bytes:,}; send less or raise "
                f"--max-file-mb",
                param="file",
                code="request_too_large",
                status=413,
            )
        await asyncio.to_thread(self._file.sync)

    async def _flush(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        await asyncio.to_thread(self._file.write, data)

    # ------------------------------------------------------------ events of the parser

    def _on_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _invalid(f"it has more than {_MAX_PARTS} parts")
        self._headers = {}
        self._header_bytes = 0

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._check_headers(end - start)
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._check_headers(end - start)
        self._value += data[start:end]

    def _check_headers(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise _invalid(f"the headers of a part have more than {_MAX_HEADER_BYTES} bytes")

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _on_headers(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"").decode("latin-1")
        _, options = parse_options_header(disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.filename is not None:
                raise refused("file", "is there twice; send one file")
            name = options.get(b"filename", b"").decode(errors="replace")
            self.filename = name.rpartition("/")[2][:_MAX_FIELD_BYTES] or "file"
        elif self._name in self.fields:
            raise refused(self._name, "is there twice; send it once")
        self._field = bytearray()

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._buffer += data[start:end]
            return
        self._field += data[start:end]
        if len(self._field) > _MAX_FIELD_BYTES:
            raise refused(
                show(self._name), f"has more than {_MAX_FIELD_BYTES} bytes; send the content as `file`"
            )

    def _on_part_end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._field.decode(errors="replace")

    def _on_end(self) -> None:
        self._ended = True


def _invalid(why: str) -> RequestError:
    return RequestError(f"the body is not a valid form: {why}; send it again", code="invalid_form")
