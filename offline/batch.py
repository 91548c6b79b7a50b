"""`Batch`: requests that one call submits together, and the rows of their outputs."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..launch.startup_display import shows_live
from ..models.tokenizer.tokenizer import Tokenizer
from ..runtime.errors import EngineDeadError
from ..runtime.grammar_use import GrammarUse
from ..runtime.messages import GenerateRequest, MediaItem
from ..runtime.request_checks import check_flag
from ..runtime.sampling_params import SamplingParams
from ..tokenizer_manager.conversation.parsing.output_parser import OutputParser
from ..tokenizer_manager.scheduling_options import Scheduling
from .engine import EngineThread, RowQueue
from .outputs import GenerationChunk, GenerationOutput, OutputBuilder, encode_token_ids


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A prompt that fits, with verified parameters; `max_new_tokens` and `seed` are set.

    Attributes:
        group, grammar, keep_special_ids, media: as in `GenerateRequest`.
        parser: of the answer's text; None: it is all content.
    """

    rid: str
    token_ids: list[int]
    sampling: SamplingParams
    group: str = ""
    grammar: GrammarUse | None = None
    keep_special_ids: tuple[int, ...] = ()
    parser: OutputParser | None = None
    media: tuple[MediaItem, ...] = ()


class Batch:
    """Runs once, by `run` or by `chunks`; if ended early (Ctrl-C, a closed iterator), it aborts unfinished requests."""

    def __init__(
        self,
        engine: EngineThread,
        tokenizer: Tokenizer,
        requests: Sequence[CheckedRequest],
        scheduling: Scheduling,
        release: Callable[[Sequence[MediaItem]], None] | None = None,
    ) -> None:
        """Take the parts; `release`: gets the images of requests at the end."""
        self._release = release
        self._engine = engine
        self._requests = requests
        self._scheduling = scheduling
        self._index_of = {request.rid: index for index, request in enumerate(requests)}
        self._builders: list[OutputBuilder] = []
        for request in requests:
            assert request.sampling.seed is not None
            self._builders.append(
                OutputBuilder(
                    request.rid,
                    request.token_ids,
                    request.sampling.seed,
                    tokenizer,
                    request.parser,
                    request.grammar,
                )
            )

    def run(self, *, progress_bar: bool) -> list[GenerationOutput]:
        """Generate all outputs, in the order of the requests."""
        with _progress(len(self._requests)) if progress_bar else contextlib.nullcontext(_ignore) as show:
            for chunk in self.chunks():
                show(chunk)
        return [builder.build() for builder in self._builders]

    def chunks(self) -> Iterator[GenerationChunk]:
        """Generate, and yield each row as it arrives; the requests are submitted by the first `next`."""
        rows: RowQueue = queue.SimpleQueue()
        try:
            self._engine.submit_all([self._message(request) for request in self._requests], rows)
            num_open = len(self._requests)
            while num_open:
                self._engine.check_process()
                row = rows.get()
                if isinstance(row, EngineDeadError):
                    raise EngineDeadError(str(row)) from row
                index = self._index_of[row.rid]
                chunk = self._builders[index].add(row, index)
                num_open -= chunk.finish_reason is not None
                yield chunk
        finally:
            for request, builder in zip(self._requests, self._builders, strict=True):
                if not builder.finished:
                    self._engine.abort(request.rid, "the caller ended the call")
                if self._release is not None:
                    self._release(request.media)

    def _message(self, request: CheckedRequest) -> GenerateRequest:
        wishes = self._scheduling
        return GenerateRequest(
            rid=request.rid,
            input_ids=encode_token_ids(request.token_ids),
            sampling=request.sampling,
            arrival_s=time.monotonic(),
            priority=wishes.priority,
            extra_key=wishes.extra_key,
            tenant=wishes.tenant,
            lora_id=wishes.lora_id,
            group=request.group,
            queue_timeout_s=wishes.queue_timeout_s,
            timeout_s=wishes.timeout_s,
            grammar=request.grammar,
            keep_special_ids=request.keep_special_ids,
            media=request.media,
        )


def shows_bar(wanted: bool | None, num_items: int) -> bool:
    """Whether to show a bar: as the caller says, else for several items in a terminal or notebook.

    Raises:
        RequestError: no boolean.
    """
    if wanted is not None:
        check_flag("progress_bar", wanted)
        return wanted
    return num_items > 1 and shows_live()


def _ignore(_chunk: GenerationChunk) -> None:
    return


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[GenerationChunk], None]]:
    """A bar of finished prompts on standard error, with the tokens per second so far."""
    with progress_of(total, "Prompts") as advance:

        def show(chunk: GenerationChunk) -> None:
            advance(len(chunk.token_ids), finished=chunk.finish_reason is not None)

        yield show


class Advance(Protocol):
    """Counts tokens, and by default the item that they finish."""

    def __call__(self, num_tokens: int, *, finished: bool = True) -> None: ...


@contextlib.contextmanager
def progress_of(total: int, name: str) -> Iterator[Advance]:
    """A bar of finished items on standard error, with the tokens per second so far."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    started_s, total_tokens = time.monotonic(), 0
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, rate="")

        def advance(num_tokens: int, *, finished: bool = True) -> None:
            nonlocal total_tokens
            total_tokens += num_tokens
            rate = f"{total_tokens / max(time.monotonic() - started_s, 1e-9):.1f} tok/s"
            progress.update(task, advance=int(finished), rate=rate)

        yield advance
