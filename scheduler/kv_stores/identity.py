"""Identity of KV that outlives a process: the facts it depends on besides tokens.

Equal identities have equal KV for equal tokens: the weights enter by content, so a folder may be renamed or moved, and
no path or version is in it. `FORMAT` is raised when a release computes KV in another way.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...models.gguf.gguf_split import parts_of
from ...models.weight_files.safetensors_header import weight_files
from ..prefix_cache.base import split_namespace
from ..prefix_cache.tier_pages import DIGEST_BYTES, digest_of

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ...runtime.config.engine_config import EngineConfig

logger = logging.getLogger(__name__)

FORMAT: Final = 1

_FRESH_NS: Final = 2_000_000_000
_PIECE_BYTES: Final = 16 << 20
"""Of weights. A thread of low priority must seldom hold the interpreter lock, for which the scheduler would wait."""


def kv_facts(
    config: EngineConfig,
    spec: ModelSpec,
    tensors: Sequence[tuple[str, int]],
    *,
    max_model_len: int,
    build: Mapping[str, str],
) -> dict[str, Any]:
    """Facts that KV depends on besides tokens and weights, by name; JSON can hold them.

    Args:
        config: resolved.
        tensors: (dtype, bytes of a page) of each tensor of the KV pool, in order; then of the states, if there are; of
            the ranks one after the other.
        max_model_len: of the capacity.
        build: `build_facts` of the runner.
    """
    model = config.model
    return {
        "format": FORMAT,
        "model_type": spec.model_type,
        "configuration": blake2b(msgspec.json.encode(spec), digest_size=DIGEST_BYTES).hexdigest(),
        "rope_positions": max_model_len if spec.rope_scaling.kind == "longrope" else None,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "model_impl": model.model_impl,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "page_size": config.cache.page_size,
        "tensors": tensors,
        "ranks": [config.parallel.tp, config.parallel.pp],
        "attention_backend": build["backend"],
        "instruction_set": build["instruction_set"],
        "deterministic": config.kernels.deterministic,
        "avoid_kernels": sorted(config.kernels.avoided),
    }


def identity_of(facts: Mapping[str, Any], weights: str) -> bytes:
    """The identity; `weights`: `weights_content`."""
    return digest_of(msgspec.json.encode({**facts, "weights": weights}, order="deterministic"))


def is_salted(namespace: str) -> bool:
    """Whether a client's salt divides this namespace from others."""
    return bool(split_namespace(namespace)[0])


def state_key(page_key: bytes) -> bytes:
    """The key of the state after a page; no page has it, because pages have whole tokens."""
    return digest_of(page_key + b"state")


# ---------------------------------------------------------------- content of weights


class _KnownFile(msgspec.Struct, frozen=True):
    """The SHA-256 of a file that had this size, modification time (ns) and inode."""

    size: int
    mtime: int
    inode: int
    sha256: str


def weights_content(path: Path, load_format: str, seed: int, memo: Path, tower: str = "") -> str:
    """Digest of the contents of all weight files, in the order in which they are loaded.

    A first look reads all of them, 1.3 GiB/s; `memo` remembers the digest of each file, until it changes.

    Args:
        path: a folder with safetensors files, or a GGUF file, of a split model the first part.
        seed: of dummy weights.
        memo: a JSON file; one that cannot be read is ignored.
        tower: the GGUF file of the model's tower, if it has one.

    Raises:
        ConfigError: files are missing.
        OSError: a file cannot be read.
    """
    if load_format == "dummy":
        return f"dummy weights, seed {seed}"
    files = [*(parts_of(path) if path.is_file() else weight_files(path)), *([Path(tower)] if tower else [])]
    known = _read_memo(memo)
    digests = {str(file.resolve()): _content_of(file.resolve(), known) for file in files}
    # A file that was written just now may be written again without a change of its time.
    lasting = {name: each for name, each in digests.items() if abs(time.time_ns() - each.mtime) > _FRESH_NS}
    if any(known.get(name) != content for name, content in lasting.items()):
        _write_memo(memo, {**known, **lasting})
    return hashlib.sha256("".join(content.sha256 for content in digests.values()).encode()).hexdigest()


def _content_of(file: Path, known: Mapping[str, _KnownFile]) -> _KnownFile:
    """The content of a file; it is read only if it is not the known one."""
    with file.open("rb", buffering=0) as opened:
        stat = os.fstat(opened.fileno())
        facts = stat.st_size, stat.st_mtime_ns, stat.st_ino
        found = known.get(str(file))
        if found is not None and (found.size, found.mtime, found.inode) == facts:
            return found
        digest, piece = hashlib.sha256(), bytearray(_PIECE_BYTES)
        while count := opened.readinto(piece):
            digest.update(memoryview(piece)[:count])
        return _KnownFile(*facts, digest.hexdigest())


def _read_memo(memo: Path) -> dict[str, _KnownFile]:
    try:
        return msgspec.json.decode(memo.read_bytes(), type=dict[str, _KnownFile])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write_memo(memo: Path, known: Mapping[str, _KnownFile]) -> None:
    """Replace the memo at once, so that another engine never reads a part of it."""
    part = memo.with_name(f".{memo.name}.{os.getpid()}")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(known)))
        part.replace(memo)
    except OSError as error:
        logger.warning("%s: the digests of the weights are not kept: %s", memo, error.strerror)
