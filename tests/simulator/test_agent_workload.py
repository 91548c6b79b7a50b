"""Tests of `simulator/agent_workload.py`: the closed loop, and what waiting requests keep in the cache of it."""

import itertools

import pytest

from engine.runtime.errors import ConfigError
from engine.scheduler.prefix_cache import wants
from engine.simulator.agent_workload import Agents
from engine.simulator.cluster import ClusterSettings, simulate
from engine.simulator.generated_workloads import Arrival
from engine.simulator.sim_request import SimRequest
from tests.simulator.linear_cost import LinearCost

COST = LinearCost(step_s=0.02, prefill_token_s=5e-4, decode_row_s=1e-3, kv_token_s=1e-8)
SMALL = Agents(num_agents=6, scale=1 / 64, max_context=40_000)


def walk(agents, num_requests, seed=0, answer_s=1.0):
    """All requests of each agent, if each answer takes `answer_s`; by agent."""
    sessions = []
    for request in agents.requests(Arrival(num_requests=num_requests, seed=seed)):
        turns = [request]
        while (after := turns[-1].next_turn(turns[-1].arrival_s + answer_s)) is not None:
            turns.append(after)
        sessions.append(turns)
    return sessions


def test_a_turn_comes_after_the_answer_and_contains_it():
    sessions = walk(SMALL, 100)
    assert sorted(map(len, sessions)) == [16, 16, 17, 17, 17, 17]
    num_continued = 0
    for turns in sessions:
        for before, after in itertools.pairwise(turns):
            assert after.arrival_s > before.arrival_s + 1.0
            if after.prompt_len > before.prompt_len:
                assert after.input_ids.startswith(before.input_ids)
                num_continued += 1
    assert num_continued > 70
    assert len({request.rid for turns in sessions for request in turns}) == 100


def test_the_requests_of_an_agent_do_not_depend_on_how_long_answers_take():
    quick, slow = walk(SMALL, 60, answer_s=0.1), walk(SMALL, 60, answer_s=100.0)
    assert [[each.input_ids for each in turns] for turns in quick] == [
        [each.input_ids for each in turns] for turns in slow
    ]
    other = walk(SMALL, 60, seed=1, answer_s=0.1)
    assert quick[0][0].input_ids != other[0][0].input_ids


def test_prompts_stay_below_the_longest_context():
    assert max(request.prompt_len for turns in walk(SMALL, 600) for request in turns) <= 40_000 / 64 + 1


@pytest.mark.parametrize("cluster", [ClusterSettings(), ClusterSettings(2), ClusterSettings(2, 1)])
def test_every_turn_is_answered_once(make_replica, cluster):
    asked = [request for turns in walk(SMALL, 60) for request in turns]
    report = simulate(
        SMALL.requests(Arrival(num_requests=60)), make_replica(num_pages=400, max_running=4), COST, cluster
    )
    assert report.num_requests == 60
    assert not report.failures
    assert report.output_tokens == sum(request.output_len for request in asked)
    assert report.prompt_tokens == sum(request.prompt_len for request in asked)


def test_a_turn_is_sent_before_a_request_that_arrives_later(make_replica):
    first = SimRequest(
        "first", 0.0, bytes(40), 5, 5, next_turn=lambda end_s: turn._replace(arrival_s=end_s + 1)
    )
    turn, later = SimRequest("turn", 0.0, bytes(40), 5, 5), SimRequest("later", 1000.0, bytes(40), 5, 5)
    report = simulate(iter([first, later]), make_replica(num_pages=400, max_running=4), COST)
    assert report.num_requests == 3
    assert report.ttft_ms.p99 < 1000


def test_what_waiting_requests_find_in_the_cache_is_kept_for_them(make_replica, monkeypatch):
    """More agents than the pool holds: without it, first come first served and lru evict what comes next."""

    def hits() -> float:
        agents = Agents(num_agents=10, scale=1 / 64, max_context=40_000)
        settings = make_replica(num_pages=100, max_running=2)
        slow = LinearCost(step_s=0.02, prefill_token_s=1e-2, decode_row_s=1e-3, kv_token_s=1e-8)
        report = simulate(agents.requests(Arrival(num_requests=150)), settings, slow)
        assert report.num_requests == 150
        return report.cache_hit_share

    with_wants = hits()
    monkeypatch.setattr(wants, "MAX_WANTS", 0)
    without = hits()
    assert with_wants > without + 0.1


def test_a_session_begins_anew_before_a_prompt_is_too_long_for_the_engine():
    agents = Agents(num_agents=3, max_model_len=24_000)
    requests = [request for turns in walk(agents, 300) for request in turns]
    assert max(request.prompt_len + request.max_new_tokens for request in requests) <= 24_000
    assert max(request.prompt_len for request in requests) > 18_000


def test_no_agents_are_an_error():
    with pytest.raises(ConfigError, match="--num-agents is 0, but it must be at least 1"):
        Agents(num_agents=0).requests(Arrival())
