"""The checks of `--kv-disk` and `--kv-store`: whether they can be used, their speed, and what a prefix costs there."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...launch.resolve.memory_budget import size_text
from ...runtime.config.engine_config import CacheConfig
from ...runtime.config.kv_store_address import parse_kv_store
from ...runtime.errors import ConfigError
from .check import Check, ok, refused

PREFIX_TOKENS: Final = 4000
_MEASURED_S: Final = 1.0
"""Seconds of writing, and of reading."""
_PIECE_BYTES: Final = 4 << 20
_MOST_BYTES: Final = 256 << 20


def check_disk(root: Path, limit_bytes: int, kv_token_bytes: int) -> Check:
    """Check the folder, and measure its disk for 2 s; a folder that was not there is not left there.

    Args:
        limit_bytes: of `--kv-disk-size`.
        kv_token_bytes: KV of a token; 0: the model is not known.
    """
    from ...scheduler.kv_stores.segment_store import check_folder

    is_new = not root.exists()
    try:
        check_folder(root, limit_bytes)
        write_rate, read_rate = measure_disk(root)
    except ConfigError as error:
        return refused("kv_disk", str(error))
    except OSError as error:
        return refused("kv_disk", f"{root}: {error.strerror}; name another folder with --kv-disk")
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                root.rmdir()
    return _speeds("kv_disk", str(root), write_rate, read_rate, kv_token_bytes)


def check_kv_store(cache: CacheConfig, kv_token_bytes: int) -> Check:
    """Check the server and the key file, and measure both directions for a second each; leaves nothing there."""
    from ...scheduler.kv_stores.page_store import StoreError
    from ...scheduler.kv_stores.remote_store import Seal, open_client, read_key
    from ...scheduler.kv_stores.store_client import WritesRefusedError

    assert cache.kv_store is not None
    address = parse_kv_store(cache.kv_store)
    name, piece = f"engine:kv:doctor:{os.urandom(8).hex()}", random.Random(0).randbytes(_PIECE_BYTES)
    try:
        if cache.kv_store_key is not None:
            Seal(read_key(Path(cache.kv_store_key).expanduser()))
        client = open_client(address)
    except ConfigError as error:
        return refused("kv_store", str(error))

    names: list[str] = []

    def put(offset: int) -> int:
        names.append(f"{name}:{offset}")
        client.put(names[-1:], [piece])
        return _PIECE_BYTES

    try:
        _, write_rate = _rate(put)
        read, read_rate = _rate(lambda _offset: len(client.get(names[:1], _PIECE_BYTES)[0] or b""))
        if not read:
            raise StoreError("it loses what is written")
    except (StoreError, WritesRefusedError) as error:
        return refused("kv_store", f"{address}: {error}; name another server with --kv-store")
    finally:
        with contextlib.suppress(StoreError):
            for each in names:
                client.remove(each)
        client.close()
    return _speeds("kv_store", str(address), write_rate, read_rate, kv_token_bytes)


def _speeds(code: str, place: str, write_rate: float, read_rate: float, kv_token_bytes: int) -> Check:
    text = f"{place}: writes {size_text(int(write_rate))}/s, reads {size_text(int(read_rate))}/s"
    seconds: dict[str, float] = {}
    if kv_token_bytes:
        num_bytes = PREFIX_TOKENS * kv_token_bytes
        seconds = {"store_s": num_bytes / write_rate, "load_s": num_bytes / read_rate}
        text += (
            f"; a prefix of {PREFIX_TOKENS:,} tokens is {size_text(num_bytes)}: {seconds['store_s']:.2f} s to store, "
            f"{seconds['load_s']:.2f} s to load"
        )
    return ok(code, text, write_bytes_per_s=int(write_rate), read_bytes_per_s=int(read_rate), **seconds)


def measure_disk(root: Path) -> tuple[float, float]:
    """Bytes a second that are written to the disk, and read from it and not from memory.

    Raises:
        OSError: the folder cannot be written, or is full.
    """
    piece = random.Random(0).randbytes(_PIECE_BYTES)  # a disk may compress
    with tempfile.TemporaryFile(dir=root) as file:
        fd = file.fileno()

        def write(offset: int) -> int:
            count = os.pwrite(fd, piece, offset)
            os.fdatasync(fd)
            return count

        written, write_rate = _rate(write)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        _, read_rate = _rate(lambda offset: len(os.pread(fd, min(_PIECE_BYTES, written - offset), offset)))
    return write_rate, read_rate


def _rate(move: Callable[[int], int]) -> tuple[int, float]:
    """Bytes that `move` moves from offset to offset, for `_MEASURED_S` at most or to the end; and bytes a second."""
    started_s = time.monotonic()
    done, seconds = 0, 0.0
    while done < _MOST_BYTES and seconds < _MEASURED_S and (count := move(done)):
        done += count
        seconds = time.monotonic() - started_s
    return done, done / max(seconds, 1e-9)
