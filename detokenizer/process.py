"""The detokenizer process: rows come in from the scheduler, text goes out to the tokenizer manager."""

from __future__ import annotations

import msgspec

from ..launch.child.child import Child
from ..models.tokenizer.tokenizer import load_tokenizer
from ..runtime.messages import HEARTBEAT_INTERVAL_S, DetokenizerInput
from ..runtime.transport.ipc import Inbox, Outbox
from .incremental import NoText
from .manager import Detokenizer


def main(child: Child) -> None:
    """Detokenize until the supervisor says stop."""
    endpoints = child.settings.endpoints
    decoder: msgspec.msgpack.Decoder[DetokenizerInput] = msgspec.msgpack.Decoder(DetokenizerInput)
    inbox = Inbox(endpoints.detokenizer, decoder, wake=child)
    outbox = Outbox(endpoints.tokenizer_manager)
    settings = child.settings
    table = NoText() if settings.spec.pooling is not None else load_tokenizer(settings.source)
    detokenizer = Detokenizer(table, after_restart=settings.life > 0)
    child.ready()
    while not child.stop_requested():
        for message in inbox.poll(HEARTBEAT_INTERVAL_S):
            answer = detokenizer.handle(message)
            if answer is not None:
                outbox.send(answer)
        child.heartbeat()
