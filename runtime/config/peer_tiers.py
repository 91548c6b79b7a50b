"""Settings of SGLang and vLLM for tiers of the prefix cache, as settings of this engine; what differs is refused.

Each function takes the value of one of their settings and gives values of ours by name, or raises `ConfigError`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..errors import ConfigError
from ..installation import cache_dir

_GIB: Final = 1 << 30
_WRITES: Final = {"write_through_selective": "selective", "write_through": "through", "write_back": "evicted"}
_FETCHES: Final = {"best_effort": "best_effort", "wait_complete": "wait", "timeout": "timeout"}
_SPECS: Final = ("CPUOffloadingSpec", "TieringOffloadingSpec")
_KEYS: Final = frozenset({"kv_connector", "kv_role", "kv_connector_extra_config"})
_SPEEDS: Final = frozenset({"block_size", "n_read_threads", "n_write_threads"})
"""Without an effect here: they change its speed only."""
_EXTRA_KEYS: Final = _SPEEDS | {"spec_name", "cpu_bytes_to_use", "secondary_tiers"}
_TIER_KEYS: Final = _SPEEDS | {"type", "root_dir", "max_disk_gib"}


def _words(name: str, setting: str, words: Mapping[str, str]) -> Callable[[object], dict[str, object]]:
    def translate(value: object) -> dict[str, object]:
        if not isinstance(value, str) or value not in words:
            raise ConfigError(
                f"{name} is {value!r}, but it must be one of {', '.join(words)}; or set {setting}"
            )
        return {setting: words[value]}

    return translate


hicache_write_policy: Final = _words("hicache_write_policy", "kv_write", _WRITES)
hicache_storage_prefetch_policy: Final = _words("hicache_storage_prefetch_policy", "kv_fetch", _FETCHES)


def hicache_storage_backend(value: object) -> dict[str, object]:
    """SGLang's folder or master are in the environment; without the folder, one in the cache folder of the user."""
    if value == "file":
        folder = os.environ.get("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR")
        return {"kv_disk": folder or str(cache_dir() / "kv")}
    if value == "mooncake" and (master := os.environ.get("MOONCAKE_MASTER")):
        return {"kv_store": f"mooncake://{master}"}
    raise ConfigError(
        f"hicache_storage_backend is {value!r}, but it must be file, or mooncake with its master in MOONCAKE_MASTER; "
        "for other stores that several servers share set kv_store to redis://host:port/db"
    )


def kv_transfer_config(value: object) -> dict[str, object]:
    """vLLM's `OffloadingConnector`: host memory, and at most one secondary tier, a file system; JSON, or a mapping."""
    try:
        config = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"kv_transfer_config is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError("kv_transfer_config must be an object of JSON")
    connector = config.get("kv_connector")
    if connector != "OffloadingConnector":
        raise _refused(
            f"has the connector {connector!r}, and OffloadingConnector is the only one here",
            "set disaggregation_mode and transfer_backend for prefill and decode engines, and kv_store for stores "
            "that several servers share (MooncakeStoreConnector, LMCacheConnectorV1)",
        )
    if config.get("kv_role", "kv_both") != "kv_both":
        raise _refused(f"has the role {config['kv_role']!r}", "write kv_both: one engine stores and loads")
    extra = _object(config.get("kv_connector_extra_config", {}), "kv_connector_extra_config")
    if extra.get("spec_name", _SPECS[0]) not in _SPECS:
        raise _refused(f"has the spec {extra['spec_name']!r}", f"write {' or '.join(_SPECS)}")
    settings: dict[str, object] = {}
    if "cpu_bytes_to_use" in extra:
        if not isinstance(extra["cpu_bytes_to_use"], int):
            raise _refused("has cpu_bytes_to_use that is no number of bytes", "set kv_host_size in GiB")
        settings["kv_host_size"] = extra["cpu_bytes_to_use"] / _GIB
    tiers = extra.get("secondary_tiers", [])
    if not isinstance(tiers, list) or len(tiers) > 1:
        raise _refused(
            "has several secondary tiers, and one outlives the process here", "write one of type fs"
        )
    unknown = [*(config.keys() - _KEYS), *(extra.keys() - _EXTRA_KEYS)]
    for each in tiers:
        tier = _object(each, "a tier")
        if tier.get("type") != "fs" or not isinstance(tier.get("root_dir"), str):
            raise _refused(
                f"has a tier of type {tier.get('type')!r}, or without root_dir",
                "write one of type fs, or set kv_disk to a folder, or kv_store to a server",
            )
        settings["kv_disk"] = tier["root_dir"]
        if "max_disk_gib" in tier:
            settings["kv_disk_size"] = tier["max_disk_gib"]
        unknown += tier.keys() - _TIER_KEYS
    if unknown:
        raise _refused(
            f"has {', '.join(sorted(map(str, unknown)))}, without a meaning here", "leave them out"
        )
    if not settings:
        raise _refused("names no tier", "set cpu_bytes_to_use, or secondary_tiers")
    return settings


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refused(f"has {name} that is no object", "write it as vLLM's guide to KV offloading shows")
    return value


def _refused(words: str, fix: str) -> ConfigError:
    return ConfigError(f"kv_transfer_config {words}; {fix}")
