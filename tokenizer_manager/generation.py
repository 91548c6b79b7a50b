"""`GenerationRequest` and `Generation`: a request of a front end, and the open stream that answers it.

The reader of every API returns a `GenerationRequest`. A chat has a `conversation` first; `Services.planned` renders it
and adds the prompt, the grammar and the plan of its answer.

A request with p prompts and n answers each becomes p * n *choices*, numbered prompt by prompt; each is one scheduler
request with its own id (`fan_out`). The manager writes into a `Generation`, one HTTP handler reads from it.

Rows that the reader has not fetched are kept here; `Aborter` bounds their number.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgspec
from msgspec.structs import replace

from ..grammar.answer_report import GuidedAnswer
from ..grammar.schema.report import Finding
from ..runtime.grammar_use import GrammarUse
from ..runtime.messages import (
    Delivered,
    Finish,
    FinishKind,
    GenerateRequest,
    KVHandoff,
    MediaItem,
    TextOutput,
    Usage,
)
from ..runtime.pooling import PoolingParams, with_shared_len
from ..runtime.sampling_params import MAX_SEED, SamplingParams
from .conversation.conversation import Conversation
from .conversation.deltas import CallBegin, CallEnd, Content, Delta
from .conversation.parsing.emitter import MakeId
from .conversation.planner import AnswerPlan
from .media.sources import ImageSource
from .scheduling_options import Scheduling, digest_of

Prompt = str | list[int]
"""A text to tokenize, or token ids."""


class Constraint(NamedTuple):
    """Constraint of an answer.

    Attributes:
        use: for the scheduler; without reasoning.
        param: the client's path of the constraint, for errors.
        warnings: for the response.
        shortest: a shortest answer, as compact JSON; None if it is not known.
        findings: of every keyword of a schema, if they were asked for.
    """

    use: GrammarUse
    param: str
    warnings: list[str]
    shortest: str | None = None
    findings: tuple[Finding, ...] = ()


_DEFAULT_SAMPLING: Final = SamplingParams()


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a front end, before tokenization.

    Attributes:
        prompts: at least one; empty for a chat that is not planned yet.
        sampling: of all choices; with n > 1, choice i of a prompt gets seed + i.
        samplings: of each prompt, if they differ; else `sampling` is that of all.
        n: answers per prompt.
        num_returned: answers per prompt that the client gets, the most likely ones; None: all n.
        id_prefix: first part of the request's id; names the API that received it.
        scheduling: of all choices.
        add_special_tokens: whether tokenization adds BOS; False for a rendered chat template.
        prompt_param, length_param: the fields that errors name.
        cut_length: `sampling.max_new_tokens` beyond the room of the context is cut to the room; else it is an error.
        probe: a health check, admitted even if the queue is full.
        arrival_s: by the manager's clock, if the request has waited before it is started; None: it arrives now.
        received_s: when its body had arrived, by the manager's clock, and the time limit of its grammars began; None:
            it arrives now.
        grammar: what the answers are constrained to; None: free text.
        grammar_param: the field that errors about the grammar name.
        keep_special_ids: see `TextOptions`.
        poolings: of each prompt, a request for a vector instead of text; empty for texts. `n` is 1 then.
        lora_ids: the adapter of each prompt, if they differ; else `scheduling.lora_id` is that of all.
        truncate_len: with `poolings`: longer prompts are cut to so many tokens; -1: to what the model takes; None: they
            are errors.
        num_kept_tokens: with `truncate_len`: last tokens of a text that stay, if it has no special tokens of its own.
        conversation: of a chat; None: the prompts are ready.
        constraint: of a chat's answer; the plan makes `grammar` of it. Its grammar is also `conversation.spec`, unless
            it has triggers (structural tags).
        plan: of a chat's answer; None before it is planned, and for other requests.
        names: names of fields in errors -> the client's.
        warnings: for the response.
        reports_progress: rows say how much of a prompt is read.
        warm_up: the prompt is computed for later requests, and the answer is empty; see `warm_up_of`.
        images: of the only prompt, a text with a marker for each, before they are decoded; those of a chat are in its
            messages.
        media: the images of the prompt, taken from the `ImageStore`; there is one prompt then.
        generation_id: the request's id; "": a new one that begins with `id_prefix`. With one, the ids of its calls
            follow from it, without what stands behind a dot: that tells the lives of a request apart.
        delivered: the part of the only answer that was generated before this server; None: it begins.
        earlier_ids: int32, the tokens of the turn that a chat continues, if they are kept: of its prompt and answer.
    """

    prompts: Sequence[Prompt] = ()
    sampling: SamplingParams = _DEFAULT_SAMPLING
    samplings: Sequence[SamplingParams] = ()
    n: int = 1
    num_returned: int | None = None
    id_prefix: str = "gen"
    scheduling: Scheduling = Scheduling()
    add_special_tokens: bool = True
    prompt_param: str = "prompt"
    length_param: str = "max_tokens"
    cut_length: bool = False
    probe: bool = False
    arrival_s: float | None = None
    received_s: float | None = None
    grammar: GrammarUse | None = None
    grammar_param: str = "response_format"
    keep_special_ids: tuple[int, ...] = ()
    poolings: Sequence[PoolingParams] = ()
    lora_ids: Sequence[str] = ()
    truncate_len: int | None = None
    num_kept_tokens: int = 0
    conversation: Conversation | None = None
    constraint: Constraint | None = None
    plan: AnswerPlan | None = None
    names: Mapping[str, str] = {}
    warnings: list[str] = []
    reports_progress: bool = False
    warm_up: bool = False
    images: tuple[ImageSource, ...] = ()
    media: tuple[MediaItem, ...] = ()
    generation_id: str = ""
    delivered: Delivered | None = None
    earlier_ids: array[int] = array("i")

    @property
    def is_ranked(self) -> bool:
        """Whether the client gets only the most likely answers of those that are generated."""
        return self.num_returned is not None and self.num_returned < self.n


