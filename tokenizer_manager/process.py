"""The tokenizer manager process: HTTP on one side, the engine's sockets on the other, one event loop.

`engine serve` opens the port and answers 503 on it (`http/port.py`); this process takes it over once the other
processes are ready. A later one, which replaces a lost process, binds the port first and listens when it can serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, assert_never

import msgspec
import uvloop

from ..grammar.compile.compile_queue import CompileQueue
from ..grammar.compile.worker import CompileWorker, SandboxSetup
from ..launch.child.child import Child
from ..launch.child.control import Order, PeerDied, PeersLost, PeersReady, Stop
from ..launch.child.process_resources import make_room_for
from ..models.tokenizer.tokenizer import Tokenizer, load_tokenizer
from ..models.tokenizer.tokenizer_export import TokenizerExport
from ..runtime.config.engine_config import EngineConfig
from ..runtime.config.server_config import ServerConfig
from ..runtime.feasibility import Capacity
from ..runtime.messages import AbandonRequests, ManagerInput
from ..runtime.transport.ipc import AsyncInbox, Outbox
from .adapters.adapter_list import AdapterList
from .adapters.registry import AdapterRegistry
from .all_processes import AllProcesses
from .conversation.chat_template import ChatTemplate
from .conversation.detection import detect_formats
from .conversation.planner import Planner
from .conversation.template_choice import load_chat_template, turn_without_end
from .conversation.template_renderer import TemplateRenderer, share_the_gil
from .dispatch.handoffs import Handoffs, Pair
from .http.app import App
from .http.batch_runner.runner import BatchRunner
from .http.connection import HttpServer
from .http.guards.auth import Authorizer, read_keys
from .http.openai.tools import ToolSchemas
from .http.port import BACKLOG, bind, is_loopback, tls_context
from .http.responses.background import keep_responses
from .http.services import ClientState, Services
from .manager import TokenizerManager
from .media.image_store import ImageStore
from .media.placement import ImagePlacement
from .overload.overload_control import OverloadLimits
from .overload.queue_limiter import BACKGROUND_PER_ROW
from .prompt_encoder import PromptEncoder
from .prompt_images import PromptImages
from .state.files import StoredFiles
from .state.response_store import ResponseStore
from .state.store import StateStore
from .telemetry.metrics import Metrics, read_build_info
from .telemetry.otlp_traces import make_traces
from .telemetry.request_record import Traces

logger = logging.getLogger(__name__)

_CHECK_TIME_S: Final = 0.1
_STORE_ID_BITS: Final = 16
"""For the ids of one manager: the scheduler may still have adapters of the one before that this one does not know."""


def main(child: Child) -> None:
    """Serve HTTP until the supervisor sends a stop order."""
    config = child.settings.config
    keys = read_keys(config.server)
    make_room_for(config.server.max_connections)
    tls_context(config.server)
    state = open_state(config.server)
    traces = make_traces(config.log.otlp_endpoint, config.model.name_in_api(child.settings.source.name))
    with _listener(config.server, child.settings.listener_fd) as listener:
        encode_only = child.settings.spec.pooling is not None
        tokenizer = load_tokenizer(child.settings.source, encode_only=encode_only)
        chat_template = load_chat_template(config.model.chat_template, tokenizer, child.settings.source.path)
        share_the_gil()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            # Bound before the peers are ready: ZMQ looks for a missing address only every 100 ms.
            inbox = runner.run(_bind_inbox(child.settings.endpoints.tokenizer_manager))
            capacity = child.wait_for_peers()
            gc.freeze()  # garbage collections skip the 40,000 objects of start-up (10 ms each)
            authorizer = Authorizer(
                keys, isolate=config.server.isolate_tenants, loopback=is_loopback(listener.getsockname()[0])
            )
            runner.run(
                _serve(child, listener, inbox, authorizer, tokenizer, chat_template, capacity, traces, state)
            )


def open_state(config: ServerConfig) -> StateStore | None:
    """The database of the state of clients, if `--state-dir` names a folder for it."""
    if config.state_dir is None:
        return None
    return StateStore.open(config.state_dir, int(config.state_max_gb * 2**30))


def _listener(config: ServerConfig, inherited_fd: int | None) -> socket.socket:
    """The socket that the supervisor has opened, or for a new tokenizer manager another one."""
    if inherited_fd is None:
        return bind(config.host, config.port)
    listener = socket.socket(fileno=inherited_fd)
    listener.set_inheritable(False)  # a grandchild that held it would keep the port from the next one
    return listener


def _pair_of(config: EngineConfig) -> Pair | None:
    if config.scheduler.disaggregation_mode != "both":
        return None
    server = config.server
    host = "127.0.0.1" if server.host in ("0.0.0.0", "localhost") else server.host
    return Pair(f"[{host}]:{server.bootstrap_port}" if ":" in host else f"{host}:{server.bootstrap_port}")


async def _bind_inbox(endpoint: str) -> AsyncInbox[ManagerInput]:
    decoder: msgspec.msgpack.Decoder[ManagerInput] = msgspec.msgpack.Decoder(ManagerInput)
    return AsyncInbox(endpoint, decoder)


async def _serve(
    child: Child,
    listener: socket.socket,
    inbox: AsyncInbox[ManagerInput],
    authorizer: Authorizer,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    capacity: Capacity,
    traces: Traces,
    state: StateStore | None,
) -> None:
    settings = child.settings
    outboxes = [
        Outbox(address) for address in settings.endpoints.schedulers or [settings.endpoints.scheduler]
    ]
    encoder = PromptEncoder(tokenizer, capacity.vocab_size)
    warn_of_unknown_tokens(tokenizer, capacity)
    if chat_template is not None and (
        line := turn_without_end(chat_template, tokenizer, settings.spec.eos_token_ids)
    ):
        logger.warning("%s", line)
    served_model = settings.config.model.name_in_api(settings.source.name)
    build = read_build_info(child.peer_details)
    metrics = Metrics(served_model, build.labels())
    limit_s = settings.config.answers.grammar_timeout
    placement, store = None, None
    if (vision := settings.spec.vision) is not None and chat_template is not None:
        placement = ImagePlacement(vision, tokenizer)
        store = ImageStore(vision, settings.endpoints.images, settings.config.media)
    setup = SandboxSetup(settings.source, capacity.vocab_size, tuple(settings.spec.eos_token_ids), limit_s)
    compile_queue = CompileQueue(lambda: CompileWorker.start(setup), limit_s)
    manager = TokenizerManager(
        encoder=encoder,
        capacity=capacity,
        limits=overload_limits(settings.config),
        watchdog_timeout_s=settings.config.server.watchdog_timeout,
        send=outboxes[0].send,
        metrics=metrics,
        draw_seed=seed_source(settings.config),
        life=settings.life,
        compile_queue=compile_queue,
        other_sends=[outbox.send for outbox in outboxes[1:]],
        dispatch_policy=settings.config.parallel.dispatch_policy,
        handoffs=Handoffs(
            settings.config.scheduler.disaggregation_mode,
            host=settings.config.server.host,
            port=settings.config.server.bootstrap_port,
            has_key=settings.config.parallel.cluster_key_file is not None,
        ),
        pair=_pair_of(settings.config),
        images=store,
    )
    if settings.life:  # abandon the requests of the manager before this one
        for outbox in outboxes:
            outbox.send(AbandonRequests(before_s=time.monotonic()))
    renderer = None if chat_template is None else TemplateRenderer(chat_template)
    limits = settings.config.limits
    planner = Planner(
        detect_formats(chat_template, tokenizer, settings.config.answers),
        tokenizer,
        settings.config.answers,
        max_tools=limits.max_tools,
        max_schema_kb=limits.max_schema_kb,
        check_schema=ToolSchemas(limits),
        images=placement,
    )
    adapters = AdapterRegistry(
        AdapterList(
            settings.spec,
            settings.config.adapters,
            settings.adapters,
            model_name=served_model,
            first_store_id=settings.life << _STORE_ID_BITS,
        ),
        settings.config.adapters,
        calls=manager.control,
        users=manager,
        order_all=child.order_all,
    )
    services = Services(
        manager=manager,
        adapters=adapters,
        all_processes=AllProcesses(child.order_all, settings.config, settings.profile),
        authorizer=authorizer,
        encoder=encoder,
        renderer=renderer,
        planner=planner,
        images=PromptImages(encoder, store, placement),
        metrics=metrics,
        config=settings.config,
        spec=settings.spec,
        source=settings.source,
        tokenizer_export=TokenizerExport(settings.source, tokenizer),
        served_model=served_model,
        any_model_name=settings.config.model.takes_any_name,
        created_s=int(time.time()),
        build=build,
        traces=traces,
        state=None if state is None else client_state(state, settings.config, capacity),
    )
    app = App(services)
    server = HttpServer(app, settings.config.server)
    if services.state is not None:
        await services.state.batches.start(app.answer_line, app.check_line)
    listener.listen(BACKLOG)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    duties = [
        http,
        asyncio.create_task(_pump(inbox, manager)),
        asyncio.create_task(_check_time_limits(manager)),
        asyncio.create_task(child.keep_beating()),
        asyncio.create_task(
            obey(child, manager, settings.config.server.drain_timeout, stop_batches=services.stop_batches)
        ),
    ]
    if services.state is not None:
        duties.append(asyncio.create_task(keep_responses(services, services.state.responses)))
    child.ready(url=_url(settings.config.server, listener.getsockname()[1]))
    compile_queue.start()  # now, so that it delays neither the start of the server nor the first grammar
    try:
        done, _ = await asyncio.wait(duties, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # only `obey` ends without an error
        server.should_exit = True
        await http
    finally:
        for task in duties:
            task.cancel()
        await asyncio.gather(*duties, return_exceptions=True)
        await compile_queue.close()
        await services.stop_batches()
        services.close()
        inbox.close()
        for outbox in outboxes:
            outbox.close()


def client_state(
    store: StateStore,
    config: EngineConfig,
    capacity: Capacity,
    wall_clock: Callable[[], float] = time.time,
) -> ClientState:
    """The state of clients; a few lines of batches are in flight for each row.

    Args:
        store: of `open_state`.
        config, capacity: of the server.
        wall_clock: Unix time, for the age of files.
    """
    files, max_body_bytes = StoredFiles(store, wall_clock), int(config.server.max_body_mb * 2**20)
    return ClientState(
        store,
        files,
        BatchRunner(
            files,
            num_slots=BACKGROUND_PER_ROW * config.parallel.dp * capacity.max_running_requests,
            limits=config.limits,
            max_body_bytes=max_body_bytes,
        ),
        ResponseStore(store, keep_s=config.server.response_retention_s, max_chain_bytes=max_body_bytes),
    )


def overload_limits(config: EngineConfig) -> OverloadLimits:
    """The limits on waiting requests."""
    return OverloadLimits(
        max_queued_requests=config.scheduler.max_queued_requests,
        max_queued_tokens=config.scheduler.max_queued_tokens,
        overload=config.scheduler.overload,
        queue_timeout_s=config.scheduler.queue_timeout,
        request_timeout_s=config.scheduler.request_timeout,
    )


def warn_of_unknown_tokens(tokenizer: Tokenizer, capacity: Capacity) -> None:
    """Warn if the tokenizer has more tokens than the model: their files may not belong together."""
    if tokenizer.vocab_size > capacity.vocab_size:
        logger.warning(
            "the tokenizer has %d tokens and the model %d; prompts with the tokens between are refused",
            tokenizer.vocab_size,
            capacity.vocab_size,
        )


def seed_source(config: EngineConfig) -> Callable[[], int]:
    """Makes seeds for requests without one: the configured seed, or a new one each."""
    fixed = config.model.seed
    return (lambda: fixed) if fixed else (lambda: secrets.randbits(63))


async def _pump(inbox: AsyncInbox[ManagerInput], manager: TokenizerManager) -> None:
    """Pass all messages to the manager."""
    while True:
        for message in await inbox.receive():
            manager.on_message(message)


async def _check_time_limits(manager: TokenizerManager) -> None:
    """Have the manager end requests beyond their time limits."""
    while True:
        manager.check_time()
        await asyncio.sleep(_CHECK_TIME_S)


class Orders(Protocol):
    """The source of the supervisor's orders: `Child`."""

    async def next_order(self) -> Order:
        """Wait for the next order."""
        ...


