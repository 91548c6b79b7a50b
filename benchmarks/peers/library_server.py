"""An HTTP server around a peer that is a Python library, run by the peer's own interpreter; it imports nothing of ours.

    PEER/v/bin/python library_server.py ik --model FILE.gguf --port 18200 --threads 2 --kv-tokens 65536 --streams 64

It answers what the clients of the benchmarks ask: `GET /v1/models`, `POST /v1/completions` with token ids, greedy and
of an exact length, streamed or whole (a token's text is its id), and `POST /completion`, llama.cpp's request for the
likeliest next tokens. `mistralrs` takes text alone: each token id becomes one of 67 words that are a token each, so
that lengths and shared prefixes are kept, and likeliest tokens are refused if the text of a prompt has other tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import tempfile
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

BATCH_TOKENS = 2048
UBATCH_TOKENS = 512  # ik_llama.cpp's default
OPENVINO_BLOCK_TOKENS = 32
WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were her all she there would their we him been has when who will more no if out so said
what up its about into than them can only other new some could time these two
""".split()  # noqa: SIM905


class UntellableError(Exception):
    """A prompt that a library cannot be given as it is."""


@dataclass(eq=False)
class Stream:
    """A request: prompt, number of tokens to generate, and those generated so far; None ends them."""

    ids: list[int]
    num_tokens: int
    tokens: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)
    num_done: int = 0

    def put(self, token: int) -> bool:
        """Hand a token to the client; returns whether it is the last one."""
        self.tokens.put(token)
        self.num_done += 1
        if self.num_done == self.num_tokens:
            self.tokens.put(None)
        return self.num_done == self.num_tokens


@dataclass
class Slot:
    """A sequence of ik_llama.cpp: the tokens whose keys and values it holds, and those to compute next."""

    seq_id: int
    stored: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    stream: Stream | None = None


class Stepwise(Protocol):
    """A library that computes all its streams in steps."""

    def add(self, stream: Stream) -> bool:
        """Take a stream; returns whether there is room for it."""

    def step(self) -> None:
        """Compute some tokens, and put them into their streams."""

    def likely(self, ids: list[int], how_many: int) -> dict[int, float]:
        """Log-probabilities of the likeliest tokens after `ids`."""


class IkLlama:
    """ik_llama.cpp through the wheel's low-level calls: a batch of all streams in each step, as its server makes it."""

    def __init__(self, options: argparse.Namespace) -> None:
        _ctypes_api, _internals = map(import_module, ("ik_llama_cpp._ctypes_api", "ik_llama_cpp._internals"))
        self._c, self._internals = _ctypes_api, _internals
        self._seq_rm = _ctypes_api._lib.llama_kv_cache_seq_rm
        self._seq_rm.argtypes = [_ctypes_api.ctypes.c_void_p, *[_ctypes_api.ctypes.c_int32] * 3]
        self._model = _internals.IkModel(str(options.model))
        # Its high-level class wants AVX-VNNI for it; with several sequences in a batch it ends in GGML_ASSERT(S > 0).
        flash = options.streams == 1 and "avx_vnni" in Path("/proc/cpuinfo").read_text()
        self._context = _internals.IkContext(
            self._model,
            n_ctx=options.kv_tokens,
            n_threads=options.threads,
            flash_attn=flash,
            n_seq_max=options.streams,
        )
        self._slots = [Slot(seq_id) for seq_id in range(options.streams)]

    def add(self, stream: Stream) -> bool:
        """Take a stream into the free slot with the longest common prefix; returns whether one is free."""
        free = [slot for slot in self._slots if slot.stream is None]
        if not free:
            return False
        slot = max(free, key=lambda slot: _common(slot.stored, stream.ids))
        kept = min(_common(slot.stored, stream.ids), len(stream.ids) - 1)
        self._seq_rm(self._context.ctx, slot.seq_id, kept, -1)
        slot.stored, slot.pending, slot.stream = stream.ids[:kept], stream.ids[kept:], stream
        return True

    def step(self) -> None:
        """Compute some tokens of each stream: those that generate first, then prompts."""
        for stream, logits in self._compute():
            slot = next(slot for slot in self._slots if slot.stream is stream)
            slot.pending = [int(logits.argmax())]
            if stream.put(slot.pending[0]):
                slot.stream = None

    def likely(self, ids: list[int], how_many: int) -> dict[int, float]:
        """Log-probabilities of the likeliest tokens after `ids`."""
        self.add(stream := Stream(ids, 1))
        while not (done := self._compute()):
            pass
        next(slot for slot in self._slots if slot.stream is stream).stream = None
        return _likeliest(done[0][1], how_many)

    def _compute(self) -> list[tuple[Stream, np.ndarray[Any, Any]]]:
        active = [slot for slot in self._slots if slot.stream is not None]
        parts, left = [], UBATCH_TOKENS
        for slot in sorted(active, key=lambda slot: len(slot.pending)):
            if part := slot.pending[:left]:
                parts.append((slot, part))
                left -= len(part)
        batch = self._c.llama_batch_init(UBATCH_TOKENS, 0, 1)
        last, idx = [], 0
        for slot, part in parts:
            for token in part:
                batch.token[idx], batch.pos[idx] = token, len(slot.stored)
                batch.n_seq_id[idx], batch.seq_id[idx][0], batch.logits[idx] = 1, slot.seq_id, 0
                slot.stored.append(token)
                idx += 1
            slot.pending = slot.pending[len(part) :]
            if not slot.pending:
                batch.logits[idx - 1] = 1
                last.append((slot, idx - 1))
        batch.n_tokens = idx
        status = self._context.decode(batch)
        self._c.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        rows = []
        for slot, row in last:
            assert slot.stream is not None  # a slot without one has nothing pending
            logits = np.ctypeslib.as_array(self._context.get_logits(row), (self._model.n_vocab,))
            rows.append((slot.stream, logits))
        return rows


