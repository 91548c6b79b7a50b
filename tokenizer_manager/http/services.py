"""The parts that handlers use, made once by `process.py`: each takes the smallest of three that has what it needs.

`ServerFacts` are values; `Engine` answers from the model; `Services` has the parts of the whole server, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from msgspec import to_builtins
from msgspec.structs import replace

from ...models.source import ModelSource, is_same_model
from ...models.spec.model_spec import ModelSpec
from ...models.tokenizer.tokenizer import Tokenizer
from ...models.tokenizer.tokenizer_export import TokenizerExport
from ...runtime.adapter_spec import LoadedAdapter
from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import RequestError
from ...runtime.messages import HintAction, HintOutcome
from ...runtime.sampling_defaults import SamplingDefaults, effective_defaults
from ..adapters.registry import AdapterRegistry
from ..all_processes import AllProcesses
from ..conversation.conversation import Conversation, free_images, image_sources
from ..conversation.planner import AnswerPlan, Planner
from ..conversation.template_choice import why_no_template
from ..conversation.template_renderer import TemplateRenderer
from ..generation import Generation, GenerationRequest
from ..manager import TokenizerManager
from ..pooling.embedding import check_task
from ..preparation import PreparedPrompt
from ..prompt_encoder import PromptEncoder, second_bos
from ..prompt_images import PlacedPrompt, PromptImages
from ..rendering.worker import PageWorker
from ..scheduling_options import FLEX, Hint, Scheduling
from ..state.files import StoredFiles
from ..state.response_store import ResponseStore
from ..state.store import StateStore
from ..telemetry.metrics import BuildInfo, Metrics
from ..telemetry.request_record import NoTraces, Traces
from .batch_runner.runner import BatchRunner
from .body_reader import BodyReader
from .exchange import Exchange, LineChecked
from .guards.auth import Authorizer
from .guards.body_budget import BodyBudget
from .recent_items import RecentItems
from .schema.constraints import chat_grammar, check_constraint_with_tools, check_room
from .schema.errors import POSITION_HEADER, renamed_fields, renamed_text
from .schema.field_policy import first_warnings
from .schema.kv_hints import HINTS_HEADER, HintResult
from .schema.values import Body, show

T = TypeVar("T")


class PreparedRequest(NamedTuple):
    """A request that could be started, and each of its prompts."""

    request: GenerationRequest
    prompts: list[PreparedPrompt]


_MAX_SHOWN_ADAPTERS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Facts about the served model and its settings.

    Attributes:
        config: resolved settings.
        spec: facts about the model.
        source: its files.
        tokenizer_export: a folder with its tokenizer, for other programs.
        served_model: its name in requests.
        any_model_name: requests may name any model (`--served-model-name '*'`).
        created_s: Unix time when serving began.
        build: the version that runs.
    """

    config: EngineConfig
    spec: ModelSpec
    source: ModelSource
    tokenizer_export: TokenizerExport
    served_model: str
    created_s: int
    build: BuildInfo
    any_model_name: bool = False

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The sampling parameters of requests without their own."""
        return effective_defaults(self.config.model.sampling_defaults, self.spec.sampling_defaults)

    @property
    def version(self) -> str:
        """Version of the engine."""
        return self.build.version

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes when the same seed may give a different text."""
        return f"engine-{self.version}-{self.config.model.dtype}"


