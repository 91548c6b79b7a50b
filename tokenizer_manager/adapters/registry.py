"""`AdapterRegistry`: the names of LoRA adapters, and their loads and unloads while the server runs.

A request names an adapter; the scheduler gets its fingerprint, the hash of its weights. So a name that is loaded again
with other weights never meets KV pages of the old ones, and two names of equal weights share pages and memory.

The registry is the only writer of the list of adapters. It tells the list to the supervisor, which gives it to every
process that is started later: a restarted scheduler reads all adapters again, and a restarted tokenizer manager knows
their names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

from ...runtime.child.control import ForAll, SetAdapters
from ...runtime.config.adapter_config import AdapterConfig
from ...runtime.errors import ConfigError, RequestError
from ...runtime.messages import AdapterDone
from ...runtime.model_files.adapters.adapter_spec import AdapterSpec, check_name, read_adapter
from ...runtime.model_files.adapters.loaded_adapter import LoadedAdapter
from ...runtime.model_files.model_spec import ModelSpec
from ...runtime.request_checks import shown

logger = logging.getLogger(__name__)

_MAX_SHOWN_NAMES: Final = 20
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
        spec: ModelSpec,
        config: AdapterConfig,
        adapters: Iterable[LoadedAdapter] = (),
        *,
        calls: AdapterCalls,
        users: AdapterUsers,
        tell_all: Callable[[ForAll], bool],
        model_name: str = "",
    ) -> None:
        """Begin with the adapters of the start.

        Args:
            spec: of the base model.
            config: resolved.
            adapters: as the supervisor knows them.
            calls: to the scheduler.
            users: the live requests.
            tell_all: sends an order to the supervisor.
            model_name: of the base model, which no adapter may have.
        """
        self._spec = spec
        self._config = config
        self._by_name = {adapter.spec.name: adapter for adapter in adapters}
        self._last_store_id = max((adapter.store_id for adapter in self._by_name.values()), default=0)
        self._calls = calls
        self._users = users
        self._tell_all = tell_all
        self._model_name = model_name
        self._changing = asyncio.Lock()
        self._drops: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """All adapters by name, in the order in which they were loaded."""
        return list(self._by_name.values())

    def find(self, name: str) -> LoadedAdapter | None:
        """The adapter of a name, also written as BASE:NAME."""
        found = self._by_name.get(name)
        if found is None and name.startswith(f"{self._model_name}:"):
            found = self._by_name.get(name.removeprefix(f"{self._model_name}:"))
        return found

    def required(self, name: str, param: str) -> LoadedAdapter:
        """The adapter of a name.

        Raises:
            RequestError: 404, with the names that there are.
        """
        found = self.find(name)
        if found is None:
            raise RequestError(
                f"{param} is {shown(name)}, but there is no such adapter; {self._known()}",
                param=param,
                code="adapter_not_found",
                status=404,
            )
        return found

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
        async with self._changing:
            self._check_new(name, replace=replace)
            root = None if self._config.lora_root is None else Path(self._config.lora_root).expanduser()
            max_rank = self._config.max_lora_rank
            assert max_rank != "auto", "the configuration is not resolved"
            try:
                spec = await asyncio.to_thread(
                    read_adapter,
                    Path(path) if root is None else root / path,
                    name,
                    self._spec,
                    max_rank=max_rank,
                    root=root,
                )
            except ConfigError as error:
                raise RequestError(str(error), param="lora_path", code="invalid_adapter") from None
            same = next(
                (each for each in self._by_name.values() if each.spec.fingerprint == spec.fingerprint), None
            )
            store_id = self._last_store_id + 1 if same is None else same.store_id
            if same is None:
                self._last_store_id = store_id
                done = await self._calls.load_adapter(store_id, spec)
                if done.error:
                    raise RequestError(done.error, param="lora_path", code="invalid_adapter")
            old = self._by_name.get(name)
            added = self._by_name[name] = LoadedAdapter(store_id, spec, pinned)
            self._changed(f"loaded adapter={name} rank={spec.rank} fingerprint={spec.fingerprint}")
            if old is not None and not self._is_named(old):
                self._drop_later(old)
            return added

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
            name = adapter.spec.name
            del self._by_name[name]
            if not self._is_named(adapter):
                await self._wait_unused(adapter, name, force=force, timeout_s=timeout_s)
                await self._calls.unload_adapter(adapter.store_id)
            self._changed(f"unloaded adapter={name}")

    async def _wait_unused(self, adapter: LoadedAdapter, name: str, *, force: bool, timeout_s: float) -> None:
        fingerprint = adapter.spec.fingerprint
        if force:
            self._users.fail_users(fingerprint, f"the adapter {name} was unloaded")
        try:
            async with asyncio.timeout(timeout_s):
                await self._users.wait_unused(fingerprint)
        except TimeoutError:
            self._by_name[name] = adapter
            raise RequestError(
                f"{self._users.num_users(fingerprint)} requests still use the adapter {shown(name)} after "
                f"{timeout_s:g} s, so it stays; try again later, or send force to end them",
                param="lora_name",
                code="adapter_in_use",
                status=409,
            ) from None
        except asyncio.CancelledError:
            self._by_name[name] = adapter
            raise

    def _drop_later(self, old: LoadedAdapter) -> None:
        """Unload an adapter without a name when its requests have ended."""

        async def drop() -> None:
            await self._users.wait_unused(old.spec.fingerprint)
            async with self._changing:
                if not self._is_named(old):
                    await self._calls.unload_adapter(old.store_id)

        task = asyncio.create_task(drop())
        self._drops.add(task)  # asyncio itself keeps weak references only
        task.add_done_callback(self._drops.discard)

    def _is_named(self, adapter: LoadedAdapter) -> bool:
        return any(each.store_id == adapter.store_id for each in self._by_name.values())

    def _changed(self, what: str) -> None:
        logger.info("%s adapters=%d", what, len(self._by_name))
        self._tell_all(SetAdapters(tuple(self._by_name.values())))

    def _check_new(self, name: str, *, replace: bool) -> None:
        if not self._config.allow_runtime_lora:
            raise RequestError(
                "this server loads no adapters while it runs; start it with --allow-runtime-lora and --lora-root, or "
                "with --lora NAME=PATH",
                code="adapters_fixed",
                status=403,
            )
        try:
            check_name(name)
        except ConfigError as error:
            raise RequestError(str(error), param="lora_name", code="invalid_value") from None
        if name == self._model_name or (name in self._by_name and not replace):
            what = "the model" if name == self._model_name else "an adapter"
            fix = "choose another one" + (
                "" if name == self._model_name else ", unload it first, or send load_inplace"
            )
            raise RequestError(
                f"{what} has the name {shown(name)} already; {fix}",
                param="lora_name",
                code="name_taken",
                status=409,
            )
        most = self._config.max_loaded_loras
        if name not in self._by_name and len(self._by_name) >= most:
            raise RequestError(
                f"{len(self._by_name)} adapters are loaded, the limit is {most}; unload one, or raise "
                "--max-loaded-loras",
                code="too_many_adapters",
                status=409,
            )

    def _known(self) -> str:
        names = list(self._by_name)
        if not names:
            return "there are none"
        more = f" and {len(names) - _MAX_SHOWN_NAMES} more" if len(names) > _MAX_SHOWN_NAMES else ""
        return "the adapters are " + ", ".join(names[:_MAX_SHOWN_NAMES]) + more
