"""`ConfigField`: one setting of `EngineConfig` as the command line, the YAML file and `LLM(...)` need it.

The fields are read from the dataclasses once, so each setting is declared in one place. A value arrives either as text
(flag, environment: `parse`) or as a typed value (YAML, Python: `check`); both return the type that the field declares.
A setting has one name and may have aliases; `find_setting` knows all of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigError
from ..text import is_unicode
from .engine_config import DERIVED, EngineConfig
from .migration import answer_for
from .setting_declaration import Alias

AUTO = "auto"
SECRETS = frozenset({"api_key", "admin_api_key", "kv_store"})  # neither printed nor logged
_TRUE, _FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})
_KIND_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigField:
    """One setting.

    Attributes:
        name: the field's name, unique across groups.
        group: the field of `EngineConfig` it lives in: `model`, `cache`, ...
        help: one sentence for `--help`.
        default: as in the dataclass.
        kind: int, float, bool or str.
        choices: the allowed words of a `Literal`; empty if any value of `kind` is allowed.
        auto: the word "auto" is allowed besides values of `kind`.
        optional: None is allowed.
        aliases: other names of the setting.
        many: it holds any number of values of `kind`: a repeated flag, a list in YAML.
    """

    name: str
    group: str
    help: str
    default: object
    kind: type
    choices: tuple[str, ...] = ()
    auto: bool = False
    optional: bool = False
    aliases: tuple[Alias, ...] = ()
    many: bool = False

    @property
    def flag(self) -> str:
        """The command line option, `--page-size`."""
        return flag_of(self.name)

    @property
    def settings(self) -> tuple[SettingName, ...]:
        """Its names: the field's own, then the aliases."""
        return SettingName(self.name, self), *(SettingName(alias.name, self, alias) for alias in self.aliases)

    @property
    def wants(self) -> str:
        """The rule for a value, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return _KIND_WORDS[self.kind] + (" or 'auto'" if self.auto else "")

    def parse(self, text: str) -> object:
        """The value for `text`.

        Raises:
            ConfigError: the text is invalid; the message names value and rule, not the origin of the text.
        """
        word = text.strip()
        if self.auto and word == AUTO:
            return AUTO
        if self.kind is bool and word.lower() in _TRUE | _FALSE:
            return word.lower() in _TRUE
        if self.kind is str and (not self.choices or word in self.choices):
            return word if self.choices else self._checked_text(text)
        if self.kind in (int, float):
            try:
                return self.kind(word.replace("_", ""))
            except ValueError:
                pass
        raise ConfigError(
            f"{self.name} is {text!r}, but it must be {self.wants}{_suggestion(word, self.choices)}"
        )

    def _checked_text(self, text: str) -> str:
        """The text, which must be Unicode and have no NUL: neither can be in a path, a name or a message."""
        if not is_unicode(text) or "\0" in text:
            problem = "a NUL character" if is_unicode(text) else "half of a surrogate pair"
            shown = "" if self.name in SECRETS else f" is {text!r}, which"
            raise ConfigError(f"{self.name}{shown} has {problem}; use text without it")
        return text

    def check(self, value: object) -> object:
        """`value` in the field's type, if it has that type or converts to it without loss.

        Raises:
            ConfigError: as for `parse`.
        """
        if self.many:
            one = dataclasses.replace(self, many=False)
            values = () if value is None else value if isinstance(value, list | tuple) else (value,)
            return tuple(one.check(item) for item in values)
        if value is None and self.optional:
            return None
        if isinstance(value, os.PathLike) and self.kind is str:
            return self.parse(os.fsdecode(value))
        if isinstance(value, bool):  # before int: bool is a subclass of int
            if self.kind is bool:
                return value
        elif isinstance(value, str):
            return self.parse(value)
        elif isinstance(value, self.kind):
            return value
        elif self.kind is float and isinstance(value, int):
            return float(value)
        is_number = isinstance(value, int | float)
        hint = "; put it in quotes" if self.kind is str and is_number and not self.choices else ""
        shown = "no text" if self.name in SECRETS else repr(value)
        raise ConfigError(f"{self.name} is {shown}, but it must be {self.wants}{hint}")


@dataclasses.dataclass(frozen=True, slots=True)
class SettingName:
    """A field under one of its names.

    Attributes:
        name: the name that the user wrote, with underscores.
        field: the field that it sets.
        alias: the alias, if `name` is not the field's own name.
    """

    name: str
    field: ConfigField
    alias: Alias | None = None

    @property
    def flag(self) -> str:
        """The command line option, `--max-num-seqs`."""
        return flag_of(self.name)

    @property
    def is_switch(self) -> bool:
        """Whether it takes true or false: a boolean field, or an alias that maps true and false to other values."""
        return self.field.kind is bool or self.switch is not None

    @property
    def switch(self) -> Mapping[bool, object] | None:
        return None if self.alias is None else self.alias.switch

    def values(self, value: object) -> dict[str, object]:
        """The values of settings, by their names, for `value` under this name; most names stand for one setting.

        Raises:
            ConfigError: as for `ConfigField.check`.
        """
        if self.alias is None or self.alias.translate is None:
            return {self.field.name: self.check(value)}
        fields = config_fields()
        return {name: fields[name].check(each) for name, each in self.alias.translate(value).items()}

    def check(self, value: object) -> object:
        """The field's value for `value` under this name; errors call the setting by this name.

        Raises:
            ConfigError: as for `ConfigField.check`.
        """
        if self.switch is None:
            return dataclasses.replace(self.field, name=self.name).check(value)
        on = ConfigField(self.name, self.field.group, "", None, bool).check(value)
        assert isinstance(on, bool)
        if on not in self.switch:
            raise ConfigError(
                f"{self.name} is {on}, but it can only be {not on}; set {self.field.name} instead"
            )
        return self.switch[on]


def flag_of(name: str) -> str:
    """The command line option for a name."""
    return "--" + name.replace("_", "-")


@functools.cache
def config_fields() -> dict[str, ConfigField]:
    """Every setting by name, in the order of the dataclasses."""
    fields: dict[str, ConfigField] = {}
    for group_name, group_type in get_type_hints(EngineConfig).items():
        hints = get_type_hints(group_type, include_extras=True)
        for field in dataclasses.fields(group_type):
            if field.metadata == DERIVED:
                continue
            if field.name in fields:
                raise TypeError(f"setting {field.name} exists in two groups; flags need unique names")
            fields[field.name] = _describe(group_name, field, hints[field.name])
    return fields


@functools.cache
def setting_names() -> dict[str, SettingName]:
    """Every name of every setting."""
    names: dict[str, SettingName] = {}
    for field in config_fields().values():
        for setting in field.settings:
            if setting.name in names:
                raise TypeError(f"the name {setting.name} stands for two settings; names are unique")
            names[setting.name] = setting
    return names


def find_setting(key: str) -> SettingName:
    """The setting called `key`, by its own name or an alias, with dashes or underscores.

    Raises:
        ConfigError: there is none; the message suggests the nearest name, or how to list them.
    """
    names = setting_names()
    name = key.replace("-", "_")
    if name not in names:
        if answer := answer_for(name):
            raise ConfigError(f"there is no setting {key!r}: {answer}")
        hint = _suggestion(name, names) or "; `engine serve --help` lists them all"
        raise ConfigError(f"unknown setting {key!r}{hint}")
    return names[name]


def _describe(group: str, field: dataclasses.Field[object], annotation: object) -> ConfigField:
    if get_origin(annotation) is not Annotated:
        raise TypeError(f"setting {field.name} has no help; annotate it with Annotated[type, 'help']")
    declared, help_text, *aliases = get_args(annotation)
    kind: type | None = None
    choices: tuple[str, ...] = ()
    auto = optional = many = False
    for part in _parts(declared):
        if part is type(None):
            optional = True
        elif get_origin(part) is Literal:
            words = get_args(part)
            auto = auto or AUTO in words
            choices = words if len(words) > 1 else choices
        elif get_origin(part) is tuple:
            kind, many = get_args(part)[0], True
        elif isinstance(part, type):
            kind = part
    return ConfigField(
        field.name,
        group,
        help_text,
        field.default,
        kind or str,
        choices,
        auto,
        optional,
        tuple(aliases),
        many,
    )


def _parts(declared: object) -> tuple[object, ...]:
    return get_args(declared) if get_origin(declared) in (Union, types.UnionType) else (declared,)


_SYNONYMS: Final[Mapping[str, str]] = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "bf16": "bfloat16",
    "fp16": "bfloat16",
    "float16": "bfloat16",
    "half": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "q8_0": "int8",
    "8bit": "int8",
    "q4_0": "int4",
    "4bit": "int4",
}
"""Values of other tools -> the nearest one here, which is not the one with the most similar letters."""


def _suggestion(word: str, known: Iterable[str]) -> str:
    """A hint with the shortest name that has all parts of `word` (max_len: max_model_len), else with a similar one."""
    names = list(known)
    if (same := _SYNONYMS.get(word)) in names:
        return f"; did you mean {same!r}?"
    parts = set(word.split("_"))
    longer = sorted((name for name in names if len(parts) > 1 and parts <= set(name.split("_"))), key=len)
    near = longer or difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
