"""`/v1/responses/{id}`: `GET`, `DELETE`, `/cancel`, and the items that a response was made from."""

from __future__ import annotations

from typing import Final

import msgspec

from ....runtime.errors import RequestError
from ...state.response_store import ResponseStore
from ...state.responses import Response
from ..exchange import Exchange
from ..schema.values import number_of, one_of, refused
from ..services import Engine
from .background import follow
from .items import context_items, page_of
from .wire import DeletedBody

PATH: Final = "/v1/responses"
MAX_EVENTS: Final = 1 << 40
"""Above the number of any event."""
_JSON: Final = b"application/json"


def whole_body(response: Response) -> bytes:
    """The JSON of a response, with its output."""
    body = msgspec.json.decode(response.body)
    return msgspec.json.encode(body | {"output": msgspec.Raw(response.output)})


async def get_response(exchange: Exchange, engine: Engine) -> None:
    """A response as it was answered, or as it is now; with `stream` the events of one in the background."""
    store, owner, response_id = (
        engine.required_state.responses,
        exchange.caller.owner,
        exchange.id_after(PATH),
    )
    first = number_of(exchange.query, "starting_after", 0, MAX_EVENTS, -1) + 1
    if one_of(exchange.query.get("stream", "false"), ("true", "false"), "stream") == "true":
        live = store.live.get((owner, response_id))
        in_background = live is not None and live.cancel is not None
        if not in_background and not await store.groups(owner, response_id, 0, 1):
            await store.find(owner, response_id)
            raise refused("stream", f"is true, but {response_id} was not made with background: true")
        async with exchange.abort_on_disconnect():
            await follow(exchange, store, owner, response_id, first)
        return
    await send_response(exchange, store, owner, response_id)


async def send_response(exchange: Exchange, store: ResponseStore, owner: str, response_id: str) -> None:
    """Answer with a response as it is now."""
    live = store.live.get((owner, response_id))
    body = live.body() if live is not None else whole_body(await store.find(owner, response_id))
    await exchange.send_bytes(body, _JSON)


async def delete_response(exchange: Exchange, engine: Engine) -> None:
    """Delete a response; those that continue it stay, and can no longer be continued."""
    response_id = exchange.id_after(PATH)
    await engine.required_state.responses.delete(exchange.caller.owner, response_id)
    await exchange.send_json(DeletedBody(id=response_id))


async def list_input_items(exchange: Exchange, engine: Engine) -> None:
    """A page of the items that a response was made from, those of the responses that it continues included."""
    chain = await engine.required_state.responses.context(exchange.caller.owner, exchange.id_after(PATH))
    await exchange.send_json(page_of(context_items(chain), exchange.query))


async def cancel_response(exchange: Exchange, engine: Engine) -> None:
    """End a response in the background; one that has ended stays as it is."""
    store, owner, response_id = (
        engine.required_state.responses,
        exchange.caller.owner,
        exchange.id_after(PATH),
    )
    response = None if (owner, response_id) in store.live else await store.find(owner, response_id)
    live = store.live.get((owner, response_id))  # of a server that begins, it may be there only now
    in_background = (
        live.cancel is not None if live else response and msgspec.json.decode(response.body)["background"]
    )
    if not in_background:
        raise RequestError(
            f"the response {response_id} was not made with background: true, so it ends when its client disconnects",
            code="not_in_background",
        )
    if live is not None and live.cancel is not None:
        live.cancel()
        while store.live.get((owner, response_id)) is live and not live.has_ended:
            await live.next_change().wait()
    await send_response(exchange, store, owner, response_id)
