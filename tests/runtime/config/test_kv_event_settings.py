"""Tests of `runtime/config/kv_event_settings.py`."""

from __future__ import annotations

import pytest

from engine.runtime.config.kv_event_settings import KVEventSettings, parse_kv_events, settings_of_replicas
from engine.runtime.config.server_config import ServerConfig
from engine.runtime.errors import ConfigError

ADDRESS = "tcp://127.0.0.1:5557"


@pytest.mark.parametrize(
    "address", [ADDRESS, "tcp://*:5557", "tcp://[::1]:0", "tcp://node-1:65535", "ipc:///run/kv"]
)
def test_an_address_is_enough(address):
    assert parse_kv_events(address, None) == KVEventSettings(address)
    assert parse_kv_events(address, "tcp://*:1") == KVEventSettings(address, "tcp://*:1")


def test_the_json_of_vllm_and_sglang_is_taken():
    text = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5600", "topic": "kv", "hwm": 7, '
        '"replay_endpoint": "tcp://*:5601", "buffer_steps": 3, "max_queue_size": 9}'
    )

    assert parse_kv_events(text, None) == KVEventSettings("tcp://*:5600", "tcp://*:5601", "kv", 3, 7)
    assert parse_kv_events("{}", ADDRESS) == KVEventSettings("tcp://*:5557", ADDRESS)
    assert parse_kv_events('{"publisher": "null"}', None) is None
    assert parse_kv_events('{"enable_kv_cache_events": false}', None) is None
    assert parse_kv_events(None, None) is None


@pytest.mark.parametrize(
    ("text", "replay", "error"),
    [
        ("5557", None, "kv_events is '5557', but it must be tcp://HOST:PORT, "),
        ("tcp://127.0.0.1:65536", None, "but it must be tcp://HOST:PORT, "),
        ("tcp://127.0.0.1", None, "but it must be tcp://HOST:PORT, "),
        (
            ADDRESS,
            "http://127.0.0.1:1",
            "kv_events_replay is 'http://127.0.0.1:1', but it must be tcp://HOST:PORT, ",
        ),
        (ADDRESS, ADDRESS, "which is the address of kv_events; use another port"),
        (None, ADDRESS, "but no KV events are published; set kv_events, too"),
        ('{"endpoint": 5}', None, "or a JSON object such as "),
        ('{"end_point": "tcp://*:1"}', None, "unknown field `end_point`"),
        ('{"publisher": "nats"}', None, "kv_events has the publisher 'nats'"),
        ('{"hwm": 0}', None, r"kv_events has hwm 0, but it must lie in \[1, 10000000\]"),
        ('{"replay_endpoint": "tcp://*:1"}', "tcp://*:2", "leave one of them out"),
    ],
)
def test_other_values_are_refused_with_the_rule(text, replay, error):
    with pytest.raises(ConfigError, match=error):
        ServerConfig(kv_events=text, kv_events_replay=replay)


def test_isolated_tenants_have_nothing_to_publish():
    with pytest.raises(ConfigError, match="with isolate_tenants each prefix is private"):
        ServerConfig(kv_events=ADDRESS, isolate_tenants=True, api_key=("k",))


def test_ports_of_replicas_count_up():
    settings = KVEventSettings("tcp://*:5557", "ipc:///tmp/replay")
    assert settings_of_replicas(settings, 1) == [settings]
    assert settings_of_replicas(settings, 3)[2] == KVEventSettings("tcp://*:5559", "ipc:///tmp/replay_dp2")
    assert settings_of_replicas(KVEventSettings("tcp://*:0"), 2) == [KVEventSettings("tcp://*:0")] * 2
    with pytest.raises(
        ConfigError, match=r"tcp://\*:5558 is needed twice; choose ports that are 2 or more apart"
    ):
        settings_of_replicas(KVEventSettings("tcp://*:5557", "tcp://*:5558"), 2)
    with pytest.raises(ConfigError, match="is at port 65535, but replica 1 needs port 65536"):
        settings_of_replicas(KVEventSettings("tcp://*:65535"), 2)
