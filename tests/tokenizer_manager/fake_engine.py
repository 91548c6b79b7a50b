"""What stands behind the manager in these tests: a scheduler and detokenizer that say what the test scripts.

`FakeEngine` collects what the manager sends. With a `script` it answers every `GenerateRequest` by itself, on the event
loop; without one the test answers, from any thread, with `say`.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import socket
import sys
import tempfile
import threading
import traceback
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, assert_never

import msgspec
import uvloop
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as CoreTokenizer

from engine.grammar.compile.compile_queue import CompileQueue
from engine.launch.child.control import ForAll, StartProfile, StopProfile
from engine.models.source import ModelSource
from engine.models.spec.encoder_spec import PoolingSpec
from engine.models.spec.model_spec import ModelSpec
from engine.models.spec.vision_spec import VisionSpec
from engine.models.tokenizer.tokenizer import Tokenizer
from engine.models.tokenizer.tokenizer_export import TokenizerExport
from engine.runtime.adapter_spec import LoadedAdapter
from engine.runtime.config.adapter_config import AdapterConfig
from engine.runtime.config.answer_config import AnswerConfig, RequestLimits
from engine.runtime.config.device_config import DispatchPolicyName, ParallelConfig
from engine.runtime.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.runtime.config.media_config import MediaConfig
from engine.runtime.config.server_config import LogConfig, ServerConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import (
    AbortRequest,
    AdapterDone,
    BatchTextOutput,
    Call,
    CallAnswer,
    CallDone,
    CallRequest,
    EndReasoning,
    Explain,
    Explanation,
    Finish,
    FinishKind,
    FlushCache,
    FlushCacheDone,
    GenerateRequest,
    GrammarReady,
    HintDone,
    HintOutcome,
    HintSession,
    ListRequests,
    ListSessions,
    LoadAdapter,
    ManagerInput,
    Pause,
    PauseDone,
    PauseMode,
    PinDone,
    PinPrefix,
    ReasoningDone,
    RequestList,
    Resume,
    SchedulerInput,
    SessionList,
    SessionState,
    TextOutput,
    UnloadAdapter,
    Usage,
)
from engine.runtime.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from engine.runtime.scheduler_report import SchedulerReport
from engine.runtime.transport.message_base import Logprobs
from engine.tokenizer_manager.adapters.adapter_list import AdapterList
from engine.tokenizer_manager.adapters.registry import AdapterRegistry
from engine.tokenizer_manager.all_processes import AllProcesses
from engine.tokenizer_manager.conversation.chat_template import ChatTemplate
from engine.tokenizer_manager.conversation.detection import AnswerFormats, detect_formats
from engine.tokenizer_manager.conversation.planner import Planner
from engine.tokenizer_manager.conversation.template_renderer import TemplateRenderer
from engine.tokenizer_manager.dispatch.handoffs import Pair
from engine.tokenizer_manager.http.app import App
from engine.tokenizer_manager.http.connection import HttpServer
from engine.tokenizer_manager.http.guards.auth import Authorizer, read_keys
from engine.tokenizer_manager.http.openai.tools import ToolSchemas
from engine.tokenizer_manager.http.responses.background import keep_responses
from engine.tokenizer_manager.http.services import Services
from engine.tokenizer_manager.manager import TokenizerManager
from engine.tokenizer_manager.media.image_store import ImageStore
from engine.tokenizer_manager.media.placement import ImagePlacement
from engine.tokenizer_manager.process import client_state, open_state, overload_limits
from engine.tokenizer_manager.prompt_encoder import PromptEncoder
from engine.tokenizer_manager.prompt_images import PromptImages
from engine.tokenizer_manager.telemetry.metrics import BuildInfo, Metrics
from engine.tokenizer_manager.telemetry.request_record import NoTraces, Traces

WAIT_S = 60.0  # a bound for what must happen at once on an idle machine
TICK_S = 0.01  # of `FakeEngine.ticks`
MODEL = "org/tiny"
EOS = 257
NO_TRACES = NoTraces()
CAPACITY = Capacity(max_model_len=256, num_pages=64, page_size=4, max_running_requests=8, vocab_size=258)
SOURCE = ModelSource("gguf", "/models/tiny.gguf", MODEL)
SPEC = ModelSpec(
    model_type="llama",
    vocab_size=258,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    torch_dtype="float32",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STOP = Finish(FinishKind.STOP, matched=EOS)
LENGTH = Finish(FinishKind.LENGTH)

Script = Callable[[GenerateRequest], Iterable[TextOutput]]


def make_tokenizer(*, adds_bos: bool = False, others: Sequence[str] = ()) -> Tokenizer:
    """One token per byte, and two special tokens, the first of which is put before texts if `adds_bos`; and others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = CoreTokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", *others)]
    )
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            "<|im_start|> $A", special_tokens=[("<|im_start|>", 256)]
        )
    return Tokenizer(
        core,
        special_tokens={"eos_token": "<|im_end|>"},
        eos_token_ids=(EOS,),
        chat_templates={"default": TEMPLATE},
    )