class OpenVino:
    """OpenVINO GenAI's continuous batching, which reads GGUF files itself."""

    def __init__(self, options: argparse.Namespace) -> None:
        openvino, openvino_genai = map(import_module, ("openvino", "openvino_genai"))
        self._openvino, self._genai, self._options = openvino, openvino_genai, options
        config = openvino_genai.SchedulerConfig()
        config.num_kv_blocks = -(-options.kv_tokens // OPENVINO_BLOCK_TOKENS)
        config.max_num_batched_tokens = BATCH_TOKENS
        config.max_num_seqs = max(options.streams, 4)
        config.dynamic_split_fuse = config.enable_prefix_caching = True
        self._threads = {"INFERENCE_NUM_THREADS": options.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(options.model), config, "CPU", self._threads
        )
        self._handles: dict[Any, Stream] = {}
        self._numbers = count()
        self._logits: Any = None

    def add(self, stream: Stream) -> bool:
        """Hand a stream to the pipeline, which queues it."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = stream.num_tokens, True, False
        ids = self._openvino.Tensor(np.array([stream.ids], dtype=np.int64))
        self._handles[self._pipeline.add_request(next(self._numbers), ids, config)] = stream
        return True

    def step(self) -> None:
        """One step of the pipeline."""
        self._pipeline.step()
        for handle, stream in list(self._handles.items()):
            if handle.can_read():
                tokens = [token for output in handle.read().values() for token in output.generated_ids]
                for token in tokens:
                    stream.put(token)
                if stream.num_done == stream.num_tokens:
                    del self._handles[handle]

    def likely(self, ids: list[int], how_many: int) -> dict[int, float]:
        """Log-probabilities of the likeliest tokens. The pipeline returns one alone, so its model is run as it is."""
        if self._logits is None:
            self._logits = self._compiled().create_infer_request()
        self._logits.reset_state()
        row = np.array([ids], dtype=np.int64)
        inputs = {
            "input_ids": row,
            "attention_mask": np.ones_like(row),
            "position_ids": np.arange(len(ids))[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        return _likeliest(self._logits.infer(inputs)["logits"][0, -1], how_many)

    def _compiled(self) -> Any:
        folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"openvino-{os.getpid()}"
        folder.mkdir()
        link = folder / self._options.model.name  # the model is written beside its file
        link.symlink_to(self._options.model)
        self._genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
        return self._openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", self._threads)


class MistralRs:
    """mistral.rs, which has its own threads and batches: a call for each stream."""

    def __init__(self, options: argparse.Namespace) -> None:
        mistralrs = import_module("mistralrs")
        self._mistralrs = mistralrs
        which = mistralrs.Which.GGUF(str(options.model.parent), options.model.name)
        with tempfile.NamedTemporaryFile("w", suffix=".jinja") as plain:  # only chats are streamed
            plain.write("{% for message in messages %}{{ message['content'] }}{% endfor %}")
            plain.flush()
            self._runner = mistralrs.Runner(which=which, max_seqs=options.streams, jinja_explicit=plain.name)

    def generate(self, ids: list[int], num_tokens: int) -> Iterator[int]:
        """A 0 for each token as it comes.

        Raises:
            RuntimeError: it counted other numbers of tokens.
        """
        text = " " + " ".join(WORDS[token % len(WORDS)] for token in ids)
        request = self._request(text, num_tokens, stream=True)
        num_given = 0
        for chunk in self._runner.send_chat_completion_request(request):
            usage = chunk.usage
            if usage is not None and usage.prompt_tokens != len(ids):
                raise RuntimeError(f"a prompt of {len(ids)} tokens counted as {usage.prompt_tokens}")
            new = usage.completion_tokens - num_given if usage is not None else 1
            for _ in range(min(new, num_tokens - num_given)):
                num_given += 1
                yield 0
        if num_given != num_tokens:
            raise RuntimeError(f"{num_given} tokens instead of {num_tokens}")

    def likely(self, ids: list[int], how_many: int) -> dict[int, float]:
        """Log-probabilities of the likeliest tokens.

        Raises:
            UntellableError: the text of the prompt has other tokens.
        """
        text = self._runner.detokenize_text(ids, False)
        if self._runner.tokenize_text(text, False, None) != ids:
            raise UntellableError("the text of this prompt has other tokens")
        request = self._request(text, 1, logprobs=True, top_logprobs=how_many)
        (choice,) = self._runner.send_chat_completion_request(request).choices
        return {one.token: one.logprob for one in choice.logprobs.content[0].top_logprobs}

    def _request(self, text: str, num_tokens: int, **others: Any) -> Any:
        return self._mistralrs.ChatCompletionRequest(
            messages=text,
            model=self._runner.list_models()[0],
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,
            **others,
        )


class Batcher:
    """One thread that computes all streams of a library, step by step; a step that fails ends the process."""

    def __init__(self, library: Stepwise) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._new: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def generate(self, ids: list[int], num_tokens: int) -> Iterator[int]:
        """Tokens as they come."""
        self._new.put(stream := Stream(ids, num_tokens))
        while (token := stream.tokens.get()) is not None:
            yield token

    def likely(self, ids: list[int], how_many: int) -> dict[int, float]:
        """Log-probabilities of the likeliest tokens, between two steps."""
        with self._lock:
            return self._library.likely(ids, how_many)

    def _run(self) -> None:
        waiting: list[Stream] = []
        running: list[Stream] = []
        try:
            while True:
                while not (waiting or running) or not self._new.empty():
                    waiting.append(self._new.get())
                with self._lock:
                    added = list(takewhile(self._library.add, waiting))
                    running += added
                    del waiting[: len(added)]
                    self._library.step()
                running = [stream for stream in running if stream.num_done < stream.num_tokens]
        except BaseException:
            traceback.print_exc()
            os._exit(1)


class Handler(BaseHTTPRequestHandler):
    """The requests of the module's docstring."""

    protocol_version = "HTTP/1.1"
    model: Batcher | MistralRs

    def do_GET(self) -> None:
        """List the one model: `engine bench serve` asks for its name."""
        self._answer(200, {"object": "list", "data": [{"id": "model", "object": "model"}]})

    def do_POST(self) -> None:
        """Generate."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = body["prompt"]
        try:
            if self.path == "/completion":
                likely = self.model.likely(ids, body["n_probs"])
                top = [{"id": token, "logprob": value} for token, value in likely.items()]
                self._answer(200, {"completion_probabilities": [{"top_logprobs": top}]})
            elif body.get("stream"):
                self._stream(ids, body["max_tokens"])
            else:
                tokens = list(self.model.generate(ids, body["max_tokens"]))
                choice = {"index": 0, "text": _text(tokens), "finish_reason": "length"}
                self._answer(200, {"choices": [choice], "usage": _usage(ids, len(tokens))})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except UntellableError as error:
            self._answer(422, {"error": {"message": str(error)}})
        except Exception as error:
            traceback.print_exc()
            self._answer(500, {"error": {"message": repr(error)}})

    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def _stream(self, ids: list[int], num_tokens: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for number, token in enumerate(self.model.generate(ids, num_tokens), 1):
            reason = "length" if number == num_tokens else None
            choice = {"index": 0, "text": _text([token]), "finish_reason": reason}
            self._event({"choices": [choice], "usage": _usage(ids, number)})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, event: object) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """A thread for each connection, and room for as many as come at once."""

    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    """Load the model, then listen: a server that answers is ready."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("library", choices=("ik", "mistralrs", "openvino"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-tokens", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True, help="at most at once; others wait")
    options = parser.parse_args()
    if options.library == "mistralrs":
        Handler.model = MistralRs(options)
    else:
        Handler.model = Batcher(IkLlama(options) if options.library == "ik" else OpenVino(options))
    Server(("127.0.0.1", options.port), Handler).serve_forever()


def _common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _likeliest(logits: np.ndarray[Any, Any], how_many: int) -> dict[int, float]:
    values = logits.astype(np.float64)
    values -= values.max() + np.log(np.exp(values - values.max()).sum())
    return {int(token): float(values[token]) for token in np.argsort(-values)[:how_many]}


def _text(tokens: list[int]) -> str:
    return "".join(f" {token}" for token in tokens)


def _usage(ids: list[int], num_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": len(ids),
        "completion_tokens": num_tokens,
        "total_tokens": len(ids) + num_tokens,
    }


if __name__ == "__main__":
    main()
