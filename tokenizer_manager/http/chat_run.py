"""`start_chat`, `ChatGeneration`: what the chat endpoints of all APIs share, from a `Conversation` to deltas.

call = ChatCall(conversation=..., sampling=..., ...)
with await start_chat(exchange, services, call) as chat:
    async for rows in chat: ...                       # a stream
    answers = await chat.collect()                    # or all at once
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Final, NamedTuple, Protocol, Self

from ...runtime.messages import Finish, FinishKind, TextOutput
from ...runtime.sampling_params import SamplingParams
from ..conversation.conversation import Conversation
from ..conversation.deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning
from ..conversation.parsing.output_parser import OutputParser
from ..conversation.planner import AnswerPlan
from ..conversation.reasoning import ReasoningCounter
from ..generation import Choice, Generation, GenerationRequest
from ..scheduling_options import Scheduling
from .delivery import Collected
from .exchange import EVENT_STREAM, Exchange
from .schema.constraints import Constraint, chat_grammar, check_constraint_with_tools, check_room
from .schema.errors import renamed_fields
from .services import Services
from .token_logprobs import int32s

_NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A chat to answer, checked by its API.

    Attributes:
        conversation: the messages, tools and options.
        sampling: of all choices.
        n: number of answers.
        id_prefix: first part of the request's id.
        scheduling: of all choices.
        length_param: the client's name of the field that bounds the answer.
        messages_param: the client's name of the field with the messages.
        constraint: of the answer; its grammar is also `conversation.spec`, unless it has triggers (structural tags).
        queue_timeout_s: the request's own limit to be started; None: the server's.
        arrival_s: by the manager's clock.
        names: names of fields in errors -> the client's.
    """

    conversation: Conversation
    sampling: SamplingParams
    n: int = 1
    id_prefix: str
    scheduling: Scheduling = Scheduling()  # noqa: RUF009  (immutable)
    length_param: str = "max_tokens"
    messages_param: str = "messages"
    constraint: Constraint | None = None
    arrival_s: float | None = None
    names: Mapping[str, str] = field(default_factory=lambda: _NO_NAMES)


class AnswerRow(NamedTuple):
    """A row of one choice.

    Attributes:
        choice: its choice.
        deltas: what is new.
        output: the row.
        finish_reason: stop, length, tool_calls or abort, in the last row of a choice.
    """

    choice: Choice
    deltas: list[Delta]
    output: TextOutput
    finish_reason: str | None


class CollectedCall(NamedTuple):
    """A whole tool call. `arguments` is JSON, or the text of a custom tool; cut if the answer was."""

    id: str
    name: str
    arguments: str
    custom: bool


class CollectedAnswer:
    """All rows of one choice, joined.

    Attributes:
        content, reasoning: text.
        calls: in order.
        finish_reason: see `AnswerRow`.
        raw: the rows as the generation has them.
    """

    __slots__ = ("calls", "content", "finish_reason", "raw", "reasoning")

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[CollectedCall] = []
        self.finish_reason: str | None = None
        self.raw = Collected()

    def add(self, row: AnswerRow) -> None:
        """Append a row."""
        self.raw.add(row.output, row.choice.prompt_ids)
        self.finish_reason = row.finish_reason or self.finish_reason
        for delta in row.deltas:
            match delta:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallBegin(id=id_, name=name, custom=custom):
                    self.calls.append(CollectedCall(id_, name, "", custom))
                case CallArguments(call, text):
                    known = self.calls[call]
                    self.calls[call] = known._replace(arguments=known.arguments + text)
                case CallEnd():
                    pass


class _ChoiceReader:
    """Parses the text of one choice."""

    __slots__ = ("_num_calls", "_num_ended", "_parser", "counter")

    def __init__(self, parser: OutputParser, counter: ReasoningCounter | None) -> None:
        self._parser = parser
        self._num_calls = 0
        self._num_ended = 0
        self.counter = counter

    def read(self, choice: Choice, output: TextOutput) -> AnswerRow:
        """The deltas of a row."""
        choice.read(output)
        if self.counter is not None:
            self.counter.add(int32s(output.token_ids))
        deltas = self._parser.feed(output.text, output.finish is not None)
        self._num_calls += sum(isinstance(delta, CallBegin) for delta in deltas)
        self._num_ended += sum(isinstance(delta, CallEnd) for delta in deltas)
        return AnswerRow(choice, deltas, output, self._finish_reason(output.finish))

    def _finish_reason(self, finish: Finish | None) -> str | None:
        """`tool_calls` if all calls are complete; `stop` if a stop string has cut one, `length` for any other cut."""
        if finish is None:
            return None
        if finish.kind is FinishKind.STOP and 0 < self._num_calls == self._num_ended:
            return "tool_calls"
        return finish.kind.value


