"""`KVEventSettings`: where KV events are published, parsed from `--kv-events` and `--kv-events-replay`.

`--kv-events` takes an address, or the JSON object of vLLM's and SGLang's `--kv-events-config`.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

from ..errors import ConfigError

DEFAULT_BUFFER_STEPS: Final = 10_000
DEFAULT_HWM: Final = 10_000
_MAX_COUNT: Final = 10_000_000
_MAX_PORT: Final = 65_535

_TCP: Final = re.compile(r"tcp://(?P<host>\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")
_IPC: Final = re.compile(r"ipc://.+")


class KVEventSettings(NamedTuple):
    """Sockets of KV events.

    Attributes:
        endpoint: where the PUB socket is bound.
        replay_endpoint: where the ROUTER socket is bound that sends past messages again; None: there is none.
        topic: first frame of each message.
        buffer_steps: most messages that are kept for replays.
        hwm: most messages that wait for one slow subscriber; further ones are dropped for it.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = DEFAULT_BUFFER_STEPS
    hwm: int = DEFAULT_HWM


class _Json(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `KVEventsConfig`, which SGLang has, too. `max_queue_size` has no effect: the queue is short."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = DEFAULT_BUFFER_STEPS
    hwm: int = DEFAULT_HWM
    max_queue_size: int = DEFAULT_HWM
    topic: str = ""


def parse_kv_events(text: str | None, replay: str | None) -> KVEventSettings | None:
    """Parse the two settings; None if no events are published.

    Raises:
        ConfigError: one is neither an address nor a valid JSON object, or they contradict each other.
    """
    if text is None:
        if replay is not None:
            raise ConfigError(
                f"kv_events_replay is {replay!r}, but no KV events are published; set kv_events, too"
            )
        return None
    settings = _from_json(text) if text.lstrip().startswith("{") else KVEventSettings(text)
    if settings is None:
        return None
    if replay is not None:
        if settings.replay_endpoint not in (None, replay):
            raise ConfigError(
                f"kv_events_replay is {replay!r}, but kv_events has the replay_endpoint {settings.replay_endpoint!r}; "
                "leave one of them out"
            )
        settings = settings._replace(replay_endpoint=replay)
    _check_address("kv_events", settings.endpoint)
    if settings.replay_endpoint is not None:
        _check_address("kv_events_replay", settings.replay_endpoint)
        if settings.replay_endpoint == settings.endpoint and not settings.endpoint.endswith(":0"):
            raise ConfigError(
                f"kv_events_replay is {settings.replay_endpoint!r}, which is the address of kv_events; use another port"
            )
    return settings


def settings_of_replicas(settings: KVEventSettings, num_replicas: int) -> list[KVEventSettings]:
    """The sockets of each replica (`--dp`): the ports count up from those of the settings, as in vLLM.

    Raises:
        ConfigError: two sockets would have one address.
    """
    each = [
        settings._replace(
            endpoint=_of_replica(settings.endpoint, number),
            replay_endpoint=settings.replay_endpoint and _of_replica(settings.replay_endpoint, number),
        )
        for number in range(num_replicas)
    ]
    taken = [
        address for one in each for address in (one.endpoint, one.replay_endpoint) if address is not None
    ]
    for address in taken:
        if taken.count(address) > 1 and not address.endswith(":0"):
            raise ConfigError(
                f"kv_events is {settings.endpoint!r} and kv_events_replay is {settings.replay_endpoint!r}, but with "
                f"{num_replicas} replicas, whose ports count up, {address} is needed twice; choose ports that are "
                f"{num_replicas} or more apart"
            )
    return each


def _of_replica(address: str, number: int) -> str:
    match = _TCP.fullmatch(address)
    if match is None:
        return f"{address}_dp{number}" if number else address
    port = int(match["port"])
    if port and port + number > _MAX_PORT:
        raise ConfigError(
            f"kv_events is at port {port}, but replica {number} needs port {port + number}; choose a lower one"
        )
    return f"tcp://{match['host']}:{port + number if port else 0}"


def _from_json(text: str) -> KVEventSettings | None:
    try:
        json = msgspec.json.decode(text, type=_Json)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(
            f"kv_events is {text!r}, but it must be an address such as tcp://127.0.0.1:5557, or a JSON object such as "
            f'{{"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}}: {error}'
        ) from None
    if json.publisher not in ("zmq", "null"):
        raise ConfigError(f'kv_events has the publisher {json.publisher!r}, but it must be "zmq" or "null"')
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if not 1 <= getattr(json, name) <= _MAX_COUNT:
            raise ConfigError(
                f"kv_events has {name} {getattr(json, name)}, but it must lie in [1, {_MAX_COUNT}]"
            )
    if not json.enable_kv_cache_events or json.publisher == "null":
        return None
    return KVEventSettings(json.endpoint, json.replay_endpoint, json.topic, json.buffer_steps, json.hwm)


def _check_address(name: str, address: str) -> None:
    match = _TCP.fullmatch(address)
    if not (match and int(match["port"]) <= _MAX_PORT) and not _IPC.fullmatch(address):
        raise ConfigError(
            f"{name} is {address!r}, but it must be tcp://HOST:PORT, tcp://*:PORT for all addresses of the machine, or "
            "ipc://PATH"
        )
