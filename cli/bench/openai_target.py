"""`OpenAITarget`: sends workload requests to any OpenAI-compatible server and times the responses.

It uses aiohttp because its parser is compiled. On a machine with two cores, a client in pure Python would take
noticeable CPU time from the server that it measures.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp

from ...runtime.errors import ConfigError, RequestError, ServerError
from ..options import read_json
from .load import BenchRequest, RequestRecord


class StructuredOutput:
    """One schema, for all requests of a run."""

    def __init__(self, schema: dict[str, Any], matches: Callable[[Any], bool]) -> None:
        """Take the schema, and a function that says whether a JSON value matches it."""
        self._schema = schema
        self._matches = matches

    @classmethod
    def read(cls, path: Path) -> StructuredOutput:
        """Read the schema in a file.

        Raises:
            ConfigError: there is none, or no library that checks answers is installed.
        """
        schema = read_json(path, f"--structured {path}")
        if not isinstance(schema, dict):
            raise ConfigError(f"--structured {path} must hold a JSON Schema, which is an object")
        return cls(schema, _validator(schema, path))

    def response_format(self) -> dict[str, Any]:
        """The field of each request."""
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self._schema}}

    def accepts(self, text: str) -> bool:
        """Whether an answer is JSON that matches the schema."""
        try:
            return self._matches(json.loads(text))
        except ValueError:
            return False


def _validator(schema: dict[str, Any], path: Path) -> Callable[[Any], bool]:
    try:
        import jsonschema_rs
    except ImportError:
        raise ConfigError(
            "--structured counts the valid answers with a JSON Schema library, which is not installed; run: "
            "pip install jsonschema-rs"
        ) from None
    try:
        matches: Callable[[Any], bool] = jsonschema_rs.validator_for(schema).is_valid
    except ValueError as error:
        raise ConfigError(f"--structured {path} is no JSON Schema: {error}") from None
    return matches


Endpoint = Literal["completions", "chat", "embeddings"]

_PATHS: Final[dict[Endpoint, str]] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
}

_START_ONE: Final = "start one with `engine serve`, or check --url"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options that all requests of a run share."""

    model: str
    endpoint: Endpoint
    temperature: float
    ignore_eos: bool
    stream: bool
    seed: int
    structured: StructuredOutput | None = None