@dataclass(frozen=True, slots=True)
class ClientState:
    """The state of clients that outlives the server, in `--state-dir`.

    Attributes:
        store: its database.
        files: uploads and results of batches.
        batches: runs them.
        responses: of `/v1/responses`.
    """

    store: StateStore
    files: StoredFiles
    batches: BatchRunner
    responses: ResponseStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(ServerFacts):
    """The served model, as an endpoint that answers from it sees it.

    Attributes:
        manager: runs generations.
        adapters: the LoRA adapters by name.
        encoder: tokenizes.
        renderer: renders chats; None for a model without a chat template.
        planner: plans their answers.
        images: of prompts.
        body_budget: bounds the bodies that are being received.
        body_reader: parses them.
        recent_items: of answers of `/v1/responses`.
        state: what clients store; None without `--state-dir`.
    """

    manager: TokenizerManager
    adapters: AdapterRegistry
    encoder: PromptEncoder
    renderer: TemplateRenderer | None
    planner: Planner
    images: PromptImages
    body_budget: BodyBudget = field(default_factory=BodyBudget)
    body_reader: BodyReader = field(default_factory=BodyReader)
    recent_items: RecentItems = field(default_factory=RecentItems)
    state: ClientState | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.encoder.tokenizer

    @property
    def required_state(self) -> ClientState:
        """The state of clients.

        Raises:
            RequestError: 404, the server stores nothing.
        """
        if self.state is None:
            raise RequestError(
                "this server stores nothing, because a store has texts of its users; start it with --state-dir DIR",
                code="no_state_dir",
                status=404,
            )
        return self.state

    def num_written_tokens(self, generation: Generation) -> int:
        """Prompt tokens of a generation that its prompts have added to the prefix cache, which takes whole pages."""
        page_size = self.manager.capacity.page_size
        if not self.config.cache.radix_cache:
            return 0
        return sum(
            max(len(choice.prompt_ids) // page_size * page_size - choice.usage.cached_tokens, 0)
            for choice in generation.prompt_choices
        )

    async def read_object(self, exchange: Exchange, *, optional: bool = False) -> Body:
        """The request's JSON object.

        Args:
            optional: an empty body is an empty object.

        Raises:
            RequestError: the body is too large, is no JSON object, or exceeds the budget of bodies.
        """
        return await self.read(exchange, _as_it_is, optional=optional)

    async def read(self, exchange: Exchange, build: Callable[[Body], T], *, optional: bool = False) -> T:
        """Read the request's JSON object, and `build` from it; off the event loop where the body is large.

        Args:
            build: checks the object; see `BodyReader.read`.
            optional: an empty body is an empty object.

        Raises:
            RequestError: the body is too large, no object, `build` refuses it, or there is no room for it.
            ClientGone: the client has disconnected before.
            LineChecked: the request is only checked, on the caller's thread.
        """
        if exchange.checked_body is not None:
            build(exchange.checked_body)
            raise LineChecked
        with self.body_budget.reserve() as reservation:
            body = await exchange.body(int(self.config.server.max_body_mb * 2**20), reservation)
            exchange.received_s = self.manager.now_s()
            return await self.body_reader.read(
                b"{}" if optional and not body else body,
                self.config.limits,
                build,
                exchange.abort_on_disconnect(),
            )

    async def start(self, exchange: Exchange, request: GenerationRequest) -> Generation:
        """Render and plan a chat, and start a request. Call it where a disconnect cancels; enter the result's `with`.

        The response has the queue position in a header.

        Raises:
            RequestError: the model has no chat template, it cannot render the messages, or the request is refused.
            QueueFullError: the queue is full.
            EngineDeadError: the engine is dead.
        """
        if exchange.line_seed is not None:
            request = _of_batch(request, exchange.line_seed)
        request = await self.planned(exchange, request)
        notes = {each.without_effect: None for each in request.samplings or (request.sampling,)}
        if any(notes):
            request = replace(request, warnings=first_warnings([*request.warnings, *filter(None, notes)]))
        with renamed_fields(request.names):
            try:
                if not request.poolings:
                    check_task(self.spec, "generate")
                generation = await self.manager.start(request)
            except BaseException:
                self.images.release(request.media)
                raise
        try:
            exchange.generations.append(generation)
            exchange.more_headers.append((POSITION_HEADER, b"%d" % generation.queue_position))
            scheduling = request.scheduling
            if scheduling.hints:
                results = [
                    await self.hinted(scheduling.session, hint, in_turn=True) for hint in scheduling.hints
                ]
                exchange.more_headers.append((HINTS_HEADER, json.dumps(to_builtins(results)).encode()))
        except BaseException:
            generation.close()
            raise
        return generation

    async def hinted(self, session: str, hint: Hint, *, in_turn: bool = False) -> HintResult:
        """Do what a hint asks for a session; in a turn of it only what is not for its prompt, see `keep_s_with`.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        outcome, detail = HintOutcome.REJECTED, hint.reason
        tier = self.config.cache.kv_tier
        if hint.action is HintAction.PREFETCH and tier and in_turn:
            outcome, detail = (
                HintOutcome.ACCEPTED,
                f"this prompt is looked up in the {tier} before it is computed",
            )
        elif hint.action is HintAction.PREFETCH:
            detail = (
                "the tokens of evicted pages are not kept; send the prompt with prewarm or max_tokens 0 to load it"
                if tier
                else "the server has no tier to load from; start it with --kv-disk or --kv-store"
            )
        elif hint.action is not None and in_turn and not (session and hint.action is HintAction.CLOSE):
            outcome = HintOutcome.DEFERRED
            kept = f"kept for {hint.ttl_s:g} s, within --pin-fraction" if hint.ttl_s else "evicted first"
            detail = f"once it is computed, this prompt is {kept}"
        elif hint.action is not None:
            done = await self.manager.control.hint(session, hint.action, ttl_s=hint.ttl_s)
            outcome, detail = done.outcome, done.detail
        return HintResult(action_id=hint.action_id, outcome=outcome, detail=detail)

    async def prepare(self, exchange: Exchange, request: GenerationRequest) -> PreparedRequest:
        """As `start`, but nothing is sent to the scheduler; see `TokenizerManager.prepare`."""
        request = await self.planned(exchange, request)
        with renamed_fields(request.names):
            check_task(self.spec, "generate")
            try:
                return PreparedRequest(request, await self.manager.prepare(request))
            finally:
                self.images.release(request.media)

    async def planned(self, exchange: Exchange, request: GenerationRequest) -> GenerationRequest:
        """The request with the time of its body; that of a chat with its prompt, its grammar and the plan.

        Raises:
            RequestError: the model has no chat template, it cannot render the messages, or the request is refused.
        """
        conversation, constraint = request.conversation, request.constraint
        if conversation is None:
            request = replace(request, received_s=exchange.received_s)
            return await self._with_images(request) if request.images else request
        arrival_s, max_tokens = self.manager.now_s(), request.sampling.max_new_tokens
        if request.warm_up:
            max_tokens = None
        check_constraint_with_tools(conversation, constraint)
        if constraint is not None and not conversation.tools:
            check_room(constraint, max_tokens, request.length_param, self.tokenizer)
        plan = await self._plan(request, conversation, max_tokens)
        placed = await self.placed(plan, request.prompt_param)
        free_images(conversation.messages)
        ids = None if placed.ids is None else placed.ids.tolist()
        if ids is None and request.earlier_ids:
            ids = await self.encoder.encode_after(
                request.earlier_ids, placed.text, param=request.prompt_param
            )
        return replace(
            request,
            prompts=[placed.text if ids is None else ids],
            media=placed.media,
            add_special_tokens=False,
            grammar=None if request.warm_up else chat_grammar(plan, constraint),
            grammar_param="tools" if constraint is None else constraint.param,
            keep_special_ids=plan.keep_special_ids,
            plan=plan,
            warnings=_warnings(request, plan),
            received_s=exchange.received_s,
            arrival_s=arrival_s,
        )

    async def _plan(
        self, request: GenerationRequest, conversation: Conversation, max_tokens: int | None = None
    ) -> AnswerPlan:
        """As `plan_chat`; errors have the client's names."""
        with renamed_fields(request.names):
            return await self.plan_chat(
                conversation,
                max_tokens=max_tokens,
                scheduling=request.scheduling,
                messages_param=request.prompt_param,
            )

    async def count_prompt(self, exchange: Exchange, request: GenerationRequest) -> tuple[int, list[str]]:
        """The number of tokens of a chat's prompt, and warnings. Call it where a disconnect cancels.

        Raises:
            RequestError: the model has no chat template, or it cannot render the messages.
        """
        assert request.conversation is not None
        plan = await self._plan(request, request.conversation)
        placed = await self.placed(plan, request.prompt_param)
        self.images.release(placed.media)
        if (ids := placed.ids) is None:
            [ids] = await self.encoder.encode(
                [placed.text], add_special_tokens=False, param=request.prompt_param
            )
        return len(ids), _warnings(request, plan)

    async def _with_images(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the token ids of its prompt, in which images have their places."""
        [prompt] = request.prompts
        assert isinstance(prompt, str)
        placed = await self.images.placed(
            prompt, request.images, request.prompt_param, add_special_tokens=request.add_special_tokens
        )
        assert placed.ids is not None
        return replace(request, prompts=[placed.ids.tolist()], media=placed.media, images=())

    async def placed(self, plan: AnswerPlan, param: str) -> PlacedPrompt:
        """The prompt of a plan, with its images; see `PromptImages.placed`."""
        return await self.images.placed(plan.prompt, image_sources(plan.conversation.messages), param)

    def second_bos(self, generation: Generation, fix: str) -> list[str]:
        """Warnings for prompts of a started request that begin with two BOS; see `second_bos` of the encoder."""
        request = generation.request
        if not request.add_special_tokens:
            return []
        encoded = [choice.prompt_ids for choice in generation.prompt_choices]
        return second_bos(self.tokenizer, request.prompts, encoded, request.prompt_param, fix)

    def check_model(self, model: str | None) -> None:
        """Check that a request names the served model, by any of its names, or none; or any, if the server is set so.

        Raises:
            RequestError: 404 for any other.
        """
        self._adapter_of(model, None)

    def with_adapter(
        self, scheduling: Scheduling, model: str | None, lora_path: str | None = None
    ) -> Scheduling:
        """The options of a request with the LoRA adapter that it names, by `model` or by `lora_path`.

        Raises:
            RequestError: 404 for a model or an adapter that is not served.
        """
        adapter = self._adapter_of(model, lora_path)
        if adapter is None:
            return scheduling
        return replace(scheduling, lora_id=adapter.spec.fingerprint, served_as=adapter.spec.name)

    def _adapter_of(self, model: str | None, lora_path: str | None) -> LoadedAdapter | None:
        """The adapter that a request names; None for the model itself."""
        if lora_path:
            return self.adapters.required(lora_path, "lora_path")
        name = untagged(model or "")
        if not name or is_same_model(name, untagged(self.served_model)):
            return None
        found = self.adapters.find(model or "") or self.adapters.find(name)
        if found is None and not self.any_model_name:
            raise unknown_model(
                model or "", self.served_model, [each.spec.name for each in self.adapters.adapters]
            )
        return found

    async def plan_chat(
        self,
        conversation: Conversation,
        *,
        max_tokens: int | None = None,
        scheduling: Scheduling = Scheduling(),  # noqa: B008  (immutable)
        messages_param: str = "messages",
    ) -> AnswerPlan:
        """The prompt of a chat, rendered off the event loop, and the plan of its answer.

        Call it where a disconnect cancels.

        Args:
            conversation: checked.
            max_tokens: of the answer, if the request says so.
            scheduling: has the time limits of the request.
            messages_param: the field that errors name.

        Raises:
            RequestError: the model has no chat template, or it cannot render these messages, or not in time.
            QueueFullError: too many renderings wait.
        """
        check_task(self.spec, "generate")
        if self.renderer is None:
            raise RequestError(
                f"the model {self.served_model} {why_no_template(self.encoder.tokenizer, 'use /v1/completions')}",
                param=messages_param,
                code="no_chat_template",
            )
        renderer, planner = self.renderer, self.planner
        limit_s = self._start_limit_s(scheduling)
        try:
            async with asyncio.timeout(limit_s):
                given = await renderer.plan(conversation, lambda: planner.render_input(conversation))
                prompt = await renderer.render(**given._asdict())
                return await renderer.plan(
                    conversation, lambda: planner.plan(conversation, prompt, max_tokens=max_tokens)
                )
        except TimeoutError:
            raise RequestError(
                f"the chat was not rendered by the chat template within {limit_s:g} s, which is the request's limit to "
                f"be started; retry later, or raise queue_timeout or timeout",
                code="queue_timeout",
                status=503,
            ) from None

    def _start_limit_s(self, scheduling: Scheduling) -> float | None:
        """How long the request may wait to be started; None: for ever."""
        scheduler = self.config.scheduler
        limits = [scheduler.queue_timeout, scheduler.request_timeout]
        limits += [scheduling.queue_timeout_s, scheduling.timeout_s]
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services(Engine):
    """One server: the engine, and the parts that only `App` and the operators' endpoints use.

    Attributes:
        all_processes: sends orders to every process.
        authorizer: checks API keys.
        metrics: of `/metrics`.
        traces: takes requests that have ended.
        page_worker: renders answers for the chat page.
    """

    all_processes: AllProcesses
    authorizer: Authorizer
    metrics: Metrics
    traces: Traces = NoTraces()  # noqa: RUF009  (immutable)
    page_worker: PageWorker = field(default_factory=PageWorker)

    async def stop_batches(self) -> None:
        """Stop the lines of batches in flight."""
        if self.state is not None:
            await self.state.batches.stop()

    def close(self) -> None:
        """Let the threads of its parts end."""
        self.traces.close()
        self.page_worker.close()
        self.images.close()
        self.encoder.close()
        self.body_reader.close()
        if self.state is not None:
            self.state.store.close()
        if self.renderer is not None:
            self.renderer.close()


def _of_batch(request: GenerationRequest, seed: int) -> GenerationRequest:
    """The request of a line of a batch: in the background, and with a seed, so that it can be computed again."""
    sampling, scheduling = request.sampling, request.scheduling
    return replace(
        request,
        sampling=sampling if sampling.seed is not None else replace(sampling, seed=seed),
        scheduling=replace(scheduling, service_tier=FLEX),
    )


def _as_it_is(body: Body) -> Body:
    return body


def _warnings(request: GenerationRequest, plan: AnswerPlan) -> list[str]:
    """The warnings of a chat, with the client's names of fields."""
    return first_warnings(request.warnings + [renamed_text(each, request.names) for each in plan.warnings])


def untagged(name: str) -> str:
    """A model's name without the tag `:latest`, which Ollama's clients put behind a name that has no tag."""
    return name.removesuffix(":latest")


def unknown_model(model: str, served: str, adapters: Sequence[str] = ()) -> RequestError:
    """The error for a model that is not served."""
    names = [show(served), *map(show, adapters[:_MAX_SHOWN_ADAPTERS])]
    more = ", ..." if len(adapters) > _MAX_SHOWN_ADAPTERS else ""
    return RequestError(
        f"the model {show(model)} is not served here; use {' or '.join(names)}{more}",
        param="model",
        code="model_not_found",
        status=404,
    )
