"""Requests of the background in a simulation: they count in no latency, and interactive ones hardly feel them."""

from __future__ import annotations

from engine.runtime.config.engine_config import EngineConfig
from engine.simulator.cluster import simulate
from engine.simulator.cost_model import Roofline
from engine.simulator.facts import DEVICES, MODELS
from engine.simulator.generated_workloads import Arrival, given_lengths
from engine.simulator.report import Report
from engine.simulator.setup import replica_settings
from engine.simulator.sim_request import SimRequest


def run(num_lines: int) -> Report:
    """Eight requests, a few at a time, beside lines that come at once."""
    model, device = MODELS["llama-3.2-1b"], DEVICES["cpu-2"]
    requests: list[SimRequest] = [
        *given_lengths([40, 90], [30, 20], Arrival(num_requests=8, rate=0.4, seed=1))
    ]
    lines = [
        as_line(each, f"line{idx}")
        for idx, each in enumerate(given_lengths([60], [40], Arrival(num_requests=max(num_lines, 1))))
    ][:num_lines]
    settings = replica_settings(EngineConfig(), model, device)
    return simulate(iter(lines + requests), settings, Roofline(model, device))


def as_line(request: SimRequest, rid: str) -> SimRequest:
    return request._replace(rid=rid, arrival_s=0.0, background=True)


def test_interactive_requests_hardly_feel_lines_which_are_all_answered():
    without, with_lines = run(0), run(30)

    assert (with_lines.num_requests, with_lines.num_background) == (8, 30)
    assert with_lines.background_tokens == 30 * 40
    assert with_lines.itl_ms.mean <= 1.05 * without.itl_ms.mean
    assert with_lines.itl_ms.p99 <= 1.05 * without.itl_ms.p99
    assert with_lines.ttft_ms.p99 <= 1.15 * without.ttft_ms.p99
