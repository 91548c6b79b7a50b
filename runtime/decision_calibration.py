"""Temperatures of decisions by type of question and number of options: `--decision-calibration`, or a GGUF file's keys.

`engine decisions fit` finds them. A key is `predicate`, `choice` or `score`, for all questions of a type, or such a
type with a number of options, `choice.4`, which comes first. Temperature scaling: Guo et al. 2017, arXiv:1706.04599.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from .errors import ConfigError

logger = logging.getLogger(__name__)

MAX_TEMPERATURE: Final = 100.0
_MOST_OPTIONS: Final = {"predicate": 2, "choice": 255, "score": 10}
_KEY: Final = re.compile(r"(predicate|choice|score)(?:\.([1-9]\d{0,2}))?")
_KEY_RULE: Final = "predicate, choice or score, alone or with a number of options (choice.4)"
_RULE: Final = f"it must be a number above 0 and at most {MAX_TEMPERATURE:g}"
_FLOAT32_DIGITS: Final = 7


def temperature_of(calibration: Mapping[str, float], kind: str, num_options: int) -> float:
    """The temperature of a question; 1 if the calibration has none."""
    return calibration.get(f"{kind}.{num_options}", calibration.get(kind, 1.0))


def read_calibration(path: str) -> dict[str, float]:
    """The temperatures of a JSON file, `{"predicate": 1.3, "choice.4": 0.8}`.

    Raises:
        ConfigError: it cannot be read, or a key or a value is wrong.
    """
    at = f"decision_calibration {path}"
    file = Path(path).expanduser()
    if file.exists() and not file.is_file():  # a pipe can be read once, or never
        raise ConfigError(f"{at} is no regular file; name a JSON file")
    try:
        found = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{at} cannot be read: {error.strerror}; check the path") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{at} is no JSON ({error}); write it with `engine decisions fit`") from None
    if not isinstance(found, dict) or not found:
        raise ConfigError(
            f'{at} must be an object with temperatures, such as {{"choice.4": 1.5}}; write it with '
            "`engine decisions fit`"
        )
    for key, value in found.items():
        if problem := _problem(key, value):
            raise ConfigError(f"{at}: {problem}; mend it, or write it with `engine decisions fit`")
    return {key: float(value) for key, value in found.items()}


def calibration_of(metadata: Mapping[str, object], prefix: str, path: object) -> dict[str, float]:
    """The temperatures in the metadata of a file; a wrong one is left out with a warning.

    Args:
        prefix: of the keys.
        path: of the file, for warnings.
    """
    kept = {}
    for name, value in metadata.items():
        if name.startswith(prefix):
            key = name.removeprefix(prefix)
            if problem := _problem(key, value):
                logger.warning("%s: %s%s; it is ignored", path, prefix, problem)
            else:
                kept[key] = float(f"{value:.{_FLOAT32_DIGITS}g}")
    return kept


def _problem(key: str, value: object) -> str:
    match = _KEY.fullmatch(key)
    if match is None:
        return f"{key!r} is no type of question; keys are {_KEY_RULE}"
    kind, count = match.groups()
    if count is not None and not 2 <= int(count) <= _MOST_OPTIONS[kind]:
        most = _MOST_OPTIONS[kind]
        rule = "a predicate has 2" if most == 2 else f"a {kind} has 2 to {most}"
        return f"{key!r} has {count} options, but {rule}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{key!r} is {str(value)[:60]!r}, but {_RULE}"
    if not 0 < value <= MAX_TEMPERATURE:  # not for NaN either
        return f"{key!r} is {str(value)[:60]}, but {_RULE}"
    return ""
