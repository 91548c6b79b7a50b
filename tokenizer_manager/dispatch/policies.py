"""The policies of `--dispatch-policy`: which of the replicas that run gets a request.

| policy | the replica | for |
|---|---|---|
| `prefix-affinity` | with most of the prompt in its prefix cache, if it is not too busy | equal beginnings |
| `round-robin` | that is next in turn | requests of equal size |
| `shortest-queue` | with the fewest live requests | requests of unequal size |
| `least-tokens` | with the fewest tokens in its live requests, answers included | very unequal prompts |

Each decides on the counts of the tokenizer manager, which are exact at once, so that a burst is spread; the
schedulers' reports are up to half a second old.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from ...runtime.config.device_config import DispatchPolicyName
from ...runtime.media import routing_id, with_image_ids
from ...runtime.messages import GenerateRequest

MAX_ANSWER: Final = 4096
"""Tokens of an answer that count as load at most: a request without a limit rarely uses it."""
MAX_LEAD: Final = 4
LEAD_FACTOR: Final = 1.5
"""A replica may have `LEAD_FACTOR` times the requests of the least busy one and `MAX_LEAD` more, and still get another
one for the sake of its cache. With a smaller lead a busy server's prompts are scattered; with a larger one a replica
idles while another has a queue."""


class ReplicaLoad:
    """The requests that were sent to a replica and have not ended.

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
            input_ids = message.input_ids
            if message.media:
                input_ids = with_image_ids(input_ids, message.media, [*map(routing_id, message.media)])
            names = block_hashes(input_ids, (message.extra_key, message.lora_id))
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


# Shapes: L tokens of a prompt, B blocks of a prompt, the last one complete.


BLOCK: Final = 32
_BLOCK_BYTES: Final = BLOCK * 4


def block_hashes(input_ids: bytes, namespace: tuple[str, str]) -> list[int]:
    """The names of a prompt's blocks, [B].

    Args:
        input_ids: [L] int32.
        namespace: prompts of different ones share nothing, see `GenerateRequest.extra_key` and `lora_id`.
    """
    name = hash(namespace)
    view = memoryview(input_ids)
    names = []
    for start in range(0, len(input_ids) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        name = hash((name, bytes(view[start : start + _BLOCK_BYTES])))
        names.append(name)
    return names


class PrefixMap:
    """The prompts that the prefix cache of one replica should hold, to the tokenizer manager's knowledge.

    It follows what was sent: a prompt that was sent to a replica is in its cache afterwards, until other prompts
    displace it. A prompt is a sequence of blocks of `BLOCK` tokens, each named by a hash of itself and all before it,
    so that one dictionary holds a tree, the oldest block first; a block is never older than those after it in a prompt.
    The oldest blocks leave when there are more than the KV pool holds. The scheduler's cache differs (it has answers,
    too, and shares memory with running requests): when a request comes back with fewer cached tokens than were
    expected, as many of the oldest blocks leave as were missing.

    SGLang's router has the same idea, an approximate tree for each worker; there it is a tree over text.
    """

    def __init__(self, max_tokens: int) -> None:
        """Know no block.

        Args:
            max_tokens: of the replica's KV pool.
        """
        self._max_blocks = max(max_tokens // BLOCK, 1)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Known blocks."""
        return len(self._blocks)

    def match(self, names: list[int]) -> int:
        """How many of a prompt's blocks are known, from its first one on."""
        low, high = 0, len(names)
        while low < high:  # a known block means that those before it are known
            middle = (low + high + 1) // 2
            if names[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, names: list[int]) -> None:
        """A prompt was sent to the replica."""
        kept = names[: self._max_blocks]
        for name in reversed(kept):  # the first block becomes the newest one
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        self._drop(len(self._blocks) - self._max_blocks)

    def missed(self, num_blocks: int) -> None:
        """The replica's cache lacked so many blocks that were expected to be in it."""
        self._drop(min(num_blocks, len(self._blocks)))

    def clear(self) -> None:
        """The replica has a new, empty cache."""
        self._blocks.clear()

    def _drop(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            self._blocks.popitem(last=False)
