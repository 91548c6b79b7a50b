"""`AdapterRegistry`: the names of LoRA adapters, and their loads and unloads while the server runs.

A request names an adapter; the scheduler gets its fingerprint, the hash of its weights. So a name that is loaded again
with other weights never meets KV pages of the old ones, and two names of equal weights share pages and memory.

The registry is the only writer of the list of adapters. It sends the list to the supervisor, which gives it to every
process that is started later: a restarted scheduler reads all adapters again, and a restarted tokenizer manager knows
their names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from ...launch.child.control import ForAll, SetAdapters
from ...runtime.adapter_spec import AdapterSpec, LoadedAdapter
from ...runtime.config.adapter_config import AdapterConfig
from ...runtime.errors import EngineDeadError, RequestError
from ...runtime.messages import AdapterDone
from ...runtime.request_checks import shown
from .adapter_list import AdapterList

logger = logging.getLogger(__name__)

UNLOAD_TIMEOUT_S: Final = 60.0


class AdapterCalls(Protocol):
    """The calls to the scheduler; `Control` implements them."""

    async def load_adapter(self, store_id: int, adapter: AdapterSpec) -> AdapterDone: ...

    async def unload_adapter(self, store_id: int) -> AdapterDone: ...


class AdapterUsers(Protocol):
    """The live requests of adapters; `TokenizerManager` implements it."""

    async def wait_unused(self, lora_id: str) -> None:
        """Return when no live request uses an adapter."""
        ...

    def num_users(self, lora_id: str) -> int:
        """Live requests that use an adapter."""
        ...

    def fail_users(self, lora_id: str, message: str) -> None:
        """End the live requests that use an adapter with an error."""
        ...


class AdapterRegistry:
    """See the module. Used on the event loop."""

    def __init__(
        self,
        adapters: AdapterList,
        config: AdapterConfig,
        *,
        calls: AdapterCalls,
        users: AdapterUsers,
        order_all: Callable[[ForAll], bool],
    ) -> None:
        """Begin with the adapters of the start.

        Args:
            adapters: those of the supervisor; nothing else changes the list from now on.
            config: resolved.
            calls: to the scheduler.
            users: the live requests.
            order_all: sends an order to the supervisor.
        """
        self._list = adapters
        self._config = config
        self._calls = calls
        self._users = users
        self._order_all = order_all
        self._changing = (
            asyncio.Lock()
        )  # loads and drops are one after the other; nothing waits for requests in it
        self._leaving: set[str] = set()  # names of adapters whose requests are waited for
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps weak references only

    def __len__(self) -> int:
        return len(self._list)

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """All adapters by name, in the order in which they were loaded."""
        return self._list.adapters

    def find(self, name: str) -> LoadedAdapter | None:
        """The adapter of a name, also written as BASE:NAME."""
        return self._list.find(name)

    def required(self, name: str, param: str) -> LoadedAdapter:
        """The adapter of a name.

        Raises:
            RequestError: 404, with the names that there are.
        """
        return self._list.required(name, param)

    async def load(
        self, name: str, path: str, *, replace: bool = False, pinned: bool = False
    ) -> LoadedAdapter:
        """Load an adapter; requests may name it when this returns.

        Args:
            name: of it.
            path: below `--lora-root`; relative ones are relative to it.
            replace: the name may be taken; its adapter is then unloaded when no request uses it any more.
            pinned: see `LoadedAdapter`.

        Raises:
            RequestError: the server is not set to load adapters, the name is taken, there is no room, or the adapter is
                broken or does not fit the model.
            EngineDeadError: the scheduler does not answer.
        """
        if not self._config.allow_runtime_lora:
            raise RequestError(
                "this server loads no adapters while it runs; start it with --allow-runtime-lora and --lora-root, or "
                "with --lora NAME=PATH",
                code="adapters_fixed",
                status=403,
            )
        async with self._changing:
            self._list.check_new(
                name,
                replace=replace,
                leaving=self._leaving,
                replace_hint="send load_inplace",
                param="lora_name",
            )
            spec = await asyncio.to_thread(self._list.read, name, path, "lora_path")
            store_id = self._list.stored_id(spec)
            if store_id is None:
                store_id = self._list.new_store_id()
                await self._store(store_id, spec)
            old = self._list.find(name)
            added = self._list.add(store_id, spec, pinned=pinned)
            self._changed(f"loaded adapter={name} rank={spec.rank} fingerprint={spec.fingerprint}")
        if old is not None and not self._list.is_named(old):
            self._begin(self._drop_unused(old))
        return added

    async def _store(self, store_id: int, spec: AdapterSpec) -> None:
        """Have the scheduler's process read an adapter; it forgets it if the caller goes away meanwhile."""
        try:
            done = await self._calls.load_adapter(store_id, spec)
        except asyncio.CancelledError:
            # It sends before the next load does, which reads a file first.
            self._begin(self._forget(store_id))
            raise
        if done.error:
            raise RequestError(done.error, param="lora_path", code="invalid_adapter")

    async def unload(self, name: str, *, force: bool = False, timeout_s: float = UNLOAD_TIMEOUT_S) -> None:
        """Unload an adapter: new requests cannot name it from now on, and running ones are waited for.

        Args:
            force: end the requests that use it, with an error; also for pinned ones.
            timeout_s: how long to wait for running requests; after that the adapter stays.

        Raises:
            RequestError: there is no such adapter, it is pinned, or requests still use it.
            EngineDeadError: the scheduler does not answer.
        """
        async with self._changing:
            adapter = self.required(name, "lora_name")
            if adapter.pinned and not force:
                raise RequestError(
                    f"the adapter {shown(name)} is pinned; send force to unload it all the same",
                    param="lora_name",
                    code="adapter_pinned",
                    status=409,
                )
            self._list.remove(adapter)
        if not self._list.is_named(adapter):
            await self._wait_unused(adapter, force=force, timeout_s=timeout_s)
        # The order first: a scheduler that is restarted from here on does not read the adapter again.
        self._changed(f"unloaded adapter={adapter.spec.name}")
        await asyncio.shield(self._begin(self._drop(adapter)))

    async def _wait_unused(self, adapter: LoadedAdapter, *, force: bool, timeout_s: float) -> None:
        name, fingerprint = adapter.spec.name, adapter.spec.fingerprint
        if force:
            self._users.fail_users(fingerprint, f"the adapter {name} was unloaded")
        self._leaving.add(name)
        try:
            async with asyncio.timeout(timeout_s):
                await self._users.wait_unused(fingerprint)
        except TimeoutError:
            self._list.put_back(adapter)
            num = self._users.num_users(fingerprint)
            who, them = ("1 request still uses", "it") if num == 1 else (f"{num} requests still use", "them")
            raise RequestError(
                f"{who} the adapter {shown(name)} after {timeout_s:g} s, so it stays; try again later, or send force "
                f"to end {them}",
                param="lora_name",
                code="adapter_in_use",
                status=409,
            ) from None
        except asyncio.CancelledError:
            self._list.put_back(adapter)
            raise
        finally:
            self._leaving.discard(name)

    async def _drop_unused(self, adapter: LoadedAdapter) -> None:
        """Drop an adapter without a name when its requests have ended."""
        await self._users.wait_unused(adapter.spec.fingerprint)
        try:
            await self._drop(adapter)
        except EngineDeadError as error:
            logger.warning("adapter=%s was not dropped: %s", adapter.spec.name, error)

    async def _drop(self, adapter: LoadedAdapter) -> None:
        """Have the scheduler forget an adapter, unless it has got a name meanwhile."""
        async with self._changing:
            if self._list.take_unnamed(adapter):
                await self._calls.unload_adapter(adapter.store_id)

    async def _forget(self, store_id: int) -> None:
        try:
            await self._calls.unload_adapter(store_id)
        except EngineDeadError as error:
            logger.warning("store_id=%d was not dropped: %s", store_id, error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _changed(self, what: str) -> None:
        logger.info("%s adapters=%d", what, len(self._list))
        self._order_all(SetAdapters(tuple(self._list.adapters)))
