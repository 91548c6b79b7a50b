"""Eviction and the queue's order, for coding agents that are more than the pool holds, in simulation.

    python benchmarks/agents.py [--seeds 2] [--num-requests 600]
    python benchmarks/agents.py --url http://127.0.0.1:30000 --num-agents 8 --scale 0.015 --num-requests 160 --seeds 2
    python benchmarks/agents.py --url http://127.0.0.1:30000 --peer-url http://127.0.0.1:8000   # beside vLLM

Each row is an order of the queue, with and without the rule that eviction takes the cached prefixes of waiting requests
last (`scheduler/prefix_cache/wants.py`). Llama-3.2-1B on two CPU cores by data sheet (as `engine simulate --device
cpu-2`), lengths of published traces divided by 16, a closed loop (`simulator/agent_workload.py`): an agent sends its
next turn some seconds after the answer. Figures are medians over seeds; ratios are to `fcfs` without the rule. With
`--url` the same agents ask a server; its pool should hold about half of their prompts (`--max-total-tokens`): in each
round without a word on sessions, and with `session_id` in each turn and `/close_session` after the last one; the cache
is flushed between the two. With `--peer-url` the other server, of as many bytes of KV, is asked in place of the round
without sessions. vLLM flushes with `VLLM_SERVER_DEV_MODE=1` only, and counts cached tokens with
`--enable-prompt-tokens-details`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from engine.runtime.config.engine_config import EngineConfig, SchedulePolicyName
from engine.scheduler.prefix_cache import wants
from engine.simulator.agent_workload import Agents
from engine.simulator.cluster import simulate
from engine.simulator.cost_model import Roofline
from engine.simulator.facts import DEVICES, MODELS
from engine.simulator.generated_workloads import Arrival
from engine.simulator.report import Report
from engine.simulator.setup import replica_settings
from engine.simulator.sim_request import FILLER_TOKEN, SimRequest

LOADS: Final = ((12, 20_000), (20, 30_000), (30, 40_000))  # agents, tokens of the pool
ROWS: Final[tuple[tuple[SchedulePolicyName, bool], ...]] = (
    ("fcfs", False),
    ("fcfs", True),
    ("lpm", False),
    ("lpm", True),
    ("hrrn", False),
    ("hrrn", True),
)


def run(policy: SchedulePolicyName, num_agents: int, pool: int, arrival: Arrival, max_wants: int) -> Report:
    """Simulate one run."""
    model, device, config = MODELS["llama-3.2-1b"], DEVICES["cpu-2"], EngineConfig()
    config = replace(
        config,
        cache=replace(config.cache, max_total_tokens=pool),
        scheduler=replace(config.scheduler, schedule_policy=policy),
    )
    requests = Agents(num_agents=num_agents, scale=1 / 16).requests(arrival)
    with mock.patch.object(wants, "MAX_WANTS", max_wants):
        return simulate(requests, replica_settings(config, model, device), Roofline(model, device))


def ask(url: str, request: SimRequest, session: str) -> tuple[int, int, float]:
    """Send one turn, answered with filler; return its tokens, the cached ones, and the seconds to the first answer.

    Args:
        session: its key; "": it names none.
    """
    body = {
        **({"session_id": session} if session else {}),
        "prompt": memoryview(request.input_ids).cast("i").tolist(),
        "max_tokens": request.output_len,
        "ignore_eos": True,
        "temperature": 0.0,
        "logit_bias": {str(FILLER_TOKEN): 100.0},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin_s, first_s, usage = time.monotonic(), 0.0, None
    with post(f"{url}/v1/completions", body) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                first_s = first_s or time.monotonic() - begin_s
                usage = json.loads(line[6:]).get("usage") or usage
    assert usage is not None
    return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0, first_s


def post(url: str, body: object) -> Any:
    """The response to a JSON body."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=600)


