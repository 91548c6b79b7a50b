"""`Handoffs`: which requests of a disaggregated engine have their other half at another one, as their fields say.

Two kinds of routers name the other half. SGLang's send one request to a prefill and a decode engine at the same time,
with `bootstrap_host`, `bootstrap_port` and `bootstrap_room`. vLLM's send it to the prefill engine first, and then, with
the `kv_transfer_params` of its answer, to the decode engine.

Without these fields a request is an ordinary one: each engine can serve it alone. `Pair` makes both halves of each
request for two replicas of one server.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ...runtime.config.engine_config import DisaggregationMode
from ...runtime.errors import RequestError
from ...runtime.messages import AbortRequest, GenerateRequest, GrammarReady, KVHandoff, SchedulerInput
from ...runtime.transport.cluster_ipc import is_loopback
from ..scheduling_options import Bootstrap

_MAX_HOST_CHARS: Final = 255


class KVTransferParams(msgspec.Struct, kw_only=True):
    """vLLM's object: what the prefill engine answers, and what the decode engine gets."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_block_ids: list[Any] | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int = 1
    remote_request_id: str | None = None


class Handoffs:
    """See the module."""

    def __init__(
        self, mode: DisaggregationMode, *, host: str = "", port: int = 0, has_key: bool = False
    ) -> None:
        """Take the settings.

        Args:
            mode: `--disaggregation-mode`.
            host, port: of a prefill engine, where decode engines claim its prompts.
            has_key: whether connections between engines are encrypted; without it they stay on this machine.
        """
        self._mode = mode
        self._host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self._port = port
        self._has_key = has_key

    def of(self, bootstrap: Bootstrap | None, num_prompts: int) -> Sequence[KVHandoff | None]:
        """[num_prompts] the other half of each prompt; None: there is none.

        Raises:
            RequestError: the fields are incomplete, or do not fit the prompts.
        """
        if bootstrap is None or self._mode in ("null", "both"):
            return [None] * num_prompts
        if bootstrap.kv_transfer_params is not None:
            return self._serial(bootstrap.kv_transfer_params, num_prompts)
        if bootstrap.room is None:
            return [None] * num_prompts
        bootstrap_rooms = [str(each) for each in _per_prompt("bootstrap_room", bootstrap.room, num_prompts)]
        if isinstance(bootstrap.room, int) and num_prompts > 1:
            bootstrap_rooms = [f"{each}-{number}" for number, each in enumerate(bootstrap_rooms)]
        if self._mode == "prefill":
            return [KVHandoff(each) for each in bootstrap_rooms]
        hosts = _per_prompt("bootstrap_host", bootstrap.host, num_prompts)
        ports = _per_prompt("bootstrap_port", bootstrap.port, num_prompts)
        return [
            KVHandoff(bootstrap_room, self._peer(host, port, "bootstrap_host", "bootstrap_port"))
            for bootstrap_room, host, port in zip(bootstrap_rooms, hosts, ports, strict=True)
        ]

    def answer(self, handoff: KVHandoff) -> dict[str, Any] | None:
        """`kv_transfer_params` of the answer of a prefill engine, from which the router makes the second request."""
        if handoff.peer:
            return None
        params = KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=f"{self._host}:{self._port}",
            remote_block_ids=[],
            remote_host=self._host,
            remote_port=self._port,
            remote_request_id=handoff.bootstrap_room,
        )
        answer: dict[str, Any] = msgspec.to_builtins(params)
        return answer

    def _serial(self, fields: dict[str, Any], num_prompts: int) -> Sequence[KVHandoff | None]:
        try:
            params = msgspec.convert(fields, KVTransferParams)
        except msgspec.ValidationError as error:
            raise _wrong("kv_transfer_params", f"kv_transfer_params: {error}") from None
        if num_prompts > 1 and (params.do_remote_decode or params.do_remote_prefill):
            raise _wrong(
                "kv_transfer_params",
                f"kv_transfer_params with {num_prompts} prompts, but they name one; send a request for each prompt",
            )
        if self._mode == "prefill":
            return [KVHandoff(str(secrets.randbits(63)))] if params.do_remote_decode else [None] * num_prompts
        if not params.do_remote_prefill:
            return [None] * num_prompts
        if not params.remote_request_id:
            raise _wrong(
                "kv_transfer_params",
                "kv_transfer_params.remote_request_id is missing; send what the prefill engine has answered",
            )
        peer = self._peer(params.remote_host, params.remote_port, "kv_transfer_params", "kv_transfer_params")
        return [KVHandoff(params.remote_request_id, peer)]

    def _peer(self, host: object, port: object, host_field: str, port_field: str) -> str:
        if not isinstance(host, str) or not 0 < len(host) <= _MAX_HOST_CHARS or set(host) & set("/ ?#@"):
            raise _wrong(
                host_field, f"{host_field} is {host!r}, but it must name the host of the prefill engine"
            )
        if not isinstance(port, int) or not 0 < port < 65536:
            raise _wrong(
                port_field,
                f"{port_field} is {port!r}, but it must be the --bootstrap-port of the prefill engine, 1 to 65535",
            )
        bare = host.removeprefix("[").removesuffix("]")
        if not self._has_key and not is_loopback(bare):
            raise _wrong(
                host_field,
                f"{host_field} is {host!r}, another machine, but the connections between engines have no key; start "
                "all engines with --cluster-key-file",
            )
        return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def _per_prompt(name: str, value: object, num_prompts: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise _wrong(name, f"{name} has {len(value)} values for {num_prompts} prompts; send one for each")
    return value


def _wrong(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")


PREFILL: Final = 0
DECODE: Final = 1
MIN_PROMPT_TOKENS: Final = 64
"""A shorter prompt delays no step of the decode replica by much, and is computed there."""

_HALF: Final = "~prefill"


class Pair:
    """`--disaggregation-mode both`: replica 0 computes the prompts of replica 1.

    Each request is sent to both with the same `bootstrap_room`, as a router does with two engines. The prefill half has
    an id of its own, which is not in the request log: its one row is dropped, and messages about a request are sent
    for both ids.
    """

    def __init__(self, peer: str) -> None:
        """`peer`: HOST:PORT at which the decode replica claims prompts."""
        self._peer = peer

    def halves(self, message: GenerateRequest) -> tuple[GenerateRequest, GenerateRequest] | None:
        """The prefill half and the decode half of a request; None: replica 1 does all of it, as with images."""
        is_short = len(message.input_ids) < 4 * MIN_PROMPT_TOKENS
        needs_all = message.pooling is not None or message.sampling.prompt_logprobs is not None
        if is_short or needs_all or message.delivered is not None or message.media:
            return None
        bootstrap_room = str(secrets.randbits(63))
        half = message.rid + _HALF
        prefill = replace(message, rid=half, handoff=KVHandoff(bootstrap_room), reports_progress=False)
        return prefill, replace(message, handoff=KVHandoff(bootstrap_room, self._peer))

    def mirrored(self, message: SchedulerInput) -> SchedulerInput | None:
        """The message to the prefill replica about its half of the request; None: there is none."""
        if isinstance(message, AbortRequest | GrammarReady):
            return replace(message, rid=message.rid + _HALF)
        return None
