"""`/log_level`, `/start_profile` and `/stop_profile`: diagnosis of a running server."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET

from ....runtime.config.server_config import LogLevel
from ....runtime.errors import RequestError
from ...all_processes import DEFAULT_DURATION_S, DEFAULT_RATE_HZ
from ..exchange import Exchange
from ..schema.field_policy import FieldPolicy
from ..schema.field_types import MAX_PROFILE_HZ, MAX_PROFILE_S, MIN_PROFILE_HZ, ProfileRate, ProfileSeconds
from ..schema.values import convert
from ..services import Services
from .wire import LogLevelBody, ProfileBody, ProfileStartedBody

LOG_LEVEL_PATH: Final = "/log_level"


class LogLevelRequest(msgspec.Struct, kw_only=True):
    """Body of `PUT /log_level`."""

    level: LogLevel


class ProfileRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /start_profile`, which may be left out."""

    duration: ProfileSeconds | None = None
    rate: ProfileRate | None = None


_LEVEL_POLICY: Final = FieldPolicy(LogLevelRequest, {})
# Fields of SGLang and vLLM: here the operator sets the folder (`--crash-dir`), and a profile ends by time.
_PROFILE_POLICY: Final = FieldPolicy(
    ProfileRequest, {"output_dir": (), "start_step": (0,), "num_steps": (), "profile_by_stage": (False,)}
)


async def log_level(exchange: Exchange, services: Services) -> None:
    """The lowest severity that is logged."""
    await exchange.send_json(LogLevelBody(level=services.all_processes.log_level))


async def set_log_level(exchange: Exchange, services: Services) -> None:
    """Set it, in all processes."""
    body = await services.read_object(exchange)
    warnings = _LEVEL_POLICY.check(body, strict=services.config.server.strict)
    services.all_processes.set_log_level(convert(body, LogLevelRequest).level)
    await exchange.send_json(LogLevelBody(level=services.all_processes.log_level, warnings=warnings or UNSET))


async def start_profile(exchange: Exchange, services: Services) -> None:
    """Have each process sample the stacks of its threads."""
    body = await services.read_object(exchange, optional=True)
    warnings = _PROFILE_POLICY.check(body, strict=services.config.server.strict)
    request = convert(body, ProfileRequest)
    duration_s = DEFAULT_DURATION_S if request.duration is None else request.duration
    rate_hz = DEFAULT_RATE_HZ if request.rate is None else request.rate
    if not 0 < duration_s <= MAX_PROFILE_S:
        raise _out_of_range("duration", duration_s, f"above 0 and at most {MAX_PROFILE_S:g} seconds")
    if not MIN_PROFILE_HZ <= rate_hz <= MAX_PROFILE_HZ:
        raise _out_of_range(
            "rate", rate_hz, f"from {MIN_PROFILE_HZ:g} to {MAX_PROFILE_HZ:g} samples per second"
        )
    profile = services.all_processes.start_profile(rate_hz=rate_hz, duration_s=duration_s)
    await exchange.send_json(
        ProfileStartedBody(
            folder=str(profile.folder), duration=duration_s, rate=rate_hz, warnings=warnings or UNSET
        )
    )


async def stop_profile(exchange: Exchange, services: Services) -> None:
    """End the profile early; the response lists the files."""
    async with exchange.abort_on_disconnect():
        profile = await services.all_processes.stop_profile()
        await exchange.send_json(
            ProfileBody(folder=str(profile.folder), files=profile.files, missing=profile.missing)
        )


def _out_of_range(name: str, value: float, rule: str) -> RequestError:
    return RequestError(f"{name} is {value:g}, but it must be {rule}", param=name, code="invalid_value")
