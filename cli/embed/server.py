"""`ServerBackend`: a server with `POST /v1/embeddings` and `/v1/rerank`, of this engine or of another one."""

from __future__ import annotations

import base64
import binascii
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import httpx
import numpy as np
import typer

from ...launch.child.socket_dir import running_servers
from ...launch.startup_display import StartupDisplay
from ...runtime.config.config_fields import config_fields
from ...runtime.config.config_sources import DEFAULT_ORIGIN, MergedConfig
from ...runtime.errors import EngineError, RequestError, ServerError
from ...runtime.text import variable
from ..chat.http import base_url, connection_problem, error_of
from ..options import FlagValues, merge_options
from .backend import (
    BASE_SETTINGS,
    Backend,
    EmbedOptions,
    InProcessBackend,
    PartError,
    Scored,
    Vectors,
    parts_of,
)

if TYPE_CHECKING:
    from ...tokenizer_manager.pooling.embedding import Want

Part = TypeVar("Part")

_TIMEOUT: Final = httpx.Timeout(10.0, read=None)  # a request may wait in the server's queue for any time
_QUICK_TIMEOUT_S: Final = 10.0
_START_ONE: Final = "start one with `engine serve minilm`, or leave out --url to run in this process"
_TEXTS_PER_REQUEST: Final = 32
"""The smallest limit of the known servers (Text Embeddings Inference)."""
_REQUESTS_AT_ONCE: Final = 8
_ATTEMPTS: Final = 20
"""Attempts per request while a full queue refuses it."""
_MAX_WAIT_S: Final = 30.0
_DOES: Final = {"generate": "generates text", "embed": "makes vectors of texts", "score": "scores texts"}
_SUITABLE: Final[Mapping[str, tuple[str, ...]]] = {"embed": ("embed",), "score": ("score", "embed")}


class ServerBackend:
    """See the module."""

    def __init__(self, url: str, *, api_key: str | None, model: str | None, wanted: Want) -> None:
        """Connect, and find out which model is served.

        Args:
            url: of the server, with or without `/v1`.
            model: the name to ask for; None takes the first the server lists.
            wanted: what the model must be able to do.

        Raises:
            RequestError: not a URL, no such model there, or it cannot do what is wanted.
            ServerError: no server answers.
        """
        self._base = base_url(url)
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT)
        self.where = f"at {self._base}"
        try:
            entry = self._find_model(model)
            self.model = str(entry["id"])
            task = entry.get("task", wanted)  # other servers do not say
            if task not in _SUITABLE[wanted]:
                does = _DOES.get(task, f"has the task {task}")
                what = "an embedder" if wanted == "embed" else "a reranker or an embedder"
                raise RequestError(
                    f"{self.model} at {self._base} {does}; name the server of {what} with --url, or leave it out",
                    code="unsupported_task",
                )
        except EngineError:
            self._client.close()
            raise

    def embed(self, texts: Sequence[str], options: EmbedOptions) -> Iterator[Vectors]:
        given = options.given()

        def ask(part: range) -> Vectors:
            body = {
                "model": self.model,
                "input": [texts[n] for n in part],
                "encoding_format": "base64",
                **given,
            }
            return _vectors(self._post("/v1/embeddings", body)["data"], len(part))

        return self._all(parts_of(len(texts), _TEXTS_PER_REQUEST), ask)

    def rerank(
        self, query: str, documents: Sequence[str], *, instruction: str | None, truncate: bool
    ) -> Iterator[list[Scored]]:
        more: dict[str, Any] = {} if instruction is None else {"instruction": instruction}
        if truncate:
            more["truncate_prompt_tokens"] = -1

        def ask(part: range) -> list[Scored]:
            body = {"model": self.model, "query": query, "documents": [documents[n] for n in part], **more}
            results = self._post("/v1/rerank", body)["results"]
            return [Scored(part[each["index"]], float(each["relevance_score"])) for each in results]

        return self._all(parts_of(len(documents), _TEXTS_PER_REQUEST), ask)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _all(self, parts: Sequence[range], ask: Callable[[range], Part]) -> Iterator[Part]:
        """The answers for the parts in their order, several requests at a time."""

        def guarded(part: range) -> Part:
            try:
                return ask(part)
            except RequestError as error:
                raise PartError(error, part.start) from None
            except (KeyError, TypeError, ValueError, IndexError, binascii.Error):
                raise ServerError(
                    f"{self._base} gave an answer that is not one of this API; check --url"
                ) from None

        pool = ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="embed")
        try:
            yield from pool.map(guarded, parts)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._answer(path, body)
        for _ in range(_ATTEMPTS - 1):
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                break
            time.sleep(_wait_s(response))
            response = self._answer(path, body)
        if response.status_code != httpx.codes.OK:
            raise error_of(response)
        answer: dict[str, Any] = response.json()
        return answer

    def _answer(self, path: str, body: dict[str, Any]) -> httpx.Response:
        try:
            return self._client.post(f"{self._base}{path}", json=body)
        except httpx.HTTPError as error:
            raise ServerError(connection_problem(self._base, error, _START_ONE)) from None

    def _find_model(self, model: str | None) -> Mapping[str, Any]:
        try:
            response = self._client.get(f"{self._base}/v1/models", timeout=_QUICK_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise ServerError(connection_problem(self._base, error, _START_ONE)) from None
        if response.status_code != httpx.codes.OK:
            raise error_of(response)
        try:
            entries = {str(entry["id"]): entry for entry in response.json()["data"]}
        except (ValueError, KeyError, TypeError):
            raise ServerError(f"{self._base}/v1/models does not speak the OpenAI API; check --url") from None
        if not entries:
            raise ServerError(f"{self._base} serves no model")
        if model is not None and model not in entries:
            raise RequestError(
                f"{self._base} has no model {model!r}; it serves {', '.join(entries)}", param="model"
            )
        found: Mapping[str, Any] = entries[model] if model is not None else next(iter(entries.values()))
        return found


def _wait_s(response: httpx.Response) -> float:
    """Seconds to wait before a request is sent again."""
    try:
        return min(max(float(response.headers.get("retry-after", "1")), 0.0), _MAX_WAIT_S)
    except ValueError:  # a date
        return 1.0


def _vectors(data: Sequence[Mapping[str, Any]], count: int) -> Vectors:
    """The vectors of an answer, in the order of its inputs."""
    rows: list[Vectors | None] = [None] * count
    for each in data:
        value = each["embedding"]  # numbers, from a server that does not know base64
        rows[each["index"]] = (
            np.frombuffer(base64.b64decode(value, validate=True), dtype="<f4")
            if isinstance(value, str)
            else np.asarray(value, dtype=np.float32)
        )
    found = [row for row in rows if row is not None]
    if len(found) < count:
        raise ValueError("a vector is missing")
    return np.stack(found)


_PANEL: Final = "Where it runs"

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Ask this server instead of loading a model.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="TEXT",
        help="Folder in Hugging Face layout, .gguf file or name of a model; with --url, which of its models  [default: "
        "minilm]",
        rich_help_panel="Model",
        show_default=False,
    ),
]
AttachOption = Annotated[
    bool,
    typer.Option(
        "--attach/--no-attach",
        help="Ask a server of this user that runs here and can do it, if nothing names a model  [default: attach]",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="TEXT",
        help="API key of that server (or set ENGINE_API_KEY).",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]


def open_backend(
    wanted: Want,
    *,
    url: str | None,
    api_key: str | None,
    attach: bool,
    settings: FlagValues,
    config_file: Path | None,
    quiet: bool,
) -> Backend:
    """The backend of a command, which closes it.

    Raises:
        ConfigError: the model cannot run on this machine.
        RequestError: the model cannot do what is wanted, or an option has no effect.
        ServerError: no server answers at `url`.
    """
    key = api_key or variable("ENGINE_API_KEY")
    if url is not None:
        return _connect(url, key, settings, wanted)
    merged = merge_options(settings, config_file=config_file, base=BASE_SETTINGS)
    if attach and not _asks_for_a_model(merged):
        server = _attach(key, wanted, quiet=quiet)
        if server is not None:
            return server
    with StartupDisplay(quiet=quiet) as display:
        return InProcessBackend.start(merged, display, wanted)


def _connect(url: str, key: str | None, settings: FlagValues, wanted: Want) -> ServerBackend:

    useless = [name for name, value in settings.items() if value is not None and name != "model"]
    if useless:
        raise RequestError(
            f"{config_fields()[useless[0]].flag} has no effect on a server that runs already; drop it"
        )
    return ServerBackend(url, api_key=key, model=settings["model"], wanted=wanted)


def _attach(key: str | None, wanted: Want, *, quiet: bool) -> ServerBackend | None:
    """The newest server of this user that can do it; one that generates text is passed over without a word."""
    for record in reversed(running_servers()):
        if not record.url:
            continue
        try:
            backend = ServerBackend(record.url, api_key=key, model=None, wanted=wanted)
        except EngineError as error:
            if not quiet and getattr(error, "code", None) != "unsupported_task":
                print(f"engine: the server at {record.url} is not used: {error}", file=sys.stderr)
            continue
        if not quiet:
            print(
                f"engine: asking {backend.model} {backend.where}; --no-attach loads a model here",
                file=sys.stderr,
            )
        return backend
    return None


def _asks_for_a_model(merged: MergedConfig) -> bool:
    """Whether a setting of the model is given."""
    own = {name: value.origin for name, value in BASE_SETTINGS.items()}
    return any(origin not in (DEFAULT_ORIGIN, own.get(name)) for name, origin in merged.origins.items())
