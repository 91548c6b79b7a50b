"""Talks to scheduler and detokenizer as the tokenizer manager does, and reports what it got as `details`."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from typing import Any

import msgspec

from engine.launch.child.child import Child
from engine.launch.child.control import PeerDied, Stop
from engine.runtime.messages import (
    AbortRequest,
    BatchTextOutput,
    Call,
    CallDone,
    FlushCache,
    FlushCacheDone,
    GenerateRequest,
    ManagerInput,
    TextOutput,
)
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.scheduler_report import SchedulerReport
from engine.runtime.transport.ipc import AsyncInbox, Outbox

PROMPT = tuple(range(3, 40))


def main(child: Child) -> None:
    child.wait_for_peers()
    asyncio.run(_run(child))


async def _run(child: Child) -> None:
    beating = asyncio.create_task(child.keep_beating())
    client = Client(child)
    details: dict[str, Any] = {
        "greedy": await client.ask("greedy"),
        "again": await client.ask("again"),
    }
    stop = details["greedy"]["text"][2:5]
    details["stopped"] = await client.ask("stopped", stop=(stop,))
    details["aborted"] = await client.ask("aborted", abort=True, max_new_tokens=400)
    details["flushed"] = await client.flush()
    details["report"] = await client.next_report()
    answers = {key: json.dumps(value) for key, value in details.items()}
    child.ready(None, "none", **answers)
    while not isinstance(await child.next_order(), Stop | PeerDied):
        pass
    beating.cancel()


class Client:
    """Sends to the scheduler, receives from the detokenizer."""

    def __init__(self, child: Child) -> None:
        endpoints = child.settings.endpoints
        decoder: msgspec.msgpack.Decoder[ManagerInput] = msgspec.msgpack.Decoder(ManagerInput)
        self._inbox = AsyncInbox(endpoints.tokenizer_manager, decoder)
        self._outbox = Outbox(endpoints.scheduler)

    async def ask(self, rid: str, *, abort: bool = False, **sampling: Any) -> dict[str, Any]:
        """One request to its end."""
        defaults: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "seed": 1, "ignore_eos": True}
        params = SamplingParams(**(defaults | sampling))
        ids = struct.pack(f"<{len(PROMPT)}i", *PROMPT)
        self._outbox.send(GenerateRequest(rid, ids, params, arrival_s=time.monotonic()))
        rows: list[TextOutput] = []
        while not rows or rows[-1].finish is None:
            for message in await self._inbox.receive():
                if isinstance(message, BatchTextOutput):
                    rows += [row for row in message.outputs if row.rid == rid]
            if rows and abort:
                self._outbox.send(AbortRequest(rid, "client disconnected"))
        last = rows[-1]
        assert last.finish is not None
        if last.ended_by_detokenizer:
            self._outbox.send(AbortRequest(rid, "stop string"))
        return {
            "text": "".join(row.text for row in rows),
            "num_ids": sum(len(row.token_ids) // 4 for row in rows),
            "finish": last.finish.kind,
            "matched": last.finish.matched,
            "completion_tokens": last.usage.completion_tokens,
            "cached_tokens": last.usage.cached_tokens,
        }

    async def flush(self) -> dict[str, int]:
        self._outbox.send(Call(1, FlushCache()))
        while True:
            for message in await self._inbox.receive():
                if isinstance(message, CallDone) and isinstance(message.answer, FlushCacheDone):
                    return {"call_id": message.call_id, "kept": message.answer.kept_tokens}

    async def next_report(self) -> dict[str, int]:
        while True:
            for message in await self._inbox.receive():
                if isinstance(message, SchedulerReport):
                    return {"running": message.num_running_reqs, "used": message.kv.used_tokens}
