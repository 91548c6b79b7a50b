"""`LLM`: the engine as a Python object: `LLM().generate(prompts, params)`, batches, streams, chats.

    with LLM() as llm:
        print(llm.generate("The sky is", SamplingParams(max_new_tokens=16)).text)

All prompts and parameters are checked before anything runs: one that is invalid raises `RequestError`, and no request
of the batch has started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack, overload

from ..launch.resolve.prepare import Prepared, prepare
from ..launch.startup_display import StartupDisplay
from ..models.hub.pull import DownloadState, Progress
from ..models.tokenizer.tokenizer import load_tokenizer
from ..runtime.config.config_sources import MergedConfig, from_arguments, merge
from ..runtime.errors import EngineDeadError, EngineError, RequestError
from ..runtime.grammar_use import GrammarSpec
from ..runtime.messages import Explain, Explanation, FlushCache, FlushCacheDone, PinDone, PinPrefix
from ..runtime.request_checks import check_integer, check_number, check_text, plain
from ..runtime.sampling_params import MAX_COUNT, SamplingParams
from ..tokenizer_manager.conversation.conversation import Conversation
from ..tokenizer_manager.pooling.embedding import check_task
from .adapters import Adapter, LocalAdapters
from .batch import Batch, CheckedRequest, shows_bar
from .build import start_engine
from .options import (
    CallOptions,
    ChatOptions,
    SchedulingOptions,
    checked_constraint,
    checked_options,
    conversation_of,
)
from .outputs import GenerationChunk, GenerationOutput, encode_token_ids
from .pooled import PooledCalls, RankedDocument, Vectors
from .prompts import as_conversations, as_params, as_prompts, located, own_names
from .request_preparer import ChatPlanner, RequestPreparer

Prompt = str | list[int]
"""A text to tokenize, or token ids."""
Params = SamplingParams | Mapping[str, Any]
"""Sampling parameters, or the fields of `SamplingParams` that differ from `LLM.get_default_sampling_params()`."""
ChatMessage = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`."""
MAX_TTL_S: Final = 1e9
"""The longest pin, 30 years."""


