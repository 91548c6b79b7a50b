"""`LocalAdapters`: the LoRA adapters of an `LLM`: their names, and loads and unloads between calls."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..runtime.errors import RequestError
from ..runtime.messages import AdapterDone, LoadAdapter, UnloadAdapter
from ..runtime.request_checks import check_flag, check_text, plain, shown, wrong_type
from ..tokenizer_manager.adapters.adapter_list import AdapterList

if TYPE_CHECKING:
    from ..launch.resolve.prepare import Prepared
    from ..runtime.adapter_spec import AdapterSpec, LoadedAdapter
    from .engine import EngineThread


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that calls can name.

    Attributes:
        name: for the option `lora`.
        path: its folder or file.
        rank: the largest rank of its modules.
        fingerprint: hash of its weights; equal for equal adapters.
    """

    name: str
    path: str
    rank: int
    fingerprint: str


class LocalAdapters:
    """See the module. Used from any thread."""

    def __init__(self, engine: EngineThread, prepared: Prepared) -> None:
        self._engine = engine
        self._is_enabled = prepared.config.adapters.is_enabled
        self._list = AdapterList(
            prepared.spec, prepared.config.adapters, prepared.adapters, model_name=prepared.model_name
        )
        self._lock = threading.Lock()
        self._replaced: list[LoadedAdapter] = []  # without a name; requests may still use them

    @property
    def adapters(self) -> list[Adapter]:
        """In the order in which they were loaded."""
        return [_shown(each.spec) for each in self._list.adapters]

    def lora_id(self, name: str | None) -> str:
        """The fingerprint of an adapter; "" without a name.

        Raises:
            RequestError: there is no such adapter; the message has the names.
        """
        if not name:
            return ""
        try:
            return self._list.required(name, "lora").spec.fingerprint
        except RequestError as error:
            if self._is_enabled:
                raise
            raise self._disabled(error.message) from None

    def load(self, name: str, path: str | os.PathLike[str], *, replace: bool) -> Adapter:
        check_text("name", plain(name))
        if not isinstance(path, str | os.PathLike):
            raise wrong_type("path", path, "the path of a folder or a file", has_default=False)
        check_flag("replace", replace)
        if not self._is_enabled:
            raise self._disabled("there is no memory for adapters")
        with self._lock:
            self._drop_replaced()
            self._list.check_new(name, replace=replace, replace_hint="pass replace=True", param="name")
            spec = self._list.read(name, os.fspath(path), "path")
            store_id = self._list.stored_id(spec)
            if store_id is None:
                store_id = self._list.new_store_id()
                done = self._engine.call(LoadAdapter(store_id, spec), AdapterDone)
                if done.error:
                    raise RequestError(done.error, param="path", code="invalid_adapter")
            old = self._list.find(name)
            self._list.add(store_id, spec, pinned=False)
            if old is not None:
                self._replaced.append(old)
                self._drop_replaced()
        return _shown(spec)

    def unload(self, name: str, *, force: bool) -> None:
        check_text("name", plain(name))
        check_flag("force", force)
        with self._lock:
            self._drop_replaced()
            adapter = self._list.required(name, "name")
            self._list.remove(adapter)
            if self._list.is_named(adapter):
                return
            num = self._engine.num_users(adapter.spec.fingerprint)
            if num and not force:
                self._list.put_back(adapter)
                who, them = (
                    ("1 request still uses", "it") if num == 1 else (f"{num} requests still use", "them")
                )
                raise RequestError(
                    f"{who} the adapter {shown(name)}; let {them} end first, or pass force=True to end {them}",
                    param="name",
                    code="adapter_in_use",
                    status=409,
                )
            if self._list.take_unnamed(adapter):
                self._engine.call(UnloadAdapter(adapter.store_id), AdapterDone)

    def _drop_replaced(self) -> None:
        """Drop the weights of replaced adapters that no request uses any more."""
        still_used = []
        for adapter in self._replaced:
            if self._list.is_named(adapter):
                continue
            if self._engine.num_users(adapter.spec.fingerprint):
                still_used.append(adapter)
            elif self._list.take_unnamed(adapter):
                self._engine.call(UnloadAdapter(adapter.store_id), AdapterDone)
        self._replaced = still_used

    @staticmethod
    def _disabled(reason: str) -> RequestError:
        return RequestError(
            f"{reason}; make the LLM with lora=['NAME=PATH'], or with enable_lora=True to load adapters later",
            param="lora",
            code="adapters_fixed",
            status=403,
        )


def _shown(spec: AdapterSpec) -> Adapter:
    return Adapter(spec.name, spec.path, spec.rank, spec.fingerprint)