def run_on_server(url: str, agents: Agents, arrival: Arrival, *, names_sessions: bool) -> tuple[float, float]:
    """Let each agent ask in a thread of its own, print hits and times to the first token, and return their means."""
    try:
        post(f"{url}/flush_cache", {}).close()
    except urllib.error.HTTPError:
        post(f"{url}/reset_prefix_cache", {}).close()  # vLLM
    turns: list[tuple[int, int, float]] = []
    start_s = time.monotonic()

    def work(first: SimRequest) -> None:
        request: SimRequest | None = first
        number, before = 0, b""
        while request is not None:
            time.sleep(max(0.0, request.arrival_s - (time.monotonic() - start_s)))
            session = f"{first.rid}-{number}" if names_sessions else ""
            if not request.input_ids.startswith(before):  # the session before is over
                if session:
                    post(f"{url}/close_session", {"session_id": session}).close()
                    session = f"{first.rid}-{number + 1}"
                number += 1
            before = request.input_ids
            turns.append(ask(url, request, session))
            assert request.next_turn is not None
            request = request.next_turn(time.monotonic() - start_s)

    firsts = list(agents.requests(arrival))
    with ThreadPoolExecutor(len(firsts)) as pool:
        list(pool.map(work, firsts))
    prompt, cached, first_s = zip(*turns, strict=True)
    p99 = sorted(first_s)[len(turns) * 99 // 100]
    hits, ttft_s = sum(cached) / sum(prompt), statistics.mean(first_s)
    seconds = time.monotonic() - start_s
    print(
        f"{'with' if names_sessions else 'without'} sessions: hits {hits:.3f}, TTFT mean {ttft_s:.2f} s, "
        f"P99 {p99:.1f} s, {len(turns)} turns of {statistics.mean(prompt):.0f} tokens in {seconds:.0f} s",
        flush=True,
    )
    return hits, ttft_s


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--num-requests", type=int, default=600)
    parser.add_argument("--url", help="of a server, instead of a simulation")
    parser.add_argument("--peer-url", help="of a server that is compared with --url")
    parser.add_argument("--num-agents", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1 / 64)
    parser.add_argument("--tool-s", type=float, default=Agents().tool_s, help="median of a tool, with --url")
    arguments = parser.parse_args()
    if arguments.url:
        agents = Agents(num_agents=arguments.num_agents, scale=arguments.scale, tool_s=arguments.tool_s)
        for seed in range(arguments.seeds):
            arrival = Arrival(num_requests=arguments.num_requests, seed=seed)
            order = (False, True) if seed % 2 == 0 else (True, False)
            urls = {False: arguments.peer_url or arguments.url, True: arguments.url}
            results = {
                each: run_on_server(urls[each], agents, arrival, names_sessions=each) for each in order
            }
            (hits, ttft_s), (more_hits, less_s) = results[False], results[True]
            print(f"seed {seed}: hits {more_hits - hits:+.3f}, mean TTFT {less_s / ttft_s:.2f}", flush=True)
        return
    print(
        "| agents, pool | order | waiting last | hits | requests/s, ratio | mean TTFT, s | ratio | P99 TTFT, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for num_agents, pool in LOADS:
        first: list[Report] = []
        for policy, keeps in ROWS:
            reports = [
                run(
                    policy,
                    num_agents,
                    pool,
                    Arrival(num_requests=arguments.num_requests, seed=seed),
                    wants.MAX_WANTS * keeps,
                )
                for seed in range(arguments.seeds)
            ]
            first = first or reports
            pairs = list(zip(reports, first, strict=True))
            rate = statistics.median(base.duration_s / report.duration_s for report, base in pairs)
            ttft = statistics.median(report.ttft_ms.mean / base.ttft_ms.mean for report, base in pairs)
            print(
                f"| {num_agents}, {pool:,} | {policy} | {'yes' if keeps else 'no'} "
                f"| {statistics.median(report.cache_hit_share for report in reports):.2f} | {rate:.2f} "
                f"| {statistics.median(report.ttft_ms.mean for report in reports) / 1e3:.1f} | {ttft:.2f} "
                f"| {statistics.median(report.ttft_ms.p99 for report in reports) / 1e3:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
