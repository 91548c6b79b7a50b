"""`Control`: calls to the scheduler that are no generation: flush, pin, explain, list, adapters.

Each is a `Call` with an id, and each scheduler answers it with a `CallDone` with that id. `PendingCalls` matches the
two; `merged` makes one answer of those of several schedulers.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar, assert_never

from msgspec.structs import replace

from ..runtime.adapter_spec import AdapterSpec
from ..runtime.errors import EngineDeadError, RequestError
from ..runtime.messages import (
    AdapterDone,
    Call,
    CallAnswer,
    CallDone,
    CallRequest,
    EndReasoning,
    Explain,
    Explanation,
    FlushCache,
    FlushCacheDone,
    HintAction,
    HintDone,
    HintOutcome,
    HintSession,
    ListRequests,
    ListSessions,
    LoadAdapter,
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
    UnloadAdapter,
)
from .engine_state import EngineState
from .generation import Prompt
from .preparation import check_may_fit
from .prompt_encoder import PromptEncoder
from .request_log import RequestLog

_ANSWER_TIMEOUT_S: Final = 10.0
_ADAPTER_TIMEOUT_S: Final = 120.0  # to read an adapter, also from a slow disk
_LAST_TOKEN_TIMEOUT_S: Final = 3600.0  # until the running requests have ended
_GENERATION_ID: Final = re.compile(r"[a-z]+-[0-9a-f]{32}")
A = TypeVar(
    "A",
    FlushCacheDone,
    PinDone,
    HintDone,
    ReasoningDone,
    Explanation,
    RequestList,
    SessionList,
    AdapterDone,
    PauseDone,
)
_BEST_FIRST: Final = (
    HintOutcome.REJECTED,  # one that is open already
    HintOutcome.DEFERRED,
    HintOutcome.CLIPPED,
    HintOutcome.ACCEPTED,
    HintOutcome.MISSING,
)
"""The first outcome that one of several schedulers has is the answer."""


class _Call:
    """One call: the answers so far, and the replicas whose schedulers have not answered."""

    def __init__(self, waits_for: Iterable[int]) -> None:
        self.waits_for = set(waits_for)
        self.answers: list[CallAnswer] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class PendingCalls:
    """Calls without all of their answers yet; ids are unique across the kinds of calls."""

    def __init__(
        self,
        send: Callable[[SchedulerInput], None],
        timeout_s: float,
        first_id: int = 0,
        running: Callable[[], Iterable[int]] = lambda: (0,),
    ) -> None:
        """Send calls through `send`, and wait `timeout_s` for each answer; ids start after `first_id`.

        Args:
            running: numbers of the replicas that answer a call that is made now.
        """
        self._send = send
        self._timeout_s = timeout_s
        self._pending: dict[int, _Call] = {}
        self._last_id = first_id
        self._running = running

    def __len__(self) -> int:
        """Number of calls that wait for an answer."""
        return len(self._pending)

    async def call(self, request: CallRequest, kind: type[A], timeout_s: float | None = None) -> A:
        """Send a call, and wait for the schedulers' answers, which are of this kind.

        Args:
            timeout_s: if the answer may take longer than usual.

        Returns:
            one answer, see `merged`.

        Raises:
            EngineDeadError: no answer in time, or the engine is lost.
        """
        self._last_id += 1
        call_id = self._last_id
        call = self._pending[call_id] = _Call(self._running())
        try:
            self._send(Call(call_id, request))
            timeout_s = self._timeout_s if timeout_s is None else timeout_s
            async with asyncio.timeout(timeout_s):
                await call.done
        except TimeoutError:
            raise EngineDeadError(f"the scheduler did not answer within {timeout_s:g} s") from None
        finally:
            del self._pending[call_id]
        answer = merged(call.answers)
        assert isinstance(answer, kind), f"{type(answer).__name__} answers a call for {kind.__name__}"
        return answer

    def resolve(self, done: CallDone) -> None:
        """Take an answer for its caller, if that still waits for this replica."""
        call = self._pending.get(done.call_id)
        if call is None or call.done.done() or done.replica not in call.waits_for:
            return
        call.waits_for.remove(done.replica)
        call.answers.append(done.answer)
        if not call.waits_for:
            call.done.set_result(None)

    def fail(self, message: str) -> None:
        """Raise `EngineDeadError` in every caller."""
        for call in self._pending.values():
            if not call.done.done():
                call.done.set_exception(EngineDeadError(message))


class Control:
    """The calls and their answers; each raises `EngineDeadError` if no scheduler can answer."""

    def __init__(
        self,
        send: Callable[[SchedulerInput], None],
        encoder: PromptEncoder,
        engine: EngineState,
        log: RequestLog,
        *,
        first_id: int = 0,
    ) -> None:
        """Take the parts.

        Args:
            send: to the schedulers of all replicas.
            encoder: tokenizes a prompt to pin.
            engine: its capacity, and whether it can answer.
            log: the live requests, to look up ids.
            first_id: ids of calls start after it.
        """
        self._calls = PendingCalls(send, _ANSWER_TIMEOUT_S, first_id, lambda: engine.running)
        self._encoder = encoder
        self._engine = engine
        self._log = log

    def resolve(self, done: CallDone) -> None:
        """Take an answer of a scheduler."""
        self._calls.resolve(done)

    def fail(self, message: str) -> None:
        """No scheduler will answer the pending calls: raise `EngineDeadError` in each."""
        self._calls.fail(message)

    async def flush_cache(
        self, *, device: bool = True, tier: bool = True, host: bool = True
    ) -> FlushCacheDone:
        """Evict what the prefix cache can evict; the answer has an error if the tier may still have it.

        Args:
            device: from the KV pool.
            tier: from the disk or the store that outlives the process, if there is one.
            host: from host memory, with --kv-host-size.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._engine.check_answering()
        return await self._calls.call(FlushCache(device, tier, host), FlushCacheDone)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; returns when no step is computed any more.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._engine.check_answering()
        self._engine.told(mode)
        timeout_s = _LAST_TOKEN_TIMEOUT_S if mode is PauseMode.WAIT else None
        await self._calls.call(Pause(mode), PauseDone, timeout_s)

    async def resume(self) -> None:
        """Go on after a pause; no effect without one.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._engine.check_answering()
        self._engine.told(None)
        await self._calls.call(Resume(), PauseDone)

    async def load_adapter(self, store_id: int, adapter: AdapterSpec) -> AdapterDone:
        """Have the scheduler's process read an adapter, which takes as long as its disk needs.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._engine.check_answering()
        return await self._calls.call(LoadAdapter(store_id, adapter), AdapterDone, _ADAPTER_TIMEOUT_S)

    async def unload_adapter(self, store_id: int) -> AdapterDone:
        """Have the scheduler forget an adapter.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._engine.check_answering()
        return await self._calls.call(UnloadAdapter(store_id), AdapterDone)

    async def explain(self, request_id: str) -> Explanation:
        """Say why a request waited, was retracted or missed the cache; also an ended one that the scheduler remembers.

        Args:
            request_id: of one choice, or of a generation, which stands for its first choice.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._engine.check_answering()
        ended = f"{request_id}-0" if _GENERATION_ID.fullmatch(request_id) else request_id
        rid = next((choice.rid for choice in self._log.choices_of(request_id)), ended)
        return await self._calls.call(Explain(rid), Explanation)

    async def pin(
        self,
        prompt: Prompt,
        *,
        ttl_s: float,
        extra_key: str,
        add_special_tokens: bool,
        param: str,
        lora_id: str = "",
    ) -> PinDone:
        """Keep the cached prefix of a prompt for `ttl_s` seconds; 0 unpins.

        Args:
            prompt: text or token ids.
            ttl_s: verified.
            extra_key: namespace of the prefix cache.
            add_special_tokens: as in `GenerationRequest`.
            param: the field that errors name.
            lora_id: fingerprint of the adapter that computed the prefix.

        Raises:
            RequestError: the prompt is empty, has unknown tokens, or is longer than any prompt that can run.
            EngineDeadError: the scheduler does not answer.
        """
        self._engine.check_answering()
        capacity = self._engine.capacity
        if isinstance(prompt, str):
            check_may_fit(prompt, self._encoder.tokenizer, capacity, param)
        [ids] = await self._encoder.encode([prompt], add_special_tokens=add_special_tokens, param=param)
        if not 1 <= len(ids) < capacity.max_model_len:
            raise RequestError(
                f"{param} has {len(ids)} tokens, but a prompt has at least 1 and at most "
                f"{capacity.max_model_len - 1}; pin what requests will begin with",
                param=param,
                code="invalid_value",
            )
        self._engine.check_answering()  # a process may have died during tokenization
        return await self._calls.call(PinPrefix(ids.tobytes(), ttl_s, extra_key, lora_id), PinDone)

    async def hint(
        self, session: str, action: HintAction, *, ttl_s: float = 0.0, tenant: str = ""
    ) -> HintDone:
        """Have the schedulers do something with the pages of a session.

        Args:
            session: a digest of its key.
            action: see `HintAction`.
            ttl_s: verified.
            tenant: of a session that is opened.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._engine.check_answering()
        return await self._calls.call(HintSession(session, action, ttl_s, tenant), HintDone)

    async def end_reasoning(self, rid: str) -> bool:
        """Let the open reasoning block of a request end; whether one was open.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._engine.check_answering()
        return (await self._calls.call(EndReasoning(rid), ReasoningDone)).done

    async def list_requests(self, limit: int) -> RequestList:
        """The live requests as the scheduler sees them, at most `limit`.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._engine.check_answering()
        answer = await self._calls.call(ListRequests(limit), RequestList)
        return replace(answer, requests=answer.requests[:limit])  # each scheduler lists so many

    async def list_sessions(self, limit: int) -> SessionList:
        """The sessions with the latest turns, at most `limit`; one at several schedulers is listed by each.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._engine.check_answering()
        answer = await self._calls.call(ListSessions(limit), SessionList)
        return replace(answer, sessions=answer.sessions[:limit])


