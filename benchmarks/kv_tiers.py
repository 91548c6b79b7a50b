"""`--kv-disk`: the first token after a restart, and what the disk costs and wins in one run.

    python benchmarks/kv_tiers.py [restart] [chats] [fresh] [--model MODEL] [--tokens 1900] [--chats 32] [--turns 6]

`restart`: time to the first token of a prompt, cold; after a restart with the files in the file cache; after a restart
without them (`posix_fadvise`). Each in a server of its own, on the same folder.

`chats`: chats that take turns, with a working set of four times the KV pool: output tokens per second with the disk and
without, by the same server options.

`fresh`: random prompts that come once, all at the same time: output tokens per second with the disk and without.

Only the ratios of one run count. The machine should be idle otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.server import engine_side, start

PARTS: Final = ("restart", "chats", "fresh")
POOL_SHARE: Final = 4
"""The working set of the chats is so many times the KV pool."""
BEGINNING_TOKENS: Final = 768
TURN_TOKENS: Final = 64
FRESH_TOKENS: Final = 512
_FIRST_ID: Final = 100
_START_S: Final = 600.0
_ANSWER_S: Final = 3600.0


def main() -> None:
    """Print a line for each part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", default=["restart"], help=", ".join(PARTS))
    parser.add_argument("--model", help="(default: that of `engine serve`)")
    parser.add_argument("--tokens", type=int, default=1_900, help="of the prompt of restart")
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--requests", type=int, default=32, help="of fresh")
    parser.add_argument("--port", type=int, default=18_500)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if "restart" in options.parts:
        print(restart_line(*measure_restart(options)))
    for name, measure in (("chats", chat_rate), ("fresh", fresh_rate)):
        if name in options.parts:
            without, with_disk = (rate(options, measure, on_disk=on_disk) for on_disk in (False, True))
            print(f"{name}: {without:.1f} tok/s, with the disk {with_disk:.1f}: {with_disk / without:.2f}")


def restart_line(cold_s: float, warm_s: float, dropped_s: float, cached: int) -> str:
    """The result of `restart` as text."""
    return (
        f"restart: cold {cold_s:.3f} s; {cached:,} tokens from disk: file cache warm {warm_s:.3f} s "
        f"({warm_s / cold_s:.3f}), dropped {dropped_s:.3f} s ({dropped_s / cold_s:.3f})"
    )


def measure_restart(options: argparse.Namespace) -> tuple[float, float, float, int]:
    """Seconds to the first token: cold, warm, without the file cache; and the tokens that came from the disk."""
    prompt = ids(random.Random(1), options.tokens)
    seconds, cached = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for part in ("cold", "warm", "dropped"):
            if part == "dropped":
                drop_file_cache(Path(folder) / "disk")

            def first_token(url: str, part: str = part) -> None:
                nonlocal cached
                ask(url, ids(random.Random(2), 100), 4)  # what the first request of a process costs
                if part != "cold":
                    wait_for_weights(Path(folder) / f"{part}.log")
                started_s = time.monotonic()
                answer = ask(url, prompt, 1)
                seconds.append(time.monotonic() - started_s)
                cached = answer["meta_info"].get("cached_tokens_by_tier", {}).get("disk", 0)

            serve(options, Path(folder), part, first_token, on_disk=True)
    return seconds[0], seconds[1], seconds[2], cached


def rate(options: argparse.Namespace, measure: Callable[..., float], *, on_disk: bool) -> float:
    """Output tokens per second of a server of its own."""
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        more: tuple[str, ...] = ()
        if measure is chat_rate:
            working_set = options.chats * (BEGINNING_TOKENS + options.turns * 2 * TURN_TOKENS)
            more = ("--max-total-tokens", str(working_set // POOL_SHARE))
        serve(
            options,
            Path(folder),
            "server",
            lambda url: rates.append(measure(options, url)),
            *more,
            on_disk=on_disk,
        )
    return rates[0]


def chat_rate(options: argparse.Namespace, url: str) -> float:
    """All chats at once, each turn after the answer to the one before; the first turn is not counted."""
    chats = [Chat(number) for number in range(options.chats)]
    with ThreadPoolExecutor(len(chats)) as pool:
        list(pool.map(lambda chat: chat.turn(url), chats))
        started_s = time.monotonic()
        list(pool.map(lambda chat: [chat.turn(url) for _ in range(options.turns - 1)], chats))
    num_tokens = len(chats) * int(options.turns - 1) * TURN_TOKENS
    return num_tokens / (time.monotonic() - started_s)


class Chat:
    """A conversation of token ids."""

    def __init__(self, number: int) -> None:
        self._source = random.Random(number)
        self._ids = ids(self._source, BEGINNING_TOKENS)

    def turn(self, url: str) -> None:
        """Say something, and wait for the answer."""
        self._ids += ids(self._source, TURN_TOKENS)
        self._ids += ask(url, self._ids, TURN_TOKENS)["output_ids"]


def fresh_rate(options: argparse.Namespace, url: str) -> float:
    """Prompts that have nothing in common."""
    prompts = [ids(random.Random(100 + number), FRESH_TOKENS) for number in range(options.requests)]
    ask(url, ids(random.Random(2), 100), 4)
    started_s = time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: ask(url, prompt, TURN_TOKENS), prompts))
    return len(prompts) * TURN_TOKENS / (time.monotonic() - started_s)


def serve(
    options: argparse.Namespace,
    folder: Path,
    name: str,
    work: Callable[[str], Any],
    *more: str,
    on_disk: bool,
) -> None:
    """Start a server, do the work at its URL, and stop it with SIGTERM."""
    disk = ("--kv-disk", str(folder / "disk"), "--log-level", "info") if on_disk else ()
    server = start(
        engine_side(name, options.port, options.model, *disk, *more), folder / f"{name}.log", _START_S
    )
    try:
        work(server.side.url)
    finally:
        server.stop()


def ask(url: str, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """One answer of this length."""
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling}
    response = httpx.post(f"{url}/generate", json=body, timeout=_ANSWER_S)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def ids(source: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return [source.randrange(_FIRST_ID, 40_000) for _ in range(count)]


def wait_for_weights(log: Path) -> None:
    """Wait until the server has the digest of its weights: before that nothing is found."""
    deadline_s = time.monotonic() + _START_S
    while "kv_stores.segment_store kv_disk=" not in log.read_text(errors="replace"):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the disk was not opened; see {log}")
        time.sleep(0.05)


def drop_file_cache(folder: Path) -> None:
    """Let the system forget what it has of the files in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


if __name__ == "__main__":
    main()
