"""`ReasoningFamily`: the markers around the reasoning of a family of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """The markers, as the model writes them.

    Attributes:
        name: that `--reasoning-parser` takes.
        empty_end: what ends an empty block, and is followed by the answer.
        repeats: an answer may have several blocks.
    """

    name: str
    begin: str
    end: str
    empty_end: str
    repeats: bool = False


HARMONY_REASONING: Final = ReasoningFamily(
    "harmony", "<|channel|>analysis<|message|>", "<|end|>", "<|end|><|start|>assistant", repeats=True
)

REASONING_FAMILIES: Final[dict[str, ReasoningFamily]] = {
    family.name: family
    for family in (
        ReasoningFamily("think", "<think>", "</think>", "\n\n</think>\n\n"),
        ReasoningFamily("magistral", "[THINK]", "[/THINK]", "[/THINK]"),
        HARMONY_REASONING,
        ReasoningFamily("seed_oss", "<seed:think>", "</seed:think>", "</seed:think>"),
        ReasoningFamily("command_a", "<|START_THINKING|>", "<|END_THINKING|>", "<|END_THINKING|>"),
        ReasoningFamily("kimi_vl", "◁think▷", "◁/think▷", "◁/think▷"),
        ReasoningFamily(
            "granite",
            "Here is my thought process:",
            "Here is my response:",
            "\n\nHere is my response:",
        ),
    )
}
