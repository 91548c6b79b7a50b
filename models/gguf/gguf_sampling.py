"""The sampling defaults of a GGUF file: its keys `general.sampling.*`, which llama.cpp writes and reads."""

from __future__ import annotations

from typing import Final

from ...runtime.sampling_defaults import NAMES, SamplingDefaults, checked_defaults
from .gguf_file import GGUFFile

_PREFIX: Final = "general.sampling."
_OWN_KEYS: Final = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_KEYS: Final = {_OWN_KEYS.get(name, name): name for name in NAMES}
_NOT_TAKEN: Final[dict[str, object]] = {
    "mirostat": 0,
    "penalty_freq": 0,
    "penalty_present": 0,
    "sequence": "",
    "xtc_probability": 0,
}
"""Keys that would change the text and are not used -> the value without an effect."""
_FLOAT32_DIGITS: Final = 7


def read_gguf_sampling(file: GGUFFile) -> SamplingDefaults:
    """The sampling defaults in the metadata of `file`.

    The repetition penalty counts over prompt and output; llama.cpp's window of `penalty_last_n` tokens is not
    supported, and a window of 0 turns the penalty off.
    """
    found = {
        key.removeprefix(_PREFIX): value for key, value in file.metadata.items() if key.startswith(_PREFIX)
    }
    values: dict[str, object] = {_KEYS[key]: _number(value) for key, value in found.items() if key in _KEYS}
    top_k, temperature = values.get("top_k"), values.get("temperature")
    if isinstance(top_k, int) and top_k <= 0:
        values["top_k"] = -1  # all
    if isinstance(temperature, float) and temperature < 0:
        values["temperature"] = 0.0  # greedy
    if found.get("penalty_last_n") == 0:
        values.pop("repetition_penalty", None)
    not_taken = tuple(
        f"{_PREFIX}{key}" for key, neutral in _NOT_TAKEN.items() if found.get(key, neutral) != neutral
    )
    return checked_defaults(values, file.path, f"{_PREFIX}* of the GGUF file", not_taken)


def _number(value: object) -> object:
    """A float32 without the digits that its conversion to float64 adds: 0.6 and not 0.6000000238."""
    return float(f"{value:.{_FLOAT32_DIGITS}g}") if isinstance(value, float) else value