def warm_up_of(request: GenerationRequest) -> GenerationRequest:
    """The request that only computes the prompts of this one: the token that it samples is left out of the answer."""
    sampling = replace(request.sampling, max_new_tokens=1, min_new_tokens=0, logprobs=None)
    return replace(request, sampling=sampling, n=1, num_returned=None, constraint=None, warm_up=True)


class Choice:
    """One scheduler request of a generation.

    Attributes:
        rid: its id in every process.
        index: position among the choices of the generation.
        prompt_ids: [prompt_len] int32.
        answer_ids: int32, the tokens of the rows that have arrived; the request log's, which adds them.
        seed: of its sampling.
        abort_asked: an abort was requested, so an ABORT row is an answer and not a failure.
        first_token_s, last_token_s: CLOCK_MONOTONIC when its tokens arrived here; None before the first.
        usage, finish: as of the latest row that was passed to `read`.
        processed_tokens: prompt tokens with KV, as of the latest row that says so.
        guided: what is known about its grammar; None without one.
        finish_reason: as of the latest row that was read: stop, length, tool_calls or abort; None before its end.
        warm_up: its answer is empty.
    """

    __slots__ = (
        "_counter",
        "_num_calls",
        "_num_ended_calls",
        "_parser",
        "abort_asked",
        "answer_ids",
        "finish",
        "finish_reason",
        "first_token_s",
        "guided",
        "index",
        "last_token_s",
        "processed_tokens",
        "prompt_ids",
        "rid",
        "seed",
        "usage",
        "warm_up",
    )

    def __init__(
        self,
        rid: str,
        index: int,
        prompt_ids: array[int],
        seed: int,
        grammar: GrammarUse | None = None,
        plan: AnswerPlan | None = None,
        *,
        warm_up: bool = False,
        make_id: MakeId | None = None,
    ) -> None:
        self.rid = rid
        self.index = index
        self.prompt_ids = prompt_ids
        self.answer_ids = bytearray()
        self.seed = seed
        self.abort_asked = False
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.usage = Usage(prompt_tokens=len(prompt_ids), completion_tokens=0)
        self.finish: Finish | None = None
        self.processed_tokens = 0
        self.finish_reason: str | None = None
        self.warm_up = warm_up
        self.guided = GuidedAnswer(grammar) if grammar is not None else None
        self._parser = None if plan is None else plan.parser(make_id)
        self._counter = None if plan is None else plan.reasoning_counter()
        self._num_calls = 0
        self._num_ended_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens inside its reasoning block, as of the latest row that was read."""
        return 0 if self._counter is None else self._counter.count

    def read(self, output: TextOutput) -> list[Delta]:
        """Apply a row, on the reader's side, once: unread rows may wait while later ones arrive.

        Returns:
            What the row adds to the answer, parsed by the plan of a chat.
        """
        self.usage = output.usage
        if self.warm_up:
            self.usage = replace(output.usage, completion_tokens=0)
            if (finish := output.finish) is not None:
                self.finish = finish
                self.finish_reason = "abort" if finish.kind is FinishKind.ABORT else "length"
            return []
        if self.guided is not None:
            self.guided.read(
                output.token_ids, output.usage.grammar, output.usage.completion_tokens, output.finish
            )
        if output.finish is not None:
            self.finish = output.finish
        if self._counter is not None:
            self._counter.add(array("i", output.token_ids))
        if self._parser is None:
            deltas: list[Delta] = [Content(output.text)] if output.text else []
        else:
            deltas = self._parser.feed(output.text, output.finish is not None)
        self._num_calls += sum(isinstance(delta, CallBegin) for delta in deltas)
        if self._counter is not None and self._num_calls:
            self._counter.end_by_call()
        self._num_ended_calls += sum(isinstance(delta, CallEnd) for delta in deltas)
        if output.finish is not None:
            self.finish_reason = self._finish_reason(output.finish)
        return deltas

    def _finish_reason(self, finish: Finish) -> str:
        """`tool_calls` if all calls are complete; `stop` if a stop string has cut one, `length` for any other cut."""
        if finish.kind is FinishKind.STOP and 0 < self._num_calls == self._num_ended_calls:
            return "tool_calls"
        return finish.kind.value


def fan_out(
    request: GenerationRequest,
    generation_id: str,
    prompts: Sequence[array[int]],
    resolved: Sequence[SamplingParams],
    *,
    arrival_s: float,
    draw_seed: Callable[[], int],
    handoffs: Sequence[KVHandoff | None] = (),
) -> Iterator[tuple[Choice, GenerateRequest]]:
    """Each choice of an admitted request with its scheduler request.

    Choice i of a prompt gets seed + i; the parallel samples of a prompt (n > 1) are one group.

    Args:
        request: admitted.
        generation_id: first part of the choices' ids.
        prompts: [p] the token ids of each.
        resolved: [p] with `max_new_tokens` set.
        arrival_s: CLOCK_MONOTONIC.
        draw_seed: a seed for a prompt whose request has none.
        handoffs: [p] the other half of each; empty: there are none.
    """
    scheduling, poolings = request.scheduling, with_shared_len(request.poolings, prompts)
    index = 0
    for number, (ids, sampling) in enumerate(zip(prompts, resolved, strict=True)):
        seed = sampling.seed if sampling.seed is not None else draw_seed()
        input_ids = ids.tobytes()  # one copy for all n
        group = f"{generation_id}-{index}" if request.n > 1 else ""  # the first sample's id, which is unique
        for i in range(request.n):
            choice = Choice(
                f"{generation_id}-{index}",
                index,
                ids,
                (seed + i) & MAX_SEED,
                request.grammar,
                request.plan,
                warm_up=request.warm_up,
                make_id=_ids_from(request.generation_id) if request.generation_id else None,
            )
            index += 1
            yield (
                choice,
                GenerateRequest(
                    rid=choice.rid,
                    input_ids=input_ids,
                    sampling=replace(sampling, seed=choice.seed),
                    arrival_s=arrival_s,
                    priority=scheduling.priority,
                    extra_key=scheduling.extra_key,
                    tenant=scheduling.tenant,
                    lora_id=request.lora_ids[number] if request.lora_ids else scheduling.lora_id,
                    group=group,
                    queue_timeout_s=scheduling.queue_timeout_s,
                    timeout_s=scheduling.timeout_s,
                    delivered=request.delivered,
                    grammar=request.grammar,
                    keep_special_ids=request.keep_special_ids,
                    pooling=poolings[number] if poolings else None,
                    data_parallel_rank=scheduling.replica,
                    handoff=_of_sample(handoffs[number], i) if handoffs else None,
                    reports_progress=request.reports_progress,
                    keep_s=scheduling.keep_s,
                    session=scheduling.session,
                    in_memory=scheduling.in_memory,
                    media=request.media,
                    background=scheduling.background,
                ),
            )


def _ids_from(generation_id: str) -> MakeId:
    """Ids of calls that are the same when the answer is parsed again."""
    generation_id = generation_id.partition(".")[0]
    return lambda name, call: f"call_{digest_of(f'{generation_id}/{call}'.encode())}"


def _of_sample(handoff: KVHandoff | None, sample: int) -> KVHandoff | None:
    """Each parallel sample of a prompt has its own first token, and so its own `bootstrap_room`."""
    return (
        handoff
        if handoff is None or not sample
        else replace(handoff, bootstrap_room=f"{handoff.bootstrap_room}.{sample}")
    )


class Row(NamedTuple):
    """A row and its choice, which reads it (`Choice.read`)."""

    choice: Choice
    output: TextOutput


_NO_REQUEST: Final = GenerationRequest()


class Generation:
    """An open stream: iterate over it for lists of rows; leave its `with` block to abort what has not finished.

    The iterator returns all unread rows at once. It ends when every choice has its finished row; after `fail` it
    raises the error once the earlier rows are read.

    Attributes:
        request: that it answers.
        queue_position: requests without a token yet when it arrived.
        opened_s: when it was tokenized and sent, by the manager's clock.
        grammar_ready_s: when its grammar was compiled in the sandbox; None if that was not necessary, or has not ended.
        kv_transfer_params: of the answer, for the router that then asks a decode engine; None: there are none.
    """

    def __init__(
        self,
        generation_id: str,
        choices: list[Choice],
        n: int,
        arrival_s: float,
        on_close: Callable[[Generation], None],
        request: GenerationRequest = _NO_REQUEST,
        queue_position: int = 0,
    ) -> None:
        self.request = request
        self.queue_position = queue_position
        self.id = generation_id
        self.choices = choices
        self.n = n
        self.arrival_s = arrival_s
        self.opened_s = arrival_s
        self.grammar_ready_s: float | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.failure: Exception | None = None
        self._on_close = on_close
        self._rows: list[Row] = []
        self._num_open = len(choices)
        self._wake: asyncio.Future[None] | None = None

    @property
    def scheduling(self) -> Scheduling:
        """The scheduling options of its request."""
        return self.request.scheduling

    @property
    def prompt_choices(self) -> list[Choice]:
        """The first choice of each prompt."""
        return self.choices[:: self.n]

    @property
    def num_waiting_rows(self) -> int:
        """Unread rows."""
        return len(self._rows)

    @property
    def started(self) -> bool:
        """Whether one of the choices has a token."""
        return any(choice.first_token_s is not None for choice in self.choices)

    @property
    def finished(self) -> bool:
        """Whether no more rows will come."""
        return self._num_open == 0 or self.failure is not None

    def reasoning_tokens(self, left_out: int | None = None) -> int | None:
        """Tokens of reasoning of all choices so far, but for one; None if the answers have no reasoning block."""
        plan = self.request.plan
        if plan is None or plan.reasoning is None:
            return None
        return sum(each.num_reasoning_tokens for each in self.choices if each.index != left_out)

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
