"""`History`: builds the messages of a `Conversation` from the items or blocks of an API.

Templates have one assistant message per turn, with its reasoning, its text and its calls; some refuse two messages of
one role in a row. The agent APIs have separate items, so neighbors of one role are joined here.
"""

from __future__ import annotations

from typing import Any, Final

TEXT_SEPARATOR: Final = "\n"
"""Between the text parts of a message, as in chat completions."""
_MESSAGE_SEPARATOR: Final = "\n\n"


class History:
    """Messages in OpenAI's form.

    Attributes:
        messages: so far.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def system(self, text: str) -> None:
        """Add instructions; those at the beginning become one message."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self._extend(self.messages[0], text, _MESSAGE_SEPARATOR)
        else:
            self.messages.append({"role": "system", "content": text})

    def user(self, text: str) -> None:
        """Add a text of the user."""
        if (last := self._last("user")) is not None:
            self._extend(last, text, _MESSAGE_SEPARATOR)
        else:
            self.messages.append({"role": "user", "content": text})

    def assistant(self, text: str) -> None:
        """Add a text of the model."""
        last = self._last("assistant")
        if last is None or "tool_calls" in last:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self._extend(last, text, TEXT_SEPARATOR)

    def reasoning(self, text: str) -> None:
        """Add a reasoning of the model; it belongs to the text and the calls after it."""
        last = self._last("assistant")
        if last is None or last["content"] or "tool_calls" in last:
            self.messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        else:
            last["reasoning_content"] = f"{last['reasoning_content']}{TEXT_SEPARATOR}{text}"

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of the model."""
        last = self._last("assistant")
        if last is None:
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        last.setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        )

    def result(self, call_id: str, text: str, name: str | None = None) -> None:
        """Add the result of a call."""
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        if name is None:
            name = self.name_of(call_id)
        if name is not None:
            message["name"] = name
        self.messages.append(message)

    def name_of(self, call_id: str) -> str | None:
        """The tool of an earlier call."""
        for message in reversed(self.messages):
            for call in message.get("tool_calls", ()):
                if call["id"] == call_id:
                    name: str = call["function"]["name"]
                    return name
        return None

    def _last(self, role: str) -> dict[str, Any] | None:
        if self.messages and self.messages[-1]["role"] == role:
            return self.messages[-1]
        return None

    @staticmethod
    def _extend(message: dict[str, Any], text: str, separator: str) -> None:
        message["content"] = f"{message['content']}{separator}{text}" if message["content"] else text
