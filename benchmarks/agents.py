"""Eviction and the queue's order, for coding agents that are more than the pool holds, in simulation.

    python benchmarks/agents.py [--seeds 2] [--num-requests 600]

Each row is an order of the queue, with and without the rule that eviction takes the cached prefixes of waiting requests
last (`scheduler/prefix_cache/wants.py`). Llama-3.2-1B on two CPU cores by data sheet (as `engine simulate --device
cpu-2`), lengths of published traces divided by 16, a closed loop (`simulator/agent_workload.py`): an agent sends its
next turn some seconds after the answer. Figures are medians over seeds; ratios are to `fcfs` without the rule.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Final
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


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--num-requests", type=int, default=600)
    arguments = parser.parse_args()
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