TOKENIZER = make_tokenizer()


def row(
    request: GenerateRequest,
    text: str,
    *,
    total: int | None = None,
    finish: Finish | None = None,
    token_ids: list[int] | None = None,
    cached: int = 0,
    logprobs: Logprobs | None = None,
    prompt_logprobs: Logprobs | None = None,
    ended_by_detokenizer: bool = False,
    processed: int | None = None,
    drafts: tuple[int, int] = (0, 0),
    from_tiers: tuple[int, int] = (0, 0),
) -> TextOutput:
    """A row for `request`: by default one token per byte of its text. Stop strings are the detokenizer's finding."""
    ids = TOKENIZER.encode(text) if token_ids is None else token_ids
    usage = Usage(
        prompt_tokens=len(request.input_ids) // 4,
        completion_tokens=len(ids) if total is None else total,
        cached_tokens=cached,
        queue_s=0.25,
        processed_tokens=processed,
        loaded_tokens=from_tiers[0],
        host_tokens=from_tiers[1],
        draft_tokens=drafts[0],
        accepted_draft_tokens=drafts[1],
    )
    return TextOutput(
        request.rid,
        text,
        array("i", ids).tobytes(),
        usage,
        finish,
        logprobs,
        prompt_logprobs,
        ended_by_detokenizer=ended_by_detokenizer or (finish is not None and isinstance(finish.matched, str)),
    )


def say_all(*texts: str, finish: Finish = STOP, cached: int = 0) -> Script:
    """Answers every request with these texts, a row each, the last one finished; labels are equally likely."""
    labels = say_vectors(lambda request: [-9.0] * len(request.pooling.label_ids) if request.pooling else ())

    def script(request: GenerateRequest) -> Iterable[TextOutput]:
        if request.pooling is not None:
            yield from labels(request)
            return
        total = 0
        for i, text in enumerate(texts):
            total += len(text.encode())
            yield row(
                request, text, total=total, cached=cached, finish=finish if i == len(texts) - 1 else None
            )

    return script


