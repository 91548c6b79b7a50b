"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import UNSET, UnsetType

from ....grammar.answer_report import Truncated
from ....models.tokenizer.tokenizer import Tokenizer
from ....runtime.messages import Finish, TextOutput
from ...conversation.deltas import Delta
from ...generation import Choice, Generation, GenerationRequest, Row
from ...prompt_encoder import NO_BOS
from ..delivery import Collected, best_answers, collect, finish_reason, num_generated, stop_reason, stream
from ..exchange import Exchange
from ..guards.auth import Caller
from ..schema.accounting import truncated_of
from ..schema.constraints import check_room, constraint_of
from ..schema.errors import OPENAI_NAMES, renamed_fields
from ..schema.field_policy import COMPLETION_NO_EFFECT, COMPLETION_NOT_YET, FieldPolicy
from ..schema.fim import fill_in
from ..schema.generation_fields import BACKGROUND_POLICY, StreamOptions, answer_limit, prompts_of
from ..schema.values import Body, convert, refused
from ..services import Engine
from ..token_logprobs import AnswerPlacement, TokenLogprob, prompt_offsets, token_as_id
from .chunks import ChunkWriter, prompt_logprobs_of, whole_body
from .wire import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, PromptLogprobs

DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's
_POLICY: Final = FieldPolicy(
    CompletionRequest,
    COMPLETION_NOT_YET,
    no_effect=COMPLETION_NO_EFFECT,
    nested={
        "stream_options": FieldPolicy(StreamOptions, {}, no_effect=()),
        "background_options": BACKGROUND_POLICY,
    },
)


