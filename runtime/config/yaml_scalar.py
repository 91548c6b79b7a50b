"""`scalar_value`: one value of a YAML file for the type of its setting, never one that YAML has changed before.

YAML 1.1 reads `0777` as 511, `1:30` as 90, `0x10` as 16 and `no` as false. A number must be decimal, so that the value
is the one in the file; a text setting keeps the characters, and a word for true or false in it is refused.
"""

from __future__ import annotations

import re
from typing import Any, Final

from ..errors import ConfigError
from .config_fields import SECRETS, SettingName

_NULL: Final = "tag:yaml.org,2002:null"
_BOOL: Final = "tag:yaml.org,2002:bool"
_INT: Final = "tag:yaml.org,2002:int"
_FLOAT: Final = "tag:yaml.org,2002:float"
_STR: Final = "tag:yaml.org,2002:str"
_TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"
_PLAIN_TAGS: Final = frozenset({_BOOL, _INT, _FLOAT, _STR, _TIMESTAMP, "tag:yaml.org,2002:value"})
_DECIMAL: Final = re.compile(r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9_]*)?|\.[0-9_]+)(?:[eE][-+]?[0-9]+)?")
_SPECIAL: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def scalar_value(loader: Any, node: Any, setting: SettingName) -> object:
    """The value of a scalar node: text, number, boolean or None, for `SettingName.check`.

    Args:
        loader: the YAML loader that read the file.
        node: its scalar node.
        setting: what the value is for.

    Raises:
        ConfigError: a number that is not decimal, a truth value for a text, an unknown tag.
    """
    field, text = setting.field, node.value
    if node.tag == _NULL:
        return None
    is_plain = node.style is None and node.tag in _PLAIN_TAGS
    if is_plain and node.tag in (_INT, _FLOAT) and not setting.is_switch and field.kind in (int, float):
        return _decimal(loader, node, setting)
    if is_plain and field.kind is str and not setting.is_switch:
        if node.tag == _BOOL and not field.choices:
            shown = "no text" if field.name in SECRETS else text
            raise ConfigError(f"{setting.name} is {shown}, but it must be text; put it in quotes")
        return text
    return _constructed(loader, node, setting)


def _decimal(loader: Any, node: Any, setting: SettingName) -> object:
    text = node.value
    if _DECIMAL.fullmatch(text):
        return text  # `check` converts it
    value = _constructed(loader, node, setting)
    if _SPECIAL.fullmatch(text):
        return value
    raise ConfigError(
        f"{setting.name} is {text}, which YAML reads as {value}; write {setting.field.wants} in decimal digits"
    )


def _constructed(loader: Any, node: Any, setting: SettingName) -> object:
    import yaml

    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{setting.name} cannot be read: {problem}") from None
