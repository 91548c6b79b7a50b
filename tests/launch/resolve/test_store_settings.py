"""What `--kv-store` takes and refuses, and that no message shows its password."""

from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.config.engine_config import CacheConfig
from engine.runtime.config.kv_store_address import KVStoreAddress, parse_kv_store
from engine.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "address", "shown"),
    [
        ("redis://localhost", ("redis", "localhost", 6379, 0, "", ""), "redis://localhost:6379/0"),
        ("redis://127.0.0.1:7000/", ("redis", "127.0.0.1", 7000, 0, "", ""), "redis://127.0.0.1:7000/0"),
        ("redis://:p%40ss@[::1]:1/15", ("redis", "::1", 1, 15, "", "p@ss"), "redis://[::1]:1/15"),
        (
            "rediss://me:a:b@kv.example/2",
            ("rediss", "kv.example", 6379, 2, "me", "a:b"),
            "rediss://kv.example:6379/2",
        ),
        ("mooncake://m", ("mooncake", "m", 50051, 0, "", ""), "mooncake://m:50051"),
    ],
)
def test_urls(url: str, address: Any, shown: str) -> None:
    parsed = parse_kv_store(url)
    assert parsed == KVStoreAddress(*address)
    assert str(parsed) == shown


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "memcached://u:secret@h:1",
            r"kv_store is 'memcached://...@h:1', but such stores are not known; write redis",
        ),
        ("h:6379", "such stores are not known"),
        ("", "such stores are not known"),
        ("redis://", "it has no host"),
        ("redis://u:secret@:6379/0", "it has no host"),
        ("redis://u:secret@h:port/0", "its host or its port cannot be read"),
        ("redis://u:secret@h:0/0", "port 0 is no port"),
        ("redis://u:secret@h:65536/0", "its host or its port cannot be read"),
        ("redis://u:sec/ret@h:6379/0", "its host or its port cannot be read"),
        ("redis://[::1", "its host or its port cannot be read"),
        ("redis://h/one", "its database is 'one' and not a number"),
        ("redis://h/-1", "its database is '-1' and not a number"),
        ("redis://h/1/2", "its database is '1/2' and not a number"),
        ("redis://h/12345678901", "its database is '12345678901' and not a number"),
        ("redis://h/0?ssl=1", "it has options"),
        ("mooncake://u:secret@h", "a master of Mooncake has no users and no databases"),
        ("mooncake://h/1", "a master of Mooncake has no users and no databases"),
        ("redis://h/0#x", "it has options"),
        ("redis://h/0?password=secret", r"kv_store is 'redis://h/0\?...', but it has options"),
        ("redis://u:12/secret@h:6379/0", "its database is 'h:6379/0' and not a number"),
        ("redis://u:12?secret@h/0", "it has options"),
        ("redis:/u:secret@h/0", r"kv_store is '...@h/0', but it has no host"),
        ("redis:u:secret@h", "it has no host"),
        ("redis://u:sec\nret@h:port", "its host or its port cannot be read"),
    ],
)
def test_other_urls(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        CacheConfig(kv_store=url)
    assert "sec" not in str(raised.value) and "ret" not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None, (
        "its text has a part of the URL"
    )


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "[::1]"])
def test_this_machine_needs_no_key(host: str) -> None:
    assert CacheConfig(kv_store=f"redis://{host}").kv_tier == "store"


@pytest.mark.parametrize("host", ["10.0.0.1", "kv.example", "[2001:db8::1]", "localhost.example", "0.0.0.0"])
@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_other_machines_need_a_key(host: str, scheme: str) -> None:
    url = f"{scheme}://u:secret@{host}"
    with pytest.raises(ConfigError, match="another machine, .* --kv-store-key FILE, .*head -c 32") as raised:
        CacheConfig(kv_store=url)
    assert "secret" not in str(raised.value)
    config = CacheConfig(kv_store=url, kv_store_key="file")
    assert config.kv_tier_place == f"{scheme}://{host}:6379/0"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_store_key": "file"}, "kv_store_key is set without kv_store"),
        (
            {"kv_store": "redis://u:secret@localhost", "kv_disk": "folder"},
            "kv_disk is folder and kv_store is redis://localhost:6379/0, but a prompt is kept in one place",
        ),
        (
            {"kv_store": "redis://localhost", "radix_cache": False},
            "kv_store is set without the prefix cache, .* or --kv-store",
        ),
    ],
)
def test_settings_that_exclude_each_other(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        CacheConfig(**settings)
    assert "secret" not in str(raised.value)
