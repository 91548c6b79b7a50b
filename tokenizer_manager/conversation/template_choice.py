"""Which of a model's chat templates, or which file, renders its chats, and whether its answers can end.

`turn_without_end` renders a chat with an answer in it and tokenizes the text after the answer. If it has none of the
tokens that end an answer, the model runs to the limit of every request: the files of the model do not belong together,
or the template was changed without the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ...models.tokenizer.chat_templates import DEFAULT, WITH_TOOLS
from ...models.tokenizer.tokenizer import Tokenizer
from ...runtime.errors import ConfigError, RequestError
from .chat_template import ChatTemplate

_FLAG: Final = "--chat-template"


def load_chat_template(choice: str | None, tokenizer: Tokenizer, model_path: str) -> ChatTemplate | None:
    """The chosen template, else the model's default one or its only one, else None (see `why_no_template`).

    With the default one, "tool_use" renders chats with tools if the model has it, as in transformers.

    Args:
        choice: of `--chat-template`: the name of one of the model's templates, or a file.
        tokenizer: has the model's templates.
        model_path: for errors.

    Raises:
        ConfigError: there is no such name or file, or it is no template.
    """
    named, special_tokens = tokenizer.chat_templates, tokenizer.special_tokens
    if choice is not None and choice not in named:
        return _compiled(_text_of(choice, named), special_tokens, f"the chat template {choice}")
    name = choice or (DEFAULT if DEFAULT in named else next(iter(named)) if len(named) == 1 else None)
    if name is None:
        return None
    try:
        with_tools = None
        if choice is None and name == DEFAULT and WITH_TOOLS in named:
            with_tools = _compiled(
                named[WITH_TOOLS], special_tokens, f"the model's chat template {WITH_TOOLS}"
            )
        shown = "the model's chat template" + ("" if name == DEFAULT else f" {name}")
        return _compiled(named[name], special_tokens, shown, with_tools)
    except ConfigError as error:  # clients see the template's name, which must not have a path of the server
        raise ConfigError(f"{model_path}: {error}") from error


def check_template_file(path: str) -> None:
    """Check a file of `--chat-template` before there is a model.

    Raises:
        ConfigError: it cannot be read, or is no template.
    """
    ChatTemplate(_text_of(path, {}), {}, f"the chat template {path}")


def why_no_template(tokenizer: Tokenizer, instead: str) -> str:
    """After "the model X": why it has no template, and what to do instead, where `load_chat_template` returns None."""
    names = tokenizer.chat_templates
    if not names:
        return f"has no chat template; {instead}, or give a file with {_FLAG}"
    return (
        f"has several chat templates, {', '.join(sorted(names))}, and none is called {DEFAULT}; {instead}, or choose "
        f"one at start, for example {_FLAG} {min(names)}"
    )


def _compiled(
    source: str, special_tokens: Mapping[str, str], name: str, with_tools: ChatTemplate | None = None
) -> ChatTemplate:
    template = ChatTemplate(source, special_tokens, name, with_tools)
    template.find_part_roles()
    template.find_shape()
    return template


def _text_of(path: str, names: Mapping[str, str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        templates = f" or one of the model's templates ({', '.join(sorted(names))})" if names else ""
        raise ConfigError(
            f"{path}: the chat template cannot be read: {reason}; give another file{templates} with {_FLAG}"
        ) from error


_ANSWER: Final = "zq answer zq"
_CHAT: Final = ({"role": "user", "content": "zq question zq"}, {"role": "assistant", "content": _ANSWER})
_MAX_SHOWN_CHARS: Final = 40


def turn_without_end(template: ChatTemplate, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> str:
    """Reason why answers do not end with the turn, and after "; " what to do; "" if they do, or if nothing is known.

    Args:
        template: of the model.
        tokenizer: of the model.
        eos_token_ids: the tokens that end an answer.
    """
    try:
        rendered = template.render(_CHAT, add_generation_prompt=False)
    except RequestError:
        return ""
    _, found, after = rendered.rpartition(_ANSWER)
    after = after.strip()
    if not found or not after:
        return ""  # a template for one turn, or of a kind that shows no end
    ids = tokenizer.encode(after, add_special_tokens=False)
    if not ids or not set(ids).isdisjoint(eos_token_ids):
        return ""
    shown = after if len(after) <= _MAX_SHOWN_CHARS else after[:_MAX_SHOWN_CHARS] + "..."
    token = tokenizer.token_bytes(ids[0]).decode("utf-8", "replace")
    if tokenizer.is_special(ids[0]):
        return (
            f"the chat template ends a turn with {token!r}, which is no end token of the model: answers run to the "
            f"limit; add {ids[0]} to eos_token_id in generation_config.json, or send stop: [{token!r}]"
        )
    return (
        f"the chat template ends a turn with {shown!r}, which is no single token of the tokenizer: answers run to the "
        f"limit; use the tokenizer that belongs to the template, or send stop: [{shown!r}]"
    )
