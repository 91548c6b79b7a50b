"""Options of commands: the settings of `EngineConfig`, grouped in `--help` and merged into one config; JSON files.

Options are made from the dataclasses (`runtime/config/config_fields.py`): a new setting appears here. An option
that is not given stays None, so that the value of the YAML file applies. Aliases of a setting are
separate options, so that the origin of a value names the one that was given; `--help` shows them with the setting only.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer
from typer.core import TyperCommand

from ..runtime.config.config_fields import (
    AUTO,
    ConfigField,
    SettingName,
    config_fields,
    flag_of,
    setting_names,
)
from ..runtime.config.config_sources import (
    Layer,
    MergedConfig,
    from_flags,
    from_yaml_file,
    merge,
)
from ..runtime.config.environment import CONFIG_FILE, from_environment
from ..runtime.config.migration import SAME_IN_CHAT, SHORT
from ..runtime.errors import ConfigError
from ..runtime.text import decode_utf8, is_unicode, variable

GROUP_TITLES: Final = {
    "model": "Model",
    "cache": "KV cache",
    "kernels": "Kernels",
    "parallel": "Several devices",
    "scheduler": "Scheduling",
    "server": "Server",
    "answers": "Structured output, tools, reasoning",
    "adapters": "LoRA adapters",
    "limits": "Limits of a request",
    "media": "Images",
    "log": "Logging",
}
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of a surrogate, paired or not."""
CONTEXT_SETTINGS: Final = {"help_option_names": ["-h", "--help"]}

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
]
RunOption = Annotated[
    int | None,
    typer.Option(
        "--run",
        metavar="N",
        help="Number of the run, from 1, if the file has several  [default: the last]",
        show_default=False,
    ),
]
ConfigFileOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file with settings, such as `page_size: 16` (or set ENGINE_CONFIG); flags win over it.",
    ),
]
PrintConfigOption = Annotated[
    bool,
    typer.Option("--print-config", help="Show every setting, its value and its source, and exit."),
]

GENERAL_TITLE: Final = "General"
_NAME_COLUMNS: Final = 34

FlagValues = dict[str, Any]
"""The setting options of one command line: name (or alias) -> text or boolean, None if not given."""


_TYPE: Final = re.compile(r"<(.+)>$")
_WORDS: Final = {"str": "TEXT", "list[str]": "TEXT", "int": "INT", "float": "NUMBER", "path": "FILE"}


def with_plain_type(names: str) -> str:
    """`--port INT` for typer's `--port <int>`; choices without their brackets. `docs/cli.md` uses it, too."""
    return _TYPE.sub(lambda kind: _WORDS.get(kind[1], kind[1]), names)


