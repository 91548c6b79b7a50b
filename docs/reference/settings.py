"""What a reader wants to know about a setting, in words: its type, range and default.

All of it is read from the configuration classes; nothing about a setting is written here.
"""

from __future__ import annotations

import re
from typing import Final, get_type_hints

from engine.runtime.config.config_fields import AUTO, SECRETS, ConfigField
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.errors import ConfigError

from .markdown import code

# Far outside of every range, and inside of what the decision log can hold.
_PROBES: Final = (-(2**62), 2**62)
_KINDS: Final = {int: "integer", float: "number", bool: "boolean", str: "text"}


def type_text(field: ConfigField) -> str:
    """`integer or auto, at least 1`; words of a choice are code spans."""
    if field.choices:
        text = "one of " + ", ".join(code(word) for word in field.choices)
    else:
        text = _KINDS[field.kind] + (f" or {code(AUTO)}" if field.auto else "")
    if field.many:
        text += ", any number of times"
    rule = range_text(field)
    return f"{text}, {rule}" if rule else text


def default_text(field: ConfigField) -> str:
    """The default as YAML writes it; never a value that depends on the machine."""
    if field.many:
        return "none"
    if field.default is None:
        return "none" if field.name in SECRETS else "not set"
    return code(str(field.default).lower() if field.kind is bool else field.default)


def range_text(field: ConfigField) -> str:
    """The range of a number as the check of its group states it, such as `at least 1`; empty: every number passes.

    The ranges are in `__post_init__`, so a value far below and one far above are tried and the errors are read.
    """
    if field.kind not in (int, float):
        return ""
    rules = [rule for probe in _PROBES if (rule := _broken_rule(field, field.kind(probe)))]
    intervals = [rule for rule in rules if rule.startswith("in ")]
    return ", ".join(dict.fromkeys(intervals or rules))


def _broken_rule(field: ConfigField, value: object) -> str:
    """The rule that `value` breaks; empty: none, or one that concerns other settings as well."""
    group = get_type_hints(EngineConfig)[field.group]
    try:
        group(**{field.name: value})
    except ConfigError as error:
        pattern = rf"{field.name} is \S+ but it must (?:be |lie )?(.+?)(?: \(\d+\))?(?:;.*)?"
        match = re.fullmatch(pattern, str(error))
        rule = match[1] if match else ""
        return f"must {rule}" if rule.startswith("not ") else rule
    return ""