async def _nothing() -> None:
    pass


async def obey(
    orders: Orders,
    manager: TokenizerManager,
    drain_timeout_s: float,
    stop_batches: Callable[[], Awaitable[None]] = _nothing,
) -> None:
    """Carry out orders; return when the process must end, with every stream ended.

    Args:
        orders: of the supervisor.
        manager: carries them out.
        drain_timeout_s: for running requests, after a stop is ordered.
        stop_batches: ends the lines of batches in flight, for which no drain waits: the next server answers them.
    """
    drained: asyncio.Task[None] | None = None
    while True:
        order = asyncio.create_task(orders.next_order())
        waiting: set[asyncio.Task[object]] = {order} if drained is None else {order, drained}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not order.done():  # drained
            order.cancel()
            break
        match order.result():
            case Stop(drain=True):
                logger.info(
                    "draining live_requests=%d timeout_s=%g", len(manager.request_log), drain_timeout_s
                )
                manager.drain()
                await stop_batches()
                drained = drained or asyncio.create_task(_wait_drained(manager, drain_timeout_s))
            case Stop():
                break
            case PeersLost() as lost:
                started = None if lost.started is None else set(lost.started)
                manager.peers_lost(lost.message, started, lost.replica, lost.restarts_left)
            case PeersReady() as back:
                manager.peers_back(back.capacity, back.restarts_left, back.replica)
            case PeerDied(message=message):
                manager.engine_died(message)
                break
            case other:
                assert_never(other)
    if drained is not None:
        drained.cancel()
    manager.drain()
    manager.abort_all("the server stopped before the answer was complete; send the request again")


async def _wait_drained(manager: TokenizerManager, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await manager.wait_idle()


def _url(config: ServerConfig, port: int) -> str:
    scheme = "http" if config.ssl_certfile is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{port}"
