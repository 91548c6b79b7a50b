"""`chat_grammar`: the grammars of a planned chat, of its plan and its constraint."""

from __future__ import annotations

from msgspec.structs import replace

from ...runtime.errors import RequestError
from ...runtime.grammar_use import GrammarKind, GrammarUse
from ..conversation.conversation import ChoiceMode, Conversation
from ..conversation.planner import AnswerPlan
from .schema.constraints import Constraint


def check_constraint_with_tools(conversation: Conversation, constraint: Constraint | None) -> None:
    """Refuse a constraint beside tools that exclude it; call it before the chat is planned.

    Raises:
        RequestError: the answer must be a call, or the constraint has triggers of its own (structural tags).
    """
    if constraint is None or not conversation.tools:
        return
    mode = conversation.tool_choice.mode
    if mode in (ChoiceMode.REQUIRED, ChoiceMode.NAMED):
        raise RequestError(
            f"{constraint.param} constrains the answer, but tool_choice demands a tool call; send one of them",
            param="tool_choice",
            code="conflicting_constraints",
        )
    if constraint.use.spec is None and mode is not ChoiceMode.NONE:
        raise RequestError(
            f"{constraint.param} and tools exclude each other; send one of them",
            param=constraint.param,
            code="conflicting_constraints",
        )


def chat_grammar(plan: AnswerPlan, constraint: Constraint | None) -> GrammarUse | None:
    """The grammars of the plan, or those of structural tags after the plan's reasoning block.

    A JSON answer is also complete if it ends by its limit of tokens, unless the request does not want that.
    """
    use = plan.grammar
    if constraint is None:
        return use
    if constraint.use.spec is None:
        return replace(constraint.use, reasoning=plan.reasoning)
    is_json = use is not None and use.spec is not None and use.spec.kind is GrammarKind.JSON_SCHEMA
    return replace(use, complete=constraint.use.complete) if use is not None and is_json else use
