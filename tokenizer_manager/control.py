"""`Control`: what people ask of the scheduler that is no generation: flush, pin, explain, list."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from ..runtime.errors import RequestError
from ..runtime.feasibility import Capacity
from ..runtime.messages import (
    Explain,
    Explanation,
    FlushCache,
    FlushCacheDone,
    ListRequests,
    PinDone,
    PinPrefix,
    RequestList,
)
from .admission.feasibility_check import check_may_fit
from .generation import Prompt
from .prompt_encoder import PromptEncoder
from .questions import Questions

_GENERATION_ID: Final = re.compile(r"[a-z]+-[0-9a-f]{32}")


class Control:
    """Orders and their answers; each raises `EngineDeadError` where nobody would answer."""

    def __init__(
        self,
        questions: Questions,
        encoder: PromptEncoder,
        *,
        capacity: Callable[[], Capacity],
        check_answering: Callable[[], None],
        first_choice: Callable[[str], str | None],
    ) -> None:
        """Ask through `questions`.

        Args:
            encoder: tokenises what is pinned.
            capacity: of today's scheduler.
            check_answering: raises where the scheduler is gone.
            first_choice: the id of a live request's first choice, by the id of that choice or of its generation.
        """
        self._questions = questions
        self._encoder = encoder
        self._capacity = capacity
        self._check_answering = check_answering
        self._first_choice = first_choice

    async def flush_cache(self) -> FlushCacheDone:
        """Drop what the prefix cache can drop.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._check_answering()
        return await self._questions.ask(FlushCache, FlushCacheDone)

    async def explain(self, request_id: str) -> Explanation:
        """Why a request fared as it did, also one that has ended, as far as the scheduler remembers.

        Args:
            request_id: of one choice, or of a generation, which stands for its first choice.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._check_answering()
        ended = f"{request_id}-0" if _GENERATION_ID.fullmatch(request_id) else request_id
        rid = self._first_choice(request_id) or ended
        return await self._questions.ask(lambda explain_id: Explain(explain_id, rid), Explanation)

    async def pin(
        self, prompt: Prompt, *, ttl_s: float, extra_key: str, add_special_tokens: bool, param: str
    ) -> PinDone:
        """Keep what is cached of a prompt for `ttl_s` seconds; 0 unpins.

        Args:
            prompt: of which a prefix is pinned.
            ttl_s: verified.
            extra_key: namespace of the prefix cache.
            add_special_tokens: as in `GenerationRequest`.
            param: the field that errors shall name.

        Raises:
            RequestError: the prompt is empty, has tokens that there are not, or is longer than any prompt that can run.
            EngineDeadError: the scheduler does not answer.
        """
        self._check_answering()
        capacity = self._capacity()
        if isinstance(prompt, str):
            check_may_fit(prompt, self._encoder.tokenizer, capacity, param)
        [ids] = await self._encoder.encode([prompt], add_special_tokens=add_special_tokens, param=param)
        if not 1 <= len(ids) < capacity.max_model_len:
            raise RequestError(
                f"{param} has {len(ids)} tokens, but a prompt has at least 1 and at most "
                f"{capacity.max_model_len - 1}; pin what requests will begin with",
                param=param,
                code="invalid_value",
            )
        self._check_answering()  # it may have died while we tokenised
        input_ids = ids.tobytes()
        return await self._questions.ask(
            lambda pin_id: PinPrefix(pin_id, input_ids, ttl_s, extra_key), PinDone
        )

    async def list_requests(self, limit: int) -> RequestList:
        """The live requests as the scheduler sees them.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        self._check_answering()
        return await self._questions.ask(lambda list_id: ListRequests(list_id, limit), RequestList)
