"""The chat templates of a Hugging Face folder, by name; the usual one is "default".

As in transformers, template files replace the templates of tokenizer_config.json:

    chat_template.jinja                      the default one
    additional_chat_templates/NAME.jinja     others
    tokenizer_config.json                    one string, a list of names and templates, or an object of them
    chat_template.json                       the same, of older multimodal models; read if the others have none
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...runtime.errors import ConfigError
from ..fields import Fields
from ..model_files import read_json

DEFAULT: Final = "default"
WITH_TOOLS: Final = "tool_use"
"""The template that transformers takes for chats with tools."""
_FILE: Final = "chat_template.jinja"
_FOLDER: Final = "additional_chat_templates"
_OF_PROCESSOR: Final = "chat_template.json"
_RULE: Final = "expected a string, or names and templates"


def read_chat_templates(folder: Path, config: Fields) -> dict[str, str]:
    """The Jinja sources.

    Args:
        folder: of the model.
        config: fields of its tokenizer_config.json.

    Raises:
        ConfigError: a file cannot be read, or the field is of another form.
    """
    files = {path.stem: path for path in sorted((folder / _FOLDER).glob("*.jinja"))}
    if (folder / _FILE).exists():
        files[DEFAULT] = folder / _FILE
    if files:
        return {name: _text(path) for name, path in files.items()}
    path = folder / _OF_PROCESSOR
    if config.get("chat_template") is None and path.exists():
        config = Fields(path, read_json(path))
    value = config.get("chat_template")
    match value:
        case None:
            return {}
        case str():
            return {DEFAULT: value}
        case list():
            pairs = [
                (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
                for entry in value
            ]
        case Mapping():
            pairs = list(value.items())
        case _:
            raise config.error("chat_template", value, _RULE)
    templates = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if len(templates) != len(pairs):
        raise config.error("chat_template", value, _RULE)
    return templates


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
