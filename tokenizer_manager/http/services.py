"""`Services`: the parts that the handlers use; made once by `process.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import RequestError
from ...runtime.model_files.model_spec import ModelSpec
from ...runtime.model_files.tokenizer import Tokenizer
from ..all_processes import AllProcesses
from ..conversation.chat_template import ChatTemplate
from ..generation import Generation, GenerationRequest
from ..manager import TokenizerManager
from ..metrics import Metrics
from ..prompt_encoder import PromptEncoder
from .exchange import Exchange
from .guards.auth import Authorizer
from .guards.body_budget import BodyBudget
from .schema.errors import POSITION_HEADER
from .schema.json_body import Body, parse_object, show


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """One engine, as its HTTP side sees it.

    Attributes:
        manager: runs generations.
        all_processes: sends orders to every process.
        authorizer: checks API keys.
        encoder: tokenizes.
        chat_template: None for a model without one.
        metrics: of `/metrics`.
        config: resolved settings.
        spec: facts about the model.
        served_model: its name in requests.
        created_s: Unix time when serving began.
        version: of the engine.
        body_budget: bounds the bodies that are being received.
    """

    manager: TokenizerManager
    all_processes: AllProcesses
    authorizer: Authorizer
    encoder: PromptEncoder
    chat_template: ChatTemplate | None
    metrics: Metrics
    config: EngineConfig
    spec: ModelSpec
    served_model: str
    created_s: int
    version: str
    body_budget: BodyBudget = field(default_factory=BodyBudget)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.encoder.tokenizer

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes when the same seed may give a different text."""
        return f"engine-{self.version}-{self.config.model.dtype}"

    async def read_object(self, exchange: Exchange, *, optional: bool = False) -> Body:
        """The request's JSON object.

        Args:
            optional: an empty body is an empty object.

        Raises:
            RequestError: the body is too large, is no JSON object, or exceeds the budget of bodies.
        """
        with self.body_budget.reserve() as reservation:
            body = await exchange.body(int(self.config.server.max_body_mb * 2**20), reservation)
            return {} if optional and not body else parse_object(body, self.config.limits)

    async def start(self, exchange: Exchange, request: GenerationRequest) -> Generation:
        """As `TokenizerManager.start`; the response has the queue position in a header."""
        generation = await self.manager.start(request)
        exchange.more_headers.append((POSITION_HEADER, b"%d" % generation.queue_position))
        return generation

    def check_model(self, model: str | None) -> None:
        """Check that a request names the served model, or none.

        Raises:
            RequestError: 404 for any other.
        """
        if model is not None and model != self.served_model:
            raise unknown_model(model, self.served_model)

    def require_chat_template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            RequestError: the model has none.
        """
        if self.chat_template is None:
            raise RequestError(
                f"the model {self.served_model} has no chat template; use /v1/completions, or start the server with "
                f"--chat-template",
                param="messages",
                code="no_chat_template",
            )
        return self.chat_template


def unknown_model(model: str, served: str) -> RequestError:
    """The error for a model that is not served."""
    return RequestError(
        f"the model {show(model)} is not served here; use {show(served)}",
        param="model",
        code="model_not_found",
        status=404,
    )
