"""`RequestPreparer`: tokenizes and checks the prompts of a call, before any of its requests starts.

`ChatPlanner` renders conversations with the model's chat template, and plans how their answers are read.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ..runtime.errors import RequestError
from ..runtime.feasibility import Capacity
from ..runtime.grammar_use import GrammarUse
from ..runtime.media import reason_against_images
from ..runtime.messages import MediaItem
from ..runtime.sampling_params import MAX_SEED, SamplingParams
from ..tokenizer_manager.conversation.conversation import Conversation
from ..tokenizer_manager.conversation.detection import detect_formats
from ..tokenizer_manager.conversation.planner import AnswerPlan, Planner
from ..tokenizer_manager.conversation.template_choice import (
    load_chat_template,
    turn_without_end,
    why_no_template,
)
from ..tokenizer_manager.generation import Constraint
from ..tokenizer_manager.http.openai.tools import ToolSchemas
from ..tokenizer_manager.http.schema.constraints import chat_grammar, check_constraint_with_tools, check_room
from ..tokenizer_manager.preparation import resolve_length, with_token_ids
from ..tokenizer_manager.prompt_encoder import second_bos, unknown_to_model
from .batch import CheckedRequest
from .images import LocalImages, PlacedChat
from .prompts import checked_token_ids

if TYPE_CHECKING:
    from ..launch.resolve.prepare import Prepared
    from ..models.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class RequestPreparer:
    """Makes requests that fit; gives each its id, and a seed if it has none."""

    def __init__(self, tokenizer: Tokenizer, capacity: Capacity, seed: int | None) -> None:
        """`seed`: of requests without one; None or 0: each gets a random one."""
        self._tokenizer = tokenizer
        self._capacity = capacity
        self._seed = seed
        self._numbers = itertools.count()

    def prepare_all(
        self,
        prompts: Sequence[object],
        params: Sequence[SamplingParams],
        constraint: Constraint | None,
        *,
        add_special_tokens: bool,
    ) -> list[CheckedRequest]:
        """A request for each prompt, with the parameters at its place.

        Raises:
            RequestError: a prompt or parameter is invalid; the message has the number of the prompt.
        """
        grammar = None if constraint is None else constraint.use
        requests: list[CheckedRequest] = []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            try:
                self.check_room(constraint, own)
                requests.append(self.prepare(prompt, own, grammar, add_special_tokens=add_special_tokens))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(
                    f"prompt {index}: {error.message}",
                    param=error.param,
                    code=error.code,
                    status=error.status,
                ) from None
        self._warn_of_second_bos(prompts, requests, add_special_tokens)
        return requests

    def prepare_samples(
        self,
        prompt: object,
        n: int,
        sampling: SamplingParams,
        constraint: Constraint | None,
        *,
        add_special_tokens: bool,
    ) -> list[CheckedRequest]:
        """n requests with the same prompt, in one group; request i has the seed of the first one plus i.

        Raises:
            RequestError: the prompt or a parameter is invalid.
        """
        (first,) = self.prepare_all([prompt], [sampling], constraint, add_special_tokens=add_special_tokens)
        seed = first.sampling.seed
        assert seed is not None
        return [
            dataclasses.replace(
                first,
                rid=f"{first.rid}-{i}",
                sampling=msgspec.structs.replace(first.sampling, seed=(seed + i) & MAX_SEED),
                group=first.rid if n > 1 else "",
            )
            for i in range(n)
        ]

    def prepare(
        self,
        prompt: object,
        sampling: SamplingParams,
        grammar: GrammarUse | None,
        *,
        add_special_tokens: bool,
    ) -> CheckedRequest:
        """One request.

        Raises:
            RequestError: the prompt or a parameter is invalid, or they do not fit.
        """
        sampling.verify(self._capacity.vocab_size)
        if sampling.without_effect:
            logger.warning("%s", sampling.without_effect)
        token_ids = self.encode(prompt, add_special_tokens=add_special_tokens)
        sampling = with_token_ids(sampling, self._tokenizer)
        sampling = resolve_length(
            sampling, len(token_ids), self._capacity, prompt_param="prompt", length_param="max_new_tokens"
        )
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seed or random.randint(0, MAX_SEED))
        if grammar is not None:
            grammar = msgspec.structs.replace(
                grammar, compiles=True
            )  # by the caller, who shares this process
        return CheckedRequest(f"llm-{next(self._numbers)}", token_ids, sampling, grammar=grammar)

    def check_images(self, media: Sequence[MediaItem]) -> None:
        """Refuse images that can never run.

        Raises:
            RequestError: they are refused.
        """
        if reason := reason_against_images(media, self._capacity):
            raise RequestError(reason, param="messages", code="unsupported_value")

    def check_room(self, constraint: Constraint | None, sampling: SamplingParams) -> None:
        """Refuse a limit on tokens below the shortest answer.

        Raises:
            RequestError: it is.
        """
        if constraint is not None:
            check_room(constraint, sampling.max_new_tokens, "max_new_tokens", self._tokenizer)

    def encode(self, prompt: object, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a prompt.

        Raises:
            RequestError: it is no prompt, or has a token that the model lacks.
        """
        vocab_size = self._capacity.vocab_size
        if not isinstance(prompt, str):
            return checked_token_ids(prompt, vocab_size)
        token_ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        if max(token_ids, default=0) >= vocab_size:
            raise unknown_to_model(self._tokenizer, token_ids, "prompt", vocab_size)
        return token_ids

    def _warn_of_second_bos(
        self, prompts: Sequence[object], requests: Sequence[CheckedRequest], add_special_tokens: bool
    ) -> None:
        if add_special_tokens:
            encoded = (request.token_ids for request in requests)
            found = second_bos(self._tokenizer, prompts, encoded, "prompt", "pass add_special_tokens=False")
            if found:
                more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
                logger.warning("%s%s", found[0], more)


