"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, also without /v1, as in SGLang and vLLM."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET

from ....runtime.adapter_spec import LoadedAdapter
from ....runtime.errors import RequestError
from ....runtime.request_checks import check_number
from ...adapters.registry import UNLOAD_TIMEOUT_S
from ..exchange import Exchange
from ..schema.field_policy import FieldPolicy
from ..schema.field_types import MAX_TTL_S, Seconds
from ..schema.values import Body, convert
from ..services import Engine


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    pinned: bool | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str
    force: bool | None = None
    timeout: Seconds | None = None


class AdapterBody(msgspec.Struct, kw_only=True):
    """One adapter."""

    name: str
    path: str
    rank: int
    fingerprint: str
    pinned: bool


class AdaptersBody(msgspec.Struct, kw_only=True):
    """Result of a load or an unload, and the adapters that are present now."""

    success: bool = True
    message: str
    loaded_adapters: list[AdapterBody]
    warnings: list[str] | msgspec.UnsetType = UNSET


_LOAD_POLICY: Final = FieldPolicy(LoadAdapterRequest, {"lora_id": (), "lora_int_id": ()})
_UNLOAD_POLICY: Final = FieldPolicy(UnloadAdapterRequest, {"lora_int_id": ()})


async def load_adapter(exchange: Exchange, engine: Engine) -> None:
    """Load a LoRA adapter from below `--lora-root`."""

    def read(body: Body) -> tuple[LoadAdapterRequest, list[str]]:
        warnings = _LOAD_POLICY.check(body, strict=engine.config.server.strict)
        return convert(body, LoadAdapterRequest), warnings

    request, warnings = await engine.read(exchange, read)
    async with exchange.abort_on_disconnect():
        added = await engine.adapters.load(
            request.lora_name,
            request.lora_path,
            replace=bool(request.load_inplace),
            pinned=bool(request.pinned),
        )
        await exchange.send_json(_body(engine, f"loaded {added.spec.name}, rank {added.spec.rank}", warnings))


async def unload_adapter(exchange: Exchange, engine: Engine) -> None:
    """Unload a LoRA adapter when no request uses it any more."""

    def read(body: Body) -> tuple[UnloadAdapterRequest, list[str]]:
        warnings = _UNLOAD_POLICY.check(body, strict=engine.config.server.strict)
        request = convert(body, UnloadAdapterRequest)
        if request.timeout is not None:
            check_number("timeout", request.timeout, 0.0, MAX_TTL_S, low_open=True, unit="seconds")
        return request, warnings

    request, warnings = await engine.read(exchange, read)
    async with exchange.abort_on_disconnect():
        if not engine.config.adapters.allow_runtime_lora:
            raise RequestError(
                "this server unloads no adapters while it runs; start it with --allow-runtime-lora and --lora-root",
                code="adapters_fixed",
                status=403,
            )
        timeout_s = UNLOAD_TIMEOUT_S if request.timeout is None else request.timeout
        await engine.adapters.unload(request.lora_name, force=bool(request.force), timeout_s=timeout_s)
        await exchange.send_json(_body(engine, f"unloaded {request.lora_name}", warnings))


def _body(engine: Engine, message: str, warnings: list[str]) -> AdaptersBody:
    return AdaptersBody(
        message=message,
        loaded_adapters=[adapter_body(adapter) for adapter in engine.adapters.adapters],
        warnings=warnings or UNSET,
    )


def adapter_body(adapter: LoadedAdapter) -> AdapterBody:
    """One adapter, for clients."""
    spec = adapter.spec
    return AdapterBody(
        name=spec.name, path=spec.path, rank=spec.rank, fingerprint=spec.fingerprint, pinned=adapter.pinned
    )
