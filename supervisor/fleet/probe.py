"""`FleetProbe`: asks a fleet's servers for their health and their load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import httpx

from .fleet import Ask, Fleet
from .scaling import Load

_TIMEOUT_S: Final = 5.0


class FleetProbe:
    """An HTTP client of all servers; an asynchronous context manager."""

    def __init__(self, fleet: Fleet, api_key: str | None) -> None:
        """Ask with this key."""
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        # Servers of this fleet are asked directly: a proxy is for what lies outside.
        self._client = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        self._fleet = fleet

    async def __aenter__(self) -> FleetProbe:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self._client.aclose()

    async def ask_all(self) -> None:
        """Ask all servers at the same time; those that do not answer are told apart by the fleet."""
        await asyncio.gather(*(self._ask(each) for each in self._fleet.to_ask()))

    async def _ask(self, ask: Ask) -> None:
        try:
            health = await self._client.get(f"{ask.url}/health")
            is_well = health.status_code == httpx.codes.OK
            load = load_of(await self._get(f"{ask.url}/v1/loads")) if is_well else None
        except httpx.HTTPError:
            return
        self._fleet.answered(ask, time.monotonic(), is_well=is_well, load=load)

    async def _get(self, url: str) -> dict[str, Any]:
        response = await self._client.get(url)
        try:
            body = response.json()
        except ValueError:
            return {}
        return body if isinstance(body, dict) else {}


def load_of(body: Mapping[str, Any]) -> Load | None:
    """The load in an answer of `/v1/loads`; None if there is none."""
    ranks = body.get("loads")
    if not isinstance(ranks, list) or not ranks:
        return None
    at_once = sum(_number(rank, "max_running_requests") for rank in ranks)
    running = sum(_number(rank, "num_running_reqs") for rank in ranks)
    usage = sum(_number(rank, "token_usage") for rank in ranks) / len(ranks)
    queue = sum(_number(rank, "num_waiting_uncached_tokens") for rank in ranks)
    return Load(int(queue), max(usage, running / at_once if at_once else 0.0))


def _number(rank: Any, name: str) -> float:
    value = rank.get(name, 0) if isinstance(rank, dict) else 0
    return float(value) if isinstance(value, int | float) else 0.0
