"""`weights_fingerprint`: shows whether two machines hold the same weights, without reading them in full.

Two checkpoints of one architecture have equal configurations and equal shapes. Ranks that load parts of different
checkpoints would compute wrong results without an error. The fingerprint covers the size and a few pieces of each file.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from typing import Final

from ...models.gguf.gguf_split import parts_of
from ...models.weight_files.safetensors_header import weight_files

_NUM_PIECES: Final = 8  # of each file: a model of 100 files costs 800 reads
_PIECE_BYTES: Final = 4096


def weights_fingerprint(path: Path, load_format: str) -> str:
    """Fingerprint of the files that are loaded; of the load format alone for dummy weights.

    Args:
        path: a folder with safetensors files, or a GGUF file, of a split model the first part.

    Raises:
        ConfigError: files are missing.
        OSError: a file cannot be read.
    """
    digest = blake2b(load_format.encode(), digest_size=16)
    if load_format != "dummy":
        for file in parts_of(path) if path.is_file() else weight_files(path):
            _add_pieces(file, digest)
    return digest.hexdigest()


def _add_pieces(path: Path, digest: blake2b) -> None:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        for idx in range(_NUM_PIECES):
            start = max(0, size - _PIECE_BYTES) * idx // (_NUM_PIECES - 1)  # from the header to the end
            digest.update(os.pread(file.fileno(), _PIECE_BYTES, start))