async def completions(exchange: Exchange, engine: Engine) -> None:
    """Continue prompts."""
    body, request = await engine.read(exchange, lambda body: read_completion(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        with await engine.start(exchange, request) as generation:
            warnings = generation.request.warnings + engine.second_bos(generation, NO_BOS)
            writer = _ChoiceWriter(engine.tokenizer, generation, body)
            options = body.events()
            if options is not None:
                chunks = ChunkWriter(Completion, engine, generation, options, warnings)
                await stream(exchange, generation, _CompletionStream(writer, chunks))
            else:
                choices = writer.choices(best_answers(generation, await collect(generation)))
                await exchange.send_json(whole_body(Completion, engine, generation, choices, warnings))


def read_completion(
    body: Body, engine: Engine, caller: Caller
) -> tuple[CompletionRequest, GenerationRequest]:
    """Check the body of a completion.

    Raises:
        RequestError: it is refused.
    """
    warnings = _POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, CompletionRequest)
    engine.check_model(request.model)
    options = request.events()
    limits = engine.config.limits
    prompts = prompts_of(
        request.prompt, "prompt", limits, max_prompt_len=engine.manager.capacity.max_model_len
    )
    max_new_tokens: int | None = DEFAULT_MAX_TOKENS
    if request.max_tokens is not None:
        max_new_tokens = answer_limit(request.max_tokens, "max_tokens")
    n = request.num_choices(limits)
    generated = num_generated(n, request.best_of, limits, stream=options is not None)
    names = OPENAI_NAMES | ({"n": "best_of"} if generated > n else {})
    with renamed_fields(names):
        sampling = request.sampling(
            limits,
            engine.sampling_defaults,
            max_new_tokens=max_new_tokens,
            min_new_tokens=request.min_tokens,
            keep_stop=request.include_stop_str_in_output,
            logprobs=0 if request.logprobs is None and generated > n else request.logprobs,
            prompt_logprobs=_num_prompt_logprobs(request),
            logprob_token_ids=request.logprob_token_ids,
        )
    if request.suffix:
        if request.echo:
            raise refused("echo", "cannot be combined with suffix; leave out one", "unsupported_value")
        room = engine.manager.capacity.max_model_len - (sampling.max_new_tokens or DEFAULT_MAX_TOKENS)
        filled, sampling = fill_in(
            engine.tokenizer,
            [(prompt, request.suffix) for prompt in prompts],
            sampling,
            room=room,
            param="suffix",
            add_special_tokens=request.add_special_tokens is not False,
            suffix_first=engine.config.answers.spm_infill,
        )
        prompts = [*filled]
    constraint = constraint_of(
        request, engine.config.answers, limits, strict_server=engine.config.server.strict
    )
    if constraint is not None:
        check_room(constraint, sampling.max_new_tokens, "max_tokens", engine.tokenizer)
        warnings += constraint.warnings
    return request, GenerationRequest(
        prompts=prompts,
        sampling=sampling,
        n=generated,
        num_returned=n,
        id_prefix="cmpl",
        scheduling=engine.with_adapter(caller.scheduling(request), request.model, request.lora_path),
        add_special_tokens=request.add_special_tokens is not False,
        grammar=None if constraint is None else constraint.use,
        grammar_param="" if constraint is None else constraint.param,
        names=names,
        warnings=warnings,
        reports_progress=request.reports_progress,
    )


def _num_prompt_logprobs(request: CompletionRequest) -> int | None:
    """The likeliest tokens that are wanted at each token of the prompt: by `prompt_logprobs`, or for its echo."""
    given = (request.prompt_logprobs, request.logprobs if request.echo else None)
    return max((count for count in given if count is not None), default=None)


class _ChoiceWriter:
    """Makes the choices of one request, whole or in parts."""

    def __init__(self, tokenizer: Tokenizer, generation: Generation, request: CompletionRequest) -> None:
        self._tokenizer = tokenizer
        self._generation = generation
        self._echo = bool(request.echo)
        self._prompts = list(generation.request.prompts)
        self._sent_as_ids = [isinstance(prompt, list) for prompt in self._prompts]
        sampling = generation.request.sampling
        self._skip_special_tokens = sampling.skip_special_tokens
        self._num_prompt_logprobs = request.prompt_logprobs
        self._has_ids = bool(request.return_token_ids)
        self._logprobs: list[CompletionLogprobsBuilder] | None = None
        if request.logprobs is not None:
            as_ids = bool(request.return_tokens_as_token_ids)
            self._logprobs = [
                CompletionLogprobsBuilder(
                    tokenizer,
                    request.logprobs,
                    as_ids,
                    AnswerPlacement(
                        tokenizer,
                        skip_special_tokens=sampling.skip_special_tokens,
                        has_stop_strings=bool(sampling.stop),
                    ),
                )
                for _ in generation.choices
            ]

    def choices(self, answers: list[tuple[Choice, Collected]]) -> list[CompletionChoice]:
        """Whole choices for these answers, in their order."""
        return [
            CompletionChoice(
                index,
                self.echo(choice) + answer.text,
                self._logprobs_of(choice, answer, first=True, whole=True),
                finish_reason(answer.finish),
                self.truncated(choice),
                *self._ids(choice, answer, first=True),
                self._prompt_logprobs(choice, answer),
                stop_reason(answer.finish),
            )
            for index, (choice, answer) in enumerate(answers)
        ]

    def part(self, choice: Choice, output: TextOutput, *, first: bool) -> CompletionChoice:
        """The part of a choice that a row adds; the first part has the echo."""
        row = Collected()
        row.add(output, choice.prompt_ids)
        text = (self.echo(choice) if first else "") + output.text
        logprobs = self._logprobs_of(choice, row, first=first)
        return CompletionChoice(
            choice.index, text, logprobs, None, UNSET, *self._ids(choice, row, first=first)
        )

    def _ids(
        self, choice: Choice, answer: Collected, *, first: bool
    ) -> tuple[list[int] | UnsetType, list[int] | UnsetType]:
        """The ids of new tokens, and those of the prompt with the first row."""
        if not self._has_ids:
            return UNSET, UNSET
        return answer.token_ids.tolist(), choice.prompt_ids.tolist() if first else UNSET

    def _prompt_logprobs(self, choice: Choice, answer: Collected) -> PromptLogprobs | UnsetType:
        if self._num_prompt_logprobs is None:
            return UNSET
        return prompt_logprobs_of(answer.prompt_logprobs, self._num_prompt_logprobs, self._tokenizer)

    def truncated(self, choice: Choice) -> Truncated | UnsetType:
        """Where a finished choice was cut and completed."""
        return truncated_of(choice, self._tokenizer)

    def _logprobs_of(
        self, choice: Choice, answer: Collected, *, first: bool, whole: bool = False
    ) -> CompletionLogprobs | None:
        """The log-probabilities of new rows, with those of the prompt if they are the first; None for no token."""
        if self._logprobs is None:
            return None
        builder, echoed = self._logprobs[choice.index], None
        if first and self._echo:
            skipped = self._skip_special_tokens and self._sent_as_ids[choice.index // self._generation.n]
            echoed = builder.prompt(
                self.echo(choice), choice.prompt_ids, answer.prompt_logprobs, skipped=skipped
            )
        if whole and echoed is None:
            echoed = CompletionLogprobs([], [], [], [])
        return builder.answer(answer.logprobs, answer.text, answer.finish, echoed)

    def echo(self, choice: Choice) -> str:
        """The prompt's text if the answer begins with it, otherwise an empty string."""
        if not self._echo:
            return ""
        index = choice.index // self._generation.n
        prompt = self._prompts[index]
        if isinstance(prompt, list):  # once for all n
            prompt = self._tokenizer.decode(prompt, skip_special_tokens=self._skip_special_tokens)
            self._prompts[index] = prompt
        return prompt


class _CompletionStream:
    """Writes text chunks and a finish chunk for each choice."""

    def __init__(self, writer: _ChoiceWriter, chunks: ChunkWriter[CompletionChoice]) -> None:
        self._writer = writer
        self._chunks = chunks
        self._begun: set[int] = set()

    def events(self, row: Row, deltas: Sequence[Delta]) -> bytes:
        """The events for one row."""
        choice, output = row
        index = choice.index
        events = self._chunks.progress_event(row, CompletionChoice(index, "", None, None))
        if output.usage.processed_tokens is not None:
            return events
        part = self._writer.part(choice, output, first=index not in self._begun)
        if part.text or part.logprobs is not None or part.token_ids:
            events += self._chunks.event(part)
        self._begun.add(index)
        if output.finish is not None:
            reason, truncated = finish_reason(output.finish), self._writer.truncated(choice)
            last = CompletionChoice(
                index, "", None, reason, truncated, stop_reason=stop_reason(output.finish)
            )
            events += self._chunks.finish_event(last)
        return events

    def closing(self) -> bytes:
        """The end of the stream, with the usage chunk if it was asked for."""
        return self._chunks.closing()


class CompletionLogprobsBuilder:
    """Turns entries into the completions API's shape, chunk after chunk of one choice.

    `text_offset` counts characters of the returned text, echoed prompt included: where a token is in the text, the text
    from its offset on begins with it. A character that several tokens share belongs to the first of them.
    """

    def __init__(self, tokenizer: Tokenizer, top_k: int, as_ids: bool, placement: AnswerPlacement) -> None:
        """Begin a choice.

        Args:
            tokenizer: of the model.
            top_k: likeliest tokens to list; an entry may have more.
            as_ids: write a token as `token_id:ID` instead of its text.
            placement: of its answer, without the echo.
        """
        self._tokenizer = tokenizer
        self._top_k = top_k
        self._as_ids = as_ids
        self._placement = placement
        self._echo_len = 0

    def prompt(
        self, echo: str, token_ids: Sequence[int], entries: Sequence[TokenLogprob], *, skipped: bool
    ) -> CompletionLogprobs:
        """The chunk of the echoed prompt, once, before the answer's.

        Args:
            echo: the prompt's text.
            token_ids: its tokens; the first one has no log-probability.
            entries: of the others.
            skipped: control tokens are not in the text; otherwise those that the client wrote are.
        """
        chunk = CompletionLogprobs([], [], [], [])
        offsets = prompt_offsets(echo, token_ids, self._tokenizer, skipped=skipped)
        self._add(chunk, token_ids[0], None, offsets[0])
        for entry, offset in zip(entries, offsets[1:], strict=True):
            self._add(chunk, entry.token_id, entry, offset)
        self._echo_len = len(echo)
        return chunk

    def answer(
        self,
        entries: Sequence[TokenLogprob],
        text: str,
        finish: Finish | None,
        chunk: CompletionLogprobs | None = None,
    ) -> CompletionLogprobs | None:
        """The chunk of a row of the answer, after `chunk` if that is given; None without one and without a token."""
        for entry, offset in self._placement.add(entries, text, finish):
            chunk = chunk or CompletionLogprobs([], [], [], [])
            self._add(chunk, entry.token_id, entry, self._echo_len + offset)
        return chunk

    def _add(self, chunk: CompletionLogprobs, token_id: int, entry: TokenLogprob | None, offset: int) -> None:
        token = self._token(token_id)
        chunk.tokens.append(token)
        chunk.token_logprobs.append(None if entry is None else entry.logprob)
        chunk.text_offset.append(offset)
        top = None
        if entry is not None:
            listed = [*entry.top[: self._top_k], *entry.chosen]
            top = {self._token(each): value for each, value in listed}
            top.setdefault(token, entry.logprob)  # OpenAI lists the sampled token too
        chunk.top_logprobs.append(top)

    def _token(self, token_id: int) -> str:
        r"""A token as text; one that is not valid UTF-8 in OpenAI's form, `bytes:\xe2\x80`."""
        if self._as_ids:
            return token_as_id(token_id)
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
