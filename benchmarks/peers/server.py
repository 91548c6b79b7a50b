"""Servers beside each other: a `Side` as data, and a running `Server` from its command to the end of its processes.

All sides get the same share of the machine: every core that this process may use, the same KV capacity in tokens,
sequences of the same length. Other settings are those that its makers recommend and that measured best.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.peers.setup import LIBRARIES, Library, LlamaCpp, Peers, Vllm

MODEL_NAME: Final = "smollm2"
MAX_MODEL_LEN: Final = 4096
HOST: Final = "127.0.0.1"
START_LIMIT_S: Final = 600.0
LLAMA_SLOTS: Final = 16
"""Slots of llama.cpp, which divide its KV: more make each slower, with fewer, requests wait."""
ENGINE_VARIANTS: Final[Mapping[str, tuple[str, ...]]] = {
    "engine-bf16": (),
    "engine-4bit": (),  # the GGUF file's own weights are kept as they are
    "engine-int8": ("--quantization", "int8", "--kv-cache-dtype", "int8"),
}
RIVALS: Final = {f"{name}-4bit": name for name in LIBRARIES}
"""Sides that serve the GGUF file through a library, and its name."""
SIDES: Final = (*ENGINE_VARIANTS, "vllm", "llama-bf16", "llama-4bit", *RIVALS)
_FIRST_PROMPT: Final = [788, 216, 34, 32, 34, 36, 28, 1792]
_POLL_S: Final = 0.05
_STOP_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Side:
    """One server.

    Attributes:
        environment: added to ours.
        fills_kv: its KV pool becomes resident only when it is written, so it is filled before memory is read.
        path, body: the request whose answer shows that it is ready, 8 tokens of a completion if None.
    """

    name: str
    command: tuple[str, ...]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    fills_kv: bool = True
    path: str = "/v1/completions"
    body: Mapping[str, object] | None = None

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://{HOST}:{self.port}"

    def settings(self) -> dict[str, object]:
        """The settings that affect a result."""
        return {"command": list(self.command), "environment": dict(self.environment)}


@dataclass(frozen=True, slots=True)
class Models:
    """One model in all its forms; `bf16_folder` may be another model, for the sides that serve no other form."""

    gguf: Path
    bf16_folder: Path
    bf16_gguf: Path

    def form_of(self, side: str) -> Path:
        """The form that the side of this name serves."""
        match side:
            case _ if side.endswith("-4bit"):
                return self.gguf
            case "llama-bf16":
                return self.bf16_gguf
            case _:
                return self.bf16_folder


@dataclass(frozen=True, slots=True)
class Room:
    """KV capacity of every server."""

    num_tokens: int
    token_bytes: int


def make_side(name: str, port: int, models: Models, peers: Peers, cores: tuple[int, ...], room: Room) -> Side:
    """The side of this name, on this port."""
    model = str(models.form_of(name))
    if name in ENGINE_VARIANTS:
        options = ("--max-model-len", str(MAX_MODEL_LEN), "--max-total-tokens", str(room.num_tokens))
        return engine_side(name, port, model, *options, *ENGINE_VARIANTS[name])
    if name == "vllm":
        limits = ["--dtype", "bfloat16", "--enable-prefix-caching", "--max-model-len", str(MAX_MODEL_LEN)]
        limits += ["--max-num-seqs", "128", "--max-num-batched-tokens", "2048"]
        # In bytes, because its environment variable accepts only whole GiB.
        limits += ["--kv-cache-memory-bytes", str(room.num_tokens * room.token_bytes)]
        return vllm_side(peers.vllm, port, model, cores, *limits)
    if name in RIVALS:
        return library_side(peers.libraries[RIVALS[name]], name, port, model, len(cores), room.num_tokens, 64)
    slots = ("--parallel", str(LLAMA_SLOTS), "--no-kv-unified", "--ctx-size", str(room.num_tokens))
    return llama_side(peers.llama, name, port, model, len(cores), *slots)


def engine_side(
    name: str, port: int, model: str | None, *options: str, body: Mapping[str, object] | None = None
) -> Side:
    """This engine; `model`: None for its default."""
    # -P: without the current folder, which would allow `import runtime`.
    command = [sys.executable, "-P", "-m", "engine", "serve", *([model] if model else [])]
    command += ["--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(port), *options]
    return Side(name, tuple(command), port)


def vllm_side(vllm: Vllm, port: int, model: str, cores: tuple[int, ...], *options: str) -> Side:
    """vLLM's build for CPUs."""
    command = (str(vllm.command), "serve", model, "--served-model-name", MODEL_NAME, "--host", HOST)
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "XDG_CACHE_HOME": str(vllm.cache),
        "VLLM_CACHE_ROOT": str(vllm.cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(vllm.cache / "inductor"),
        "LD_PRELOAD": ":".join(map(str, vllm.preloads)),
        "PATH": f"{vllm.command.parent}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": "",  # not the engine's
    }
    return Side("vllm", (*command, "--port", str(port), *options), port, environment)


