"""`--print-config`: every setting, its effective value and where it came from, as YAML that `--config` reads back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from ..runtime.config.config_fields import AUTO, SECRETS, config_fields
from ..runtime.config.config_sources import DEFAULT_ORIGIN, MergedConfig
from ..runtime.config.engine_config import EngineConfig
from ..runtime.sampling_defaults import NAMES, OPENAI_DEFAULTS, OPENAI_SOURCE, SamplingDefaults
from ..runtime.sampling_params import SamplingParams

_COMMENT_COLUMN = 44


def render_config(
    effective: EngineConfig,
    merged: MergedConfig,
    notes: Mapping[str, str],
    sampling: SamplingDefaults = OPENAI_DEFAULTS,
) -> str:
    """The text of `--print-config`.

    Args:
        effective: the resolved configuration.
        merged: the configuration before resolving, with its origins.
        notes: why `resolve` chose what it chose.
        sampling: the parameters of requests without their own; no settings, so they are comments.
    """
    lines: list[str] = []
    group = ""
    for field in config_fields().values():
        if field.group != group:
            group = field.group
            lines.append(f"{group}:")
        value = getattr(getattr(effective, group), field.name)
        written = getattr(getattr(merged.config, group), field.name)
        comment = _origin(written, merged.origins[field.name], notes.get(field.name))
        if field.name in SECRETS and value not in (None, ()):
            lines.append(f"  # {field.name} is set and not shown ({comment})")
        else:
            lines.append(f"{f'  {field.name}: {_yaml(value)}':<{_COMMENT_COLUMN}}  # {comment}")
        if field.name == "sampling_defaults":
            lines += _sampling_lines(sampling)
    return "\n".join(lines)


def _sampling_lines(sampling: SamplingDefaults) -> list[str]:
    """Each sampling default with its source."""
    found, usual = sampling.values(), SamplingParams()
    lines = []
    for name in NAMES:
        value = found.get(name, getattr(usual, name))
        source = sampling.source if name in found else OPENAI_SOURCE
        lines.append(f"{f'  #   {name}: {_yaml(value)}':<{_COMMENT_COLUMN}}  # {source}")
    return lines


def _origin(written: object, origin: str, note: str | None) -> str:
    """`auto: <reason>`, `--port`, `engine.yaml:3, 65 in whole pages of 16`, ..."""
    if written == AUTO:
        source = AUTO if origin == DEFAULT_ORIGIN else f"{AUTO} by {origin}"
        return f"{source}: {note}" if note else source
    return f"{origin}, {note}" if note else origin


def _yaml(value: object) -> str:
    """One scalar that YAML reads back as the same value: JSON is YAML, and plain words need no quotes."""
    if isinstance(value, str) and value.isidentifier() and value.lower() not in _WORDS_OF_YAML:
        return value
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return f"{value:.1f}"
    return json.dumps(value, ensure_ascii=False)


_WORDS_OF_YAML = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
