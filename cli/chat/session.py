"""`ChatSession`: one conversation: system prompt, messages, settings; on disk a JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Final

from ...runtime.errors import ConfigError, RequestError
from ..options import read_json
from .settings import PARAMETERS, ChatSettings

FILE_VERSION: Final = 1

Part = dict[str, Any]
"""A text or an image (`data:` URL) of a message, as chat completions have it."""
Content = str | list[Part]
Message = dict[str, Any]
"""`{"role": "user" | "assistant", "content": Content}`."""


class ChatSession:
    """The messages of a conversation, which alternate: user, assistant, user, ..."""

    def __init__(self, system: str | None = None, settings: ChatSettings | None = None) -> None:
        self.system = system
        self.settings = settings or ChatSettings()
        self._messages: list[Message] = []

    @property
    def num_exchanges(self) -> int:
        return len(self._questions())

    def messages(self, question: Content | None = None) -> list[Message]:
        """The messages for the model: the system prompt, the conversation, and `question` at the end."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        tail = [{"role": "user", "content": question}] if question is not None else []
        return [*head, *self._messages, *tail]

    def add(self, question: Content, answer: str) -> None:
        """Keep one exchange; of a stopped answer, keep the part that arrived."""
        self._messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def take_back(self) -> Content | None:
        """Forget the last exchange; returns its question, None if there is none."""
        if not self._messages:
            return None
        start = self._questions()[-1]
        question: Content = self._messages[start]["content"]
        del self._messages[start:]
        return question

    def drop_oldest(self, count: int) -> int:
        """Forget the oldest exchanges; returns how many were there to forget."""
        starts = self._questions()
        del self._messages[: [*starts, len(self._messages)][min(count, len(starts))]]
        return min(count, len(starts))

    def clear(self) -> None:
        """Forget every message; the system prompt and the settings stay."""
        self._messages.clear()

    def _questions(self) -> list[int]:
        """The index of each question."""
        return [n for n, message in enumerate(self._messages) if message["role"] == "user"]

    def save(self, path: Path, model: str) -> None:
        """Write the conversation; see `_write`."""
        document = {
            "version": FILE_VERSION,
            "model": model,
            "system": self.system,
            "settings": {k: v for k, v in dataclasses.asdict(self.settings).items() if v is not None},
            "messages": self._messages,
        }
        _write(path, json.dumps(document, ensure_ascii=False, indent=2) + "\n")

    def export(self, path: Path, model: str) -> None:
        """Write the conversation as Markdown: a heading for each message; see `_write`."""
        names = {"system": "System", "user": "You", "assistant": model}
        parts = []
        for message in self.messages():
            text, images = text_and_images(message["content"])
            text = "\n\n".join([*["[image]"] * len(images), text.strip()])
            parts.append(f"## {names[message['role']]}\n\n{text}\n")
        _write(path, "\n".join([f"# Chat with {model}\n", *parts]))

    def load(self, path: Path) -> None:
        """Replace this conversation by one from a file; nothing changes if the file is no saved chat.

        Raises:
            RequestError: it cannot be read.
        """
        try:
            document = read_json(path, f"the saved chat {path}")
        except ConfigError as error:
            raise RequestError(str(error)) from None
        system, settings, messages = _check_document(document, path)
        self.system, self.settings, self._messages = system, settings, messages


def _write(path: Path, text: str) -> None:
    """Write a file; an existing one is replaced atomically.

    Raises:
        RequestError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except (OSError, UnicodeEncodeError) as error:
        raise RequestError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def _check_document(document: Any, path: Path) -> tuple[str | None, ChatSettings, list[Message]]:
    if not isinstance(document, dict) or not isinstance(document.get("messages"), list):
        raise RequestError(f"{path} is not a saved chat: it has no list of messages")
    if document.get("version") != FILE_VERSION:
        raise RequestError(
            f"{path} has version {document.get('version')!r}, this engine reads {FILE_VERSION}"
        )
    messages: list[Message] = []
    for number, entry in enumerate(document["messages"]):
        expected = "assistant" if number % 2 else "user"
        match entry:
            case {"role": str(role), "content": str(content)} if role == expected:
                messages.append({"role": role, "content": content})
            case {"role": "user", "content": list(parts)} if expected == "user" and all(map(_is_part, parts)):
                messages.append({"role": "user", "content": parts})
            case _:
                raise RequestError(f"{path}: message {number} is no message of the {expected}")
    system = document.get("system")
    if system is not None and not isinstance(system, str):
        raise RequestError(f"{path}: the system prompt is not text")
    return system, _check_settings(document.get("settings", {}), path), messages


def text_and_images(content: Content) -> tuple[str, list[Part]]:
    """A question as its text and its images."""
    if isinstance(content, str):
        return content, []
    texts = [part["text"] for part in content if part["type"] == "text"]
    return "\n\n".join(texts), [part for part in content if part["type"] == "image_url"]


def _is_part(part: Any) -> bool:
    """Whether this is a `Part`."""
    match part:
        case {"type": "text", "text": str()} | {"type": "image_url", "image_url": {"url": str()}}:
            return True
    return False


def _check_settings(values: Any, path: Path) -> ChatSettings:
    if not isinstance(values, dict):
        raise RequestError(f"{path}: the settings are not a JSON object")
    unknown = values.keys() - PARAMETERS
    if unknown:
        raise RequestError(f"{path}: unknown settings {', '.join(sorted(unknown))}")
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
        if not (texts if name == "stop" else number):
            raise RequestError(f"{path}: {name} is {value!r}, which is not valid")
    checked: dict[str, Any] = {k: tuple(value) if k == "stop" else value for k, value in values.items()}
    return ChatSettings(**checked)
