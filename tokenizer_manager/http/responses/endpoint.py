"""`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

from __future__ import annotations

from msgspec import UNSET

from ..delivery import collect_deltas, stream
from ..exchange import Exchange
from ..services import Engine
from .background import answer_in_background
from .reading import read_request
from .wire import InputTokensBody
from .writer import ResponseWriter


async def responses(exchange: Exchange, engine: Engine) -> None:
    """Answer a chat in the form of the Responses API."""
    read = await read_request(exchange, engine)
    if read.request.background:
        await answer_in_background(exchange, engine, read)
        return
    async with exchange.abort_on_disconnect():
        with await engine.start(exchange, read.generation) as generation:
            writer = ResponseWriter(engine, generation, read)
            with writer.running():
                if read.request.stream:
                    exchange.failure_event = writer.fail
                    await stream(exchange, generation, writer, before_end=writer.end)
                else:
                    writer.stream.events(await collect_deltas(generation))
                    await writer.end()
                    await exchange.send_json(writer.stream.body)


async def response_input_tokens(exchange: Exchange, engine: Engine) -> None:
    """The number of tokens of the prompt of a response."""
    read = await read_request(exchange, engine)
    async with exchange.abort_on_disconnect():
        num_tokens, warnings = await engine.count_prompt(exchange, read.generation)
        await exchange.send_json(InputTokensBody(input_tokens=num_tokens, warnings=warnings or UNSET))
