"""The sandbox process, `python -m engine.grammar.compile.sandbox PID SETUP`: compiles grammars, each in a fork.

It loads tokenizer and library once. The kernel ends a fork that has used up its CPU time (SIGPROF), its time on a busy
machine (SIGALRM) or its memory. Long compilations have a low priority, but not the lowest one: with that, two of them
hold their places for minutes on a busy machine.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Final, NoReturn

import msgspec
import numpy as np
import setproctitle

from ...launch.child.child import die_with
from ...models.tokenizer.tokenizer import load_tokenizer
from ...runtime.errors import ConfigError
from ...runtime.grammar_use import GrammarKind, GrammarSpec
from ..backend import GrammarBackend, GrammarError, Matcher, MatcherErrorCode, Vocabulary
from ..closing import forced_share
from ..llguidance_backend import LLGuidanceBackend
from ..vocabulary import TokenizerVocabulary
from .worker import CompileResult, SandboxSetup

MAX_WALL: Final = 4.0
"""Times the limit of CPU time: a compilation ends after it, also if it got less time than the limit."""
_NICENESS: Final = 10
_SHORT_S: Final = 0.5
"""A fork has the usual priority for so long: common grammars are compiled by then, also on a busy machine."""
_NUM_WALKS: Final = 2
_WALK_TOKENS: Final = 24


def main() -> None:
    """Serve one parent until it closes the control socket, which is the standard input."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the terminal sends them to all; the parent decides
    die_with(int(sys.argv[1]))
    setproctitle.setproctitle("engine: grammar")
    setup = msgspec.json.decode(sys.argv[2], type=SandboxSetup)
    try:
        vocabulary = TokenizerVocabulary(load_tokenizer(setup.source), setup.vocab_size, setup.eos_token_ids)
        backend = LLGuidanceBackend(vocabulary)  # with the tables of the vocabulary, which all forks share
    except (ConfigError, ImportError) as error:
        failed = CompileResult(lost=str(error))
        _serve(setup, lambda spec: failed)
    else:
        _serve(setup, lambda spec: compile_grammar(backend, vocabulary, spec))


def compile_grammar(backend: GrammarBackend, vocabulary: Vocabulary, spec: GrammarSpec) -> CompileResult:
    """Compile a grammar, and walk some tokens through it."""
    try:
        begin_s = time.perf_counter()
        compiled = backend.compile(spec)
        compile_s = time.perf_counter() - begin_s
    except GrammarError as error:
        return CompileResult(error.code, error.message)
    for seed in range(_NUM_WALKS):
        if error_text := _walk(compiled.matcher(), vocabulary, seed):
            text = f"the grammar goes beyond a limit while text is generated: {error_text}"
            return CompileResult("schema_too_complex", text)
    is_json = spec.kind is GrammarKind.JSON_SCHEMA
    return CompileResult(compile_s=compile_s, forced_share=forced_share(compiled) if is_json else None)


def _walk(matcher: Matcher, vocabulary: Vocabulary, seed: int) -> str:
    """Generate some allowed tokens, as a model without knowledge would; the error if the matcher reaches a limit.

    Some grammars compile at once and then take longer with each token, until a limit of the library ends the answer.
    """
    mask = np.zeros(-(-vocabulary.size // 32), dtype=np.int32)
    rng = random.Random(seed)
    for _ in range(_WALK_TOKENS):
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        choices = np.setdiff1d(allowed, vocabulary.eos_token_ids)
        if matcher.ended or matcher.error or not len(choices):
            break
        matcher.accept((int(choices[rng.randrange(len(choices))]),))
    return matcher.error if matcher.error_code is MatcherErrorCode.LIMIT else ""


def _serve(setup: SandboxSetup, compile_one: Callable[[GrammarSpec], CompileResult]) -> None:
    """Fork for each grammar that arrives, and answer for the forks that die."""
    gc.freeze()
    control = socket.socket(fileno=0)
    running: dict[int, tuple[int, socket.socket, GrammarSpec]] = {}  # pidfd -> process id, ...
    fresh: dict[int, float] = {}  # pidfd -> when its fork loses the usual priority
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        events = poll.poll(_SHORT_S * 1e3 if fresh else None)
        for fd in [fd for fd, until_s in fresh.items() if until_s <= time.monotonic()]:
            del fresh[fd]
            lower = os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS  # the kernel cuts it to 19
            os.setpriority(os.PRIO_PROCESS, running[fd][0], lower)
        for fd, _ in events:
            if fd in running:
                poll.unregister(fd)
                os.close(fd)
                fresh.pop(fd, None)
                pid, channel, spec = running.pop(fd)
                if exit_code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
                    _send(channel, _result_of_dead(exit_code, spec, setup))
                channel.close()
            elif fds := socket.recv_fds(control, 1, 1)[1]:
                channel = socket.socket(fileno=fds[0])
                with channel.makefile("rb") as file:
                    spec = msgspec.msgpack.decode(file.read(), type=GrammarSpec)
                own_pid, pid = os.getpid(), os.fork()
                if pid == 0:
                    _run(own_pid, setup, channel, spec, compile_one)
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid, channel, spec
                fresh[pidfd] = time.monotonic() + _SHORT_S
                poll.register(pidfd, select.POLLIN)
            else:
                return  # the parent has closed it; forks die with this process


def _run(
    parent_pid: int,
    setup: SandboxSetup,
    channel: socket.socket,
    spec: GrammarSpec,
    compile_one: Callable[[GrammarSpec], CompileResult],
) -> NoReturn:
    """Answer one request in a fork."""
    exit_code = 1
    try:
        die_with(parent_pid)
        _limit_memory(setup.memory_bytes)
        signal.setitimer(signal.ITIMER_REAL, MAX_WALL * setup.limit_s)
        signal.setitimer(signal.ITIMER_PROF, setup.limit_s)
        result = compile_one(spec)
        # A fork that dies while it answers would be answered for again.
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _send(channel, result)
        exit_code = 0
    except MemoryError:
        os.abort()
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(exit_code)


def _result_of_dead(exit_code: int, spec: GrammarSpec, setup: SandboxSetup) -> CompileResult:
    """The result of a fork that has ended without one; a negative exit code is that of a signal."""
    if exit_code == -signal.SIGALRM:
        why = f"the grammar was not compiled within {MAX_WALL * setup.limit_s:g} s beside others"
        return CompileResult(lost=why)
    if exit_code > 0 or exit_code == -signal.SIGKILL:
        return CompileResult(lost="a compilation was killed")
    why = "takes too much memory to compile; simplify it"
    if exit_code == -signal.SIGPROF:
        why = f"took longer than {setup.limit_s:g} s to compile; simplify it, or start the server with a higher "
        why += "--grammar-timeout"
    return CompileResult("schema_too_complex", f"the grammar has {len(spec.text):,} characters and {why}")


def _send(channel: socket.socket, result: CompileResult) -> None:
    with contextlib.suppress(OSError):  # no request waits for it any more
        channel.sendall(msgspec.msgpack.encode(result))
        channel.shutdown(socket.SHUT_WR)


def _limit_memory(memory_bytes: int) -> None:
    """Bound the address space to what is mapped now plus `memory_bytes`; no core dump of what goes beyond it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + memory_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


if __name__ == "__main__":
    main()
