"""The model of `engine embed` and `engine rerank`: `LLM` in this process, or `ServerBackend`."""

from __future__ import annotations

import base64
import binascii
import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import httpx
import numpy as np

from ...launch.startup_display import StartupDisplay
from ...models.hub.built_in.models import MINILM
from ...runtime.config.config_sources import MergedConfig, from_arguments
from ...runtime.errors import RequestError, ServerError
from ...runtime.text import variable
from ..exit_codes import ends_at_interrupt
from ..options import FlagValues, merge_options
from ..server_client import (
    ServerConnection,
    attach,
    error_of,
    is_busy,
    names_a_model,
    refuse_settings,
    wait_s,
)
from .files import Texts, Vectors

if TYPE_CHECKING:
    from ...launch.resolve.prepare import Prepared
    from ...offline.llm import LLM
    from ...tokenizer_manager.pooling.embedding import Want

Part = TypeVar("Part")
Backend: TypeAlias = "LLM | ServerBackend"

BASE_SETTINGS: Final = from_arguments({"model": MINILM.short_names[0]})
_START_ONE: Final = "start one with `engine serve minilm`, or leave out --url to run in this process"
_TEXTS_AT_ONCE: Final = 1024
"""Vectors of so many are written at a time. The engine is idle for a moment between them."""
_TEXTS_PER_REQUEST: Final = 32
"""The smallest limit of the known servers (Text Embeddings Inference)."""
_REQUESTS_AT_ONCE: Final = 8
_ATTEMPTS: Final = 20
"""Attempts per request while a full queue refuses it."""
_MAX_WAIT_S: Final = 30.0
_DOES: Final = {"generate": "generates text", "embed": "makes vectors of texts", "score": "scores texts"}
_SUITABLE: Final[Mapping[str, tuple[str, ...]]] = {"embed": ("embed",), "score": ("score", "embed")}
_FIXES: Final = {
    "send truncate_prompt_tokens": "pass --truncate",
    "raise max_model_len": "raise --max-model-len",
    "start the server with matryoshka": "pass --matryoshka",
    "serve a model for it, or start the server with": "name an embedder with --model, or pass",
    "serve a reranker": "name a reranker or an embedder with --model",
}
"""Advice of the engine to API clients -> the option of the command that does it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A document's relevance. `index`: its place among the documents of a call."""

    index: int
    score: float


class ServerBackend:
    """The calls of `LLM` over `POST /v1/embeddings` and `/v1/rerank` of this engine or of another one."""

    def __init__(self, url: str, *, api_key: str | None, model: str | None, wanted: Want) -> None:
        """Connect; see `ServerConnection`.

        Raises:
            RequestError: the model cannot do what is wanted, too.
        """
        self._server = ServerConnection(url, api_key=api_key, model=model, how_to_start=_START_ONE)
        self.model, self.where = self._server.model, self._server.where
        task = self._server.entry.get("task", wanted)  # other servers do not say
        if task not in _SUITABLE[wanted]:
            self.close()
            does = _DOES.get(task, f"has the task {task}")
            what = "an embedder" if wanted == "embed" else "a reranker or an embedder"
            raise RequestError(
                f"{self.model} {self.where} {does}; name the server of {what} with --url, or leave it out",
                code="unsupported_task",
            )

    def embed(self, inputs: list[str], *, progress_bar: bool = False, **options: Any) -> Vectors:
        """As `LLM.embed`; there is no bar of its own."""
        body = {"input": inputs, "encoding_format": "base64", **options}
        return self._post("/v1/embeddings", body, lambda answer: _vectors(answer["data"], len(inputs)))

    def rerank(
        self, query: str, documents: list[str], *, progress_bar: bool = False, **options: Any
    ) -> list[Scored]:
        """As `LLM.rerank`."""

        def read(answer: Any) -> list[Scored]:
            indices = range(len(documents))
            return [Scored(indices[row["index"]], float(row["relevance_score"])) for row in answer["results"]]

        return self._post("/v1/rerank", {"query": query, "documents": documents, **options}, read)

    def close(self) -> None:
        self._server.client.close()

    def _post(self, path: str, body: dict[str, Any], read: Callable[[Any], Part]) -> Part:
        body["model"] = self.model
        if body.pop("truncate", False):
            body["truncate_prompt_tokens"] = -1
        attempts = 0
        while True:
            attempts += 1
            try:
                response = self._server.client.post(f"{self._server.base}{path}", json=body)
            except httpx.HTTPError as error:
                raise self._server.failure(error) from None
            is_full = response.status_code == httpx.codes.TOO_MANY_REQUESTS  # other servers do not say when
            if not (is_full or is_busy(response)) or attempts == _ATTEMPTS:
                break
            time.sleep(min(wait_s(response), _MAX_WAIT_S))
        if response.status_code != httpx.codes.OK:
            raise error_of(response)
        try:
            return read(response.json())
        except (KeyError, TypeError, ValueError, IndexError, binascii.Error):
            raise ServerError(
                f"{self._server.base} gave an answer that is not one of this API; check --url"
            ) from None


