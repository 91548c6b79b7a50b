"""The lines of a batch: the input is checked before any of them runs, and each result is a line of a file."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
from msgspec import UNSET

from ....runtime.config.answer_config import RequestLimits
from ....runtime.errors import RequestError
from ..schema.json_body import parse_object
from ..schema.values import Body, refused, show
from .wire import ENDPOINTS, LineError

MAX_LINES: Final = 50_000
MAX_ERRORS: Final = 100
MAX_ID_CHARS: Final = 512
_FRAME_BYTES: Final = 4096
"""Room for a line's fields around its body."""
_MEMBERS: Final = frozenset({"custom_id", "method", "url", "body"})
_KEY_BYTES: Final = 4096
"""The beginning of the instructions, and of the prompt, by which lines are ordered."""
_BLOCK_BYTES: Final = 128
"""Some 32 tokens; the key of a line has 4 bytes for each, so the keys of 50,000 lines take 13 MB."""
_UNANSWERED: Final = {"batch_cancelled": "canceled", "batch_expired": "expired"}
_INSTRUCTIONS: Final = ("model", "previous_response_id", "tools", "instructions", "system")
_PROMPTS: Final = ("prompt", "input", "query")


class LineAnswer(NamedTuple):
    """The HTTP answer to a line.

    Attributes:
        status: of the response.
        body: JSON.
        code: of its error; "" for none.
    """

    status: int
    body: bytes
    code: str


class InputLine(NamedTuple):
    """A checked line, its place in the file, in bytes, and its `prefix_key`."""

    custom_id: str
    place: int
    length: int
    prefix: bytes


