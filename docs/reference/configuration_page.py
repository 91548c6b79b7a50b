"""`docs/configuration.md`: every setting of `EngineConfig`, with its names in SGLang and vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Final

from engine.cli.options import GROUP_TITLES
from engine.runtime.config.config_fields import SECRETS, ConfigField, config_fields
from engine.runtime.config.environment import variable_of
from engine.runtime.config.presets import PRESETS

from .markdown import DASH, bullet, code, link_to, page, paragraph, plain
from .peer_names import READ_AT, SETTINGS, PeerNames
from .settings import default_text, type_text

NAME: Final = "configuration.md"
_EXAMPLE: Final = """```yaml
# engine.yaml: engine serve --config engine.yaml
model: ./my-model
cache:
  page_size: 16
  kv_cache_dtype: auto
max-running-requests: 64
```"""


def configuration_page() -> str:
    """The text of the page."""
    groups = {name: list(fields) for name, fields in groupby(config_fields().values(), lambda f: f.group)}
    return page(
        "# Configuration",
        "<!-- Generated from the code by `make docs`; do not edit. -->",
        paragraph(
            "Every setting of the engine. The commands that take a setting are listed in [cli.md](cli.md); environment "
            f"variables are in [environment.md](environment.md). Names in other engines are those of {READ_AT}; "
            f"{DASH} means that there is no such setting."
        ),
        *(_contents_line(name, fields) for name, fields in groups.items()),
        bullet(link_to("Presets")),
        "## Where a value comes from",
        paragraph(
            "Later sources win: default, preset, file of `--config`, environment variable, flag (or argument of "
            "`LLM(...)`). `engine serve --print-config` prints every setting, its value and its source, as a file that "
            "`--config` reads."
        ),
        paragraph(
            "A setting has one name everywhere: `page_size` in a file and in `LLM(page_size=16)`, `--page-size` on the "
            "command line. A file may use dashes or underscores, and may put settings under the name of their group. "
            "A boolean setting has two flags, `--strict` and `--no-strict`. Its environment variable is `ENGINE_` and "
            "the name in capitals, `ENGINE_PAGE_SIZE=16`."
        ),
        _EXAMPLE,
        paragraph(
            "`auto` is replaced once, at start, by a value for this machine and model; `--print-config` states the "
            "value and the reason."
        ),
        *(block for name, fields in groups.items() for block in _group(name, fields)),
        *_presets(),
    )


def group_heading(group: str) -> str:
    """The heading of a group, which no setting has: equal headings have different anchors."""
    return f"{GROUP_TITLES[group]} ({code(group)})"


def names_text(names: PeerNames | None) -> str:
    """`SGLang: ...; vLLM: ...` and the note; a dash where there is no such setting."""
    names = names or PeerNames()
    text = f"SGLang: {_codes(names.sglang)}; vLLM: {_codes(names.vllm)}"
    if names.sglang and names.sglang == names.vllm:
        text = f"SGLang and vLLM: {_codes(names.sglang)}"
    if names.llama_server:
        text += f"; llama-server: {_codes(names.llama_server)}"
    return f"{text}. {names.note}" if names.note else text


def _contents_line(group: str, fields: list[ConfigField]) -> str:
    links = ", ".join(f"[{field.name}](#{field.name})" for field in fields)
    return bullet(f"{link_to(group_heading(group))}: {links}")


def _group(name: str, fields: list[ConfigField]) -> Iterator[str]:
    yield f"## {group_heading(name)}"
    for field in fields:
        yield f"### {field.name}"
        yield paragraph(plain(field.help))
        yield bullet(f"flag: {_flags(field)}")
        yield bullet(f"type: {type_text(field)}; default: {default_text(field)}")
        if field.name in SECRETS:
            yield bullet(f"environment variable: {code(variable_of(field.name))}")
        yield bullet(names_text(SETTINGS.get(field.name)))


def _flags(field: ConfigField) -> str:
    """All flags of a setting, its own first."""
    flags = []
    for setting in field.settings:
        flags.append(setting.flag)
        if setting.is_switch and (setting.switch is None or False in setting.switch):
            flags.append(f"--no-{setting.flag[2:]}")
    return _codes(flags)


def _presets() -> Iterator[str]:
    yield "## Presets"
    yield paragraph("`--preset NAME` sets these values; every other source of a value wins over a preset.")
    for name, values in PRESETS.items():
        shown: Mapping[str, object] = {setting: value.value for setting, value in values.items()}
        yield bullet(f"{code(name)}: " + ", ".join(code(f"{key}: {value}") for key, value in shown.items()))


def _codes(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(code(name) for name in names) or DASH
