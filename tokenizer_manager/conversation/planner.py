"""`Planner`: from a `Conversation` to what the chat template is given, and from the prompt to an `AnswerPlan`.

    input = planner.render_input(conversation)
    prompt = template.render(input.messages, tools=input.tools, ...)      on a thread, or at once
    plan = planner.plan(conversation, prompt)

Both steps are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from ...grammar.lowering.lark import embedded
from ...models.tokenizer.tokenizer import Tokenizer
from ...runtime.config.answer_config import AnswerConfig
from ...runtime.errors import RequestError
from ...runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse, ReasoningBlock
from ..media.placement import ImagePlacement
from .conversation import ChoiceMode, Conversation, Tool
from .detection import AnswerFormats
from .parameters import Unenforceable
from .parsing.emitter import MakeId
from .parsing.families import Form, ToolFamily
from .parsing.output_parser import OutputParser
from .parsing.reasoning_families import ReasoningFamily
from .reasoning import ReasoningCounter, reasoning_block, reasoning_variables
from .tool_grammars import ToolGrammars, generic_grammar
from .tools import checked_tools, generic_messages, history_warnings, messages_for_template, tool_for_template

_ANSWER_SHARE: Final = 10  # percent of max_tokens that the reasoning leaves for a constrained answer


CheckSchema = Callable[[dict[str, Any], str, bool], tuple[dict[str, Any], list[str]]]
"""(schema, field of the request, strict) -> (schema that can be compiled, warnings); raises RequestError."""


class RenderInput(NamedTuple):
    """The arguments of `ChatTemplate.render`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Plan of the generation and parsing of one request.

    Attributes:
        prompt: the text to generate after; it may be longer than the rendered one. For a model that sees images,
            `ImagePlacement` makes the tokens of it.
        grammar: None: free text, without a budget of reasoning.
        keep_special_ids: special tokens that the parser needs in the text.
        warnings: for the client.
        reasoning: None: the answer has no block.
        tools: that may be called; `strict`: the grammar enforces their schemas.
        closes_reasoning: reasoning is off, but the template cannot say so: `prompt` has an empty block that it lacks.
        answer_begin: text that the model writes between `prompt` and its answer when it does not reason.
    """

    prompt: str
    grammar: GrammarUse | None
    keep_special_ids: tuple[int, ...]
    warnings: list[str]
    reasoning: ReasoningBlock | None
    tools: tuple[Tool, ...]
    conversation: Conversation
    family: ToolFamily | None
    reasoning_family: ReasoningFamily | None
    token_bytes: Callable[[int], bytes]
    closes_reasoning: bool
    answer_begin: str

    def parser(self, make_id: MakeId | None = None) -> OutputParser:
        """A parser for one choice."""
        return OutputParser(
            self.family,
            self.tools,
            reasoning=self.reasoning_family,
            opened=self.reasoning is not None and self.reasoning.opened,
            options=self.conversation.reasoning,
            must_call=_must_call(self.conversation),
            make_id=make_id,
        )

    def reasoning_counter(self) -> ReasoningCounter | None:
        """A counter of the reasoning tokens of one choice; None if the answer has no block."""
        if self.reasoning is None:
            return None
        block = self.reasoning
        return ReasoningCounter(self.reasoning_family, block.opened, self.token_bytes, block.calls)


class Planner:
    """Plans answers for one model."""

    def __init__(
        self,
        formats: AnswerFormats,
        tokenizer: Tokenizer,
        config: AnswerConfig,
        *,
        max_tools: int = 512,
        max_schema_kb: int = 256,
        check_schema: CheckSchema | None = None,
        images: ImagePlacement | None = None,
    ) -> None:
        """Prepare.

        Args:
            formats: of the model.
            tokenizer: of the model.
            config: whitespace in JSON.
            max_tools, max_schema_kb: limits of a request.
            check_schema: of tools with arguments that follow it; None: the grammars have the schemas as they are.
            images: of a model that sees them.
        """
        self.formats = formats
        self._tokenizer = tokenizer
        self._config = config
        self._max_tools = max_tools
        self._max_schema_kb = max_schema_kb
        self._check_schema = check_schema
        self._images = images

    def render_input(self, conversation: Conversation) -> RenderInput:
        """Make the input of the template.

        Raises:
            RequestError: the tools or the choice are refused.
        """
        self._check(conversation)
        offered = _offered(conversation)
        formats = self.formats
        if offered and not formats.template_tools and formats.tools is not None:
            if conversation.continue_final_message:
                raise RequestError(
                    "continue_final_message cannot be combined with tools on a model without a tool template",
                    param="continue_final_message",
                )
            messages = generic_messages(conversation.messages, offered, conversation.tool_choice)
        elif not formats.template_tools and _has_calls(conversation.messages):
            messages = generic_messages(conversation.messages, (), conversation.tool_choice)
        else:
            messages = messages_for_template(
                conversation.messages,
                object_arguments=formats.object_arguments,
                written=formats.tools if formats.written_calls else None,
            )
        given = RenderInput(
            messages=messages,
            tools=[tool_for_template(tool) for tool in offered]
            if offered and formats.template_tools
            else None,
            documents=list(conversation.documents) or None,
            variables={
                **reasoning_variables(self.formats, conversation.reasoning)[0],
                **conversation.variables,
            },
            add_generation_prompt=conversation.add_generation_prompt
            and not conversation.continue_final_message,
            continue_final_message=conversation.continue_final_message,
        )
        return given if self._images is None else RenderInput(*map(self._images.without_markers, given))

    def plan(self, conversation: Conversation, prompt: str, *, max_tokens: int | None = None) -> AnswerPlan:
        """Constraint and parser of the answer.

        Args:
            conversation: as given to `render_input`.
            prompt: as rendered.
            max_tokens: of the request, if known: reasoning without a budget leaves a part of it for an answer that is
                constrained.

        Raises:
            RequestError: the tools or the choice are refused.
        """
        warnings = self._check(conversation)
        warnings += reasoning_variables(self.formats, conversation.reasoning)[1]
        if not self.formats.template_tools or self.formats.object_arguments:
            warnings += history_warnings(conversation.messages)
        warnings += [
            f"tools[{index}]: the grammar of a custom tool is enforced only if it is a regular expression"
            for index, tool in enumerate(_offered(conversation))
            if tool.custom_grammar is not None and tool.custom_grammar.kind is not GrammarKind.REGEX
        ]
        family = self.formats.tools if _offered(conversation) else None
        tools, found = self._compilable(conversation, family)
        warnings += found
        rendered = prompt
        prompt, block = reasoning_block(self.formats, conversation, rendered)
        if block is not None and family is not None and tools:
            block = replace(block, calls=tuple(marker.encode() for marker in family.reasoning_ends))
        reasoning = self.formats.reasoning
        grammar = self._grammar(conversation, family, tools, block, max_tokens)
        return AnswerPlan(
            prompt=prompt,
            grammar=grammar,
            keep_special_ids=self._kept(family, reasoning),
            warnings=warnings,
            reasoning=block,
            tools=tuple(tools),
            conversation=conversation,
            family=family,
            reasoning_family=reasoning,
            token_bytes=self._tokenizer.token_bytes,
            closes_reasoning=prompt != rendered,
            answer_begin=self._answer_begin(prompt),
        )

    # ------------------------------------------------------------ grammar

    def _grammar(
        self,
        conversation: Conversation,
        family: ToolFamily | None,
        tools: Sequence[Tool],
        block: ReasoningBlock | None,
        max_tokens: int | None,
    ) -> GrammarUse | None:
        use = self._answer_grammar(conversation, family, tools, block)
        if block is None:
            return use
        if use is None:
            is_bounded = block.budget is not None or conversation.reasoning.control
            return GrammarUse(reasoning=block) if is_bounded else None
        if use.spec is not None and block.budget is None and max_tokens is not None:
            reserved = max(1, max_tokens * _ANSWER_SHARE // 100)
            block = replace(block, budget=max(0, max_tokens - reserved))
        return replace(use, reasoning=block)

    def _answer_grammar(
        self,
        conversation: Conversation,
        family: ToolFamily | None,
        tools: Sequence[Tool],
        block: ReasoningBlock | None,
    ) -> GrammarUse | None:
        """The grammar of the answer after its reasoning."""
        choice, answer = conversation.tool_choice, conversation.spec
        must_call = _must_call(conversation)
        parallel = choice.parallel and choice.mode is not ChoiceMode.NAMED
        if family is None or not tools:
            if answer is None:
                return None
            if self._is_harmony:
                return GrammarUse(spec=self._final_channel(answer))
            return GrammarUse(spec=answer)
        if family.form is Form.GENERIC:
            spec = generic_grammar(
                tools,
                must_call=must_call,
                parallel=parallel,
                whitespace=self._config.whitespace,
                answer=answer,
                leading_space=block is not None,
            )
            return GrammarUse(spec=spec)
        grammars = self._tool_grammars(family, tools, parallel)
        if must_call or answer is not None:
            return GrammarUse(
                spec=grammars.required(leading_space=block is not None, answer=None if must_call else answer)
            )
        return GrammarUse(triggered=grammars.triggered(), ends_after_first=not parallel)

    def _tool_grammars(self, family: ToolFamily, tools: Sequence[Tool], parallel: bool) -> ToolGrammars:
        return ToolGrammars(
            family, tools, parallel=parallel, whitespace=self._config.whitespace, marker_id=self._special_id
        )

    @property
    def _is_harmony(self) -> bool:
        return self.formats.reasoning is not None and self.formats.reasoning.name == "harmony"

    def _final_channel(self, answer: GrammarSpec) -> GrammarSpec:
        """An answer in harmony's channel `final`."""

        def marker(text: str) -> str:
            token_id = self._special_id(text)
            return f'"{text}"' if token_id is None else f"<[{token_id}]>"

        head = f'({marker("<|start|>")} "assistant")? {marker("<|channel|>")} "final" {marker("<|message|>")}'
        return GrammarSpec(GrammarKind.LARK, f"start: {head} answer\nanswer: {embedded(answer)}\n")

    # ------------------------------------------------------------ others

    def _answer_begin(self, prompt: str) -> str:
        if self._is_harmony:
            return "<|channel|>final<|message|>"
        family = self.formats.reasoning
        if family is None or len(family.answer_marks) < 2 or not prompt.rstrip().endswith(family.end):
            return ""
        return family.answer_marks[0]

    def _check(self, conversation: Conversation) -> list[str]:
        warnings = checked_tools(
            conversation.tools,
            conversation.tool_choice,
            at=conversation.tool_path,
            schema_field=conversation.schema_field,
            max_tools=self._max_tools,
            max_schema_kb=self._max_schema_kb,
        )
        mode = conversation.tool_choice.mode
        if _must_call(conversation):
            _check_custom_grammars(conversation)
            if self.formats.tools is None:
                raise RequestError(
                    f"tool_choice is {mode.value}, but the server does not parse tool calls; start it without "
                    f"--tool-call-parser none",
                    param="tool_choice",
                    code="unsupported_field",
                )
            if conversation.spec is not None:
                raise RequestError(
                    f"a constraint of the answer and tool_choice {mode.value} exclude each other; send one of them",
                    param="tool_choice",
                    code="conflicting_constraints",
                )
        return warnings

    def _compilable(
        self, conversation: Conversation, family: ToolFamily | None
    ) -> tuple[list[Tool], list[str]]:
        """The tools that may be called, with schemas that can be compiled; and warnings about the schemas.

        The arguments follow the schema of a strict tool, and of every tool if a call is demanded.
        """
        tools, warnings = list(callable_tools(conversation)), []
        places = {tool.name: index for index, tool in enumerate(conversation.tools)}
        for number, tool in enumerate(tools):
            if tool.custom or tool.parameters is None or not (tool.strict or _must_call(conversation)):
                continue
            place = f"{conversation.tool_path.format(places[tool.name])}.{conversation.schema_field}"
            try:
                tools[number], found = self._enforced(tool, place, family)
            except RequestError as error:
                if tool.strict:
                    raise
                found = [f"{error.message}; the arguments of {tool.name} do not follow this schema"]
            warnings += found
        return tools, warnings

    def _enforced(self, tool: Tool, place: str, family: ToolFamily | None) -> tuple[Tool, list[str]]:
        """A tool as a strict one, and warnings.

        Raises:
            RequestError: its schema cannot be enforced.
        """
        schema, is_strict = tool.parameters or {}, tool.strict
        warnings: list[str] = []
        if self._check_schema is not None:
            schema, warnings = self._check_schema(schema, place, is_strict)
        tool = replace(tool, parameters=schema, strict=True)
        if family is not None:
            try:
                self._tool_grammars(family, [tool], parallel=False).check(tool)
            except Unenforceable as error:
                advice = "; send strict: false and check the arguments yourself" if is_strict else ""
                raise RequestError(
                    f"{place}: the format of calls {family.name} cannot enforce {error}{advice}",
                    param=place,
                    code="unsupported_schema",
                ) from None
        return tool, warnings

    def _special_id(self, text: str) -> int | None:
        token_id = self._tokenizer.token_to_id(text) if text else None
        return token_id if token_id is not None and self._tokenizer.is_special(token_id) else None

    def _kept(self, family: ToolFamily | None, reasoning: ReasoningFamily | None) -> tuple[int, ...]:
        """The special tokens among the markers."""
        texts: list[str] = [piece.strip() for piece in family.markers] if family is not None else []
        if family is not None and family.name.startswith("mistral"):
            texts.append("[CALL_ID]")
        if reasoning is not None:
            texts += [reasoning.begin, reasoning.end, *reasoning.answer_marks, *reasoning.tokens]
        ids = [self._special_id(text) for text in dict.fromkeys(texts)]
        return tuple(token_id for token_id in ids if token_id is not None)


