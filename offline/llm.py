"""`LLM`: the engine as a Python object: `LLM().generate(prompts, params)`, batches, streams, chats.

    with LLM() as llm:
        print(llm.generate("The sky is", SamplingParams(max_new_tokens=16)).text)

All prompts and parameters are checked before anything runs: one that is invalid raises `RequestError`, and no request
of the batch has started.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack, overload

import msgspec

from ..runtime.config.config_sources import MergedConfig, from_arguments, merge
from ..runtime.errors import EngineDeadError, RequestError
from ..runtime.grammar_use import GrammarUse
from ..runtime.messages import Explanation, FlushCacheDone, PinDone
from ..runtime.model_files.download_progress import DownloadState, Progress
from ..runtime.model_files.tokenizer import load_tokenizer
from ..runtime.progress.startup_display import StartupDisplay
from ..runtime.request_checks import check_integer, check_number, check_text, plain
from ..runtime.resolve.prepare import prepare
from ..runtime.sampling_params import MAX_COUNT, MAX_SEED, SamplingParams
from ..tokenizer_manager.admission.feasibility_check import resolve_length
from ..tokenizer_manager.conversation.conversation import Conversation
from ..tokenizer_manager.conversation.detection import detect_formats
from ..tokenizer_manager.conversation.end_of_turn import turn_without_end
from ..tokenizer_manager.conversation.planner import AnswerPlan, Planner
from ..tokenizer_manager.conversation.template_choice import load_chat_template, why_no_template
from ..tokenizer_manager.http.chat_grammar import chat_grammar, check_constraint_with_tools
from ..tokenizer_manager.http.schema.constraints import Constraint, check_room
from ..tokenizer_manager.http.schema.tool_schemas import ToolSchemas
from ..tokenizer_manager.prompt_encoder import second_bos, unknown_to_model
from .batch import Batch, CheckedRequest
from .build import start_engine
from .options import CallOptions, ChatOptions, checked_constraint, checked_options, conversation_of
from .outputs import GenerationChunk, GenerationOutput, encode_token_ids
from .own_names import own_names
from .prompts import as_params, as_prompts, checked_token_ids

logger = logging.getLogger(__name__)

Prompt = str | list[int]
"""A text to tokenize, or token ids."""
Params = SamplingParams | Mapping[str, Any]
"""Sampling parameters, or the fields of `SamplingParams` that differ from `LLM.get_default_sampling_params()`."""
ChatMessage = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`."""
MAX_TTL_S: Final = 1e9
"""Of a pin, 30 years."""


logger = logging.getLogger(__name__)


