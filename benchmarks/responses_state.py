"""The cost and the use of stored responses: a server with `--state-dir`, asked with `store` true and false in turn.

    python benchmarks/responses_state.py [--model MODEL] [--rounds 3] [--num-requests 64] [--rows 100000]
        [-- FLAGS OF engine serve]

- `W3`: requests at once, streamed, 64 to 512 tokens in, 64 to 256 out: output tokens a second with `store` to without
- `last event`: seconds from the last delta of a stream to its end, P95, with `store` less without
- `turn 33`: cached tokens of the 33rd turn of a conversation that names `previous_response_id`, to one that sends all
- `computed`: prompt tokens that all turns compute at temperature 1, to one that sends all: with an id the tokens are
  those that were generated, and not those of their text
- `GET`: milliseconds, P95, of a response among --rows stored ones, which are written before the server starts

A round without `store` follows each round with it; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.server import exit_at_sigterm
from engine.tokenizer_manager.state import responses
from engine.tokenizer_manager.state.responses import Response, Retention
from engine.tokenizer_manager.state.store import StateStore

PATH: Final = "/v1/responses"
NUM_TURNS: Final = 33
NUM_GETS: Final = 200
_ROWS_AT_ONCE: Final = 2000
_MAX_BYTES: Final = 100 << 30
_READY: Final = re.compile(r"at (http://\S+)")
_WORDS: Final = ("river", "stone", "paper", "light", "table", "window", "garden", "letter", "winter", "music")


class Streamed(NamedTuple):
    """One answer: its output tokens, and the seconds from its last delta to its end."""

    num_tokens: int
    last_event_s: float


@contextmanager
def serving(model: Sequence[str], folder: Path, flags: Sequence[str]) -> Iterator[str]:
    """A server with this state; its URL."""
    command = [
        sys.executable,
        "-m",
        "engine.cli.main",
        "serve",
        *model,
        "--port",
        "0",
        "--state-dir",
        str(folder),
    ]
    exit_at_sigterm()
    with subprocess.Popen(
        [*command, "--state-max-gb", "100", *flags], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := _READY.search(line):
                    yield found[1]
                    return
            raise SystemExit("the server has ended before it was ready")
        finally:
            process.terminate()


def call(connection: HTTPConnection, method: str, path: str, body: Any = None) -> Any:
    """The JSON that answers a request."""
    connection.request(method, path, None if body is None else json.dumps(body))
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    if reply.status != 200:
        raise SystemExit(f"{method} {path}: {reply.status} {answer}")
    return answer


def connect(url: str) -> HTTPConnection:
    """A connection for one request after another."""
    return HTTPConnection(urlsplit(url).netloc, timeout=600)


def stream(url: str, body: Any) -> Streamed:
    """Send a streamed request and read its answer."""
    connection = connect(url)
    connection.request("POST", PATH, json.dumps(body | {"stream": True}))
    reply = connection.getresponse()
    name, last_delta_s, data = "", 0.0, b""
    for line in reply:
        if line.startswith(b"event: "):
            name = line[7:].decode().strip()
            if name.endswith(".delta"):
                last_delta_s = time.monotonic()
        elif line.startswith(b"data: "):
            data = line[6:]
    end_s = time.monotonic()
    connection.close()
    answer = json.loads(data)["response"]
    return Streamed(answer["usage"]["output_tokens"], end_s - last_delta_s)


def text_of(rng: random.Random, num_words: int) -> str:
    """Words, of about a token each."""
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


def load(url: str, num_requests: int, *, store: bool, seed: int) -> tuple[float, list[float]]:
    """Send all requests at once, none of them cached; output tokens a second, and the seconds of each last event."""
    connection = connect(url)
    call(connection, "POST", "/flush_cache")
    connection.close()
    rng = random.Random(seed)
    bodies = [
        {
            "input": text_of(rng, rng.randint(64, 512)),
            "max_output_tokens": rng.randint(64, 256),
            "ignore_eos": True,
            "store": store,
        }
        for _ in range(num_requests)
    ]
    began_s = time.monotonic()
    with ThreadPoolExecutor(num_requests) as threads:
        answers = list(threads.map(lambda body: stream(url, body), bodies))
    rate = sum(each.num_tokens for each in answers) / (time.monotonic() - began_s)
    return rate, [each.last_event_s for each in answers]


def converse(connection: HTTPConnection, *, by_id: bool, temperature: float) -> tuple[int, int]:
    """A conversation: cached tokens of its last turn, and the prompt tokens that all turns compute."""
    num_computed = 0
    items: list[Any] = []
    previous: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    for turn in range(NUM_TURNS):
        items.append({"role": "user", "content": f"{'By id' if by_id else 'All'}, turn {turn}: go on."})
        body = {"input": items[-1:] if by_id else items, "max_output_tokens": 16}
        answer = call(connection, "POST", PATH, body | previous | {"temperature": temperature, "seed": turn})
        usage = answer["usage"]
        num_computed += usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
        previous = {"previous_response_id": answer["id"]} if by_id else {}
        items += answer["output"]
    return int(usage["input_tokens_details"]["cached_tokens"]), num_computed


def fill(folder: Path, num_rows: int) -> None:
    """Store responses of one turn each, as a server would."""
    body = json.dumps({"object": "response", "status": "completed", "background": False, "text": "x" * 1000})
    retention = Retention(30 * 86_400.0, _MAX_BYTES)
    store = StateStore.open(folder, _MAX_BYTES)

    def add(first: int) -> None:
        def change(db: Any) -> None:
            for number in range(first, min(first + _ROWS_AT_ONCE, num_rows)):
                name = f"resp_{number}"
                row = Response("", name, "", name, 1, 2, "completed", body=body.encode())
                responses.add(db, row, time.time(), retention)

        store.submit(change).result()

    for first in range(0, num_rows, _ROWS_AT_ONCE):
        add(first)
    store.close()


def p95(values: Sequence[float]) -> float:
    """The 95th percentile."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="as of engine serve; its default unless set")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("flags", nargs="*", help="of engine serve, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        fill(state, args.rows)
        with serving([args.model] if args.model else [], state, args.flags) as url:
            load(url, args.num_requests, store=True, seed=0)  # warms up
            rates: dict[bool, list[float]] = {True: [], False: []}
            ends: dict[bool, list[float]] = {True: [], False: []}
            for number in range(args.rounds):
                for store in (True, False) if number % 2 else (False, True):
                    rate, last_s = load(url, args.num_requests, store=store, seed=number + 1)
                    rates[store].append(rate)
                    ends[store] += last_s
            gets_ms, connection = [], connect(url)
            for number in random.Random(7).sample(range(args.rows), min(NUM_GETS, args.rows)):
                began_s = time.perf_counter()
                call(connection, "GET", f"{PATH}/resp_{number}")
                gets_ms.append((time.perf_counter() - began_s) * 1e3)
            by_id, whole = (converse(connection, by_id=each, temperature=0)[0] for each in (True, False))
            call(connection, "POST", "/flush_cache")
            computed = [converse(connection, by_id=each, temperature=1)[1] for each in (True, False)]
    stored, plain = (statistics.median(rates[store]) for store in (True, False))
    more_ms = (p95(ends[True]) - p95(ends[False])) * 1e3
    print(
        f"W3          store {stored:.1f} tok/s, without {plain:.1f}; ratio {stored / plain:.3f} (goal 0.98)"
    )
    print(f"last event  P95 {more_ms:+.1f} ms (goal +20)")
    print(f"turn 33     {by_id} of {whole} cached tokens; ratio {by_id / whole:.3f} (goal 0.98)")
    print(f"computed    {computed[0]} of {computed[1]} prompt tokens; ratio {computed[0] / computed[1]:.3f}")
    print(
        f"GET         P95 {p95(gets_ms):.2f} ms, median {statistics.median(gets_ms):.2f} of {args.rows:,} rows (goal 5)"
    )


if __name__ == "__main__":
    main()