def in_parts(
    backend: Backend, texts: Texts, compute: Callable[[list[str]], Part]
) -> Iterator[tuple[range, Part]]:
    """Compute all texts, some at a time: a server gets several requests at once.

    Yields:
        The indices of a part, and what `compute` returned for its texts; in the order of the texts.

    Raises:
        RequestError: a text or an option is refused; the message has the place of the text and the command's options.
    """
    is_server = isinstance(backend, ServerBackend)
    size = _TEXTS_PER_REQUEST if is_server else _TEXTS_AT_ONCE
    count = len(texts.texts)
    parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
    inputs = [texts.texts[part.start : part.stop] for part in parts]
    with contextlib.closing(
        _map_at_once(compute, inputs) if is_server else (compute(own) for own in inputs)
    ) as results:
        for part in parts:
            try:
                result = next(results)
            except RequestError as error:
                raise texts.located(error, in_options(str(error)), part.start) from None
            yield part, result


def _map_at_once(compute: Callable[[list[str]], Part], inputs: Sequence[list[str]]) -> Generator[Part]:
    """`map` with several requests at once; what has not begun when it is closed is not computed.

    Its threads are daemons: an exit, as after Ctrl-C, waits for the threads of an executor, which wait for a server.
    """
    futures: list[Future[Part]] = [Future() for _ in inputs]
    waiting = deque(zip(inputs, futures, strict=True))

    def work() -> None:
        while True:
            try:
                own, future = waiting.popleft()
            except IndexError:
                return
            try:
                future.set_result(compute(own))
            except Exception as error:
                future.set_exception(error)

    for number in range(min(_REQUESTS_AT_ONCE, len(inputs))):
        threading.Thread(target=work, name=f"embed-{number}", daemon=True).start()
    try:
        for future in futures:
            yield future.result()
    finally:
        waiting.clear()


def open_backend(
    wanted: Want,
    *,
    url: str | None,
    api_key: str | None,
    attach_first: bool,
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
        refuse_settings(settings, except_for=("model",))
        return ServerBackend(url, api_key=key, model=settings["model"], wanted=wanted)
    merged = merge_options(settings, config_file=config_file, base=BASE_SETTINGS)
    if attach_first and not names_a_model(merged, BASE_SETTINGS):
        server = attach(
            lambda url: ServerBackend(url, api_key=key, model=None, wanted=wanted),
            (lambda _line: None) if quiet else (lambda line: print(f"engine: {line}", file=sys.stderr)),
            word="asking",
            passes_over=("unsupported_task",),
        )
        if server is not None:
            return server
    with StartupDisplay(quiet=quiet) as display, ends_at_interrupt():
        return _load(merged, display, wanted)


def _load(merged: MergedConfig, display: StartupDisplay, wanted: Want) -> Backend:
    """Load the model; one that cannot do what is wanted is refused before its weights are read."""
    display.step("import the engine")
    from ...offline.llm import LLM
    from ...tokenizer_manager.pooling.embedding import check_task

    def check(prepared: Prepared) -> None:
        try:
            check_task(prepared.spec, wanted)
        except RequestError as error:
            message = f"{prepared.model_name}: {in_options(str(error))}"
            raise RequestError(message, code=error.code) from None

    return LLM.from_config(merged, on_step=display.step, on_download=display.download, check=check)


def in_options(message: str) -> str:
    """An error of the engine, with its fix in terms of the command's options."""
    for before, after in _FIXES.items():
        message = message.replace(before, after)
    return message


def _vectors(data: Sequence[Mapping[str, Any]], count: int) -> Vectors:
    """The vectors of an answer, in the order of its inputs; numbers come from a server that does not know base64."""
    rows: dict[int, Vectors] = {}
    for each in data:
        value = each["embedding"]
        rows[range(count)[each["index"]]] = (
            np.frombuffer(base64.b64decode(value, validate=True), dtype="<f4")
            if isinstance(value, str)
            else np.asarray(value, dtype=np.float32)
        )
    return np.stack([rows[index] for index in range(count)])
