"""Which replica each policy chooses."""

from __future__ import annotations

from array import array
from itertools import count
from typing import get_args

import pytest
from msgspec.structs import replace

from engine.runtime.config.device_config import DispatchPolicyName
from engine.runtime.messages import GenerateRequest, MediaItem
from engine.runtime.sampling_params import SamplingParams
from engine.tokenizer_manager.dispatch.policies import (
    BLOCK,
    MAX_LEAD,
    DispatchPolicy,
    PrefixAffinity,
    ReplicaLoad,
    make_policy,
)

NUMBERS = count()
POOL = 64 * BLOCK


def request(*blocks: int, salt: str = "") -> GenerateRequest:
    ids = array("i", [token for block in blocks for token in [block] * BLOCK] + [0])
    params = SamplingParams(max_new_tokens=4, seed=0)
    return GenerateRequest(f"r{next(NUMBERS)}", ids.tobytes(), params, extra_key=salt)


def with_image(message: GenerateRequest, digest: bytes) -> GenerateRequest:
    """The same prompt, its second block the placeholders of an image."""
    item = MediaItem(digest * 32, array("i", [BLOCK, BLOCK]).tobytes(), "", (1, 4, 4, 3))
    return replace(message, media=(item,))


def loads(*requests: int, tokens: tuple[int, ...] = ()) -> list[ReplicaLoad]:
    made = [ReplicaLoad() for _ in requests]
    for number, each in enumerate(made):
        each.num_requests = requests[number]
        each.num_tokens = tokens[number] if tokens else requests[number]
    return made


def send(policy: DispatchPolicy, message: GenerateRequest, load: list[ReplicaLoad]) -> int:
    chosen = policy.choose(message, load, range(len(load)))
    policy.sent(message, chosen)
    return chosen


@pytest.mark.parametrize("name", get_args(DispatchPolicyName))
def test_only_a_running_replica_is_chosen(name):
    policy = make_policy(name, 4, POOL)
    for _ in range(3):
        assert policy.choose(request(1), loads(0, 5, 5, 0), [2]) == 2
        assert policy.choose(request(1), loads(0, 5, 5, 0), [1, 2]) in (1, 2)


def test_each_in_turn_also_when_one_is_lost():
    policy = make_policy("round-robin", 3, POOL)
    assert [policy.choose(request(), loads(9, 0, 0), range(3)) for _ in range(4)] == [0, 1, 2, 0]
    assert [policy.choose(request(), loads(9, 0, 0), [0, 2]) for _ in range(3)] == [2, 0, 2]


def test_the_shortest_queue_and_the_fewest_tokens():
    load = loads(3, 2, 2, tokens=(10, 40, 30))
    assert make_policy("shortest-queue", 3, POOL).choose(request(), load, range(3)) == 2
    assert make_policy("least-tokens", 3, POOL).choose(request(), load, range(3)) == 0


def test_prompts_go_where_most_of_them_is_cached():
    policy = PrefixAffinity(3, POOL)
    idle = loads(0, 0, 0)
    homes = [send(policy, request(family, 7), idle) for family in (1, 2, 3)]

    assert homes == [0, 1, 2]  # an idle server's caches are filled evenly
    assert [send(policy, request(family, 8), idle) for family in (3, 1, 2)] == [2, 0, 1]
    assert send(policy, request(1, 8, 9), loads(2, 0, 0)) == 0
    assert (
        send(policy, request(1, 8, 9, salt="x"), loads(2, 0, 1)) == 1
    )  # nothing is shared with another salt


def test_a_replica_that_is_far_busier_is_passed_over():
    policy = PrefixAffinity(2, POOL)
    assert send(policy, request(1, 2), loads(0, 0)) == 0
    assert send(policy, request(1, 2), loads(MAX_LEAD, 0)) == 0
    assert send(policy, request(1, 2), loads(MAX_LEAD + 9, 6)) == 0  # half as many more are allowed
    assert send(policy, request(1, 2), loads(MAX_LEAD + 1, 0)) == 1
    assert send(policy, request(1, 2), loads(5, 3)) == 1  # now both have it


def test_a_cache_that_was_cleared_and_one_that_has_less_than_expected():
    policy = PrefixAffinity(2, POOL)
    idle = loads(0, 0)
    assert send(policy, request(1, 2, 3, 4), idle) == 0
    policy.restarted(0)
    assert policy._maps[0].match(policy._names_of(request(1, 2, 3, 4))) == 0
    assert send(policy, request(5), loads(1, 0)) == 1
    assert send(policy, request(1, 2, 3, 4), loads(0, 0)) == 0
    again = request(1, 2, 3, 4)
    assert send(policy, again, idle) == 0
    policy.started(again, 0, cached_tokens=4 * BLOCK - 1)  # all but the last token
    assert policy._maps[0].match(policy._names_of(request(1, 2, 3, 4))) == 4
    again = request(1, 2, 3, 4)
    send(policy, again, idle)
    policy.started(again, 0, cached_tokens=0)
    assert policy._maps[0].match(policy._names_of(request(1, 2, 3, 4))) == 1


def test_nothing_is_kept_of_requests_that_ended():
    policy = PrefixAffinity(2, POOL)
    for _ in range(3):
        message = request(1, 2)
        send(policy, message, loads(0, 0))
        policy.ended(message)
    assert policy._expected == {}


def test_an_image_goes_to_the_replica_that_has_it():
    """Placeholders of all images are alike: by their ids all images would be at the first replica."""
    policy = PrefixAffinity(3, POOL)
    first, second = (with_image(request(1, 2, 3), digest) for digest in (b"a", b"b"))
    assert send(policy, first, loads(0, 1, 1)) == 0
    assert send(policy, second, loads(1, 0, 1)) == 0  # for the text before it
    policy.restarted(0)
    assert send(policy, first, loads(1, 0, 1)) == 1
    assert send(policy, replace(first, rid="again"), loads(0, 1, 0)) == 1
    policy._maps[2].add(policy._names_of(second))
    assert send(policy, replace(second, rid="other"), loads(0, 0, 0)) == 2