def llama_side(llama: LlamaCpp, name: str, port: int, model: str, num_threads: int, *options: str) -> Side:
    """llama.cpp. It clears its KV at the start, so all of it is resident from then on."""
    command = [str(llama.server), "--model", model, "--alias", MODEL_NAME, "--host", HOST]
    command += ["--port", str(port), "--threads", str(num_threads), *options]
    return Side(name, tuple(command), port, fills_kv=False)


def library_side(
    library: Library, name: str, port: int, model: str, num_threads: int, kv_tokens: int, streams: int
) -> Side:
    """A peer that is a Python library. mistral.rs takes its number of threads from rayon's environment variable."""
    script = str(Path(__file__).with_name("library_server.py"))
    command = [str(library.python), "-P", script, library.folder.name, "--model", model, "--port", str(port)]
    command += ["--threads", str(num_threads), "--kv-tokens", str(kv_tokens), "--streams", str(streams)]
    environment = {"RAYON_NUM_THREADS": str(num_threads), "PYTHONPATH": ""}
    return Side(name, tuple(command), port, environment)


class ServerError(Exception):
    """A server did not start, or did not answer; the message has the end of its log."""


class Server:
    """A running side.

    Attributes:
        first_completion_s: from its command until its first request was answered.
    """

    def __init__(self, side: Side, process: subprocess.Popen[bytes], log: Path) -> None:
        self.side = side
        self.first_completion_s = 0.0
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """The pid of the started process; the others are its descendants."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether that process runs."""
        return self._process.poll() is None

    def wait_for_completion(self, timeout_s: float) -> float:
        """Wait until it is healthy, and for its first answer; returns the seconds.

        Raises:
            ServerError: it ended, or is not ready in time.
        """
        started_s = time.monotonic()
        while not self._healthy():
            if not self.alive:
                raise ServerError(
                    f"{self.side.name} ended with code {self._process.returncode}:\n{self._tail()}"
                )
            if time.monotonic() - started_s > timeout_s:
                raise ServerError(f"{self.side.name} is not ready after {timeout_s:.0f} s:\n{self._tail()}")
            time.sleep(_POLL_S)
        body = self.side.body or {
            "model": MODEL_NAME,
            "prompt": _FIRST_PROMPT,
            "max_tokens": 8,
            "temperature": 0,
        }
        try:
            status, answer = self._ask(
                "POST", self.side.path, body, timeout_s - (time.monotonic() - started_s)
            )
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.side.name} broke off its first answer: {error!r}") from error
        if status != 200:
            raise ServerError(f"{self.side.name} answered HTTP {status}: {answer[:300]}")
        return time.monotonic() - started_s

    def stop(self) -> None:
        """End all its processes, with SIGTERM first."""
        for number, wait_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                break
        with contextlib.suppress(ProcessLookupError):  # children that outlive their parent
            os.killpg(self.pid, signal.SIGKILL)

    def _healthy(self) -> bool:
        try:
            return self._ask("GET", "/health", None, 5.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _ask(self, method: str, path: str, body: object, timeout_s: float) -> tuple[int, str]:
        connection = http.client.HTTPConnection(HOST, self.side.port, timeout=max(timeout_s, 1.0))
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def _tail(self, num_lines: int = 15) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(lines[-num_lines:])


def exit_at_sigterm() -> None:
    """Let SIGTERM end this process by an exception, as SIGINT does, so that the blocks that stop servers end."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would end the stopping of servers
        sys.exit(128 + signal.SIGTERM)

    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, leave)


def start(side: Side, log: Path, timeout_s: float = START_LIMIT_S) -> Server:
    """Start a side and wait for its first completion. SIGTERM ends this process by `exit_at_sigterm` from then on.

    Raises:
        ServerError: its port is taken, its command cannot be run, or it is not ready in time; its
            processes are ended then.
    """
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, side.port))
        except OSError as error:
            raise ServerError(f"port {side.port} of {side.name} is taken; choose another --port") from error
    exit_at_sigterm()
    started_s = time.monotonic()
    with open(log, "ab") as output:  # after the output of earlier starts
        try:
            process = subprocess.Popen(
                side.command,
                env={**os.environ, **side.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"{side.name} cannot be started: {error}") from error
    server = Server(side, process, log)
    try:
        server.wait_for_completion(timeout_s)
        server.first_completion_s = time.monotonic() - started_s
    except BaseException:
        server.stop()
        raise
    return server


@contextmanager
def running(side: Side, log: Path, timeout_s: float = START_LIMIT_S) -> Iterator[Server]:
    """A server for the time of the block; see `start`."""
    server = start(side, log, timeout_s)
    try:
        yield server
    finally:
        server.stop()
