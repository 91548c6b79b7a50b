"""Choices of a user about a model: its task, how it pools, how its weights are quantized."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

TaskName = Literal["auto", "generate", "embed", "score"]
PoolingType = Literal["cls", "mean", "last"]
"""Which hidden states become the vector: the first token's, the mean of all, or the last token's."""
QuantMethod = Literal[
    "fp8",
    "awq",
    "gptq",
    "compressed-tensors",
    "nvfp4",
    "mxfp4",
    "bitsandbytes",
    "torchao",
    "mixed",
    "mlx",
    "gguf",
    "int8",
    "int4",
]
Quantization = Literal[QuantMethod, "none"]
"""The values of `--quantization`."""


class TaskChoice(NamedTuple):
    """Task that the user asks of a model.

    Attributes:
        task: "auto": what the model's files say.
        pooling: None: what the model's files say. For embed.
        any_dimensions: vectors may be cut to any length. For embed.
        language_only: towers of the files are left out.
    """

    task: TaskName = "auto"
    pooling: PoolingType | None = None
    any_dimensions: bool = False
    language_only: bool = False


NO_CHOICE: Final = TaskChoice()
