"""The proving process, `python -m engine.grammar.proving PID`.

It compiles grammars that may take too long or too much memory.

`ProofWorker` in the tokenizer manager starts it, kills it after the time limit, and reads its results. It ends with
its parent. Its memory is limited: a failed allocation ends the process, and the parent refuses the grammar.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import sys
import time
from typing import Final

import msgspec
import numpy as np
import setproctitle

from ...launch.child.child import die_with
from ...models.tokenizer.tokenizer import load_tokenizer
from ...runtime.errors import ConfigError
from ...runtime.grammar_use import GrammarKind, GrammarSpec
from ..backend import GrammarBackend, GrammarError, Matcher, MatcherErrorCode, Vocabulary
from ..closing import JsonState, shortest_end
from ..llguidance_backend import LLGuidanceBackend
from ..vocabulary import TokenizerVocabulary
from .messages import (
    FRAME_LENGTH,
    ProofRequest,
    ProofResult,
    ProofSetup,
    ProverReady,
    ToProver,
    frame,
)

_STDIN: Final = 0
_NICENESS: Final = 10
"""A new grammar waits longer on a busy machine; the streams of others do not. Only compilations have it: a start takes
0.3 s of CPU time more, which may be half a minute at this priority, and requests wait for it."""
_NUM_WALKS: Final = 2
_WALK_TOKENS: Final = 24
_MAX_SHORT_TOKENS: Final = 2048
"""Of the answer that is measured."""
_DECODER: Final[msgspec.msgpack.Decoder[ToProver]] = msgspec.msgpack.Decoder(ToProver)


def main() -> None:
    """Serve one parent until it closes the socket."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            signum, signal.SIG_IGN
        )  # the terminal sends them to all; the parent decides when this ends
    die_with(int(sys.argv[1]))
    setproctitle.setproctitle("engine: grammar")
    with socket.socket(fileno=os.dup(_STDIN)) as channel:
        setup = _receive(channel)
        if not isinstance(setup, ProofSetup):
            return
        try:
            vocabulary = TokenizerVocabulary(
                load_tokenizer(setup.source), setup.vocab_size, setup.eos_token_ids
            )
            backend = LLGuidanceBackend(vocabulary)
        except (ConfigError, ImportError) as error:
            channel.sendall(frame(ProverReady(error=str(error))))
            return
        _limit_memory(setup.memory_bytes)
        os.nice(_NICENESS)
        channel.sendall(frame(ProverReady()))
        while isinstance(request := _receive(channel), ProofRequest):
            channel.sendall(frame(_prove(backend, vocabulary, request)))


def _prove(backend: GrammarBackend, vocabulary: Vocabulary, request: ProofRequest) -> ProofResult:
    """Compile the grammar, and walk some tokens through it."""
    try:
        begin_s = time.perf_counter()
        compiled = backend.compile(request.spec)
        compile_s = time.perf_counter() - begin_s
        for seed in range(_NUM_WALKS):
            if error := _walk(compiled.matcher(), vocabulary, seed):
                return ProofResult(
                    "schema_too_complex", f"the grammar goes beyond a limit while text is generated: {error}"
                )
    except GrammarError as error:
        return ProofResult(error.code, error.message)
    except MemoryError:
        return ProofResult("schema_too_complex", "the grammar takes too much memory")
    share = forced_share(compiled.matcher(), vocabulary, request.spec) if request.measures else None
    return ProofResult(compile_s=compile_s, forced_share=share)


def forced_share(matcher: Matcher, vocabulary: Vocabulary, spec: GrammarSpec) -> float | None:
    """The share of forced tokens in a short document of a schema, as the search for its end makes it.

    None for other grammars, and where the search finds no document.
    """
    if spec.kind is not GrammarKind.JSON_SCHEMA:
        return None
    way = shortest_end(matcher, vocabulary, JsonState(), _MAX_SHORT_TOKENS)
    if not way:
        return None
    for token_id in way:
        matcher.forced()  # it counts them
        matcher.accept((token_id,))
    return round(matcher.num_forced / len(way), 3)


def _walk(matcher: Matcher, vocabulary: Vocabulary, seed: int) -> str:
    """Generate some allowed tokens, as a model without knowledge would; the error if the matcher reaches a limit.

    Some grammars compile at once and then take longer with each token, until a limit of the library ends the answer.
    """
    mask = np.zeros(-(-vocabulary.size // 32), dtype=np.int32)
    rng = random.Random(seed)
    for _ in range(_WALK_TOKENS):
        matcher.fill(mask)
        if matcher.ended or matcher.error:
            break
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        choices = np.setdiff1d(allowed, vocabulary.eos_token_ids)
        if not len(choices):
            break
        matcher.accept((int(choices[rng.randrange(len(choices))]),))
    return matcher.error if matcher.error_code is MatcherErrorCode.LIMIT else ""


def _receive(channel: socket.socket) -> ToProver | None:
    """The next message, or None if the parent has closed the socket."""
    header = _receive_exactly(channel, FRAME_LENGTH.size)
    if len(header) < FRAME_LENGTH.size:
        return None
    (length,) = FRAME_LENGTH.unpack(header)
    data = _receive_exactly(channel, length)
    return _DECODER.decode(data) if len(data) == length else None


def _receive_exactly(channel: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length and (chunk := channel.recv(length - len(data))):
        data += chunk
    return data


def _limit_memory(memory_bytes: int) -> None:
    """Bound the address space to what is mapped now plus `memory_bytes`; no core dump of what goes beyond it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped_bytes = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = mapped_bytes + memory_bytes
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )
