"""`SimulatedDispatcher`: the policies of `--dp` over simulated replicas, the code of the tokenizer manager."""

from __future__ import annotations

from collections.abc import Collection

from ..runtime.config.device_config import DispatchPolicyName
from ..tokenizer_manager.dispatch.policies import ReplicaLoad, make_policy
from .sim_request import ActiveRequest


class SimulatedDispatcher:
    """Chooses replicas as a server's `Dispatcher` does: by what it has sent and what has come back, nothing else."""

    def __init__(self, policy: DispatchPolicyName, num_replicas: int, max_tokens: int) -> None:
        """Know no request.

        Args:
            max_tokens: KV slots of a replica.
        """
        self._policy = make_policy(policy, num_replicas, max_tokens)
        self._loads = [ReplicaLoad() for _ in range(num_replicas)]

    def send(self, live: ActiveRequest, accepting: Collection[int]) -> int:
        """Choose the replica of a request among those that accept one, at least one; returns its number."""
        message = live.message
        only = len(accepting) == 1
        live.replica = next(iter(accepting)) if only else self._policy.choose(message, self._loads, accepting)
        self._loads[live.replica].add(message)
        self._policy.sent(message, live.replica)
        return live.replica

    def started(self, live: ActiveRequest, cached_tokens: int) -> None:
        """A request has its first token; so many tokens of its prompt were in the replica's prefix cache."""
        self._policy.started(live.message, live.replica, cached_tokens)

    def ended(self, live: ActiveRequest) -> None:
        """A request has left its replica."""
        self._loads[live.replica].remove(live.message)
        self._policy.ended(live.message)