def merged(answers: Sequence[CallAnswer]) -> CallAnswer:
    """One answer from those of the schedulers, at least one, all of one kind.

    Flushed tokens and requests are those of all. A prefix is pinned wherever it is cached, and the longest one counts:
    the requests that use it go there, and so do the turns of a session. A request is explained by the scheduler that
    has it; an adapter is loaded if all have loaded it.
    """
    first, *others = answers
    if not others:
        return first
    match first:
        case FlushCacheDone():
            counts = [each for each in answers if isinstance(each, FlushCacheDone)]
            flushed, kept = (
                sum(each.flushed_tokens for each in counts),
                sum(each.kept_tokens for each in counts),
            )
            error = next((each.error for each in counts if each.error), "")
            return FlushCacheDone(flushed, kept, error)
        case PinDone():
            pins = [each for each in answers if isinstance(each, PinDone)]
            return max(pins, key=lambda each: each.pinned_tokens)
        case HintDone():
            hints = [each for each in answers if isinstance(each, HintDone)]
            return min(hints, key=lambda each: _BEST_FIRST.index(each.outcome))
        case Explanation():
            return next((each for each in answers if isinstance(each, Explanation) and each.found), first)
        case RequestList():
            lists = [each for each in answers if isinstance(each, RequestList)]
            figures: Counter[str] = Counter()
            for each in lists:
                figures.update(each.last_pass)
            requests = [request for each in lists for request in each.requests]
            total = sum(each.total for each in lists)
            return replace(first, requests=requests, total=total, last_pass=dict(figures))
        case SessionList():
            states = [
                each for answer in answers if isinstance(answer, SessionList) for each in answer.sessions
            ]
            total = sum(each.total for each in answers if isinstance(each, SessionList))
            return SessionList(sorted(states, key=lambda each: each.idle_s), total)
        case ReasoningDone():
            return ReasoningDone(any(each.done for each in answers if isinstance(each, ReasoningDone)))
        case PauseDone():
            return PauseDone(all(each.paused for each in answers if isinstance(each, PauseDone)))
        case AdapterDone():
            return next((each for each in answers if isinstance(each, AdapterDone) and each.error), first)
        case _:
            assert_never(first)
