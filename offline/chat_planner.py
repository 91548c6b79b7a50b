"""`ChatPlanner`: renders conversations with the model's chat template, and plans how their answers are read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..runtime.errors import RequestError
from ..tokenizer_manager.conversation.conversation import Conversation
from ..tokenizer_manager.conversation.detection import detect_formats
from ..tokenizer_manager.conversation.planner import AnswerPlan, Planner
from ..tokenizer_manager.conversation.template_choice import (
    load_chat_template,
    turn_without_end,
    why_no_template,
)
from ..tokenizer_manager.http.openai.tools import ToolSchemas

if TYPE_CHECKING:
    from ..launch.resolve.prepare import Prepared
    from ..models.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class ChatPlanner:
    """The chats of one model."""

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer) -> None:
        """Load the chat template; warns of one with turns at which answers do not end.

        Raises:
            ConfigError: the template cannot be read.
        """
        config = prepared.config
        self._model_name = prepared.model_name
        self._tokenizer = tokenizer
        self._template = load_chat_template(config.model.chat_template, tokenizer, prepared.source.path)
        if self._template is not None and (
            line := turn_without_end(self._template, tokenizer, prepared.spec.eos_token_ids)
        ):
            logger.warning("%s", line)
        self._planner = Planner(
            detect_formats(self._template, tokenizer, config.answers),
            tokenizer,
            config.answers,
            max_tools=config.limits.max_tools,
            max_schema_kb=config.limits.max_schema_kb,
            check_schema=ToolSchemas(config.limits),
        )

    def plan(self, conversation: Conversation, max_tokens: int | None) -> AnswerPlan:
        """The prompt of a conversation, and the form of its answer.

        Raises:
            RequestError: the model has no template, or the template refuses a message.
        """
        if self._template is None:
            raise RequestError(
                f"{self._model_name} {why_no_template(self._tokenizer, 'use `generate`')}",
                param="messages",
            )
        given = self._planner.render_input(conversation)
        prompt = self._template.render(**given._asdict())
        return self._planner.plan(conversation, prompt, max_tokens=max_tokens)