class LLM:
    """A model, ready to generate in this process.

    Attributes:
        config: the effective configuration, no "auto" left.
        model_name: the model's name in the API.
        max_model_len: tokens of prompt and answer together.
        tokenizer: of the model.
    """

    @own_names()
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
        check: Callable[[Prepared], None] | None = None,
    ) -> Self:
        """Load a model with a configuration from another source (the command line); shows nothing by itself.

        `check` may refuse the model, before its weights are read.
        """
        llm = cls.__new__(cls)
        llm._start(merged, on_step, on_download, check)
        return llm

    def _start(
        self,
        merged: MergedConfig,
        on_step: Callable[[str], None] | None,
        on_download: Progress | None,
        check: Callable[[Prepared], None] | None = None,
    ) -> None:
        step = on_step or (lambda _name: None)
        prepared = prepare(merged, on_step=step, on_download=on_download)
        if check is not None:
            check(prepared)
        self.config = prepared.config
        self.model_name = prepared.model_name
        step("tokenizer")
        self.tokenizer = load_tokenizer(prepared.source, encode_only=prepared.spec.pooling is not None)
        self._chats = ChatPlanner(prepared, self.tokenizer)
        self._sampling_defaults = prepared.sampling_defaults
        self._engine = start_engine(prepared, self.tokenizer, on_step=step)
        self.max_model_len = self._engine.capacity.max_model_len
        self._preparer = RequestPreparer(self.tokenizer, self._engine.capacity, self.config.model.seed)
        self._pooled = PooledCalls(self._engine, self.tokenizer, prepared.spec)
        self._adapters = LocalAdapters(self._engine, prepared)
        self._spec = prepared.spec

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
        progress_bar: bool | None = None,
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
        progress_bar: bool | None = None,
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
        progress_bar: bool | None = None,
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
        progress_bar: bool | None = None,
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
            progress_bar: show finished prompts and tokens per second on standard error; None: of several prompts, in a
                terminal or notebook.
            add_special_tokens: put BOS before texts if the model requires it; False for a text that has it.
            options: `json_schema`, `regex`, `choice` and `grammar` say what the answers match; `lora` is the name of a
                LoRA adapter; `priority`, `timeout` and others say how the requests are scheduled. See
                `engine.offline.options.CallOptions`.

        Returns:
            One output for one prompt, a list in the order of the prompts for a list. A request that failed on its own
            has the finish reason `error` and the reason in `error`; the others continue.

        Raises:
            RequestError: a prompt or parameter is invalid; no request has started.
            EngineDeadError: the engine has ended.
        """
        self._engine.check_usable()
        check_task(self._spec, "generate")
        items, is_single = as_prompts(prompts)
        scheduling = checked_options(options, self._adapters.lora_id, CallOptions)
        constraint = checked_constraint(options, self.config)
        checked_params = as_params(params, len(items), self._sampling_defaults)
        requests = self._preparer.prepare_all(
            items, checked_params, constraint, add_special_tokens=add_special_tokens
        )
        batch = Batch(self._engine, self.tokenizer, requests, scheduling)
        if stream:
            return batch.chunks()
        outputs = batch.run(progress_bar=shows_bar(progress_bar, len(items)))
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
        check_task(self._spec, "generate")
        n = check_integer("n", plain(n), 1, MAX_COUNT, "must be at least 1")
        (sampling,) = as_params(params, 1, self._sampling_defaults)
        scheduling = checked_options(options, self._adapters.lora_id, CallOptions)
        constraint = checked_constraint(options, self.config)
        requests = self._preparer.prepare_samples(
            prompt, n, sampling, constraint, add_special_tokens=add_special_tokens
        )
        batch = Batch(self._engine, self.tokenizer, requests, scheduling)
        return batch.run(progress_bar=False)

    @overload
    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: Params | None = None,
        *,
        stream: Literal[False] = False,
        progress_bar: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> GenerationOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[ChatMessage]],
        params: Params | Sequence[Params] | None = None,
        *,
        stream: Literal[False] = False,
        progress_bar: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[GenerationOutput]: ...

    @overload
    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        params: Params | Sequence[Params] | None = None,
        *,
        stream: Literal[True],
        progress_bar: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[GenerationChunk]: ...

    @own_names()
    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        params: Params | Sequence[Params] | None = None,
        *,
        stream: bool = False,
        progress_bar: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> GenerationOutput | list[GenerationOutput] | Iterator[GenerationChunk]:
        """Answer a conversation, or a list of them in one batch, rendered with the model's chat template.

        Args:
            messages: in the forms of the chat API: roles system, user, assistant and tool, tool calls, text parts,
                image_url parts, and {"type": "image", "image": X}, an image of Pillow or an array [H, W, 3] uint8; or
                a list of such conversations.
            params: the sampling parameters, or a dict, for all conversations or one for each, as for `generate`; None:
                the defaults.
            stream: return an iterator of chunks instead.
            progress_bar: as for `generate`.
            options: those of `generate`, `tools`, `tool_choice`, `reasoning_effort` and others, for all conversations.
                See `engine.offline.options.ChatOptions`.

        Returns:
            One output for one conversation, a list in the order of the conversations for a list.

        Raises:
            RequestError: a message the template refuses, or as for `generate`.
        """
        self._engine.check_usable()
        check_task(self._spec, "generate")
        scheduling = checked_options(options, self._adapters.lora_id, ChatOptions)
        chats, is_single = as_conversations(messages)
        constraint = checked_constraint(options, self.config)
        spec = None if constraint is None else constraint.use.spec
        requests: list[CheckedRequest] = []
        try:
            for number, sampling in enumerate(as_params(params, len(chats), self._sampling_defaults)):
                with located("messages" if is_single else f"conversation {number}: messages", "messages"):
                    conversation = self._conversation(chats[number], options, spec)
                    requests.append(self._chats.prepare(conversation, sampling, constraint, self._preparer))
        except BaseException:
            for request in requests:
                self._chats.release(request.media)
            raise
        batch = Batch(self._engine, self.tokenizer, requests, scheduling, self._chats.release)
        if stream:
            return batch.chunks()
        outputs = batch.run(progress_bar=shows_bar(progress_bar, len(chats)))
        return outputs[0] if is_single else outputs

    # ------------------------------------------------------------ vectors and scores

    @own_names()
    def embed(
        self,
        inputs: str | list[int] | list[str] | list[list[int]] | list[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        input_type: str | None = None,
        truncate: bool = False,
        progress_bar: bool | None = None,
        **options: Unpack[SchedulingOptions],
    ) -> Vectors:
        """The vectors of one or many texts; for a model that makes vectors.

        Args:
            inputs: a text or token ids, or a list of these.
            dimensions: leading numbers to keep, for models that were trained for it.
            normalize: scale vectors to length 1; None: as the model's files say.
            prompt_name: the model's prompt of this name is put before each text.
            input_type: "query" or "document": the model's prompt of this kind is put before each text.
            truncate: cut inputs that are longer than the model takes; otherwise they are errors.
            progress_bar: show finished texts and tokens per second on standard error.
            options: how the requests are scheduled; see `engine.offline.options.SchedulingOptions`.

        Returns:
            float32 [D] for one input, [n, D] for a list, in its order.

        Raises:
            RequestError: an input or argument is invalid, or an input failed; the message has its number.
            EngineDeadError: the engine has ended.
        """
        return self._pooled.embed(
            inputs,
            checked_options(options, self._adapters.lora_id, SchedulingOptions),
            dimensions=dimensions,
            normalize=normalize,
            prompt_name=prompt_name,
            input_type=input_type,
            truncate=truncate,
            progress_bar=progress_bar,
        )

    @own_names()
    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: bool = False,
        progress_bar: bool | None = None,
        **options: Unpack[SchedulingOptions],
    ) -> list[RankedDocument]:
        """Documents by their relevance to a query, the most relevant first.

        A reranker computes query and document together; an embedder compares their vectors.

        Args:
            query: a text.
            documents: texts.
            top_n: how many to return; None: all.
            instruction: what makes a document relevant, for models that take an instruction.
            truncate, progress_bar, options: as for `embed`.

        Raises:
            RequestError: as for `embed`.
        """
        return self._pooled.rerank(
            query,
            documents,
            checked_options(options, self._adapters.lora_id, SchedulingOptions),
            top_n=top_n,
            instruction=instruction,
            truncate=truncate,
            progress_bar=progress_bar,
        )

    @own_names()
    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        progress_bar: bool | None = None,
        **options: Unpack[SchedulingOptions],
    ) -> list[float] | list[list[float]]:
        """The score of each pair of texts; a list of numbers per pair from a classifier with several labels.

        Args:
            first: a text for all pairs, or as many as `second` has.
            second: a text or texts.
            instruction, truncate, progress_bar, options: as for `rerank`.

        Raises:
            RequestError: as for `embed`.
        """
        return self._pooled.score(
            first,
            second,
            checked_options(options, self._adapters.lora_id, SchedulingOptions),
            instruction=instruction,
            truncate=truncate,
            progress_bar=progress_bar,
        )

    @own_names()
    def label_probabilities(
        self,
        prompts: str | list[int] | list[str] | list[list[int]] | list[Prompt],
        labels: Sequence[str | int],
        *,
        among_labels: bool = True,
        **options: Unpack[SchedulingOptions],
    ) -> list[list[float]]:
        """Compute the probability of each label as the next token of each prompt; for a model that generates text.

        Args:
            prompts: one prompt or a list.
            labels: texts of one token each, or token ids.
            among_labels: probabilities that sum to 1 over the labels; False: among all tokens.
            options: as for `embed`.

        Raises:
            RequestError: a label is not one token, or as for `embed`.
        """
        scheduling = checked_options(options, self._adapters.lora_id, SchedulingOptions)
        return self._pooled.label_probabilities(prompts, labels, scheduling, among_labels=among_labels)

    # ------------------------------------------------------------ adapters

    @property
    def adapters(self) -> list[Adapter]:
        """The LoRA adapters that calls can name with `lora`, in the order in which they were loaded."""
        return self._adapters.adapters

    @own_names()
    def load_adapter(self, name: str, path: str | os.PathLike[str], *, replace: bool = False) -> Adapter:
        """Load a LoRA adapter: a folder as peft's `save_pretrained` writes it, or a GGUF file.

        Calls on other threads go on meanwhile.

        Args:
            name: for the option `lora` of calls.
            path: of the folder or file; below `lora_root` if that is set.
            replace: the name may be taken: running requests keep the old adapter until they end.

        Raises:
            RequestError: the name is taken, there are too many adapters, or the adapter is broken or of another model.
            EngineDeadError: the engine has ended.
        """
        self._engine.check_usable()
        return self._adapters.load(name, path, replace=replace)

    @own_names()
    def unload_adapter(self, name: str, *, force: bool = False) -> None:
        """Forget a LoRA adapter, and free its memory.

        Args:
            name: of it.
            force: end the requests that use it, with an error.

        Raises:
            RequestError: there is no such adapter, or requests use it.
            EngineDeadError: the engine has ended.
        """
        self._engine.check_usable()
        self._adapters.unload(name, force=force)

    # ------------------------------------------------------------ prompts and cache

    @own_names()
    def render_chat(self, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> list[int]:
        """The token ids of a conversation, up to the beginning of the answer.

        Raises:
            RequestError: a message the template refuses.
        """
        self._engine.check_process()  # the tokenizer's threads are those of its process, too
        checked_options(options, self._adapters.lora_id, ChatOptions)
        chat = self._chats.placed(self._chats.plan(self._conversation(messages, options, None), None))
        self._chats.release(chat.media)
        return chat.ids

    def _conversation(self, messages: object, options: ChatOptions, spec: GrammarSpec | None) -> Conversation:
        return conversation_of(
            messages, options, self.config.limits, spec, sees_images=self._chats.sees_images
        )

    def flush_cache(self) -> FlushCacheDone:
        """Drop cached prefixes, also those on the disk; for measurements.

        Raises:
            EngineError: the disk may still have them.
        """
        done = self._engine.call(FlushCache(), FlushCacheDone)
        if done.error:
            raise EngineError(f"the KV pool is flushed, but not the tier: {done.error}; flush again")
        return done

    @own_names()
    def pin(self, prompt: Prompt, *, ttl: float, cache_salt: str = "", lora: str | None = None) -> PinDone:
        """Keep the cached part of a prompt for `ttl` seconds, within the quota; 0 unpins.

        `cache_salt` and `lora` are those of the requests that use it.

        Returns:
            Tokens that are pinned, tokens of the prompt, and the reason if not all are pinned.

        Raises:
            RequestError: the prompt is empty or no prompt, or `ttl` is no number, negative or not finite.
        """
        self._engine.check_usable()
        ttl = check_number("ttl", plain(ttl), 0.0, MAX_TTL_S, unit="seconds; 0 unpins")
        check_text("cache_salt", cache_salt)
        token_ids = self._preparer.encode(prompt, add_special_tokens=True)
        if not 1 <= len(token_ids) < self.max_model_len:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens, but one has at least 1 and at most {self.max_model_len - 1}",
                param="prompt",
                code="invalid_value",
            )
        pin = PinPrefix(encode_token_ids(token_ids), ttl, cache_salt, self._adapters.lora_id(lora))
        return self._engine.call(pin, PinDone)

    def why(self, request_id: str) -> Explanation:
        """Say why a request waited, was chunked, retracted or missed the cache; `request_id` stands in its output."""
        check_text("request_id", request_id)
        return self._engine.call(Explain(request_id), Explanation)

    # ------------------------------------------------------------ end

    @property
    def sees_images(self) -> bool:
        """Whether messages of `chat` may have images."""
        return self._chats.sees_images

    def close(self) -> None:
        """End the engine and free its memory; running calls raise `EngineDeadError`. Closing twice is allowed."""
        self._engine.close()
        self._chats.close()

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


def _bytes_of(on_download: Callable[[int, int], None]) -> Progress:
    """Reports of a download as (bytes so far, bytes in all)."""

    def report(state: DownloadState) -> None:
        if state.total_bytes:
            on_download(state.done_bytes, state.total_bytes)

    return report
