"""`Calls`: answers the calls of the tokenizer manager: flush, pin, explain, list, load and unload adapters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import assert_never

from ...runtime.messages import (
    AdapterDone,
    Call,
    CallAnswer,
    CallDone,
    Explain,
    FlushCache,
    FlushCacheDone,
    ListRequests,
    LoadAdapter,
    PinDone,
    PinPrefix,
    UnloadAdapter,
)
from ..adapters.adapter_slots import AdapterSlots
from ..adapters.adapter_table import AdapterTable
from ..arrays import TOKEN_ID_BYTES
from ..memory.kv_memory import KVMemory
from ..prefix_cache.base import namespace_of
from ..records.decision_log import DecisionLog
from ..requests.intake import reason_to_refuse_pin
from ..requests.requests import Requests
from .explainer import explain_live
from .request_list import list_requests

EndUsers = Callable[[str, str, int, float], None]
"""Ends the requests of an adapter: its fingerprint, the error, its HTTP status, the time."""


class Calls:
    """See the module. The answers are kept until `take`.

    An explanation takes some milliseconds, in which no step is planned, so there is at most one per pass; further
    questions wait for later passes.
    """

    def __init__(
        self,
        kv: KVMemory,
        requests: Requests,
        decisions: DecisionLog,
        *,
        adapters: AdapterTable,
        adapter_slots: AdapterSlots,
        max_pinned_tokens: int,
    ) -> None:
        """Take the parts.

        Args:
            max_pinned_tokens: the quota, for the answer; the prefix cache enforces it.
        """
        self._kv = kv
        self._requests = requests
        self._decisions = decisions
        self._adapters = adapters
        self._adapter_slots = adapter_slots
        self._max_pinned_tokens = max_pinned_tokens
        self._done: list[CallDone] = []
        self._questions: deque[tuple[int, Explain]] = deque()
        self._explained = False  # since the last pass

    @property
    def has_questions(self) -> bool:
        """Whether a pass is needed to explain the next request."""
        return bool(self._questions)

    def take(self) -> list[CallDone]:
        """The answers since the last call, in order."""
        done, self._done = self._done, []
        return done

    def handle(self, call: Call, now_s: float, end_users: EndUsers) -> None:
        """Answer a call, now or later."""
        request = call.request
        answer: CallAnswer | None
        match request:
            case FlushCache():
                dropped, kept = self._kv.flush()
                answer = FlushCacheDone(dropped * self._kv.page_size, kept * self._kv.page_size)
            case PinPrefix():
                answer = self._pin(request, now_s)
            case Explain():
                self._questions.append((call.call_id, request))
                if not self._explained:
                    self._explain_next()
                return
            case ListRequests():
                answer = list_requests(self._requests, self._decisions, request.limit, now_s)
            case LoadAdapter():
                answer = self._adapters.load(call.call_id, request)
            case UnloadAdapter():
                answer = self._unload(request, now_s, end_users)
            case _:
                assert_never(request)
        if answer is not None:
            self._answer([call.call_id], answer)

    def next_pass(self) -> None:
        """A pass begins: explain the request of the oldest waiting question, if there is one."""
        self._explained = False
        self._explain_next()

    def adapter_read(self, store_id: int, error: str, now_s: float, end_users: EndUsers) -> None:
        """An adapter is read. If it could not be, the requests that wait for it fail."""
        fingerprint, call_ids = self._adapters.read(store_id, error)
        self._answer(call_ids, AdapterDone(error))
        if error and fingerprint:
            end_users(fingerprint, error, 400, now_s)

    def _answer(self, call_ids: Iterable[int], answer: CallAnswer) -> None:
        self._done += [CallDone(call_id, answer) for call_id in call_ids if call_id]

    def _explain_next(self) -> None:
        if self._questions:
            self._explained = True
            call_id, question = self._questions.popleft()
            self._answer([call_id], explain_live(self._decisions, self._requests.by_id, question.rid))

    def _unload(self, request: UnloadAdapter, now_s: float, end_users: EndUsers) -> AdapterDone:
        if fingerprint := self._adapters.remove(request.store_id):
            end_users(fingerprint, "the LoRA adapter of the request was unloaded", 409, now_s)
            self._adapter_slots.unloaded(fingerprint)
        return AdapterDone()

    def _pin(self, request: PinPrefix, now_s: float) -> PinDone:
        """Pin the cached part of a prefix, up to the quota."""
        refusal = reason_to_refuse_pin(request)
        if refusal is not None:
            return PinDone(0, 0, refusal)
        page_size = self._kv.page_size
        until_s = now_s + request.ttl_s if request.ttl_s > 0 else None
        namespace = namespace_of(request.extra_key, request.lora_id)
        pinned_tokens = self._kv.pin(namespace, request.input_ids, until_s) * page_size
        asked_tokens = len(request.input_ids) // TOKEN_ID_BYTES
        reason = ""
        if until_s is not None and pinned_tokens < asked_tokens // page_size * page_size:
            reason = self._reason_for_less(pinned_tokens)
        elif pinned_tokens < asked_tokens and until_s is not None:
            reason = f"prefixes are kept in whole pages of {page_size} tokens"
        return PinDone(pinned_tokens, asked_tokens, reason)

    def _reason_for_less(self, pinned_tokens: int) -> str:
        page_size, quota = self._kv.page_size, self._max_pinned_tokens
        if self._kv.pinned_pages * page_size >= quota:
            return (
                f"the quota is {quota} tokens and all of it is in use; wait, unpin others, or "
                f"raise --pin-fraction"
            )
        if not pinned_tokens and self._kv.num_pins * page_size >= quota:
            return (
                f"there are {self._kv.num_pins} pins, and no more are allowed than the quota has pages; wait, "
                "unpin others, or raise --pin-fraction"
            )
        return "only what is cached can be pinned; send the prompt as a request first"
