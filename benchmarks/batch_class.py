"""Interactive streams beside flex requests, and flex requests alone, against a running server.

    engine serve &                                        # http://127.0.0.1:30000
    python benchmarks/batch_class.py [--rounds 2] [--num-prompts 60] [--alone 64]
    python benchmarks/batch_class.py --simulate llama-3.2-1b:cpu-2:0.1 llama-3.1-8b:h200:5   # no server
    engine serve --state-dir DIR --max-total-tokens 8192 &
    python benchmarks/batch_class.py --prefixes 64 --lines 4                                 # only this part

1. The workload of Poisson arrivals (W5 of `cpu_vs_peers.py`) without flex requests, then with `--num-flex` of them in
   flight all the time, in turn. Goals: P99 and mean ITL at most 1.05 of those without, P99 TTFT at most 1.15.
2. `--alone` flex requests at once, and `LLM.generate` in this process over the same prompts, in turn. Goal: 0.95.
3. Of the time that the scheduler of part 1 had no step, the share that flex requests used: their tokens a second beside
   the workload, divided by their rate alone times that share of time. Goal: 0.8.

With `--prefixes` a batch of `/v1/batches`: so many prefixes of 1,024 tokens, `--lines` lines of each, shuffled. Prompt
tokens that are computed, to the least possible: each prefix once, and the rest of each line. Goal: 1.05, in a server
with room for a few of the prefixes.

Ratios within one run are what counts. `--simulate MODEL:DEVICE:RATE` does 1 and 3 with the serving scheduler on a model
of the device (`engine simulate`), where nothing else runs: 300 requests, and 2,000 lines that all wait from the start.
The P99 of 60 would be decided by the first one, which waits for the longest step: of a quiet night. The
share of 3 is what the lines' end comes earlier by than with none of the idle time; a device with room beside decodes
does more than 1.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import http.client
import json
import random
import statistics
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.workloads import run_client
from engine import LLM, SamplingParams
from engine.runtime.config.engine_config import EngineConfig
from engine.simulator.cluster import simulate
from engine.simulator.cost_model import Roofline
from engine.simulator.facts import DEVICES, MODELS
from engine.simulator.report import Report
from engine.simulator.setup import replica_settings
from engine.simulator.sim_request import SimRequest

_MOST_ID = 20_000
_LIMIT_S = 900.0
_BUSY = 0.99  # share of the time with a step, above which there is no idle time to use
_SIMULATED_REQUESTS, _SIMULATED_LINES = 300, 2000
_PREFIX_LEN, _OWN_LEN = 1024, 32


@dataclass(frozen=True, slots=True)
class Line:
    """One flex request: token ids of its prompt, and tokens of its answer."""

    prompt: list[int]
    output_len: int

    @classmethod
    def at_random(cls, rng: random.Random) -> Line:
        """A line with the lengths of W5."""
        prompt = [rng.randrange(10, _MOST_ID) for _ in range(rng.randint(64, 512))]
        return cls(prompt, rng.randint(64, 128))


@dataclass(slots=True)
class Server:
    """The server that is measured; counts what flex requests have generated."""

    url: str
    tokens: int = 0
    lines: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that answers a request; None if it was aborted."""
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=_LIMIT_S)
        with contextlib.closing(connection):
            connection.request(
                method,
                path,
                json.dumps(body) if body is not None else None,
                {"Content-Type": "application/json"},
            )
            reply = connection.getresponse()
            data = reply.read()
            if reply.status == 429:
                time.sleep(0.05)
            return json.loads(data) if reply.status == 200 and data[:1] in b"{[" else None

    def complete(self, line: Line) -> None:
        """Have a line answered as flex, and count its tokens."""
        body = {
            "prompt": line.prompt,
            "max_tokens": line.output_len,
            "ignore_eos": True,
            "service_tier": "flex",
        }
        answer = self.ask("POST", "/v1/completions", body)
        if answer is not None:
            with self._lock:
                self.tokens += answer["usage"]["completion_tokens"]
                self.lines += 1

    def flush(self) -> None:
        """Empty the prefix cache.

        Raises:
            SystemExit: the server has not done it, so what follows would be measured with cached prompts.
        """
        if self.ask("POST", "/flush_cache") is None:
            raise SystemExit(f"{self.url} has not flushed its cache: is it ready, and without an API key?")

    def totals(self) -> tuple[float, int]:
        """Seconds of all steps so far, and tokens generated."""
        figures = self.ask("GET", "/server_info")["scheduler"]
        return float(figures["step_s_total"]), int(figures["generation_tokens_total"])

    @contextlib.contextmanager
    def with_flex(self, count: int, seed: int) -> Iterator[None]:
        """Keep so many flex requests in flight."""
        stop = threading.Event()

        def work(number: int) -> None:
            rng = random.Random(seed * 1000 + number)
            while not stop.is_set():
                self.complete(Line.at_random(rng))

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            while any(thread.is_alive() for thread in threads):
                self.ask("POST", "/abort_request", {"abort_all": True})
                time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Beside:
    """One run of the workload.

    Attributes:
        mean_itl, p99_itl, p99_ttft: in ms.
        busy: share of its time with a step.
        flex_rate: tokens a second of flex requests.
    """

    mean_itl: float
    p99_itl: float
    p99_ttft: float
    busy: float
    flex_rate: float


