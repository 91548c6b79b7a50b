"""`AdapterConfig`, a group of `EngineConfig`: LoRA adapters, and the memory for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from ..errors import ConfigError
from .setting_declaration import Alias, check_at_least

MAX_LORA_RANK: Final = 512
ALL_LINEAR: Final = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """LoRA adapters."""

    lora: Annotated[
        tuple[str, ...],
        "LoRA adapter as NAME=PATH, a folder of peft's or a GGUF file; may be repeated. Requests choose it with model.",
        Alias("lora_paths"),
        Alias("lora_modules"),
    ] = ()
    enable_lora: Annotated[
        bool, "Reserve memory for adapters, also without --lora, so that they can be loaded later."
    ] = False
    allow_runtime_lora: Annotated[
        bool, "Let admins load adapters from --lora-root, and unload them, while the server runs."
    ] = False
    lora_root: Annotated[
        str | None,
        "Folder of the adapters that may be loaded at run time; required for --allow-runtime-lora.",
    ] = None
    max_lora_rank: Annotated[
        int | Literal["auto"],
        "Largest rank of an adapter; auto: of those given with --lora, at least 16 if more can be loaded.",
    ] = "auto"
    max_loaded_loras: Annotated[
        int,
        "Most adapters in host memory; further ones are refused until one is unloaded.",
        Alias("max_cpu_loras"),
    ] = 1024
    lora_target_modules: Annotated[
        tuple[str, ...],
        "Modules that adapters may change, such as q_proj, or experts; all-linear: all linear layers but these and the "
        "output head. Not given: those of the adapters of --lora, all-linear if more can be loaded. May be repeated.",
    ] = ()

    def __post_init__(self) -> None:
        check_at_least("max_loaded_loras", self.max_loaded_loras, 1)
        if self.max_lora_rank != "auto":
            check_at_least("max_lora_rank", self.max_lora_rank, 1)
            if self.max_lora_rank > MAX_LORA_RANK:
                raise ConfigError(
                    f"max_lora_rank is {self.max_lora_rank}, but it must be at most {MAX_LORA_RANK}"
                )
        names = [name for name, _ in self.named_paths]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"lora names {name!r} twice; give each adapter a name of its own")
        if len(names) > self.max_loaded_loras:
            raise ConfigError(
                f"lora has {len(names)} adapters, but max_loaded_loras is {self.max_loaded_loras}; raise it"
            )
        if self.allow_runtime_lora and self.lora_root is None:
            raise ConfigError(
                "allow_runtime_lora is on, but lora_root is not set: clients name paths, and adapters are read only "
                "from below a folder; set lora_root"
            )

    @property
    def is_enabled(self) -> bool:
        """Whether the server has memory for adapters."""
        return self.enable_lora or self.allow_runtime_lora or bool(self.lora)

    @property
    def can_load_more(self) -> bool:
        """Whether adapters may be loaded after the start."""
        return self.enable_lora or self.allow_runtime_lora

    @property
    def named_paths(self) -> list[tuple[str, str]]:
        """Name and path of each adapter of `lora`.

        Raises:
            ConfigError: an entry is of another form.
        """
        pairs = []
        for entry in self.lora:
            name, separator, path = entry.partition("=")
            if not separator or not name or not path:
                raise ConfigError(f"lora is {entry!r}, but it must be NAME=PATH, such as sql=./adapters/sql")
            pairs.append((name, path))
        return pairs