class GroupedCommand(TyperCommand):
    """A command that shows its options in `--help` under titles, in plain text that fits 80 columns.

    typer's own boxes cut long option names at that width. Needs `rich_markup_mode=None` in the `typer.Typer`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; flags of other engines become the options with the same meaning, where there are."""
        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [_own_flag(word, own) for word in args[:end]] + args[end:])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line; a required argument is `NAME`, where typer writes `{NAME}`."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section per title, general options last; "Options" where none has a title."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":  # typer puts the Python type after the name
                sections.setdefault("Arguments", []).append((record[0].partition(" ")[0], record[1]))
            else:
                title = getattr(param, "rich_help_panel", None) or GENERAL_TITLE
                sections.setdefault(title, []).append((with_plain_type(record[0]), record[1]))
        if GENERAL_TITLE in sections:
            has_titles = sections.keys() - {GENERAL_TITLE, "Arguments"}
            sections[GENERAL_TITLE if has_titles else "Options"] = sections.pop(GENERAL_TITLE)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=min(_NAME_COLUMNS, formatter.width // 2))


def _own_flag(word: str, own: Collection[str]) -> str:
    """`--model` for `-m`, `--temperature=0` for `--temp=0`."""
    flag, equals, value = word.partition("=")
    name = SHORT.get(flag)
    same = SAME_IN_CHAT.get(flag) or (name and flag_of(name))
    return f"{same}{equals}{value}" if flag not in own and same in own else word


def takes_config_options(
    groups: Collection[str] = tuple(GROUP_TITLES), *, exclude: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command one option per setting of these groups; it receives them together, as `settings: FlagValues`."""
    fields = [f for f in config_fields().values() if f.group in groups and f.name not in exclude]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "settings"
        ]
        names = [setting for field in fields for setting in field.settings]
        options = [_parameter(setting) for setting in names]

        @functools.wraps(command)
        def wrapper(**values: Any) -> Any:
            settings = {setting.name: values.pop(setting.name) for setting in names}
            return command(**values, settings=settings)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *options)]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def takes_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command one option per field of its dataclass parameters, in their places."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {
        name: hint
        for name, hint in hints.items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }
    parameters: list[inspect.Parameter] = []
    for name, own in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        field_hints = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=field_hints[field.name],
            )
            for field in dataclasses.fields(groups[name])
        ]

    @functools.wraps(command)
    def wrapper(**values: Any) -> Any:
        for name, group in groups.items():
            fields = dataclasses.fields(group)
            values[name] = group(**{field.name: values.pop(field.name) for field in fields})
        return command(**values)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def merge_options(
    settings: FlagValues,
    *,
    config_file: Path | None = None,
    model: str | None = None,
    base: Layer | None = None,
) -> MergedConfig:
    """The configuration of a command line: preset < base < file < environment < flags.

    Args:
        settings: from `takes_config_options`.
        config_file: from `--config`.
        model: the positional MODEL.
        base: settings of the command that replace the defaults.
    """
    flags: Mapping[str, Any] = settings
    if model is not None:
        if settings.get("model") not in (None, model):
            raise ConfigError(
                f"the model is given twice: {model!r} and --model {settings['model']!r}; drop one"
            )
        flags = {**settings, "model": model}
    if config_file is None and (named := variable(CONFIG_FILE)) is not None:
        config_file = Path(named)
    file_layer = from_yaml_file(config_file) if config_file is not None else {}
    taken = {setting_names()[name].field.name for name in settings}
    return merge(base or {}, file_layer, from_environment(names=taken), from_flags(flags))


def _parameter(setting: SettingName) -> inspect.Parameter:
    """The keyword parameter from which typer makes the option."""
    field, is_switch = setting.field, setting.is_switch
    option = typer.Option(
        _declaration(setting),
        help=field.help + _alias_text(field) + _default_text(field),
        metavar=None if is_switch else _metavar(field),
        show_default=False,
        rich_help_panel=GROUP_TITLES[field.group],
        autocompletion=None if is_switch else _completion(field),
        hidden=setting.alias is not None,
    )
    kind: Any = bool if is_switch else list[str] if field.many else str
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _declaration(setting: SettingName) -> str:
    """`--page-size`, or with its negation if both values are meaningful: `--strict/--no-strict`."""
    negatable = setting.is_switch and (setting.switch is None or False in setting.switch)
    return f"{setting.flag}/--no-{setting.flag[2:]}" if negatable else setting.flag


def _alias_text(field: ConfigField) -> str:
    """` (also --max-num-seqs)`."""
    named = [flag_of(alias.name) for alias in field.aliases if alias.in_help]
    return f" (also {', '.join(named)})" if named else ""


def _metavar(field: ConfigField) -> str:
    if field.choices:
        return "|".join(field.choices)
    kind = {int: "INT", float: "NUMBER", str: "TEXT"}[field.kind]
    return f"{kind}|{AUTO}" if field.auto else kind


def _default_text(field: ConfigField) -> str:
    """`  [default: auto]`; empty if the help states the effect of omitting the option."""
    if field.default is None or field.many:
        return ""
    if field.kind is bool and field.default != AUTO:
        return f"  [default: {'' if field.default else 'no-'}{field.flag[2:]}]"
    return f"  [default: {field.default}]"


def _completion(field: ConfigField) -> Callable[[str], list[str]] | None:
    """None for values without a word: typer takes half a millisecond to look at a function."""
    words = field.choices or ((AUTO,) if field.auto else ())
    if not words:
        return None

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def read_json(path: Path, what: str) -> Any:
    """The value in a file.

    Args:
        what: names the file in errors: `--schema FILE`.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, not JSON, or has a text that is not Unicode.
    """
    return read_json_text(path, what)[1]


def read_json_text(path: Path, what: str) -> tuple[str, Any]:
    """As `read_json`, with the text of the file before the value."""
    try:
        text = decode_utf8(path.read_bytes(), what)
        value = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is not JSON: {error}") from None
    if _SURROGATE.search(text) and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise ConfigError(
            f"{what} has a text with half of a surrogate pair (an escape from \\ud800 to \\udfff); remove it"
        )
    return text, value
