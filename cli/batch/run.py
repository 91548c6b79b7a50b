"""`LineSender`: sends the lines of a file to a server, as many at once as its batch class takes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from ...runtime.config.answer_config import RequestLimits
from ...runtime.errors import ConfigError, RequestError, ServerError
from ...tokenizer_manager.http.batch_runner.lines import (
    InputLine,
    InputReader,
    LineAnswer,
    answered,
    line_id,
    request_at,
)
from ...tokenizer_manager.overload.queue_limiter import BACKGROUND_PER_ROW
from ..server_client import QUICK_TIMEOUT_S, connection_problem, is_busy, wait_s
from .answers import Answers

_MAX_BODY_BYTES: Final = 1 << 30
"""The server has the limit that counts."""
_USUAL_AT_ONCE: Final = 64
_MOST_AT_ONCE: Final = 1024
_SHOWN_ERRORS: Final = 5
_PATIENCE_S: Final = 600.0
"""Time without any answer after which a busy server is given up."""
_MAX_WAIT_S: Final = 30.0
_RECONNECTS: Final = 5
_FLEX: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Endpoints that take `service_tier`."""


def read_lines(path: Path) -> list[InputLine]:
    """The lines of an input.

    Raises:
        ConfigError: it cannot be read.
        RequestError: lines are no requests; names the first of them.
    """
    reader = InputReader(None, lambda _body: None, RequestLimits(), _MAX_BODY_BYTES, max_lines=float("inf"))
    try:
        lines, errors = reader.read(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; name a file with a request in each line"
        ) from None
    if errors:
        shown = [
            f"line {error.line}: {error.message}" if isinstance(error.line, int) else error.message
            for error in errors[:_SHOWN_ERRORS]
        ]
        more = f"; {len(errors) - _SHOWN_ERRORS} more" if len(errors) > _SHOWN_ERRORS else ""
        raise RequestError(f"{path} has lines that are no requests: {'; '.join(shown)}{more}")
    return lines


class LineSender:
    """Sends lines to one server, and keeps their results.

    A busy server gets a line again, as does one that has just restarted. Any other answer is the result of the line.
    """

    def __init__(self, base: str, *, api_key: str | None, model: str | None, retry_s: float = 1.0) -> None:
        """Prepare.

        Args:
            base: URL of the server, without a path.
            api_key: bearer token.
            model: replaces the name in each line; None: none does.
            retry_s: the first time between attempts to connect, which doubles.
        """
        self._base, self._model, self._retry_s = base, model, retry_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._answered_s = time.monotonic()

    async def send_all(
        self,
        path: Path,
        lines: Sequence[InputLine],
        answers: Answers,
        digest: str,
        on_progress: Callable[[int], None],
    ) -> None:
        """Have the lines answered that have no result yet, those that begin alike one after another.

        Args:
            path, lines, digest: of the input.
            answers: open.
            on_progress: called with the number of results.

        Raises:
            ServerError: the server does not answer; the results so far are kept.
        """
        order = sorted(range(len(lines)), key=lambda number: lines[number].prefix)
        waiting = iter([number for number in order if lines[number].custom_id not in answers])
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(QUICK_TIMEOUT_S, read=None, pool=None)

        async with httpx.AsyncClient(
            base_url=self._base, headers=self._headers, limits=limits, timeout=timeout
        ) as client:

            async def work() -> None:
                for number in waiting:
                    line = lines[number]
                    url, body = request_at(path, line.place, line.length)
                    answer = await self._answer(client, url, self._body(url, body), line_id(digest, number))
                    answers.add(answered(digest, number, line.custom_id, answer))
                    on_progress(len(answers))

            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(await self._num_at_once(client), len(lines))):
                        tasks.create_task(work())
            except ExceptionGroup as group:  # the first ends the other tasks
                raise group.exceptions[0] from None

    async def _num_at_once(self, client: httpx.AsyncClient) -> int:
        try:
            info = (await client.get("/server_info", timeout=QUICK_TIMEOUT_S)).json()
            num_rows = int(info["max_running_requests"]) * int(info.get("dp_size", 1))
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
            return _USUAL_AT_ONCE  # another server
        return max(1, min(BACKGROUND_PER_ROW * num_rows, _MOST_AT_ONCE))

    def _body(self, url: str, body: bytes) -> bytes:
        fields: dict[str, Any] = json.loads(body)
        if url in _FLEX:
            fields.setdefault("service_tier", "flex")
        if url == "/v1/responses":
            fields.setdefault("store", False)
        if self._model is not None:
            fields["model"] = self._model
        return json.dumps(fields, ensure_ascii=False).encode()

    async def _answer(self, client: httpx.AsyncClient, url: str, body: bytes, name: str) -> LineAnswer:
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        num_failed = 0
        while True:
            try:
                response = await client.post(url, content=body, headers=headers)
            except httpx.HTTPError as error:
                num_failed += 1
                if num_failed == _RECONNECTS:
                    hint = "start the same command again to go on"
                    raise ServerError(connection_problem(self._base, error, hint)) from None
                await asyncio.sleep(self._retry_s * 2 ** (num_failed - 1))
                continue
            now_s = time.monotonic()
            is_full = response.status_code == httpx.codes.TOO_MANY_REQUESTS  # other servers do not say when
            if not (is_full or is_busy(response)):
                self._answered_s = now_s
                return LineAnswer(response.status_code, _as_json(response), "")
            if now_s - self._answered_s > _PATIENCE_S:
                raise ServerError(
                    f"{self._base} was busy for {_PATIENCE_S:g} s without an answer to any line; start the same "
                    "command again to go on"
                )
            await asyncio.sleep(min(wait_s(response), _MAX_WAIT_S))


def _as_json(response: httpx.Response) -> bytes:
    """The body; that of a proxy in between may be no JSON."""
    try:
        json.loads(response.content)
    except ValueError:
        return json.dumps({"error": {"message": response.text[:1000]}}).encode()
    return response.content
