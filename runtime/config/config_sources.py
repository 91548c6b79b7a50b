"""The sources of a setting's value: defaults < preset < YAML file < environment < flags (or arguments of `LLM`).

`merge` combines the layers and keeps the origin of every value: `--print-config` shows it, and an error names the line
or flag to change. `environment.py` has the layer of environment variables.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_type_hints

from ..errors import ConfigError
from ..text import decode_utf8
from .config_fields import SECRETS, SettingName, config_fields, find_setting, setting_names
from .engine_config import EngineConfig
from .presets import PRESETS, preset_origin

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
    """The value of a scalar node: text, number, boolean or None, for `SettingName.check`; never changed by YAML.

    YAML 1.1 reads `0777` as 511, `1:30` as 90, `0x10` as 16 and `no` as false. A number must be decimal, so that the
    value is the one in the file; a text setting keeps the characters, and a word for true or false in it is refused.

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


DEFAULT_ORIGIN: Final = "default"
_GUARDS: Final = {
    "api_key": "every client would have access",
    "api_key_file": "every client would have access",
    "admin_api_key": "every client on a loopback address would be an admin",
    "ssl_certfile": "connections would not be encrypted",
}
"""Settings that must not be empty by accident: a key in the file without a value is an error, with this consequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A value and where it was written: `engine.yaml:3`, `--port`, `$ENGINE_API_KEY`, `argument port`."""

    value: object
    origin: str


Layer = Mapping[str, Value]


@dataclasses.dataclass(frozen=True, slots=True)
class MergedConfig:
    """A complete configuration, "auto" values not yet resolved.

    Attributes:
        config: the values.
        origins: setting -> where its value was written; `default` if it was not set.
    """

    config: EngineConfig
    origins: Mapping[str, str]


def merge(*layers: Layer) -> MergedConfig:
    """Build the configuration; later layers override earlier ones, and all of them override the chosen preset.

    Raises:
        ConfigError: a value out of range; the message ends with its origin.
    """
    merged: dict[str, Value] = {}
    for layer in layers:
        merged.update(layer)
    merged = _preset_layer(merged.get("preset")) | merged
    origins = dict.fromkeys(config_fields(), DEFAULT_ORIGIN) | {
        name: value.origin for name, value in merged.items()
    }
    groups: dict[str, Any] = {}
    for group_name, group_type in get_type_hints(EngineConfig).items():
        values = {f.name: merged[f.name].value for f in dataclasses.fields(group_type) if f.name in merged}
        try:
            groups[group_name] = group_type(**values)
        except ConfigError as error:
            raise _with_origin(error, origins) from None
    return MergedConfig(EngineConfig(**groups), origins)


def from_flags(given: Mapping[str, object]) -> dict[str, Value]:
    """The layer of command line options: name of a setting -> text or boolean, None if it was not given."""
    layer: dict[str, Value] = {}
    for name, value in given.items():
        setting = setting_names()[name]
        if value is not None and value != []:  # typer's value for a repeatable option that is not given
            try:
                values = setting.values(value)
            except ConfigError as error:
                raise ConfigError(str(error).replace(name, setting.flag, 1)) from None
            put(layer, values, setting.flag)
    return layer


def from_arguments(arguments: Mapping[str, object]) -> dict[str, Value]:
    """The layer of keyword arguments: `LLM(max_model_len=512)`."""
    layer: dict[str, Value] = {}
    for key, value in arguments.items():
        setting = find_setting(key)
        put(layer, setting.values(value), f"argument {setting.name}")
    return layer


def from_yaml_file(path: Path) -> dict[str, Value]:
    """The layer of a YAML file: `page_size: 16`, `page-size: 16`, or grouped, `cache: {page_size: 16}`.

    Raises:
        ConfigError: not readable, not YAML, an unknown or repeated key, a wrong type; with file and line.
    """
    import yaml  # here, because most starts have no file

    try:
        text = decode_utf8(path.read_bytes(), f"the configuration file {path}")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}"
        ) from None
    layer: dict[str, Value] = {}
    if root is None:
        return layer
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: must hold settings as `name: value` lines")
    for key, node, line in _settings(loader, root, path):
        origin = f"{path}:{line}"
        try:
            setting = find_setting(key)
            first = layer.get(setting.field.name)
            if first is not None:
                name = "" if setting.alias is None else f", another name of {setting.field.name},"
                raise ConfigError(f"{key}{name} is set a second time (first at {first.origin})")
            if setting.field.name in _GUARDS and node.value == "":  # an explicit null or [] is intended
                raise ConfigError(
                    f"{key} has no value, and without one {_GUARDS[setting.field.name]}; write one, or null"
                )
            put(layer, setting.values(_node_value(loader, node, setting)), origin)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from None
    return layer


def put(layer: dict[str, Value], values: Mapping[str, object], origin: str) -> None:
    """Add values of settings, by their names, to a layer where each setting is given once.

    Raises:
        ConfigError: it has already been given under another name.
    """
    for name, value in values.items():
        if (first := layer.get(name)) is not None:
            raise ConfigError(f"{first.origin} and {origin} are two names of one setting; give one of them")
        layer[name] = Value(value, origin)


def _preset_layer(preset: Value | None) -> dict[str, Value]:
    if preset is None or preset.value is None:
        return {}
    origin = preset_origin(str(preset.value))
    return {name: Value(chosen.value, origin) for name, chosen in PRESETS[str(preset.value)].items()}


def _settings(loader: Any, root: Any, path: Path) -> Iterator[tuple[str, Any, int]]:
    """(key, value node, line) of every setting; a group's mapping is flattened, and its settings must belong to it."""
    import yaml

    groups = get_type_hints(EngineConfig)
    for key_node, node in root.value:
        key = str(key_node.value)
        if not (key in groups and isinstance(node, yaml.MappingNode)):
            yield key, node, key_node.start_mark.line + 1
            continue
        for inner_key, inner_node in node.value:
            line = inner_key.start_mark.line + 1
            name = str(inner_key.value)
            setting = setting_names().get(name.replace("-", "_"))
            if setting is not None and setting.field.group != key:
                raise ConfigError(
                    f"{path}:{line}: {name} belongs to the group {setting.field.group!r}, not to {key!r}"
                )
            yield name, inner_node, line


def _node_value(loader: Any, node: Any, setting: SettingName) -> object:
    """The node's value, or a list of values for a setting that holds several."""
    import yaml

    if setting.field.many and isinstance(node, yaml.SequenceNode):
        return [_node_value(loader, item, setting) for item in node.value]
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{setting.name} is a list or a mapping, but it must be {setting.field.wants}")
    return scalar_value(loader, node, setting)


def _with_origin(error: ConfigError, origins: Mapping[str, str]) -> ConfigError:
    """A range error with the value's origin added; range errors start with the setting's name."""
    message = str(error)
    origin = origins.get(message.split(" ", 1)[0], DEFAULT_ORIGIN)
    return ConfigError(message if origin == DEFAULT_ORIGIN else f"{message} (set by {origin})")