class ChatPlanner:
    """The chats of one model."""

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer) -> None:
        """Load the chat template; warns of one with turns at which answers do not end.

        Raises:
            ConfigError: the template cannot be read.
        """
        config, vision = prepared.config, prepared.spec.vision
        self._images = None if vision is None else LocalImages(vision, tokenizer, config.media)
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
            images=None if self._images is None else self._images.placement,
        )

    @property
    def sees_images(self) -> bool:
        """Whether messages may have images."""
        return self._images is not None

    def placed(self, plan: AnswerPlan) -> PlacedChat:
        """The token ids of a plan, and its images; `release` them.

        Raises:
            RequestError: an image cannot be used.
        """
        if self._images is not None:
            return self._images.placed(plan)
        return PlacedChat(self._tokenizer.encode(plan.prompt, add_special_tokens=False), ())

    def release(self, media: Sequence[MediaItem]) -> None:
        """Give images back."""
        if self._images is not None:
            self._images.release(media)

    def close(self) -> None:
        """Remove the files of images."""
        if self._images is not None:
            self._images.close()
            self._images = None

    def prepare(
        self,
        conversation: Conversation,
        sampling: SamplingParams,
        constraint: Constraint | None,
        preparer: RequestPreparer,
    ) -> CheckedRequest:
        """The request of a conversation.

        Raises:
            RequestError: see `plan` and `RequestPreparer.prepare`; or the constraint excludes the tools.
        """
        check_constraint_with_tools(conversation, constraint)
        if not conversation.tools:
            preparer.check_room(constraint, sampling)
        plan = self.plan(conversation, sampling.max_new_tokens)
        use = chat_grammar(plan, constraint)
        if use is not None:
            use = msgspec.structs.replace(use, param="tools" if constraint is None else constraint.use.param)
        if self._images is None:
            request = preparer.prepare(plan.prompt, sampling, use, add_special_tokens=False)
            return dataclasses.replace(request, keep_special_ids=plan.keep_special_ids, parser=plan.parser())
        chat = self._images.placed(plan)
        try:
            preparer.check_images(chat.media)
            request = preparer.prepare(chat.ids, sampling, use, add_special_tokens=False)
        except BaseException:
            self._images.release(chat.media)
            raise
        return dataclasses.replace(
            request, keep_special_ids=plan.keep_special_ids, parser=plan.parser(), media=chat.media
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