class LLM:
    """A model, ready to generate in this process.

    Attributes:
        config: the effective configuration, no "auto" left.
        model_name: the model's name in the API.
        max_model_len: tokens of prompt and answer together.
        tokenizer: of the model.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "default",
        *,
        on_step: Callable[[str], None] | None = None,
        on_download: Callable[[int, int], None] | None = None,
        show_progress: bool = True,
        **settings: Any,
    ) -> None:
        """Load a model; takes seconds, and longer the first time: the model is downloaded, the kernels are compiled.

        Args:
            model: folder in Hugging Face layout, .gguf file, name of a model (docs/models.md), or 'default'.
            on_step: called with the name of each step of the start, on the thread that runs it.
            on_download: called with (bytes so far, bytes in all) while model files are downloaded.
            show_progress: show downloads and compilation on standard error, unless `on_step` or `on_download` is given:
                a bar in a terminal or notebook, else one line per file.
            settings: any setting of the command line, with underscores: `max_model_len=4096`, `preset="batch"`.

        Raises:
            ConfigError: an unknown setting, a bad value, a broken model, too little memory.
        """
        merged = merge(from_arguments({"model": model, **settings}))
        given = on_step is not None or on_download is not None
        with StartupDisplay(quiet=given or not show_progress, only_slow=True) as display:
            if given:
                self._start(merged, on_step, on_download and _bytes_of(on_download))
            else:
                self._start(merged, display.step, display.download)

    @classmethod
    def from_config(
        cls,
        merged: MergedConfig,
        *,
        on_step: Callable[[str], None] | None = None,
        on_download: Progress | None = None,
    ) -> Self:
        """Load a model with a configuration from another source (the command line); shows nothing by itself."""
        llm = cls.__new__(cls)
        llm._start(merged, on_step, on_download)
        return llm

    def _start(
        self,
        merged: MergedConfig,
        on_step: Callable[[str], None] | None,
        on_download: Progress | None,
    ) -> None:
        step = on_step or (lambda _name: None)
        prepared = prepare(merged, on_step=step, on_download=on_download)
        self.config = prepared.config
        self.model_name = prepared.model_name
        self._request_numbers = itertools.count()
        step("tokenizer")
        self.tokenizer = load_tokenizer(prepared.source)
        self._chat_template = load_chat_template(
            prepared.config.model.chat_template, self.tokenizer, prepared.source.path
        )
        if self._chat_template is not None and (
            line := turn_without_end(self._chat_template, self.tokenizer, prepared.spec.eos_token_ids)
        ):
            logger.warning("%s", line)
        limits = self.config.limits
        self._planner = Planner(
            detect_formats(self._chat_template, self.tokenizer, self.config.answers),
            self.tokenizer,
            self.config.answers,
            max_tools=limits.max_tools,
            max_schema_kb=limits.max_schema_kb,
            check_schema=ToolSchemas(limits),
        )
        self._sampling_defaults = prepared.sampling_defaults
        self._engine = start_engine(prepared, self.tokenizer, on_step=step)
        self.max_model_len = self._engine.capacity.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without any: those of the model's files, unless `sampling_defaults` is "openai".

        Change them with `msgspec.structs.replace`, or pass a dict of the fields that differ instead of them.
        """
        return self._sampling_defaults.params()

    # ------------------------------------------------------------ generating

    @overload
    def generate(
        self,
        prompts: str | list[int],
        params: Params | None = None,
        *,
        stream: Literal[False] = False,
        progress_bar: bool = False,
        add_special_tokens: bool = True,
        **options: Unpack[CallOptions],
    ) -> GenerationOutput: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        stream: Literal[False] = False,
        progress_bar: bool = False,
        add_special_tokens: bool = True,
        **options: Unpack[CallOptions],
    ) -> list[GenerationOutput]: ...

    @overload
    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]] | list[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        stream: Literal[True],
        progress_bar: bool = False,
        add_special_tokens: bool = True,
        **options: Unpack[CallOptions],
    ) -> Iterator[GenerationChunk]: ...

    @own_names()
    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]] | list[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        stream: bool = False,
        progress_bar: bool = False,
        add_special_tokens: bool = True,
        **options: Unpack[CallOptions],
    ) -> GenerationOutput | list[GenerationOutput] | Iterator[GenerationChunk]:
        """Continue one or many prompts; many run in one batch.

        Args:
            prompts: one prompt or a list of prompts, each a text or a list of token ids. Arrays and tensors of integers
                are lists of token ids; one of two dimensions has a prompt in each row.
            params: for all prompts, or one per prompt; None: the defaults. A dict has the fields that differ from the
                defaults; a `SamplingParams` is taken as it is.
            stream: return an iterator of chunks instead; closing it aborts unfinished requests.
            progress_bar: show finished prompts and tokens per second on standard error.
            add_special_tokens: put BOS before texts if the model requires it; False for a text that has it.
            options: `json_schema`, `regex`, `choice` and `grammar` say what the answers match; `priority`, `timeout`
                and others how the requests are scheduled. See `engine.offline.options.CallOptions`.

        Returns:
            One output for one prompt, a list in the order of the prompts for a list. A request that failed on its own
            has the finish reason `error` and the reason in `error`; the others continue.

        Raises:
            RequestError: a prompt or parameter is invalid; no request has started.
            EngineDeadError: the engine has ended.
        """
        self._engine.check_usable()
        items, is_single = as_prompts(prompts)
        batch = self._prepare(items, params, options, add_special_tokens=add_special_tokens)
        if stream:
            return batch.chunks()
        outputs = batch.run(progress_bar=progress_bar)
        return outputs[0] if is_single else outputs

    @own_names()
    def sample(
        self,
        prompt: Prompt,
        n: int,
        params: Params | None = None,
        *,
        add_special_tokens: bool = True,
        **options: Unpack[CallOptions],
    ) -> list[GenerationOutput]:
        """n answers to one prompt, which is computed once; answer i has the seed of the first one plus i.

        Raises:
            RequestError: n is below 1, or as for `generate`.
        """
        self._engine.check_usable()
        n = check_integer("n", plain(n), 1, MAX_COUNT, "must be at least 1")
        (sampling,) = as_params(params, 1, self._sampling_defaults)
        scheduling = checked_options(options)
        constraint = checked_constraint(options, self.config)
        grammar = None if constraint is None else constraint.use
        self._check_room(constraint, sampling)
        first = self._prepare_one(prompt, sampling, grammar, add_special_tokens=add_special_tokens)
        self._warn_of_second_bos([prompt], [first], add_special_tokens)
        seed = first.sampling.seed
        assert seed is not None
        siblings = [
            dataclasses.replace(
                first,
                rid=f"{first.rid}-{i}",
                sampling=msgspec.structs.replace(first.sampling, seed=(seed + i) & MAX_SEED),
                group=first.rid if n > 1 else "",
            )
            for i in range(n)
        ]
        batch = Batch(self._engine, self.tokenizer, siblings, scheduling)
        return batch.run(progress_bar=False)

    @overload
    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: Params | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> GenerationOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: Params | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Iterator[GenerationChunk]: ...

    @own_names()
    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: Params | None = None,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> GenerationOutput | Iterator[GenerationChunk]:
        """Answer a conversation, rendered with the model's chat template.

        Args:
            messages: in the forms of the chat API: roles system, user, assistant and tool, tool calls, text parts.
            params: the sampling parameters, or a dict, as for `generate`; None: the defaults.
            stream: return an iterator of chunks instead.
            options: those of `generate`, `tools`, `tool_choice`, `reasoning_effort` and others. See
                `engine.offline.options.ChatOptions`.

        Raises:
            RequestError: a message the template refuses, or as for `generate`.
        """
        self._engine.check_usable()
        scheduling = checked_options(options, tuple(ChatOptions.__annotations__))
        (sampling,) = as_params(params, 1, self._sampling_defaults)
        constraint = checked_constraint(options, self.config)
        spec = None if constraint is None else constraint.use.spec
        conversation = conversation_of(messages, options, self.config.limits, spec)
        check_constraint_with_tools(conversation, constraint)
        if not conversation.tools:
            self._check_room(constraint, sampling)
        plan = self._plan(conversation, sampling.max_new_tokens)
        use = chat_grammar(plan, constraint)
        request = self._prepare_one(plan.prompt, sampling, use, add_special_tokens=False)
        request = dataclasses.replace(request, keep_special_ids=plan.keep_special_ids, parser=plan.parser())
        batch = Batch(self._engine, self.tokenizer, [request], scheduling)
        return batch.chunks() if stream else batch.run(progress_bar=False)[0]

    @own_names()
    def render_chat(self, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> list[int]:
        """The token ids of a conversation, up to the beginning of the answer.

        Raises:
            RequestError: a message the template refuses.
        """
        self._engine.check_process()  # the tokenizer's threads are those of its process, too
        checked_options(options, tuple(ChatOptions.__annotations__))
        conversation = conversation_of(messages, options, self.config.limits, None)
        return self.tokenizer.encode(self._plan(conversation, None).prompt, add_special_tokens=False)

    def _plan(self, conversation: Conversation, max_tokens: int | None) -> AnswerPlan:
        if self._chat_template is None:
            raise RequestError(
                f"{self.model_name} {why_no_template(self.tokenizer, 'use `generate`')}",
                param="messages",
            )
        given = self._planner.render_input(conversation)
        prompt = self._chat_template.render(**given._asdict())
        return self._planner.plan(conversation, prompt, max_tokens=max_tokens)

    def flush_cache(self) -> FlushCacheDone:
        """Drop cached prefixes; for measurements."""
        return self._engine.flush_cache()

    @own_names()
    def pin(self, prompt: Prompt, *, ttl: float, cache_salt: str = "") -> PinDone:
        """Keep the cached part of a prompt for `ttl` seconds, within the quota; 0 unpins.

        Returns:
            Tokens that are pinned, tokens of the prompt, and the reason if not all are pinned.

        Raises:
            RequestError: the prompt is empty or no prompt, or `ttl` is no number, negative or not finite.
        """
        self._engine.check_usable()
        ttl = check_number("ttl", plain(ttl), 0.0, MAX_TTL_S, unit="seconds; 0 unpins")
        check_text("cache_salt", cache_salt)
        token_ids = self._encode(prompt, add_special_tokens=True)
        if not 1 <= len(token_ids) < self.max_model_len:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens, but one has at least 1 and at most {self.max_model_len - 1}",
                param="prompt",
                code="invalid_value",
            )
        return self._engine.pin(encode_token_ids(token_ids), ttl, cache_salt)

    def why(self, request_id: str) -> Explanation:
        """Why a request waited, was chunked, retracted or missed the cache; `request_id` stands in its output."""
        check_text("request_id", request_id)
        return self._engine.explain(request_id)

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """End the engine and free its memory; running calls raise `EngineDeadError`. Closing twice is allowed."""
        self._engine.close()

    def __repr__(self) -> str:
        if getattr(self, "_engine", None) is None:
            return "<LLM, not started>"
        model = self.config.model
        try:
            self._engine.check_usable()
            state = ""
        except EngineDeadError:
            state = ", ended"
        return f"<LLM {self.model_name}: {model.dtype} on {model.device}, context {self.max_model_len} tokens{state}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "an LLM cannot be pickled or copied, because its engine runs in this process; make one in each process "
            "that needs it, or start `engine serve` and use its HTTP API"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ internals

    def _prepare(
        self,
        prompts: Sequence[object],
        params: Params | Sequence[Params] | None,
        options: CallOptions,
        *,
        add_special_tokens: bool,
    ) -> Batch:
        """Tokenize and check everything; starts nothing."""
        scheduling = checked_options(options)
        constraint = checked_constraint(options, self.config)
        grammar = None if constraint is None else constraint.use
        requests: list[CheckedRequest] = []
        all_params = as_params(params, len(prompts), self._sampling_defaults)
        for index, (prompt, own) in enumerate(zip(prompts, all_params, strict=True)):
            try:
                self._check_room(constraint, own)
                requests.append(
                    self._prepare_one(prompt, own, grammar, add_special_tokens=add_special_tokens)
                )
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(
                    f"prompt {index}: {error.message}",
                    param=error.param,
                    code=error.code,
                    status=error.status,
                ) from None
        self._warn_of_second_bos(prompts, requests, add_special_tokens)
        return Batch(self._engine, self.tokenizer, requests, scheduling)

    def _warn_of_second_bos(
        self, prompts: Sequence[object], requests: Sequence[CheckedRequest], add_special_tokens: bool
    ) -> None:
        if add_special_tokens:
            encoded = (request.token_ids for request in requests)
            found = second_bos(self.tokenizer, prompts, encoded, "prompt", "pass add_special_tokens=False")
            if found:
                more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
                logger.warning("%s%s", found[0], more)

    def _prepare_one(
        self,
        prompt: object,
        sampling: SamplingParams,
        grammar: GrammarUse | None = None,
        *,
        add_special_tokens: bool,
    ) -> CheckedRequest:
        capacity = self._engine.capacity
        sampling.verify(capacity.vocab_size)
        token_ids = self._encode(prompt, add_special_tokens=add_special_tokens)
        sampling = resolve_length(
            sampling, len(token_ids), capacity, prompt_param="prompt", length_param="max_new_tokens"
        )
        if sampling.seed is None:
            sampling = msgspec.structs.replace(
                sampling, seed=self.config.model.seed or random.randint(0, MAX_SEED)
            )
        if grammar is not None:
            grammar = msgspec.structs.replace(grammar, proved=True)  # by the caller, who shares this process
        rid = f"llm-{next(self._request_numbers)}"
        return CheckedRequest(rid, token_ids, sampling, grammar=grammar)

    def _check_room(self, constraint: Constraint | None, sampling: SamplingParams) -> None:
        """Refuse a limit on tokens below the shortest answer."""
        if constraint is not None:
            check_room(constraint, sampling.max_new_tokens, "max_new_tokens", self.tokenizer)

    def _encode(self, prompt: object, *, add_special_tokens: bool) -> list[int]:
        vocab_size = self._engine.capacity.vocab_size
        if not isinstance(prompt, str):
            return checked_token_ids(prompt, vocab_size)
        token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        if max(token_ids, default=0) >= vocab_size:
            raise unknown_to_model(self.tokenizer, token_ids, "prompt", vocab_size)
        return token_ids


def _bytes_of(on_download: Callable[[int, int], None]) -> Progress:
    """Reports of a download as (bytes so far, bytes in all)."""

    def report(state: DownloadState) -> None:
        if state.total_bytes:
            on_download(state.done_bytes, state.total_bytes)

    return report
