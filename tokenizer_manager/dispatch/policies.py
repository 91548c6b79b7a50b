"""The policies of `--dispatch-policy`: which of the replicas that run gets a request.

| policy | the replica | for |
|---|---|---|
| `prefix-affinity` | with most of the prompt in its prefix cache, if it is not too busy | equal beginnings |
| `round-robin` | that is next in turn | requests of equal size |
| `shortest-queue` | with the fewest live requests | requests of unequal size |
| `least-tokens` | with the fewest tokens in its live requests, answers included | very unequal prompts |

Each decides on what the tokenizer manager knows at once, its own counts, so that a burst of requests is spread; the
schedulers' reports are up to half a second old.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Protocol

from ...runtime.config.device_config import DispatchPolicyName
from ...runtime.messages import GenerateRequest
from .prefix_map import BLOCK, PrefixMap, block_hashes

MAX_ANSWER: Final = 4096
"""Tokens of an answer that count as load at most: a request without a limit rarely uses it."""
MAX_LEAD: Final = 4
LEAD_FACTOR: Final = 1.5
"""A replica may have `LEAD_FACTOR` times the requests of the least busy one and `MAX_LEAD` more, and still get another
one for the sake of its cache. With a smaller lead a busy server's prompts are scattered; with a larger one a replica
idles while another has a queue."""


class ReplicaLoad:
    """What was sent to a replica and has not ended.

    Attributes:
        num_requests: live ones.
        num_tokens: of their prompts, and of their answers at their longest (at most `MAX_ANSWER` each).
    """

    __slots__ = ("num_requests", "num_tokens")

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0

    def add(self, message: GenerateRequest) -> None:
        """A request is sent."""
        self.num_requests += 1
        self.num_tokens += _tokens_of(message)

    def remove(self, message: GenerateRequest) -> None:
        """A request that was added has ended."""
        self.num_requests -= 1
        self.num_tokens -= _tokens_of(message)


def _tokens_of(message: GenerateRequest) -> int:
    return len(message.input_ids) // 4 + min(message.sampling.max_new_tokens or 0, MAX_ANSWER)


class DispatchPolicy(Protocol):
    """Chooses replicas; see the module."""

    def choose(self, message: GenerateRequest, loads: Sequence[ReplicaLoad], running: Collection[int]) -> int:
        """The number of one of the `running` replicas, at least one; `loads` are of all."""
        ...

    def sent(self, message: GenerateRequest, replica: int) -> None:
        """A request was sent to a replica, chosen by the policy or by its client."""
        ...

    def started(self, message: GenerateRequest, replica: int, cached_tokens: int) -> None:
        """The prompt of a request is computed; `cached_tokens` of it were in the replica's prefix cache."""
        ...

    def ended(self, message: GenerateRequest) -> None:
        """A request is no longer with its replica, started or not."""
        ...

    def restarted(self, replica: int) -> None:
        """A replica was lost: its successor's cache is empty."""
        ...


class ByLoad:
    """`shortest-queue` and `least-tokens`."""

    def __init__(self, *, by_tokens: bool) -> None:
        """Compare tokens first, or requests first; the other one decides between equals, then the number."""
        self._by_tokens = by_tokens

    def choose(self, message: GenerateRequest, loads: Sequence[ReplicaLoad], running: Collection[int]) -> int:
        def load(replica: int) -> tuple[int, int, int]:
            requests, tokens = loads[replica].num_requests, loads[replica].num_tokens
            return (tokens, requests, replica) if self._by_tokens else (requests, tokens, replica)

        return min(running, key=load)

    def sent(self, message: GenerateRequest, replica: int) -> None:
        pass

    def started(self, message: GenerateRequest, replica: int, cached_tokens: int) -> None:
        pass

    def ended(self, message: GenerateRequest) -> None:
        pass

    def restarted(self, replica: int) -> None:
        pass


class RoundRobin(ByLoad):
    """`round-robin`."""

    def __init__(self, num_replicas: int) -> None:
        """Begin with the first one."""
        super().__init__(by_tokens=False)
        self._num_replicas = num_replicas
        self._next = 0

    def choose(self, message: GenerateRequest, loads: Sequence[ReplicaLoad], running: Collection[int]) -> int:
        chosen = min(running, key=lambda replica: (replica - self._next) % self._num_replicas)
        self._next = (chosen + 1) % self._num_replicas
        return chosen


class PrefixAffinity:
    """`prefix-affinity`."""

    def __init__(self, num_replicas: int, max_tokens: int) -> None:
        """Know no prompt; `max_tokens` of each KV pool."""
        self._maps = [PrefixMap(max_tokens) for _ in range(num_replicas)]
        self._expected: dict[str, int] = {}  # rid -> known blocks of its prompt when it was sent
        self._hashed: tuple[str, list[int]] = "", []  # rid and blocks of the last request

    def choose(self, message: GenerateRequest, loads: Sequence[ReplicaLoad], running: Collection[int]) -> int:
        """See `DispatchPolicy`.

        Of replicas with equally much of the prompt the least busy one is chosen; of equally busy ones the one with the
        emptiest cache, so that the first requests of a quiet server already use all caches.
        """
        limit = LEAD_FACTOR * min(loads[replica].num_requests for replica in running) + MAX_LEAD
        names = self._names_of(message)

        def preference(replica: int) -> tuple[int, int, int, int]:
            known = self._maps[replica]
            return -known.match(names), loads[replica].num_requests, len(known), replica

        return min((each for each in running if loads[each].num_requests <= limit), key=preference)

    def sent(self, message: GenerateRequest, replica: int) -> None:
        names = self._names_of(message)
        known = self._maps[replica]
        if expected := known.match(names):
            self._expected[message.rid] = expected
        known.add(names)

    def started(self, message: GenerateRequest, replica: int, cached_tokens: int) -> None:
        expected = self._expected.pop(message.rid, 0)
        # The last token of a prompt is always computed, and with it up to a page; a block is larger than both.
        missing = expected - 1 - cached_tokens // BLOCK
        if missing > 0:
            self._maps[replica].missed(missing)

    def ended(self, message: GenerateRequest) -> None:
        self._expected.pop(message.rid, None)

    def restarted(self, replica: int) -> None:
        self._maps[replica].clear()

    def _names_of(self, message: GenerateRequest) -> list[int]:
        if self._hashed[0] != message.rid:
            names = block_hashes(message.input_ids, (message.extra_key, message.lora_id))
            self._hashed = message.rid, names
        return self._hashed[1]


def make_policy(name: DispatchPolicyName, num_replicas: int, max_tokens: int) -> DispatchPolicy:
    """The policy with this name; for one replica one that follows nothing, since there is no choice.

    Args:
        num_replicas: numbered from 0.
        max_tokens: KV slots of a replica.
    """
    if num_replicas == 1:
        return ByLoad(by_tokens=False)
    match name:
        case "prefix-affinity":
            return PrefixAffinity(num_replicas, max_tokens)
        case "round-robin":
            return RoundRobin(num_replicas)
        case "shortest-queue" | "least-tokens":
            return ByLoad(by_tokens=name == "least-tokens")
