"""`GenerationRequest` and `Generation`: what a front end asks for, and the open stream that answers it.

A request with p prompts and n answers each becomes p * n *choices*, numbered prompt by prompt; each is one request
of the scheduler with an id of its own. The manager writes into a `Generation`, one HTTP handler reads from it.

What a slow reader has not fetched yet is kept here; `sweep` bounds it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from ..runtime.messages import Finish, TextOutput, Usage
from ..runtime.sampling_params import SamplingParams
from .admission.scheduling_options import Scheduling

Prompt = str | list[int]
"""A text to tokenise, or token ids."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end wants generated, before tokenising.

    Attributes:
        prompts: at least one.
        sampling: of all choices; with n > 1, choice i of a prompt gets seed + i.
        n: answers per prompt.
        id_prefix: first part of the request's id, which names the API it came by.
        scheduling: of all choices.
        add_special_tokens: whether tokenising puts BOS first; no for a rendered chat template.
        prompt_param, length_param: the fields that errors shall name.
        probe: asks whether the engine works, and is let in however many wait.
        arrival_s: by the manager's clock, of a request that has waited before it is started; None: it arrives now.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    n: int = 1
    id_prefix: str = "gen"
    scheduling: Scheduling = Scheduling()
    add_special_tokens: bool = True
    prompt_param: str = "prompt"
    length_param: str = "max_tokens"
    probe: bool = False
    arrival_s: float | None = None


class Choice:
    """One scheduler request of a generation.

    Attributes:
        rid: its id in every process.
        index: position among the choices of the generation.
        prompt_ids: [prompt_len] int32.
        seed: of its sampling.
        abort_asked: somebody wants it to end early, so an ABORT row is an answer and not a failure.
        first_token_s, last_token_s: CLOCK_MONOTONIC when its tokens arrived here; None before the first.
        usage, finish: as of the latest row that the reader has taken in with `read`.
    """

    __slots__ = (
        "abort_asked",
        "finish",
        "first_token_s",
        "index",
        "last_token_s",
        "prompt_ids",
        "rid",
        "seed",
        "usage",
    )

    def __init__(self, rid: str, index: int, prompt_ids: array[int], seed: int) -> None:
        self.rid = rid
        self.index = index
        self.prompt_ids = prompt_ids
        self.seed = seed
        self.abort_asked = False
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.usage = Usage(prompt_tokens=len(prompt_ids), completion_tokens=0)
        self.finish: Finish | None = None

    def read(self, output: TextOutput) -> None:
        """Take in a row, on the reader's side: rows may wait while later ones arrive."""
        self.usage = output.usage
        if output.finish is not None:
            self.finish = output.finish


class Row(NamedTuple):
    """News of one choice."""

    choice: Choice
    output: TextOutput


class Generation:
    """An open stream: iterate over it for lists of rows; leave its `with` block to abort what has not finished.

    The iterator gives all rows that wait, so that a reader who was busy catches up in one go. It ends when every
    choice has its finished row, and raises what `fail` was given after the rows that came before.

    Attributes:
        scheduling: the wishes it came with.
        queue_position: how many requests had no token yet when it came.
    """

    def __init__(
        self,
        generation_id: str,
        choices: list[Choice],
        n: int,
        arrival_s: float,
        on_close: Callable[[Generation], None],
        scheduling: Scheduling = Scheduling(),  # noqa: B008  (immutable)
        queue_position: int = 0,
    ) -> None:
        self.scheduling = scheduling
        self.queue_position = queue_position
        self.id = generation_id
        self.choices = choices
        self.n = n
        self.arrival_s = arrival_s
        self.failure: Exception | None = None
        self._on_close = on_close
        self._rows: list[Row] = []
        self._num_open = len(choices)
        self._wake: asyncio.Future[None] | None = None

    @property
    def prompt_choices(self) -> list[Choice]:
        """The first choice of each prompt."""
        return self.choices[:: self.n]

    @property
    def num_waiting_rows(self) -> int:
        """Rows that nobody has read yet."""
        return len(self._rows)

    @property
    def started(self) -> bool:
        """Whether one of the choices has a token."""
        return any(choice.first_token_s is not None for choice in self.choices)

    @property
    def finished(self) -> bool:
        """Whether no more rows will come."""
        return self._num_open == 0 or self.failure is not None

    # ------------------------------------------------------------ the manager's side

    def put(self, choice: Choice, output: TextOutput) -> None:
        """Add a row of one of the choices."""
        if output.finish is not None:
            self._num_open -= 1
        self._rows.append(Row(choice, output))
        self._wake_reader()

    def fail(self, error: Exception) -> None:
        """End the stream with an error; the first one counts."""
        if not self.finished:
            self.failure = error
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # ------------------------------------------------------------ the reader's side

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Row]:
        while not self._rows:
            if self.failure is not None:
                raise self.failure
            if self._num_open == 0:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        rows, self._rows = self._rows, []
        return rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort the choices that have not finished. Idempotent."""
        self._on_close(self)