def run_beside(server: Server, options: Sequence[str], num_flex: int, seed: int) -> Beside:
    """Run the workload once, beside `num_flex` flex requests, with nothing of an earlier run in the cache."""
    server.flush()
    with server.with_flex(num_flex, seed) if num_flex else contextlib.nullcontext():
        if num_flex:
            time.sleep(3.0)
        before, start_s = server.totals(), time.monotonic()
        summary, rows = run_client(server.url, (*options, "--seed", str(seed)), _LIMIT_S)
        wall_s, after = time.monotonic() - start_s, server.totals()
    busy = (after[0] - before[0]) / wall_s
    rate = max(0, after[1] - before[1] - sum(row.output_tokens for row in rows)) / wall_s
    return Beside(summary["itl_ms"]["mean"], summary["itl_ms"]["p99"], summary["ttft_ms"]["p99"], busy, rate)


def run_prefixes(server: Server, num_prefixes: int, num_lines: int) -> None:
    """Answer a batch with shared prefixes, and print what was computed."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(10, _MOST_ID) for _ in range(count)]

    prompts = [
        prefix + ids(_OWN_LEN) for prefix in map(ids, [_PREFIX_LEN] * num_prefixes) for _ in range(num_lines)
    ]
    rng.shuffle(prompts)
    url, name = "/v1/completions", "requests.jsonl"
    lines = [
        {"custom_id": str(i), "method": "POST", "url": url, "body": {"prompt": prompt, "max_tokens": 4}}
        for i, prompt in enumerate(prompts)
    ]
    server.flush()
    start_s = time.monotonic()
    with httpx.Client(base_url=server.url, timeout=_LIMIT_S) as client:
        content = "".join(json.dumps(line) + "\n" for line in lines)
        file = client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "batch"}).json()
        request = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
        batch = client.post("/v1/batches", json=request).json()
        while batch["status"] not in ("completed", "failed", "expired"):
            time.sleep(0.5)
            batch = client.get(f"/v1/batches/{batch['id']}").json()
    usage = batch["usage"]
    computed = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    least = num_prefixes * _PREFIX_LEN + len(lines) * _OWN_LEN
    print(
        f"{num_prefixes} prefixes of {_PREFIX_LEN} tokens, {len(lines)} lines, {batch['status']} in "
        f"{time.monotonic() - start_s:.0f} s, {batch['request_counts']['failed']} failed: computed {computed:,} of "
        f"{usage['input_tokens']:,} prompt tokens, to the least possible {computed / least:.3f} (goal 1.05)",
        flush=True,
    )


def run_alone(server: Server, lines: Sequence[Line]) -> float:
    """Tokens a second of flex requests that are sent at once."""
    before, start_s = server.tokens, time.monotonic()
    threads = [threading.Thread(target=server.complete, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (server.tokens - before) / (time.monotonic() - start_s)


def run_offline(llm: LLM, lines: Sequence[Line]) -> float:
    """Tokens a second of `LLM.generate` over the same lines."""
    start_s = time.monotonic()
    params = [SamplingParams(max_new_tokens=line.output_len, ignore_eos=True) for line in lines]
    outputs = llm.generate([line.prompt for line in lines], params)
    num_tokens = sum(len(each.token_ids) for each in outputs)
    return num_tokens / (time.monotonic() - start_s)


def simulate_all(model_name: str, device_name: str, rate: float) -> None:
    """Parts 1 and 3 in simulation."""
    model, device = MODELS[model_name], DEVICES[device_name]
    settings = replica_settings(EngineConfig(), model, device)

    def request(rng: random.Random, rid: str, arrival_s: float, *, background: bool) -> SimRequest:
        line = Line.at_random(rng)
        ids = array.array("i", line.prompt).tobytes()
        return SimRequest(rid, arrival_s, ids, line.output_len, line.output_len, background=background)

    def run(num_requests: int, num_lines: int) -> Report:
        rng, now_s = random.Random(0), 5.0
        requests = [request(rng, f"line{idx}", 0.0, background=True) for idx in range(num_lines)]
        rng = random.Random(1)
        for idx in range(num_requests):
            now_s += rng.expovariate(rate)
            requests.append(request(rng, f"r{idx}", now_s, background=False))
        return simulate(iter(requests), settings, Roofline(model, device))

    without, lines = run(_SIMULATED_REQUESTS, 0), run(0, _SIMULATED_LINES)
    with_lines = run(_SIMULATED_REQUESTS, _SIMULATED_LINES)
    ratios = [
        f"{name} {new:.1f} to {old:.1f} ms, {new / old:.3f}"
        for name, new, old in (
            ("ITL mean", with_lines.itl_ms.mean, without.itl_ms.mean),
            ("P99", with_lines.itl_ms.p99, without.itl_ms.p99),
            ("TTFT P99", with_lines.ttft_ms.p99, without.ttft_ms.p99),
        )
    ]
    idle_s = min((1 - without.busy_share) * without.duration_s, lines.duration_s)
    saved_s = lines.duration_s + without.duration_s - with_lines.duration_s
    used = f"{saved_s / idle_s:.2f}" if without.busy_share < _BUSY else "too little to tell"
    print(
        f"{model_name} on {device_name}, {rate:g}/s, steps {without.busy_share:.2f} of the time: "
        f"{'; '.join(ratios)}; of the idle time used: {used}; {with_lines.retractions} retractions",
        flush=True,
    )


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--rounds", type=int, default=2, help="of each kind, in turn")
    parser.add_argument(
        "--num-prompts", type=int, default=60, help="interactive requests of a run; 0: skip part 1"
    )
    parser.add_argument("--rate", type=float, default=2.2, help="interactive requests a second")
    parser.add_argument("--num-flex", type=int, default=64, help="flex requests in flight in part 1")
    parser.add_argument("--alone", type=int, default=64, help="flex requests of part 2; 0: skip it")
    parser.add_argument(
        "--model", default=None, help="of part 2 (default: the default model, as the server's)"
    )
    parser.add_argument(
        "--prefixes", type=int, default=0, help="shared prefixes of a batch; only this part is run"
    )
    parser.add_argument("--lines", type=int, default=4, help="lines of each prefix")
    parser.add_argument("--simulate", nargs="*", metavar="MODEL:DEVICE:RATE", help="instead of a server")
    arguments = parser.parse_args()
    if arguments.simulate:
        for each in arguments.simulate:
            model, device, rate = each.split(":")
            simulate_all(model, device, float(rate))
        return
    server = Server(arguments.url)
    if arguments.prefixes:
        run_prefixes(server, arguments.prefixes, arguments.lines)
        return

    alone = 0.0
    if arguments.alone:
        lines = [Line.at_random(random.Random(number)) for number in range(arguments.alone)]
        llm = LLM(*([] if arguments.model is None else [arguments.model]))
        pairs = []
        for number in range(arguments.rounds + 1):
            pairs.append((run_alone(server, lines), run_offline(llm, lines)))
            note = " (not counted)" if not number else ""
            print(
                f"alone: flex {pairs[-1][0]:.0f} tok/s, LLM.generate {pairs[-1][1]:.0f} tok/s{note}",
                flush=True,
            )
            server.flush()
            llm.flush_cache()
        del llm
        alone = statistics.median(flex for flex, _ in pairs[1:])
        offline = statistics.median(rate for _, rate in pairs[1:])
        print(f"alone: flex to LLM.generate {alone / offline:.3f} (goal 0.95)", flush=True)
    if not arguments.num_prompts:
        return
    options = ["--random-input-len", "64:512", "--random-output-len", "64:128"]
    options += ["--num-prompts", str(arguments.num_prompts), "--request-rate", str(arguments.rate)]
    runs: dict[bool, list[Beside]] = {False: [], True: []}
    for number in range(arguments.rounds):
        for flex in (False, True):
            run = run_beside(server, options, arguments.num_flex if flex else 0, number)
            runs[flex].append(run)
            print(
                f"{'with   ' if flex else 'without'} flex: ITL mean {run.mean_itl:.1f} ms, P99 {run.p99_itl:.1f} ms; "
                f"TTFT P99 {run.p99_ttft:.0f} ms; steps {run.busy:.2f} of the time; flex {run.flex_rate:.0f} tok/s",
                flush=True,
            )
    for name, goal in (("mean_itl", 1.05), ("p99_itl", 1.05), ("p99_ttft", 1.15)):
        values = [statistics.median(getattr(run, name) for run in runs[flex]) for flex in (False, True)]
        print(f"{name}: with to without {values[1] / values[0]:.3f} (goal {goal})")
    if alone:
        idle = 1 - statistics.median(run.busy for run in runs[False])
        rate = statistics.median(run.flex_rate for run in runs[True])
        print(f"idle share {idle:.2f}: flex used {rate / (alone * idle):.2f} of it (goal 0.8)")


if __name__ == "__main__":
    main()
