"""`docs/migration.md`: the commonest flags of vLLM, SGLang and llama-server, and what to use here."""

from __future__ import annotations

from typing import Final

from engine.runtime.config.config_fields import flag_of, setting_names
from engine.runtime.config.migration import ANSWERS, CHAT_ANSWERS, COMMANDS, SAME_IN_CHAT, SHORT

from .common_flags import COMMON
from .markdown import bullet, code, link_to, page, paragraph
from .peer_names import SETTINGS

NAME: Final = "migration.md"


def migration_page() -> str:
    """The text of the page."""
    works = {short: name for short, name in SHORT.items() if name in setting_names()}
    return page(
        "# Coming from vLLM, SGLang, llama.cpp or Ollama",
        "<!-- Generated from the code by `make docs`; do not edit. -->",
        paragraph(
            "Flags with the same meaning work under their names, as options, as keys of a configuration file and as "
            "arguments of `LLM`; `--help` does not list them. A flag with another meaning is an error that says what "
            "to use. [configuration.md](configuration.md) has all settings."
        ),
        *(bullet(link_to(engine)) for engine in COMMON),
        bullet(link_to("Short flags")),
        bullet(link_to("Commands")),
        bullet(link_to("Flags of engine chat")),
        bullet(link_to("Benchmarks")),
        *(block for engine, names in COMMON.items() for block in (f"## {engine}", *map(_line, names))),
        "## Short flags",
        paragraph(
            "These work in every command that has the setting. `-c` is the context of one request; it is not divided."
        ),
        *(
            bullet(f"{code(short)}: {code(setting_names()[name].field.flag)}")
            for short, name in works.items()
        ),
        paragraph("The others are errors with the answer of the long name:"),
        *(
            bullet(f"{code(short)}: {code(flag_of(name))}")
            for short, name in SHORT.items()
            if short not in works
        ),
        "## Commands",
        paragraph(
            "`pull`, `list`, `rm`, `ps`, `serve` and `bench` have the names that they have in Ollama and vLLM:"
        ),
        *(bullet(f"{code(name)}: {answer}") for name, answer in COMMANDS.items()),
        "## Flags of engine chat",
        paragraph("For flags of llama-cli and `ollama run`; those of llama-server have the answers above:"),
        *(bullet(f"{code(flag)}: the same as {code(own)}") for flag, own in SAME_IN_CHAT.items()),
        *(bullet(f"{code(flag_of(name))}: {answer}") for name, answer in CHAT_ANSWERS.items()),
        "## Benchmarks",
        paragraph(
            "`engine bench serve` takes `--base-url`, or `--host` and `--port`; `--backend` with the names of vLLM and "
            "SGLang for OpenAI's two endpoints; `--dataset-name custom` with a file of JSON Lines, "
            '`{"prompt": "...", "output_tokens": 64}`.'
        ),
    )


def _line(name: str) -> str:
    setting = setting_names().get(name)
    if setting is None:
        return bullet(f"{code(flag_of(name))}: {ANSWERS[name]}")
    link = f"[{code(setting.field.flag)}](configuration.md#{setting.field.name})"
    if setting.alias is None:
        return bullet(f"{code(flag_of(name))}: the same, {link}")
    if setting.alias.translate is not None:
        return bullet(f"{code(flag_of(name))}: {link}. {SETTINGS[setting.field.name].note}")
    if setting.switch is None:
        return bullet(f"{code(flag_of(name))}: {link}")
    values = ", ".join(f"{str(on).lower()} is {str(value).lower()}" for on, value in setting.switch.items())
    return bullet(f"{code(flag_of(name))}: {link} ({values})")
