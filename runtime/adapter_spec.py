"""`AdapterSpec`: the facts about one LoRA adapter, without its tensors. It travels inside messages.

`models.adapters` reads it from an adapter's files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

WEIGHTS_FILE: Final = "adapter_model.safetensors"
"""The file with the tensors of an adapter that peft wrote."""


class AdapterModule(msgspec.Struct, frozen=True):
    """One module. Its output grows by `scale` * B (A x); for the embedding, A has a column for each token.

    Attributes:
        name: the base model's module.
        rank: rows of A, columns of B.
        scale: alpha / rank, or alpha / sqrt(rank).
        a, b: names of the tensors in the file, A [rank, inputs] and B [outputs, rank].
        heads: number of heads whose rows of B are stored in llama.cpp's order, see `model_runner.weights.gguf`; 0: the
            rows are in Hugging Face's order.
        a_is_transposed: A is stored as [inputs, rank].
        num_experts: the tensors are those of a module of each expert, which `name` has as `experts.*`: A
            [experts * rank, inputs], B [outputs, rank * experts] with the experts of a rank side by side. Where
            `a_is_transposed`, both are: A [inputs, rank * experts], B [experts * rank, outputs]. 0: of one.
        rows: start, stop and step of the outputs of such a B that are this module's.
    """

    name: str
    rank: int
    scale: float
    a: str
    b: str
    heads: int = 0
    a_is_transposed: bool = False
    num_experts: int = 0
    rows: tuple[int, int, int] | None = None


class AdapterSpec(msgspec.Struct, frozen=True):
    """One adapter.

    Attributes:
        name: the name that requests ask for; no part of the adapter's identity.
        path: the folder or the GGUF file, without links.
        fingerprint: hash of all that changes the adapter's results; equal for equal adapters with different names.
        rank: the largest rank of its modules.
        num_bytes: size of the file with its tensors.
        modules: the adapted modules.
    """

    name: str
    path: str
    fingerprint: str
    rank: int
    num_bytes: int
    modules: tuple[AdapterModule, ...] = ()

    @property
    def file(self) -> Path:
        """The file with the tensors."""
        path = Path(self.path)
        return path / WEIGHTS_FILE if path.is_dir() else path


class LoadedAdapter(msgspec.Struct, frozen=True):
    """One name of one adapter.

    Attributes:
        store_id: above 0; names of equal adapters share it.
        spec: the adapter, with its name.
        pinned: it came with the start of the server, or was loaded as pinned; it is unloaded only with `force`.
    """

    store_id: int
    spec: AdapterSpec
    pinned: bool = False
