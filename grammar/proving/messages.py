"""What the tokenizer manager and a proving process say to each other, and how it is framed.

A frame is a length (uint32, little-endian) and a msgpack message. The socket is the process' standard input.

    tokenizer manager -> process: ProofSetup once, then ProofRequest, one at a time
    process -> tokenizer manager: ProverReady once, then ProofResult, one per request
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from ...models.source import ModelSource
from ...runtime.grammar_use import GrammarSpec
from ...runtime.transport.message_base import Message

FRAME_LENGTH: Final = struct.Struct("<I")


class ProofSetup(Message, frozen=True):
    """What the process needs to compile grammars as the scheduler does.

    Attributes:
        source: of the tokenizer.
        vocab_size: of the logits.
        eos_token_ids: all tokens that end an answer.
        memory_bytes: that proofs may take, in addition to what the process has when it is ready.
    """

    source: ModelSource
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    memory_bytes: int


class ProverReady(Message, frozen=True):
    """The process can work; or `error`, why it cannot."""

    error: str = ""


class ProofRequest(Message, frozen=True):
    """Compile this grammar and fill some masks; `measures`: measure it, too."""

    spec: GrammarSpec
    measures: bool = False


class ProofResult(Message, frozen=True):
    """How it went.

    Attributes:
        code, message: of the `GrammarError`; "" if the grammar is good.
        compile_s: time to compile it.
        forced_share: share of the tokens of a short answer that the grammar forces, in [0, 1]; None if it was not
            measured, or if no short answer is known.
    """

    code: str = ""
    message: str = ""
    compile_s: float = 0.0
    forced_share: float | None = None


ToProver = ProofSetup | ProofRequest
FromProver = ProverReady | ProofResult

_ENCODER: Final = msgspec.msgpack.Encoder()


def frame(message: Message) -> bytes:
    """A message as it is sent."""
    data = _ENCODER.encode(message)
    return FRAME_LENGTH.pack(len(data)) + data
