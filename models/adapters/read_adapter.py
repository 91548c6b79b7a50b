"""`read_adapter`: reads the facts about one LoRA adapter from its files and checks them against the base model.

Only headers are read and checked; the model runner reads the tensors (`model_runner.adapters`), and the bytes of the
file are read once more for the fingerprint.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ...runtime.adapter_spec import WEIGHTS_FILE, AdapterModule, AdapterSpec
from ...runtime.errors import ConfigError
from .base_modules import BaseModules
from .peft_folder import CONFIG_FILE, check_files, peft_modules

if TYPE_CHECKING:
    from ..spec.model_spec import ModelSpec

MAX_RANK: Final = 512
"""The largest rank that any server accepts."""
_MAX_NAME_CHARS: Final = 256
_PIECE_BYTES: Final = 1 << 20


def read_adapter(
    path: str | os.PathLike[str],
    name: str,
    base: ModelSpec,
    *,
    max_rank: int | None = None,
    root: Path | None = None,
) -> AdapterSpec:
    """Read an adapter's headers, check it against the base model, and hash its content.

    Args:
        path: a folder as peft writes it, or a GGUF file.
        max_rank: the largest rank that the server has memory for; None: `MAX_RANK`.
        root: the folder that the path may not leave, also not through links; None: any path.

    Raises:
        ConfigError: a file is missing, truncated or damaged; or the adapter is of a kind or shape that cannot be
            applied to this model. The message has tensor or field, value, rule and a fix.
    """
    from ..gguf.gguf_file import is_gguf  # with numpy: not needed by processes that only pass adapters on
    from .gguf_adapter import gguf_modules

    check_name(name)
    found = _inside(Path(path), root)
    modules_of = BaseModules(base)
    if found.is_dir():
        check_files(found)
        _inside(found / CONFIG_FILE, root)
        weights = _inside(found / WEIGHTS_FILE, root)
        modules = peft_modules(found, modules_of)
    elif is_gguf(found):
        weights = found
        modules = gguf_modules(found, base, modules_of)
    else:
        raise ConfigError(
            f"{found}: neither a folder with adapter_config.json and {WEIGHTS_FILE} nor a GGUF file; "
            "give the folder that peft's save_pretrained wrote"
        )
    _check_ranks(found, modules, MAX_RANK if max_rank is None else max_rank)
    return AdapterSpec(
        name,
        str(found),
        adapter_fingerprint(weights, modules),
        max(module.rank for module in modules),
        weights.stat().st_size,
        modules,
    )


def check_name(name: str) -> None:
    """Check that a name can be sent in requests and shown in paths of an API.

    Raises:
        ConfigError: it is empty, too long, or has a separator or a character that is not printable.
    """
    if not name or len(name) > _MAX_NAME_CHARS:
        raise ConfigError(
            f"an adapter's name has {len(name)} characters, it must have 1 to {_MAX_NAME_CHARS}; choose another name"
        )
    if any(char in "/\\:=" or not char.isprintable() for char in name) or name in (".", ".."):
        raise ConfigError(
            f"{name!r} cannot be an adapter's name: it must be printable, without '/', '\\', ':' and '='; "
            "choose another name"
        )


def adapter_fingerprint(weights: Path, modules: tuple[AdapterModule, ...]) -> str:
    """Hash of the file's bytes, and of what the configuration makes of them.

    Raises:
        ConfigError: the file cannot be read.
    """
    digest = blake2b(msgspec.msgpack.encode(modules), digest_size=16)
    try:
        with weights.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise ConfigError(f"{weights}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _inside(path: Path, root: Path | None) -> Path:
    """The path without links, which must exist, and be inside of `root`."""
    try:
        found = path.resolve(strict=True)
        allowed = None if root is None else root.resolve(strict=True)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: a loop of links; ValueError: a null byte
        raise ConfigError(f"{path}: no such adapter ({error}); check the path") from error
    if allowed is not None and not found.is_relative_to(allowed):
        raise ConfigError(
            f"{path}: leads to {found}, outside of {allowed}; adapters are read only from there: move it there, "
            "or start the server with another --lora-root"
        )
    return found


def _check_ranks(path: Path, modules: tuple[AdapterModule, ...], max_rank: int) -> None:
    for module in modules:
        if module.rank > max_rank:
            raise ConfigError(
                f"{path}: {module.name} has rank {module.rank}, the maximum is {max_rank}; "
                "start the server with a larger --max-lora-rank"
            )