class InputReader:
    """Reads and checks the lines of an input; blocks, so it is called on a thread."""

    def __init__(
        self,
        endpoint: str | None,
        check: Callable[[Body], None],
        limits: RequestLimits,
        max_body_bytes: int,
        max_lines: float = MAX_LINES,
    ) -> None:
        """Prepare for one file.

        Args:
            endpoint: that all lines must name; None: each names one of `ENDPOINTS`.
            check: raises a RequestError if the endpoint's reader refuses a body.
            limits: on JSON.
            max_body_bytes: of one body.
            max_lines: of the file.
        """
        self._endpoints = ENDPOINTS if endpoint is None else (endpoint,)
        self._max_lines = max_lines
        self._check = check
        self._limits = limits
        self._max_bytes = max_body_bytes + _FRAME_BYTES
        self._numbers: dict[str, int] = {}  # of the lines by their ids

    def read(self, path: Path) -> tuple[list[InputLine], list[LineError]]:
        """The lines of a file that are valid, and the first errors of those that are not."""
        lines: list[InputLine] = []
        errors: list[LineError] = []
        with path.open("rb") as file:
            for number, place, content in self._split(file):
                if number > self._max_lines:
                    message = f"the file has more than {self._max_lines} lines; split it"
                    errors.append(LineError(code="too_many_lines", message=message, line=number))
                    break
                try:
                    custom_id, prefix = self._checked(number, content)
                    lines.append(InputLine(custom_id, place, len(content), prefix))
                except RequestError as error:
                    errors.append(
                        LineError(
                            code=error.code or "invalid_value",
                            message=error.message,
                            line=number,
                            param=error.param or UNSET,
                        )
                    )
                    if len(errors) == MAX_ERRORS:
                        break
        if not lines and not errors:
            errors.append(
                LineError(code="empty_file", message="the file has no line; write one request per line")
            )
        return lines, errors

    def _split(self, file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
        """Number, place and content of each line that is not blank; of a long one only the beginning."""
        number = place = 0
        while content := file.readline(self._max_bytes + 1):
            number += 1
            begin, place = place, place + len(content)
            rest = content
            while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
                place += len(rest)
            if content.strip():
                yield number, begin, content

    def _checked(self, number: int, content: bytes) -> tuple[str, bytes]:
        """The id of a line, and its `prefix_key`.

        Raises:
            RequestError: the line is refused.
        """
        if len(content) > self._max_bytes:
            raise RequestError(
                f"the line is larger than {self._max_bytes} bytes; send less or raise --max-body-mb",
                code="request_too_large",
            )
        line = parse_object(content, self._limits)
        if unknown := sorted(line.keys() - _MEMBERS):
            raise refused(show(unknown[0]), f"is no field of a line; use {', '.join(sorted(_MEMBERS))}")
        custom_id = line.get("custom_id")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
            raise refused(
                "custom_id", f"is {show(custom_id)}, but it must be a text of 1 to {MAX_ID_CHARS} characters"
            )
        if custom_id in self._numbers:
            raise refused(
                "custom_id",
                f"is {show(custom_id)}, as in line {self._numbers[custom_id]}; give each line its own",
            )
        if line.get("method") != "POST":
            raise refused("method", f"is {show(line.get('method'))}, but it must be POST")
        if line.get("url") not in self._endpoints:
            several = len(self._endpoints) > 1
            rule = "it must be one of" if several else "the endpoint of the batch is"
            raise refused("url", f"is {show(line.get('url'))}, but {rule} {', '.join(self._endpoints)}")
        if not isinstance(body := line.get("body"), dict):
            raise refused("body", f"is {show(body)}, but it must be an object")
        self._check_body(body)
        self._numbers[custom_id] = number
        return custom_id, prefix_key(body)

    def _check_body(self, body: Body) -> None:
        if body.get("stream"):
            raise refused("body.stream", "is true, but the answers of a batch are whole; leave it out")
        if body.get("background"):
            raise refused(
                "body.background", "is true, but a batch runs in the background anyway; leave it out"
            )
        try:
            self._check(body)
        except RequestError as error:
            error.param = f"body.{error.param}" if error.param else "body"
            raise


def prefix_key(body: Body) -> bytes:
    """A key by which sorted lines have equal beginnings of their prompts side by side, depth first.

    It is made of the fields that templates render first, the instructions, then of the prompt. Rendering itself would
    cost more than all else of the check, and begins alike where these fields do. A block of either is its checksum: the
    order of different blocks does not matter, and two that collide only cost a shared prefix.
    """
    messages = body.get("messages")
    messages = messages if isinstance(messages, list) else []
    num_system = 0
    while num_system < len(messages) and _is_instruction(messages[num_system]):
        num_system += 1
    instructions, prompt = (
        json.dumps([*(body.get(name) for name in names), part], ensure_ascii=False).encode()
        for names, part in ((_INSTRUCTIONS, messages[:num_system]), (_PROMPTS, messages[num_system:]))
    )
    return _blocks(instructions) + zlib.crc32(instructions).to_bytes(4, "big") + _blocks(prompt)


def _is_instruction(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


def _blocks(text: bytes) -> bytes:
    starts = range(0, min(len(text), _KEY_BYTES), _BLOCK_BYTES)
    return b"".join(zlib.crc32(text[start : start + _BLOCK_BYTES]).to_bytes(4, "big") for start in starts)


class _Line(msgspec.Struct):
    body: msgspec.Raw
    url: str = ""


def request_at(path: Path, place: int, length: int) -> tuple[str, bytes]:
    """The endpoint and the body of a checked line; blocks."""
    with path.open("rb") as file:
        file.seek(place)
        line = msgspec.json.decode(file.read(length), type=_Line)
    return line.url, bytes(line.body)


def body_at(path: Path, place: int, length: int) -> bytes:
    """The body of a checked line; blocks."""
    return request_at(path, place, length)[1]


def line_id(batch_id: str, number: int) -> str:
    """The name of a line's request, the same after a restart."""
    return f"batch_req_{_hash(batch_id, number).hex()}"


def seed_of(batch_id: str, number: int) -> int:
    """The seed of a line without one, the same after a restart."""
    return int.from_bytes(_hash(batch_id, number)[:7], "little")


def _hash(batch_id: str, number: int) -> bytes:
    return hashlib.blake2b(f"{batch_id}/{number}".encode(), digest_size=12).digest()


def answered(batch_id: str, number: int, custom_id: str, answer: LineAnswer) -> bytes:
    """The line of a result."""
    name = line_id(batch_id, number)
    response = {"status_code": answer.status, "request_id": name, "body": msgspec.Raw(answer.body or b"null")}
    return _encoded({"id": name, "custom_id": custom_id, "response": response, "error": None})


def unanswered(batch_id: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """The line of an error without an answer."""
    error = {"code": code, "message": message}
    name = line_id(batch_id, number)
    return _encoded({"id": name, "custom_id": custom_id, "response": None, "error": error})


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Result(msgspec.Struct):
    custom_id: str
    response: _Response | None
    error: _Error | None


def as_message_result(line: bytes) -> bytes:
    """A line of a result in the form of Anthropic's batches."""
    result = msgspec.json.decode(line, type=_Result)
    response, error = result.response, result.error
    shown: dict[str, Any]
    if response is not None:
        is_error = response.status_code >= 400
        shown = (
            {"type": "errored", "error": response.body}
            if is_error
            else {"type": "succeeded", "message": response.body}
        )
    elif error is not None and error.code in _UNANSWERED:
        shown = {"type": _UNANSWERED[error.code]}
    else:
        message = "" if error is None else error.message
        body = {"type": "error", "error": {"type": "api_error", "message": message}, "request_id": None}
        shown = {"type": "errored", "error": body}
    return _encoded({"custom_id": result.custom_id, "result": shown})


def _encoded(line: dict[str, Any]) -> bytes:
    return msgspec.json.encode(line) + b"\n"


class _WithUsage(msgspec.Struct):
    usage: dict[str, Any] | None = None


def usage_in(body: bytes) -> dict[str, int]:
    """The columns of a line with the tokens that its answer has, in the names of any endpoint."""
    try:
        usage = msgspec.json.decode(body, type=_WithUsage).usage or {}
    except msgspec.ValidationError:
        return {}
    inside = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    outside = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    found = {
        "input_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
        "cached_tokens": inside.get("cached_tokens"),
        "output_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
        "reasoning_tokens": outside.get("reasoning_tokens"),
    }
    return {name: value for name, value in found.items() if isinstance(value, int)}