def _must_call(conversation: Conversation) -> bool:
    return conversation.tool_choice.mode in (ChoiceMode.REQUIRED, ChoiceMode.NAMED)


def callable_tools(conversation: Conversation) -> tuple[Tool, ...]:
    """The tools that the answer may call."""
    choice = conversation.tool_choice
    tools = _offered(conversation)
    if choice.mode is ChoiceMode.NAMED:
        return tuple(tool for tool in tools if tool.name == choice.name)
    if choice.allowed is not None:
        return tuple(tool for tool in tools if tool.name in choice.allowed)
    return tools


def _check_custom_grammars(conversation: Conversation) -> None:
    """Refuse custom tools with grammars that cannot be enforced, where a tool must be called."""
    places = {tool.name: index for index, tool in enumerate(conversation.tools)}
    for tool in callable_tools(conversation):
        if tool.custom_grammar is not None and tool.custom_grammar.kind is not GrammarKind.REGEX:
            path = conversation.tool_path.replace(".function", ".custom")
            place = f"{path.format(places[tool.name])}.format"
            raise RequestError(
                f"{place} is a {tool.custom_grammar.kind.value} grammar, which cannot be enforced in a call, but "
                f"tool_choice demands one; write it as a regex, or set tool_choice to auto",
                param=place,
                code="unsupported_value",
            )


def _offered(conversation: Conversation) -> tuple[Tool, ...]:
    return () if conversation.tool_choice.mode is ChoiceMode.NONE else conversation.tools


def _has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
