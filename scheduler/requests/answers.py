"""`Answers`: what the scheduler has to say to the detokenizer, in order, until somebody takes it."""

from __future__ import annotations

from ...runtime.messages import BatchTokenOutput, DetokenizerInput, TokenOutput


class Answers:
    """A list that only grows, and is taken whole."""

    __slots__ = ("_messages",)

    def __init__(self) -> None:
        self._messages: list[DetokenizerInput] = []

    def rows(self, rows: list[TokenOutput]) -> None:
        """News of requests, at most one row of each."""
        if rows:
            self._messages.append(BatchTokenOutput(rows))

    def message(self, message: DetokenizerInput) -> None:
        """Anything else."""
        self._messages.append(message)

    def take(self) -> list[DetokenizerInput]:
        """Everything since the last call."""
        messages, self._messages = self._messages, []
        return messages