class OpenAITarget:
    """One server, reached through one connection pool. Use as an async context manager."""

    def __init__(self, url: str, api_key: str | None, options: RequestOptions, timeout_s: float) -> None:
        self._options = options
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._open: aiohttp.ClientSession | None = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._open is not None, "used outside of its context"
        return self._open

    async def __aenter__(self) -> OpenAITarget:
        self._open = aiohttp.ClientSession(
            base_url=self._url,
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=self._timeout,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def run(self, request: BenchRequest, record: RequestRecord) -> None:
        """Answer one request; see `load.Target`."""
        path = _PATHS[self._options.endpoint]
        try:
            async with self._session.post(path, json=self._body(request)) as response:
                if response.status != 200:
                    record.error = f"HTTP {response.status}: {_error_text(await response.text())}"
                    record.refused = _refuses(response.status)
                elif self._options.endpoint == "embeddings":
                    _take_vectors(record, request, json.loads(await response.read()))
                elif self._options.stream:
                    await self._read_stream(response, record)
                else:
                    body = await response.json()
                    record.arrivals.append((time.monotonic(), body["usage"]["completion_tokens"]))
                    _take_usage(record, body["usage"])
                    self._check(record, _text(body["choices"][0]))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            record.error = f"{type(error).__name__}: {error}"
        except (ValueError, KeyError, TypeError) as error:
            record.error = f"the answer does not follow the OpenAI API ({type(error).__name__}: {error})"

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        options = self._options
        if options.endpoint == "embeddings":  # as the official client sends it
            return {"model": options.model, "input": request.texts, "encoding_format": "base64"}
        body: dict[str, Any] = {
            "model": options.model,
            "max_tokens": request.output_len,
            "temperature": options.temperature,
            "seed": options.seed,
            "stream": options.stream,
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.structured is not None:
            body["response_format"] = options.structured.response_format()
        if options.stream:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if options.endpoint == "completions":
            body["prompt"] = request.prompt
        else:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        return body

    async def _read_stream(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        done = False
        counted = 0
        texts: list[str] = []
        async for data in _sse_data(response):
            now = time.monotonic()
            if data == b"[DONE]":
                done = True
                break
            event = json.loads(data)
            if "error" in event:
                record.error = f"error event: {_error_text(event)}"
                return
            usage = event.get("usage")
            if usage:
                _take_usage(record, usage)
            if not event["choices"]:
                continue
            text = _text(event["choices"][0])
            texts.append(text)
            num_new = usage["completion_tokens"] - counted if usage else int(bool(text))
            if num_new > 0:
                record.arrivals.append((now, num_new))
                counted += num_new
        if not done:
            record.error = "the stream ended without [DONE]"
            return
        if record.output_tokens == 0:
            record.output_tokens = counted
        self._check(record, "".join(texts))

    def _check(self, record: RequestRecord, text: str) -> None:
        if self._options.structured is not None:
            record.valid = self._options.structured.accepts(text)


async def check_ready(url: str, api_key: str | None, timeout_s: float) -> str:
    """Wait until the server lists its models; returns the first model's name.

    Raises:
        RequestError: a wrong key, or no such endpoint.
        ServerError: no answer within the time.
    """
    import asyncio

    deadline = time.monotonic() + timeout_s
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=10)) as session:
        while True:
            try:
                async with session.get(f"{url}/v1/models") as response:
                    if response.status == 200:
                        return str((await response.json())["data"][0]["id"])
                    text = await response.text()
                    reason = f"HTTP {response.status}: {_error_text(text)}"
                    if _refuses(response.status):
                        refused = f"the server at {url} refuses ({reason}); see --url and --api-key"
                        raise RequestError(_key_problem(response.status, text, api_key) or refused)
                    problem = f"no server is ready at {url} ({reason}); {_START_ONE}"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                from ..server_client import why_unreachable  # with httpx, which this module has no use for

                problem = why_unreachable(
                    url, error, connected=not isinstance(error, aiohttp.ClientConnectorError), hint=_START_ONE
                )
            except (ValueError, KeyError, IndexError, TypeError):
                problem = f"/v1/models of {url} does not follow the OpenAI API; {_START_ONE}"
            if time.monotonic() > deadline:
                raise ServerError(problem)
            await asyncio.sleep(0.2)


async def flush_cache(url: str, api_key: str | None) -> None:
    """Empty the server's prefix cache.

    Raises:
        RequestError: the server has no such endpoint, or refuses.
        ServerError: it does not answer.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{url}/flush_cache") as response,
        ):
            status, text = response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ServerError(f"POST {url}/flush_cache failed: {str(error) or type(error).__name__}") from None
    if status != 200:
        kind = RequestError if _refuses(status) else ServerError
        problem = _key_problem(status, text, api_key) or f"POST {url}/flush_cache answered HTTP {status}"
        raise kind(f"{problem}; leave out --flush-cache")


async def _sse_data(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _text(choice: dict[str, Any]) -> str:
    """The text of a choice, or its new text, of either endpoint."""
    message = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or message.get("content") or ""


def _take_usage(record: RequestRecord, usage: dict[str, Any]) -> None:
    record.prompt_tokens = usage["prompt_tokens"]
    record.output_tokens = usage["completion_tokens"]
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _take_vectors(record: RequestRecord, request: BenchRequest, body: dict[str, Any]) -> None:
    """Record the end of an answer with vectors; their values are not read."""
    record.arrivals.append((time.monotonic(), 0))
    record.num_vectors = len([row["embedding"] for row in body["data"]])
    record.prompt_tokens = (body.get("usage") or {}).get("prompt_tokens") or 0
    if record.num_vectors != len(request.texts):
        record.error = f"{record.num_vectors} vectors came for {len(request.texts)} texts"


def _refuses(status: int) -> bool:
    """Whether an HTTP status refuses the request itself: an equal one would be refused, too."""
    return 400 <= status < 500 and status not in (408, 429)


def _key_problem(status: int, text: str, api_key: str | None) -> str:
    """The sentence for a refused key; "" if the server refuses something else."""
    from ..server_client import key_problem

    return key_problem(status, _error_object(text), sent=bool(api_key))


def _error_object(body: Any) -> Any:
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError:
            return body
    return body.get("error", body) if isinstance(body, dict) else body


def _error_text(body: Any) -> str:
    error = _error_object(body)
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:200]
