"""Settings from environment variables: `ENGINE_PAGE_SIZE=64` is `--page-size 64`, for containers.

Every setting has a variable, under its own name and its aliases. Other variables that begin with `ENGINE_` are
mistakes, except `OTHERS` and those that Kubernetes makes for a service named `engine`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from ..errors import ConfigError
from ..text import variable
from .config_fields import SECRETS, SettingName, setting_names
from .config_sources import Value, put

PREFIX: Final = "ENGINE_"
CONFIG_FILE: Final = "ENGINE_CONFIG"
CACHE_DIR: Final = "ENGINE_CACHE_DIR"
OTHERS: Final = frozenset({CONFIG_FILE, CACHE_DIR})
"""Variables that are no settings."""
_OF_KUBERNETES: Final = re.compile(
    r"ENGINE_(?:SERVICE_(?:HOST|PORT)(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)"
)
_LINK: Final = re.compile(r"(?:tcp|udp|sctp)://\S+")
"""The value of `ENGINE_PORT` that Kubernetes makes for a service named `engine`."""


def variable_of(name: str) -> str:
    """The variable of a setting: `ENGINE_PAGE_SIZE`."""
    return PREFIX + name.upper()


def from_environment(
    environ: Mapping[str, str] | None = None, names: Collection[str] | None = None
) -> dict[str, Value]:
    """The layer of environment variables; an empty variable counts as not set.

    Args:
        environ: the environment; None: that of this process.
        names: settings that the command takes; None: all.

    Raises:
        ConfigError: a value that its setting does not take, with the variable's name.
    """
    environ = os.environ if environ is None else environ
    layer: dict[str, Value] = {}
    for name, text in sorted(environ.items()):
        setting = _setting_of(name)
        if setting is None or not text or _is_link(name, text):
            continue
        if names is None or setting.field.name in names:
            put(layer, _checked(setting, name, environ), f"${name}")
    return layer


def doubtful_variables(environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """One sentence for each variable that begins with `ENGINE_` and has no effect."""
    environ = os.environ if environ is None else environ
    known = [*setting_names(), *(other.removeprefix(PREFIX).lower() for other in sorted(OTHERS))]
    for name, text in sorted(environ.items()):
        if _is_link(name, text):
            yield f"${name} is {text!r}, which Kubernetes sets for a service named `engine`; it has no effect"
        elif name.startswith(PREFIX) and not _is_known(name) and not _OF_KUBERNETES.fullmatch(name):
            near = difflib.get_close_matches(name.removeprefix(PREFIX).lower(), known, n=1)
            hint = (
                f"did you mean {variable_of(near[0])}?" if near else "docs/environment.md lists the variables"
            )
            yield f"${name} is no setting and has no effect; {hint}"


def _is_known(name: str) -> bool:
    return name in OTHERS or _setting_of(name) is not None


def _setting_of(name: str) -> SettingName | None:
    if not name.startswith(PREFIX) or name in OTHERS or name != name.upper():
        return None
    return setting_names().get(name.removeprefix(PREFIX).lower())


def _is_link(name: str, text: str) -> bool:
    return name == variable_of("port") and _LINK.fullmatch(text) is not None


def _checked(setting: SettingName, name: str, environ: Mapping[str, str]) -> dict[str, object]:
    text = variable(name, environ)
    field = setting.field
    value: object = text
    if field.many and field.name not in SECRETS and text is not None:  # a key may have a comma
        value = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return setting.values(value)
    except ConfigError as error:
        raise ConfigError(str(error).replace(setting.name, f"${name}", 1)) from None
