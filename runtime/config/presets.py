"""Presets: settings for a kind of load, each with its reason; `--preset chat`.

A preset is a layer of its own, directly above the defaults: values from file, environment, flags or arguments override
it. It only sets values that are right on every device; sizes that depend on the device (chunk, KV pool) stay "auto"
unless the kind of load needs another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, get_args

from .engine_config import PresetName


class PresetValue(NamedTuple):
    """One setting of a preset, and the reason for its value."""

    value: object
    reason: str


PRESETS: Final[Mapping[str, Mapping[str, PresetValue]]] = {
    # Users wait for each token, and each turn repeats the conversation so far as a longer prompt.
    "chat": {
        "schedule_policy": PresetValue("fcfs", "later requests never overtake, whatever is cached"),
        "phases": PresetValue("mixed", "running requests decode while other prompts are prefilled"),
        "chunked_prefill_size": PresetValue(512, "a long prompt does not stall running requests"),
        "max_num_partial_prefills": PresetValue(4, "short prompts are prefilled beside a long one"),
        "eviction_policy": PresetValue("slru", "conversations that continue outlive single questions"),
    },
    # Long prompts with common documents, short answers: prefill is most of the work, and much of it repeats.
    "rag": {
        "schedule_policy": PresetValue("lpm", "questions about one document run while it is cached"),
        "phases": PresetValue("mixed", "short answers do not delay the next prompts"),
        "max_num_partial_prefills": PresetValue(4, "short prompts are prefilled beside long ones"),
        "look_ahead": PresetValue(64, "smaller prompts may overtake one that lacks memory"),
        "eviction_policy": PresetValue("slru", "documents used twice outlive those used once"),
        "pin_fraction": PresetValue(0.5, "capacity to pin the instructions and documents of every prompt"),
    },
    # Coding agents: long prompts that grow by a tool's result each, and more agents than the pool holds.
    "agents": {
        "schedule_policy": PresetValue("lpm", "a turn runs before its cached history is evicted"),
        "phases": PresetValue("mixed", "running requests decode while other prompts are prefilled"),
        "max_num_partial_prefills": PresetValue(4, "short turns are prefilled beside long ones"),
    },
    # Offline work: only tokens per second count, and thousands of requests wait from the start.
    "batch": {
        "schedule_policy": PresetValue("fcfs", "its cost does not grow with the queue"),
        "phases": PresetValue("mixed", "every step is full"),
        "target_step_ms": PresetValue(0.0, "latency does not matter, full chunks compute a little faster"),
        "max_running_requests": PresetValue(512, "weights are read once per step for all running requests"),
        "max_queued_requests": PresetValue(1_000_000, "the whole batch may be sent at once"),
        "schedule_conservativeness": PresetValue(0.5, "a retraction costs less than unused memory"),
        "look_ahead": PresetValue(64, "smaller requests fill the memory that a large one cannot use"),
    },
    # First-token latency and decode rate of each request count more than throughput: refuse rather than queue.
    "latency": {
        "schedule_policy": PresetValue("priority", "urgent requests go first; equals in order of arrival"),
        "phases": PresetValue("decode-first", "running requests take their tokens of every step first"),
        "chunked_prefill_size": PresetValue(256, "steps stay short even during a prefill"),
        "max_num_partial_prefills": PresetValue(4, "a short prompt is prefilled beside a long one"),
        "max_running_requests": PresetValue(16, "each further request makes every step longer"),
        "max_queued_requests": PresetValue(64, "further requests get 429 at once instead of a long wait"),
        "schedule_conservativeness": PresetValue(1.4, "a retraction pauses an answer in the middle"),
    },
}
assert set(PRESETS) == set(get_args(PresetName))


def preset_reasons(preset: str | None, origins: Mapping[str, str]) -> dict[str, str]:
    """Setting -> the reason for its value, for the settings that have it from the preset.

    Args:
        preset: the chosen preset.
        origins: setting -> where its value was written.
    """
    chosen = PRESETS[preset] if preset is not None else {}
    return {
        name: value.reason
        for name, value in chosen.items()
        if origins[name] == preset_origin(str(preset))  # values that the user set are not the preset's
    }


def preset_origin(preset: str) -> str:
    """The origin of a preset's values: `preset chat`."""
    return f"preset {preset}"
