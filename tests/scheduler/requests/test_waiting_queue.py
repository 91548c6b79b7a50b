"""Tests of `scheduler/requests/requests.py`."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.messages import GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.scheduler.policy.key_orders import Fcfs
from engine.scheduler.requests.req import Req
from engine.scheduler.requests.requests import WaitingQueue
from tests.scheduler.policy.model import NoMemory


def make_req(seq):
    ids = np.zeros(1, dtype=np.int32).tobytes()
    return Req(GenerateRequest(f"r{seq}", ids, SamplingParams(max_new_tokens=1)), seq, 0.0)


def seqs(queue):
    return [req.seq for req in queue]


def test_keeps_the_order_of_arrival():
    queue = WaitingQueue(Fcfs(), NoMemory())
    reqs = [make_req(seq) for seq in range(1, 6)]
    for req in reqs:
        queue.append(req)

    queue.remove(reqs[2])

    assert seqs(queue) == [1, 2, 4, 5]
    assert len(queue) == queue.num_tokens == 4


@given(st.lists(st.integers(1, 12), unique=True))
def test_a_request_put_back_gets_its_old_place(back):
    queue = WaitingQueue(Fcfs(), NoMemory())
    reqs = {seq: make_req(seq) for seq in range(1, 13)}
    for seq, req in reqs.items():
        if seq not in back:
            queue.append(req)

    for seq in back:
        queue.requeue(reqs[seq])

    assert seqs(queue) == list(range(1, 13))
    assert queue.num_tokens == 12


class Noting(NoMemory):
    """The requests that are in the queue, as it says."""

    def __init__(self) -> None:
        self.seqs: set[int] = set()

    def enqueued(self, req: Req) -> None:
        self.seqs.add(req.seq)

    def dequeued(self, req: Req) -> None:
        self.seqs.remove(req.seq)


@given(st.lists(st.integers(1, 12), unique=True))
def test_the_memory_is_notified_of_all_requests_in_the_queue(back):
    memory = Noting()
    queue = WaitingQueue(Fcfs(), memory)
    reqs = [make_req(seq) for seq in range(1, 13)]
    for req in reqs:
        queue.append(req)
    assert memory.seqs == set(seqs(queue))
    for seq in back:
        queue.remove(reqs[seq - 1])
    assert memory.seqs == set(seqs(queue))
    for seq in back:
        queue.requeue(reqs[seq - 1])
    assert memory.seqs == set(seqs(queue)) == set(range(1, 13))
