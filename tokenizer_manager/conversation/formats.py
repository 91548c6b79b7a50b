"""`AnswerFormats`: how a model writes tool calls and reasoning, and what its chat template knows."""

from __future__ import annotations

from dataclasses import dataclass

from .parsing.families import GENERIC, Form, ToolFamily
from .parsing.reasoning_families import ReasoningFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormats:
    """Found once, at start.

    Attributes:
        tools: the format of calls; None (`--tool-call-parser none`): answers are not parsed for calls.
        reasoning: None: the model does not reason, or its reasoning is not told from the answer.
        template_tools: the template shows tools and calls; otherwise they are written into the messages.
        object_arguments: the template wants the arguments of earlier calls as objects; otherwise as JSON text.
        several_calls: the template can show several calls of one message.
        variables: names of the variables that the template reads.
    """

    tools: ToolFamily | None = GENERIC
    reasoning: ReasoningFamily | None = None
    template_tools: bool = False
    object_arguments: bool = True
    several_calls: bool = True
    variables: frozenset[str] = frozenset()

    @property
    def is_generic(self) -> bool:
        """Calls are described in the system message and always constrained."""
        return self.tools is not None and self.tools.form is Form.GENERIC

    @property
    def reasoning_switch(self) -> str | None:
        """The variable that turns reasoning on and off."""
        for name in ("enable_thinking", "thinking"):
            if name in self.variables:
                return name
        return None