class ChatGeneration:
    """An open chat: iterate over it for groups of `AnswerRow`; leave its `with` block to abort what has not finished.

    Attributes:
        generation: the stream below it.
        warnings: of planning.
        plan: how the answers are constrained and parsed.
        tokenizer: the model's.
    """

    def __init__(self, generation: Generation, plan: AnswerPlan, services: Services) -> None:
        self.generation = generation
        self.plan = plan
        self.warnings = plan.warnings
        self.tokenizer = services.tokenizer
        self._readers: list[_ChoiceReader] = []
        for _ in generation.choices:
            counter = None
            if plan.reasoning is not None:
                counter = plan.reasoning_counter(services.tokenizer.token_bytes)
            self._readers.append(_ChoiceReader(plan.parser(), counter))

    def reasoning_tokens(self, left_out: int | None = None) -> int | None:
        """Tokens of reasoning of all choices so far, but for one; None if the answers have no reasoning block."""
        if self.plan.reasoning is None:
            return None
        return sum(
            reader.counter.count
            for index, reader in enumerate(self._readers)
            if reader.counter is not None and index != left_out
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Iterator[AnswerRow]:
        """The unread rows; each is read, and counts for usage, when the iterator reaches it."""
        rows = await self.generation.__anext__()
        return (self._readers[row.choice.index].read(row.choice, row.output) for row in rows)

    async def collect(self) -> list[CollectedAnswer]:
        """Wait until all choices have finished; one entry per choice.

        Raises:
            EngineError: the generation failed.
        """
        answers = [CollectedAnswer() for _ in self.generation.choices]
        async for rows in self:
            for row in rows:
                answers[row.choice.index].add(row)
        return answers

    def __enter__(self) -> Self:
        self.generation.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.generation.__exit__(kind, error, trace)


async def start_chat(exchange: Exchange, services: Services, call: ChatCall) -> ChatGeneration:
    """Render, plan and start a chat. Call it where a disconnect cancels, and enter the result's `with` block.

    Raises:
        RequestError: the model has no chat template, it cannot render the messages, or the request is refused.
        QueueFullError: the queue is full.
        EngineDeadError: the engine is dead.
    """
    plan, request = await plan_generation(services, call)
    with renamed_fields(call.names):
        generation = await services.start(exchange, request)
    return ChatGeneration(generation, plan, services)


async def plan_generation(services: Services, call: ChatCall) -> tuple[AnswerPlan, GenerationRequest]:
    """Render and plan a chat: the plan, and the request that generates its answer. Call it where a disconnect cancels.

    Raises:
        RequestError: the model has no chat template, it cannot render the messages, or the request is refused.
    """
    constraint = call.constraint
    check_constraint_with_tools(call.conversation, constraint)
    if constraint is not None and not call.conversation.tools:
        check_room(constraint, call.sampling.max_new_tokens, call.length_param, services.tokenizer)
    plan = await services.plan_chat(
        call.conversation,
        max_tokens=call.sampling.max_new_tokens,
        scheduling=call.scheduling,
        messages_param=call.messages_param,
    )
    request = GenerationRequest(
        prompts=[plan.prompt],
        sampling=call.sampling,
        n=call.n,
        id_prefix=call.id_prefix,
        scheduling=call.scheduling,
        add_special_tokens=False,
        prompt_param=call.messages_param,
        length_param=call.length_param,
        arrival_s=call.arrival_s,
        grammar=chat_grammar(plan, constraint),
        grammar_param="tools" if constraint is None else constraint.param,
        keep_special_ids=plan.keep_special_ids,
    )
    return plan, request


class AnswerWriter(Protocol):
    """Writes the stream of one API."""

    def begin(self, row: AnswerRow) -> bytes:
        """What comes before the first row, framed."""
        ...

    def row(self, row: AnswerRow) -> bytes:
        """What is new in a row, framed; may be empty."""
        ...

    def closing(self) -> bytes:
        """The end of the stream, framed."""
        ...


async def send_stream(
    exchange: Exchange, chat: ChatGeneration, writer: AnswerWriter, media_type: bytes = EVENT_STREAM
) -> None:
    """Send an answer as a stream. It begins with the first row, so that earlier failures have an HTTP status.

    Raises:
        EngineError: the generation failed; what was sent so far is incomplete.
    """
    async for rows in chat:
        events = b""
        for row in rows:
            if not exchange.streaming:
                await exchange.start_events(media_type)
                events += writer.begin(row)
            events += writer.row(row)
        if events:
            await exchange.send_events(events)
    await exchange.end_events(writer.closing())
