"""Presets: settings for a kind of load, each with its reason; `--preset chat`.

A preset is a layer of its own, right above the defaults: whatever file, environment, flags or arguments set wins over
it. It only sets what would be right on every device; sizes that depend on the device (chunk, KV pool) stay "auto"
unless the load itself asks for another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, get_args

from .engine_config import PresetName


class PresetValue(NamedTuple):
    """One setting of a preset, and why it has this value."""

    value: object
    reason: str


PRESETS: Final[Mapping[str, Mapping[str, PresetValue]]] = {
    # People wait for each token and come back with the same beginning, longer each time.
    "chat": {
        "schedule_policy": PresetValue("fcfs", "no turn waits behind later ones, whatever is cached"),
        "phases": PresetValue("mixed", "answers go on while others' prompts are read"),
        "chunked_prefill_size": PresetValue(512, "a pasted document makes no answer pause for long"),
        "max_num_partial_prefills": PresetValue(4, "short turns are read beside a long document"),
        "eviction_policy": PresetValue("slru", "conversations that came back outlive single questions"),
    },
    # Long prompts with common documents, short answers: reading prompts is most of the work, and much of it repeats.
    "rag": {
        "schedule_policy": PresetValue("lpm", "questions about one document run while it is cached"),
        "phases": PresetValue("mixed", "short answers do not hold up the next prompts"),
        "max_num_partial_prefills": PresetValue(4, "a short question is read beside long documents"),
        "look_ahead": PresetValue(64, "a prompt that lacks memory lets smaller ones pass"),
        "eviction_policy": PresetValue("slru", "documents asked for twice outlive those asked for once"),
        "pin_fraction": PresetValue(0.5, "room to pin the instructions and documents of every prompt"),
    },
    # Nobody watches: only tokens per second count, and thousands of requests wait from the start.
    "batch": {
        "schedule_policy": PresetValue("fcfs", "costs nothing however many wait"),
        "phases": PresetValue("mixed", "every step is full"),
        "target_step_ms": PresetValue(0.0, "nobody reads along, and full chunks compute a little faster"),
        "max_running_requests": PresetValue(512, "weights are read once per step, for as many as fit"),
        "max_queued_requests": PresetValue(1_000_000, "the whole batch may be sent at once"),
        "schedule_conservativeness": PresetValue(0.5, "a retraction costs less than memory left empty"),
        "look_ahead": PresetValue(64, "smaller requests fill the memory that a large one cannot use"),
    },
    # First token and pace of each answer count more than how many are served: better refuse than keep waiting.
    "latency": {
        "schedule_policy": PresetValue("priority", "urgent requests go first; equals in order of arrival"),
        "phases": PresetValue("decode-first", "running answers have the first claim on every step"),
        "chunked_prefill_size": PresetValue(256, "a step is short even while a prompt is read"),
        "max_num_partial_prefills": PresetValue(4, "a short prompt is read beside a long one"),
        "max_running_requests": PresetValue(16, "each further request makes every step longer"),
        "max_queued_requests": PresetValue(64, "a long queue is told by 429 at once"),
        "schedule_conservativeness": PresetValue(1.4, "a retraction is a pause in the middle of an answer"),
    },
}
assert set(PRESETS) == set(get_args(PresetName))


def preset_reasons(preset: str | None, origins: Mapping[str, str]) -> dict[str, str]:
    """Setting -> why it has its value, for those that have it from the preset.

    Args:
        preset: the one that was chosen.
        origins: setting -> where its value was written.
    """
    chosen = PRESETS[preset] if preset is not None else {}
    return {
        name: value.reason
        for name, value in chosen.items()
        if origins[name] == preset_origin(str(preset))  # what the user set is not the preset's doing
    }


def preset_origin(preset: str) -> str:
    """The origin of what a preset sets: `preset chat`."""
    return f"preset {preset}"