def say_vectors(vector_of: Callable[[GenerateRequest], Sequence[float]]) -> Script:
    """Answers every pooling request with a vector."""

    def script(request: GenerateRequest) -> Iterable[TextOutput]:
        usage = Usage(prompt_tokens=len(request.input_ids) // 4, completion_tokens=0, queue_s=0.25)
        vector = floats(*vector_of(request))
        yield TextOutput(request.rid, "", b"", usage, Finish(FinishKind.STOP), vector=vector)

    return script


def floats(*values: float) -> bytes:
    """float32 as in messages."""
    return array("f", values).tobytes()


def ids_of(request: GenerateRequest) -> list[int]:
    """The prompt's token ids."""
    return memoryview(request.input_ids).cast("i").tolist()


class FakeEngine:
    """Scheduler and detokenizer, as the manager sees them.

    Attributes:
        generate, aborts, ready, pins, explains: what arrived, for tests on any thread to take.
        loads, unloads: messages about adapters that arrived; store ids of unloads.
        flushes: flushes that arrived.
        load_error: the answer to loads; "" if they succeed.
        ended_reasoning, is_reasoning: ids that `EndReasoning` named, and the answer to it.
        live: the answer to `ListRequests`.
        explanations: by request id; others are not found.
        answers: whether pins, flushes and questions are answered.
        ticks, abort_ticks: how often the server's loop has gone round a timer of `TICK_S`, now and at each abort. The
            time that the server itself has had, however busy the machine is.
        script: answers requests; None: the test does.
        orders: for all processes, that arrived.
        takes_orders: whether the supervisor does.
        profiled: processes that write a file at the end of a profile.
        crash_dir: where profiles are.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.generate: queue.Queue[GenerateRequest] = queue.Queue()
        self.aborts: queue.Queue[AbortRequest] = queue.Queue()
        self.ready: queue.Queue[GrammarReady] = queue.Queue()
        self.pins: queue.Queue[PinPrefix] = queue.Queue()
        self.hints: queue.Queue[HintSession] = queue.Queue()
        self.hint_outcome = HintOutcome.ACCEPTED
        self.explains: queue.Queue[Explain] = queue.Queue()
        self.explanations: dict[str, Explanation] = {}
        self.loads: list[LoadAdapter] = []
        self.unloads: list[int] = []
        self.flushes: list[FlushCache] = []
        self.pauses: list[PauseMode | None] = []  # None: go on
        self.ended_reasoning: queue.Queue[str] = queue.Queue()
        self.is_reasoning = True
        self.flush_error = ""
        self.load_error = ""
        self.live = RequestList([], 0)
        self.answers = True
        self.replica = 0
        self.ticks = 0
        self.abort_ticks: list[int] = []
        self.script = script
        self.orders: list[ForAll] = []
        self.takes_orders = True
        self.profiled: tuple[str, ...] = ("tokenizer_manager", "scheduler", "detokenizer")
        self._crash_dir = tempfile.TemporaryDirectory(prefix="fake-engine-")  # gone with this object
        self.crash_dir = Path(self._crash_dir.name)
        self.deliver: Callable[[ManagerInput], None] = lambda message: None
        self.loop: asyncio.AbstractEventLoop | None = None

    def take_order(self, order: ForAll) -> bool:
        """What the manager calls to tell all processes."""
        if not self.takes_orders:
            return False
        self.orders.append(order)
        if isinstance(order, StopProfile):
            [*_, begun] = [each for each in self.orders if isinstance(each, StartProfile)]
            for name in self.profiled:
                (self.crash_dir / begun.folder / f"{name}.folded").touch()
        return True

    def receive(self, message: SchedulerInput) -> None:
        """What the manager calls to send."""
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=SchedulerInput)
        match message:
            case GenerateRequest():
                self.generate.put(message)
                if self.script is not None:
                    for output in self.script(message):
                        self._later(BatchTextOutput([output]))
            case AbortRequest():
                self.abort_ticks.append(self.ticks)
                self.aborts.put(message)
            case GrammarReady():
                self.ready.put(message)
            case Call():
                answer = self._answer_to(message.request)
                if self.answers:
                    self._later(CallDone(message.call_id, answer, self.replica))

    def _answer_to(self, request: CallRequest) -> CallAnswer:
        match request:
            case FlushCache():
                self.flushes.append(request)
                return FlushCacheDone(flushed_tokens=32, kept_tokens=8, error=self.flush_error)
            case PinPrefix():
                self.pins.put(request)
                asked = len(request.input_ids) // 4
                return PinDone(asked // 2, asked, "half of it is not cached")
            case Pause():
                self.pauses.append(request.mode)
                return PauseDone(paused=True)
            case Resume():
                self.pauses.append(None)
                return PauseDone(paused=False)
            case ListSessions():
                return SessionList([SessionState("3f2a99c0d1e2f3a4", 12, 2, 640, 1.5)], 7)
            case HintSession():
                self.hints.put(request)
                return HintDone(self.hint_outcome, "as the test says")
            case LoadAdapter():
                self.loads.append(request)
                return AdapterDone(self.load_error)
            case UnloadAdapter():
                self.unloads.append(request.store_id)
                return AdapterDone()
            case EndReasoning():
                self.ended_reasoning.put(request.rid)
                return ReasoningDone(self.is_reasoning)
            case ListRequests():
                return self.live
            case Explain():
                self.explains.put(request)
                return self.explanations.get(request.rid, Explanation(found=False, sentence=""))
            case _:
                assert_never(request)

    def next_request(self) -> GenerateRequest:
        """The next request that arrived; waits for it."""
        return self.generate.get(timeout=WAIT_S)

    def next_abort(self) -> AbortRequest:
        """The next abort that arrived; waits for it."""
        return self.aborts.get(timeout=WAIT_S)

    def say(self, *outputs: TextOutput) -> None:
        """Send rows, from any thread."""
        self.tell(BatchTextOutput(list(outputs)))

    def tell(self, message: ManagerInput) -> None:
        """Send a message, from any thread."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.deliver, message)

    def _later(self, message: ManagerInput) -> None:
        asyncio.get_running_loop().call_soon(self.deliver, message)


class FakeClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make_services(
    engine: FakeEngine,
    *,
    clock: FakeClock | None = None,
    chat_template: str | None = TEMPLATE,
    capacity: Capacity = CAPACITY,
    max_queued_requests: int = 16,
    loopback: bool = True,
    scheduler: dict[str, Any] | None = None,
    answers: dict[str, Any] | None = None,
    compile_queue: CompileQueue | None = None,
    model: dict[str, Any] | None = None,
    of_model: SamplingDefaults = OPENAI_DEFAULTS,
    tokenizer: Tokenizer = TOKENIZER,
    log_requests: bool = False,
    traces: Traces = NO_TRACES,
    pooling: PoolingSpec | None = None,
    adapters: Sequence[LoadedAdapter] = (),
    lora: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    others: Sequence[FakeEngine] = (),
    dispatch_policy: DispatchPolicyName = "prefix-affinity",
    pair: Pair | None = None,
    vision: VisionSpec | None = None,
    limits: dict[str, Any] | None = None,
    media: dict[str, Any] | None = None,
    calibration: dict[str, float] | None = None,
    **server: Any,
) -> Services:
    """A manager on a fake engine, and what the HTTP side needs besides; the scheduler has reported once."""
    clock = clock or FakeClock()
    encoder = PromptEncoder(tokenizer, capacity.vocab_size)
    metrics = Metrics(MODEL)
    config = EngineConfig(
        model=ModelConfig(**({"served_model_name": MODEL, "dtype": "float32"} | (model or {}))),
        scheduler=SchedulerConfig(max_queued_requests=max_queued_requests, **(scheduler or {})),
        cache=CacheConfig(**(cache or {})),
        server=ServerConfig(**server),
        answers=AnswerConfig(**(answers or {})),
        limits=RequestLimits(**(limits or {})),
        media=MediaConfig(**(media or {})),
        adapters=AdapterConfig(**({"max_lora_rank": 16} | (lora or {}))),
        parallel=ParallelConfig(dp=1 + len(others), dispatch_policy=dispatch_policy),
        log=LogConfig(crash_dir=str(engine.crash_dir), log_requests=log_requests),
    )
    store = (
        None if vision is None else ImageStore(vision, tempfile.mkdtemp(), config.media, max_pixels=1_000_000)
    )
    placement = None if vision is None else ImagePlacement(vision, tokenizer)
    manager = TokenizerManager(
        encoder=encoder,
        capacity=capacity,
        limits=overload_limits(config),
        watchdog_timeout_s=config.server.watchdog_timeout,
        send=engine.receive,
        metrics=metrics,
        draw_seed=lambda: 7,
        clock=clock,
        compile_queue=compile_queue,
        other_sends=[other.receive for other in others],
        dispatch_policy=dispatch_policy,
        pair=pair,
        images=store,
    )
    template = None if chat_template is None else _compiled(chat_template)
    for replica, each in enumerate((engine, *others)):
        each.replica = replica
        each.deliver = manager.on_message
        manager.on_message(SchedulerReport(sent_s=clock.now_s, replica=replica))
    state = open_state(config.server)
    spec = msgspec.structs.replace(
        SPEC,
        sampling_defaults=of_model,
        pooling=pooling,
        vision=vision,
        decision_temperatures=calibration or {},
    )
    return Services(
        manager=manager,
        adapters=AdapterRegistry(
            AdapterList(spec, config.adapters, adapters, model_name=MODEL),
            config.adapters,
            calls=manager.control,
            users=manager,
            order_all=engine.take_order,
        ),
        all_processes=AllProcesses(
            engine.take_order, config, clock=clock, wall_clock=lambda: 1.7e9 + clock.now_s
        ),
        authorizer=Authorizer(
            read_keys(config.server), isolate=config.server.isolate_tenants, loopback=loopback
        ),
        encoder=encoder,
        renderer=None if template is None else TemplateRenderer(template),
        planner=Planner(
            _formats(template, config.answers),
            TOKENIZER,
            config.answers,
            max_tools=config.limits.max_tools,
            max_schema_kb=config.limits.max_schema_kb,
            check_schema=ToolSchemas(config.limits),
            images=placement,
        ),
        images=PromptImages(encoder, store, placement),
        metrics=metrics,
        config=config,
        spec=spec,
        source=SOURCE,
        tokenizer_export=TokenizerExport(SOURCE, tokenizer),
        served_model=MODEL,
        any_model_name=config.model.takes_any_name,
        created_s=1_700_000_000,
        build=BuildInfo("0.0.0", torch="2.0", device="cpu"),
        traces=traces,
        state=None if state is None else client_state(state, config, capacity, lambda: 1.7e9 + clock.now_s),
    )


@functools.cache
def _compiled(chat_template: str) -> ChatTemplate:
    """Compiled and probed, as at start, once for hundreds of servers."""
    template = ChatTemplate(chat_template, TOKENIZER.special_tokens)
    template.find_part_roles()
    template.find_shape()
    return template


@functools.cache
def _formats(template: ChatTemplate | None, answers: AnswerConfig) -> AnswerFormats:
    return detect_formats(template, TOKENIZER, answers)


class ServerThread:
    """Serves over HTTP on a free port of the loopback, from a thread.

    Attributes:
        url: where.
    """

    def __init__(self, services: Services, engine: FakeEngine) -> None:
        self._services = services
        self._engine = engine
        # Clients may connect from here on.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._app = App(services)
        self._server = HttpServer(self._app, services.config.server)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="http")
        self._thread.start()

    def stop(self) -> None:
        """Let it end; does not wait."""
        self._server.should_exit = True

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), self._where_it_waits()

    def _where_it_waits(self) -> str:
        """The stack of the thread, and the tasks of its loop."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        tasks = [] if self._engine.loop is None else asyncio.all_tasks(self._engine.loop)
        return "\n".join([f"the server does not end: {stack}", *map(repr, tasks)])

    def _serve(self) -> None:
        # The event loop of the product; asyncio's own leaves Nagle's algorithm on for such a listener: 40 ms a request.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        self._engine.loop = asyncio.get_running_loop()
        self._tick()
        services, keeping = self._services, None
        if services.state is not None:
            keeping = asyncio.create_task(keep_responses(services, services.state.responses))
            await services.state.batches.start(self._app.answer_line, self._app.check_line)
        with self._listener:
            await self._server.serve(sockets=[self._listener])
        if keeping is not None:
            keeping.cancel()
        await services.stop_batches()
        services.close()

    def _tick(self) -> None:
        self._engine.ticks += 1
        asyncio.get_running_loop().call_later(TICK_S, self._tick)
