"""`ReasoningFamily`: the markers that a family of models writes around its reasoning and its answer.

Parser, detection and the counter of reasoning tokens read the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .families import HARMONY_MARKERS


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """The markers, as the model writes them.

    Attributes:
        name: that `--reasoning-parser` takes.
        empty_end: what ends an empty block, and is followed by the answer.
        repeats: an answer may have several blocks.
        answer_marks: around the answer after the block; not a part of it.
        tokens: of the model that are parts of the markers.
    """

    name: str
    begin: str
    end: str
    empty_end: str
    repeats: bool = False
    answer_marks: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()


HARMONY_REASONING: Final = ReasoningFamily(
    "harmony",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|end|><|start|>assistant",
    repeats=True,
    tokens=HARMONY_MARKERS,
)

REASONING_FAMILIES: Final[dict[str, ReasoningFamily]] = {
    family.name: family
    for family in (
        ReasoningFamily(
            "granite33",
            "<think>",
            "</think>",
            "\n\n</think>\n\n",
            answer_marks=("<response>", "</response>"),
        ),
        ReasoningFamily("think", "<think>", "</think>", "\n\n</think>\n\n"),
        ReasoningFamily("magistral", "[THINK]", "[/THINK]", "[/THINK]"),
        HARMONY_REASONING,
        ReasoningFamily("seed_oss", "<seed:think>", "</seed:think>", "</seed:think>"),
        ReasoningFamily(
            "cohere2_moe",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|END_THINKING|>",
            answer_marks=("<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        ReasoningFamily(
            "command_a",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|END_THINKING|>",
            answer_marks=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        ReasoningFamily("kimi_vl", "◁think▷", "◁/think▷", "◁/think▷"),
        ReasoningFamily(
            "granite",
            "Here is my thought process:",
            "Here is my response:",
            "\n\nHere is my response:",
        ),
        ReasoningFamily(
            "gemma4",
            "<|channel>thought",
            "<channel|>",
            "\n<channel|>",
            tokens=("<|channel>", "<channel|>"),
        ),
        ReasoningFamily("apertus", "<|inner_prefix|>", "<|inner_suffix|>", "<|inner_suffix|>"),
        ReasoningFamily(
            "apriel",
            "Here are my reasoning steps:",
            "[BEGIN FINAL RESPONSE]",
            "\n\n[BEGIN FINAL RESPONSE]\n",
            answer_marks=("[END FINAL RESPONSE]",),
        ),
    )
}
