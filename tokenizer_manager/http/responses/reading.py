"""From the body of `/v1/responses`, and the responses that it continues, to what is generated and what is stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ...generation import GenerationRequest
from ...state.responses import Response, tokens_of_chain
from ..body_reader import SMALL_BYTES
from ..exchange import Exchange
from ..guards.auth import Caller
from ..schema.values import Body
from ..services import Engine
from .convert import read_responses
from .items import input_items, items_of
from .wire import ResponseBody, ResponsesRequest, Status

PREVIOUS: Final = "previous_response_id"


class ReadRequest(NamedTuple):
    """A checked request.

    Attributes:
        parent: the response that it continues, without its contents.
        items: its own input as JSON, to be stored; b"": it is not stored.
        body: without the input, of a request in the background.
    """

    request: ResponsesRequest
    generation: GenerationRequest
    parent: Response | None
    items: bytes
    body: Body

    def response(self, response_id: str, status: Status = "queued", **more: Any) -> Response:
        """The row that is stored before its end."""
        parent = self.parent
        return Response(
            owner=self.generation.scheduling.owner,
            id=response_id,
            parent="" if parent is None else parent.id,
            root=response_id if parent is None else parent.root,
            depth=1 if parent is None else parent.depth + 1,
            chain_bytes=len(self.items) + (0 if parent is None else parent.chain_bytes),
            status=status,
            input=self.items,
            **more,
        )


async def read_request(exchange: Exchange, engine: Engine) -> ReadRequest:
    """Read a request, and the responses that it continues.

    Raises:
        RequestError: it is refused.
    """
    caller = exchange.caller

    def build(body: Body) -> ReadRequest | Body:
        if exchange.line_seed is not None and body.get("store") is None:
            body["store"] = False  # a batch has its results in a file; a rerun would store a second response
        continues = isinstance(body.get(PREVIOUS), str) and body[PREVIOUS] and engine.state is not None
        return body if continues else read_body(body, engine, caller)

    read = await engine.read(exchange, build)
    if isinstance(read, ReadRequest):
        return read
    body, chain = read, await engine.required_state.responses.continued(caller.owner, read[PREVIOUS])
    declared = exchange.headers.get(b"content-length", b"")
    num_bytes = chain[-1].chain_bytes + (int(declared) if declared.isdigit() else SMALL_BYTES)
    return await engine.body_reader.run(
        lambda: read_body(body, engine, caller, chain), num_bytes, exchange.abort_on_disconnect()
    )


def read_body(body: Body, engine: Engine, caller: Caller, chain: Sequence[Response] = ()) -> ReadRequest:
    """Check a request that continues a chain of responses, the first one first.

    Raises:
        RequestError: it is refused.
    """

    def find_item(item_id: str) -> Body | None:
        return engine.recent_items.find(item_id, caller.owner)

    request, generation = read_responses(
        body,
        engine.config,
        engine.sampling_defaults,
        find_item,
        items_of(chain),
        sees_images=engine.images.are_seen,
        is_stored=engine.state is not None,
    )
    engine.check_model(request.model)
    items = b""
    if engine.state is not None and request.store is not False:
        items = msgspec.json.encode(input_items(request.input, find_item))
    request.input = []  # the conversation has them; an answer may take long, and images are megabytes
    root = chain[0].id if chain else None
    scheduling = caller.scheduling(request, body=body, user_session=root)
    generation = replace(
        generation,
        scheduling=engine.with_adapter(scheduling, request.model),
        earlier_ids=tokens_of_chain(chain),
    )
    parent = chain[-1]._replace(input=b"", output=b"", body=b"", tokens=b"") if chain else None
    again = {name: value for name, value in body.items() if name != "input"} if request.background else {}
    return ReadRequest(request, generation, parent, items, again)


def body_at_beginning(
    engine: Engine, generation: GenerationRequest, read: ReadRequest, response_id: str
) -> ResponseBody:
    """The response at its beginning, with the request's settings."""
    request, sampling = read.request, generation.sampling
    reasoning = request.reasoning or {}
    text = request.text or {}
    return ResponseBody(
        id=response_id,
        created_at=int(time.time()),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        model=generation.scheduling.served_as or engine.served_model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        temperature=sampling.temperature,
        text={"format": text.get("format") or {"type": "text"}},
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_p=sampling.top_p,
        background=bool(request.background),
        store=bool(read.items),
        previous_response_id=request.previous_response_id,
        user=request.user or UNSET,
        service_tier=generation.scheduling.service_tier or UNSET,
        metadata=request.metadata or {},
        warnings=generation.warnings or UNSET,
    )
