"""The dispatcher of a simulation: its policy is told what a server's is told, and sees the loads that are there."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pytest

from engine.runtime.messages import GenerateRequest
from engine.simulator import dispatch
from engine.simulator.cluster import Cluster, ClusterSettings
from engine.simulator.generated_workloads import Arrival, given_lengths
from engine.simulator.report import Measurements
from engine.simulator.sim_request import TOKEN_ID_BYTES, ActiveRequest, SimRequest
from engine.tokenizer_manager.dispatch.policies import ReplicaLoad
from tests.simulator.linear_cost import LinearCost


class Watched:
    """A policy that prefers one replica, and notes what it is told and shown."""

    def __init__(self, preferred: int) -> None:
        self.preferred = preferred
        self.told: list[tuple[str, str]] = []
        self.cached: dict[str, int] = {}
        self.shown: list[tuple[int, int]] = []  # live requests by the loads, and by what it was told

    def choose(self, message: GenerateRequest, loads: Sequence[ReplicaLoad], running: Collection[int]) -> int:
        names = [name for name, _ in self.told]
        live = names.count("sent") - names.count("ended")
        self.shown.append((sum(load.num_requests for load in loads), live))
        return self.preferred if self.preferred in running else min(running)

    def sent(self, message: GenerateRequest, replica: int) -> None:
        self.told.append(("sent", message.rid))

    def started(self, message: GenerateRequest, replica: int, cached_tokens: int) -> None:
        self.told.append(("started", message.rid))
        self.cached[message.rid] = cached_tokens

    def ended(self, message: GenerateRequest) -> None:
        self.told.append(("ended", message.rid))

    def restarted(self, replica: int) -> None:
        raise AssertionError("no simulated replica is lost")


@pytest.mark.parametrize("num_prefill", [0, 2])
def test_each_request_is_sent_started_and_ended(make_replica, monkeypatch, num_prefill):
    policies: list[Watched] = []

    def make(name: str, num_replicas: int, max_tokens: int) -> Watched:
        assert max_tokens == 4096 * 16
        policies.append(Watched(num_replicas - 1))
        return policies[-1]

    monkeypatch.setattr(dispatch, "make_policy", make)
    measurements = Measurements()
    cluster = Cluster(ClusterSettings(3, num_prefill), make_replica(), LinearCost(step_s=0.01), measurements)
    prompt = bytes(TOKEN_ID_BYTES * 64)
    cluster.run(iter([SimRequest(f"r{idx}", 0.1 * idx, prompt, 20, 20) for idx in range(12)]))

    assert measurements.num_answered == 12
    entry = policies[0]
    for idx in range(12):
        assert [name for name, rid in entry.told if rid == f"r{idx}"] == ["sent", "started", "ended"]
    assert len(entry.shown) == 12
    assert all(by_loads == live for by_loads, live in entry.shown)
    assert max(live for _, live in entry.shown) > 0 or num_prefill  # prefill replicas are done at once
    assert [entry.cached[f"r{idx}"] > 0 for idx in range(12)] == [False] + [True] * 11


def test_a_replica_with_a_full_queue_gets_none(make_replica, monkeypatch):
    monkeypatch.setattr(dispatch, "make_policy", lambda name, num_replicas, max_tokens: Watched(1))
    settings = make_replica(max_running=2, max_queued_requests=3)
    measurements = Measurements()
    cluster = Cluster(ClusterSettings(2), settings, LinearCost(step_s=0.01), measurements)
    most = [0, 0]

    def watched():
        for request in given_lengths([10], [5], Arrival(num_requests=40, rate=math.inf)):
            most[:] = map(max, most, (replica.num_outstanding for replica in cluster.replicas))
            yield request

    cluster.run(watched())
    assert measurements.num_answered == 40
    assert most == [5, 5]


def test_a_decode_replica_gets_the_first_token_and_the_rest_of_the_limit():
    live = ActiveRequest(SimRequest("r", 0.0, bytes(TOKEN_ID_BYTES * 8), 5, 20))
    before, after = live.first_token_only(), live.after_first_token()

    assert (before.input_ids, before.sampling.max_new_tokens) == (live.message.input_ids, 1)
    assert len(after.input_ids) == TOKEN_ID_BYTES * 9
    assert after.input_ids.startswith(live.message.input_ids)
    assert after.sampling.max_new_tokens == 19
