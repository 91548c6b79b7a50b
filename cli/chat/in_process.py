"""`InProcessBackend`: the engine in this process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Final

from ...launch.startup_display import StartupDisplay
from ...runtime.config.config_sources import MergedConfig, from_arguments
from ...runtime.errors import EngineError, RequestError
from .backend import AnswerChunk, AnswerUsage, Call, why_it_cannot_chat
from .session import Message
from .settings import AnswerForm, ChatSettings

if TYPE_CHECKING:
    from ...launch.resolve.prepare import Prepared
    from ...offline.llm import LLM
    from ...offline.options import ChatOptions

# One conversation at a time; the KV of a second sequence keeps the old conversation cached after /clear or /regen.
BASE_SETTINGS: Final = from_arguments({"max_running_requests": 2})


class InProcessBackend:
    """A backend over `LLM`."""

    def __init__(self, llm: LLM, form: AnswerForm) -> None:
        self._llm = llm
        self._form = form
        self.model = llm.model_name
        self.where = "in this process"
        self.max_context: int | None = llm.max_model_len

    @classmethod
    def start(
        cls,
        merged: MergedConfig,
        display: StartupDisplay,
        form: AnswerForm = AnswerForm(),  # noqa: B008  (immutable)
    ) -> InProcessBackend:
        """Load the model; `form`: of the answers.

        Raises:
            ConfigError: the model cannot run on this machine.
        """
        display.step("import the engine")
        from ...offline.llm import LLM

        llm = LLM.from_config(merged, on_step=display.step, on_download=display.download, check=_check_chats)
        return cls(llm, form)

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings
    ) -> Generator[AnswerChunk, None, None]:
        options: ChatOptions = {}
        if (response_format := self._form.response_format()) is not None:
            options["response_format"] = response_format
        if self._form.tools:
            options["tools"] = self._form.tools
        for chunk in self._llm.chat(messages, settings.params(), stream=True, **options):
            if chunk.error is not None:
                raise EngineError(chunk.error)
            usage = chunk.usage
            yield AnswerChunk(
                chunk.text,
                AnswerUsage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
                chunk.finish_reason,
                reasoning=chunk.reasoning,
                calls=tuple(Call(call.index, call.name, call.arguments) for call in chunk.tool_calls),
            )

    def count_tokens(self, messages: Sequence[Message]) -> int | None:
        return len(self._llm.render_chat(messages))

    def close(self) -> None:
        """Stop the engine."""
        self._llm.close()


def _check_chats(prepared: Prepared) -> None:
    """Refuse a model without text, before its weights are read."""
    if prepared.spec.pooling is not None:
        raise RequestError(why_it_cannot_chat(prepared.model_name, prepared.spec.pooling.task))
