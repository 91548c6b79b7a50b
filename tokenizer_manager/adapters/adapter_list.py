"""`AdapterList`: the LoRA adapters by name, and the checks of a new one.

The registry of a server and `LLM` each have one and are its only writer. It does no input or output besides reading
headers in `read`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...models.adapters.read_adapter import check_name, read_adapter
from ...runtime.adapter_spec import AdapterSpec, LoadedAdapter
from ...runtime.errors import ConfigError, RequestError
from ...runtime.request_checks import shown

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ...runtime.config.adapter_config import AdapterConfig

_MAX_SHOWN_NAMES: Final = 20


class AdapterList:
    """See the module. Names are in the order in which they were loaded.

    An adapter without a name stays stored while requests use it. One of equal weights that is loaded meanwhile shares
    its store id.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: AdapterConfig,
        adapters: Iterable[LoadedAdapter] = (),
        *,
        model_name: str = "",
        first_store_id: int = 0,
    ) -> None:
        """Begin with the adapters of the start.

        Args:
            spec: of the base model.
            config: resolved.
            adapters: the list of the supervisor.
            model_name: of the base model, which no adapter may have.
            first_store_id: ids of further adapters come after it and after those of `adapters`.
        """
        self._spec = spec
        self._config = config
        self._by_name = {adapter.spec.name: adapter for adapter in adapters}
        self._stored = {each.spec.fingerprint: each.store_id for each in self._by_name.values()}
        self._last_store_id = max(first_store_id, *self._stored.values(), 0)
        self._model_name = model_name

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """All adapters."""
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

    def check_new(
        self, name: str, *, replace: bool, leaving: Collection[str] = (), replace_hint: str, param: str
    ) -> None:
        """Check that an adapter may be loaded under a name.

        Args:
            replace: the name may be taken.
            leaving: names whose adapters are being unloaded: they count as taken.
            replace_hint: how a caller asks for `replace`.
            param: the field or argument with the name.

        Raises:
            RequestError: the name is no name, or is taken, or there are too many adapters.
        """
        try:
            check_name(name)
        except ConfigError as error:
            raise RequestError(str(error), param=param, code="invalid_value") from None
        if name == self._model_name:
            raise self._taken(
                f"the model has the name {shown(name)} already; choose another one for the adapter", param
            )
        if name in leaving:
            raise self._taken(f"the adapter {shown(name)} is being unloaded; try again when it is", param)
        if name in self._by_name:
            if replace:
                return
            raise self._taken(
                f"an adapter has the name {shown(name)} already; choose another one, unload it first, or "
                f"{replace_hint}",
                param,
            )
        num, most = len(self._by_name) + len(leaving), self._config.max_loaded_loras
        if num >= most:
            raise RequestError(
                f"{num} adapters are loaded, the limit is {most}; unload one, or raise --max-loaded-loras",
                code="too_many_adapters",
                status=409,
            )

    @staticmethod
    def _taken(message: str, param: str) -> RequestError:
        return RequestError(message, param=param, code="name_taken", status=409)

    def read(self, name: str, path: str | Path, param: str) -> AdapterSpec:
        """The adapter in a file, if it fits the model; reads headers, and the whole file for the fingerprint.

        Args:
            path: below `--lora-root` if there is one; relative ones are relative to it.
            param: the field or argument with the path.

        Raises:
            RequestError: it is broken, or does not fit the model.
        """
        root = None if self._config.lora_root is None else Path(self._config.lora_root).expanduser()
        max_rank = self._config.max_lora_rank
        assert max_rank != "auto", "the configuration is not resolved"
        found = Path(path).expanduser() if root is None else root / path
        try:
            return read_adapter(found, name, self._spec, max_rank=max_rank, root=root)
        except ConfigError as error:
            raise RequestError(str(error), param=param, code="invalid_adapter") from None

    def stored_id(self, spec: AdapterSpec) -> int | None:
        """The store id of an adapter of equal weights, if there is one."""
        return self._stored.get(spec.fingerprint)

    def new_store_id(self) -> int:
        """A store id that no other adapter has or had."""
        self._last_store_id += 1
        return self._last_store_id

    def add(self, store_id: int, spec: AdapterSpec, *, pinned: bool) -> LoadedAdapter:
        """Name a stored adapter; another one may lose this name."""
        self._stored[spec.fingerprint] = store_id
        added = self._by_name[spec.name] = LoadedAdapter(store_id, spec, pinned)
        return added

    def put_back(self, adapter: LoadedAdapter) -> None:
        """Undo a `remove`."""
        self._by_name[adapter.spec.name] = adapter

    def remove(self, adapter: LoadedAdapter) -> None:
        """Take an adapter's name; the adapter stays stored."""
        del self._by_name[adapter.spec.name]

    def is_named(self, adapter: LoadedAdapter) -> bool:
        """Whether a name leads to these weights."""
        return any(each.store_id == adapter.store_id for each in self._by_name.values())

    def take_unnamed(self, adapter: LoadedAdapter) -> bool:
        """Whether an adapter is stored without a name; from now on it is not stored, so drop its weights."""
        if self._stored.get(adapter.spec.fingerprint) != adapter.store_id or self.is_named(adapter):
            return False
        del self._stored[adapter.spec.fingerprint]
        return True

    def _known(self) -> str:
        names = list(self._by_name)
        if not names:
            return "there are none"
        more = f" and {len(names) - _MAX_SHOWN_NAMES} more" if len(names) > _MAX_SHOWN_NAMES else ""
        return "the adapters are " + ", ".join(names[:_MAX_SHOWN_NAMES]) + more
