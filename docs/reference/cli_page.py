"""`docs/cli.md`: every command of `engine` with its arguments and options, read from the command tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from typer.main import get_command

from engine.cli.exit_codes import MEANINGS
from engine.cli.main import COMMANDS, app, load_command
from engine.cli.options import GROUP_TITLES, with_plain_type
from engine.runtime.config.config_fields import config_fields, flag_of, setting_names

from .configuration_page import NAME as CONFIGURATION
from .configuration_page import group_heading, names_text
from .markdown import bullet, code, link_to, page, paragraph, plain
from .peer_names import BENCH_SERVE

NAME: Final = "cli.md"
_MAIN: Final = "engine serve"
_PEER_OPTIONS: Final = {"engine bench serve": BENCH_SERVE}
# `get_help_record` of Click: `text  [default: 1.0]`, `text  [required]`, `text  [env var: NAME]`
_REMARK: Final = re.compile(r"\s+\[((?:default|required|env var)[^\[\]]*)\]$")
_TYPE: Final = re.compile(r"\s*<[\w|\[\]-]+>$")


def cli_page() -> str:
    """The text of the page."""
    commands = dict(_commands())
    return page(
        "# Command line",
        "<!-- Generated from the code by `make docs`; do not edit. -->",
        paragraph(
            "`engine COMMAND --help` (`-h`) shows the same on the terminal. Options that set a field of the "
            f"configuration are described once, in [{CONFIGURATION}]({CONFIGURATION}), with type, default and names in "
            "SGLang and vLLM; here each command lists those that it takes."
        ),
        bullet(f"{link_to('Exit codes')}, {link_to('Shell completion')}"),
        *(bullet(f"{link_to(name)}: {plain(_first_line(command))}") for name, command in commands.items()),
        "## engine",
        *_parameters("engine", get_command(app)),
        "## Exit codes",
        *(bullet(f"{code(str(int(number)))}: {meaning}") for number, meaning in MEANINGS.items()),
        "## Shell completion",
        paragraph(
            "`engine --install-completion` adds completion to the shell that runs it (bash, zsh, fish, PowerShell): "
            "commands, options, and the words that an option takes. For bash it writes "
            "`~/.bash_completions/engine.sh` and a line in `~/.bashrc`, for zsh `~/.zfunc/_engine` and lines in "
            "`~/.zshrc`, for fish `~/.config/fish/completions/engine.fish`; remove them to undo it. "
            "`engine --show-completion` prints the script instead."
        ),
        *(block for name, command in commands.items() for block in _command(name, command)),
    )


def options_of(name: str) -> set[str]:
    """The long options of a command."""
    params = dict(_commands())[name].params
    return {flag for param in params for flag in param.opts if flag.startswith("--")}


def _commands() -> Iterator[tuple[str, Any]]:
    """Each command that does something, by its full name."""
    for name in COMMANDS:
        yield from _leaves(f"engine {name}", load_command(name))


def _leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    if not children:
        yield name, command
    for child, inner in children.items():
        yield from _leaves(f"{name} {child}", inner)


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [_usage(param) for param in command.params if param.param_type_name == "argument"]
    yield f"## {name}"
    yield f"```console\n$ {' '.join([name, *arguments, '[OPTIONS]'])}\n```"
    for text in re.split(r"\n\s*\n", (command.help or "").strip()):
        yield _help_paragraph(text)
    yield from _parameters(name, command)


def _help_paragraph(text: str) -> str:
    """A paragraph of the help; an example becomes a block of code."""
    flat = " ".join(text.split())
    example = flat.removeprefix("Example: ")
    return f"Example:\n\n```console\n$ {example}\n```" if example != flat else paragraph(plain(flat))


def _parameters(name: str, command: Any) -> Iterator[str]:
    """Arguments, the command's own options by title, then the settings that it takes."""
    settings: dict[str, list[str]] = {}
    own: dict[str, list[str]] = {}
    context = command.context_class(command, info_name=name)
    for param in command.params:
        if getattr(param, "hidden", False):
            continue
        if group := _group_of_setting(param):
            settings.setdefault(group, []).append(param.name)
            continue
        title = "Arguments" if param.param_type_name == "argument" else param.rich_help_panel or "Options"
        own.setdefault(title, []).append(_parameter(name, param, context))
    for title, bullets in own.items():
        yield f"{title}:"
        yield from bullets
    if settings:
        yield f"Settings, see [{CONFIGURATION}]({CONFIGURATION}):"
    for group, taken in settings.items():
        yield bullet(_settings_line(group, taken, all_are_listed=name == _MAIN))


def _settings_line(group: str, names: list[str], *, all_are_listed: bool) -> str:
    """The flags of a group that a command takes; a group that is taken whole is listed with the main command only."""
    link = link_to(group_heading(group), CONFIGURATION)
    whole = [field.name for field in config_fields().values() if field.group == group]
    if names == whole and not all_are_listed:
        return f"{link}: all"
    flags = (f"[{code(flag_of(name))}]({CONFIGURATION}#{name})" for name in names)
    return f"{link}: {', '.join(flags)}"


def _parameter(command: str, param: Any, context: Any) -> str:
    """`--url URL`: meaning. Default: `...`."""
    names, text = param.get_help_record(context)
    if param.param_type_name == "argument":
        names = _TYPE.sub("", names)
    names = with_plain_type(names)
    remarks: list[str] = []
    while match := _REMARK.search(text):
        kind, _, value = match[1].partition(": ")
        remarks.insert(0, f"{kind.capitalize()}: {plain(value)}." if value else f"{kind.capitalize()}.")
        text = text[: match.start()]
    parts = [f"{code(names)}: {plain(text)}", *remarks]
    if parts[0][-1] not in ".!?)":
        parts[0] += "."
    peers = _PEER_OPTIONS.get(command, {})
    long_name = next((flag for flag in reversed(param.opts) if flag in peers), None)
    if long_name is not None:
        parts.append(names_text(peers[long_name]).rstrip(".") + ".")
    return bullet(" ".join(parts))


def _group_of_setting(param: Any) -> str:
    """The group of the setting that an option sets; empty for an option of the command's own."""
    setting = setting_names().get(param.name)
    panel = getattr(param, "rich_help_panel", None)
    return setting.field.group if setting and panel == GROUP_TITLES[setting.field.group] else ""


def _usage(param: Any) -> str:
    name = (param.metavar or param.name.upper()) + ("..." if param.nargs == -1 else "")
    return name if param.required else f"[{name}]"


def _first_line(command: Any) -> str:
    return " ".join((command.help or "").strip().split("\n\n")[0].split())
