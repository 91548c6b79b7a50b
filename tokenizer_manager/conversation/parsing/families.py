"""`ToolFamily`: how a family of models writes tool calls.

Parser, detection and grammars read the same rows.

Literals are tuples of pieces: joined, they are the text that the model is trained to write; the parser accepts any
whitespace in front of each piece. An answer with calls is

    section_begin  call  separator  call  section_end          call = call_begin  body  call_end

and the body depends on the form:

    JSON       {"name": NAME, ARGUMENTS_KEY: {...}}
    NAMED      NAME arguments_begin {...}
    TAGGED     NAME arguments_begin  parameter_begin KEY parameter_middle VALUE parameter_end ...
    PYTHONIC   NAME(key=value, ...), or with other brackets and separators (`syntax`)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final

Pieces = tuple[str, ...]


class Form(enum.Enum):
    """Notation of the body of a call. GENERIC and HARMONY are whole answers with readers of their own."""

    JSON = enum.auto()
    NAMED = enum.auto()
    TAGGED = enum.auto()
    PYTHONIC = enum.auto()
    GENERIC = enum.auto()
    HARMONY = enum.auto()


class IdRule(enum.Enum):
    """Ids of calls: OPENAI "call_" and 24 hex digits; NINE letters and digits; INDEXED as `functions.NAME:0`."""

    OPENAI = enum.auto()
    NINE = enum.auto()
    INDEXED = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """One row; see the docstring of the module.

    Attributes:
        at_start: calls are recognized only at the beginning of the answer, because their first piece is ordinary text.
        also_begins: further markers in front of calls that models write: one that they put in front of everything
            (with `at_start`), a later piece with which they begin, or another spelling of the first piece.
        name_prefix: in front of the name, not a part of it.
        indexed_name: the name is followed by ":" and the index of the call.
        arguments_keys: of the form JSON; the first one is the model's own.
        name_key: of the form JSON; "": the call is {NAME: {...}}.
        id_key: of the form JSON: a member with the number of the call, in front of the others.
        syntax: of the form PYTHONIC: opening bracket, sign after a key, separator, closing bracket.
        quote: of the form PYTHONIC: around strings, instead of Python's quotes; what is inside is plain text.
        string_flag: the middle of a parameter is `" string="true">` or `" string="false">`, which marks strings.
        newlines: one newline after the beginning of a value and one before its end are not a part of it.
        inner_tokens: tokens of the model inside of pieces.
        alternative: another row whose calls the parser accepts after the same marker.
    """

    name: str
    form: Form
    section_begin: Pieces = ()
    section_end: Pieces = ()
    call_begin: Pieces = ()
    call_end: Pieces = ()
    separator: Pieces = ()
    at_start: bool = False
    also_begins: Pieces = ()
    name_prefix: str = ""
    indexed_name: bool = False
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    name_key: str = "name"
    id_key: str = ""
    syntax: tuple[str, str, str, str] = ("(", "=", ", ", ")")
    quote: str = ""
    arguments_begin: Pieces = ()
    parameter_begin: Pieces = ()
    parameter_middle: Pieces = ()
    parameter_end: Pieces = ()
    string_flag: bool = False
    newlines: bool = False
    inner_tokens: Pieces = ()
    id_rule: IdRule = IdRule.OPENAI
    alternative: ToolFamily | None = None

    @property
    def begin(self) -> Pieces:
        """Beginning of the first call."""
        return self.section_begin or self.call_begin

    @property
    def call_markers(self) -> Pieces:
        """Markers in front of calls anywhere in the answer; with `at_start`, those that are in front of everything."""
        begins = self.also_begins if self.at_start else (*self.begin[:1], *self.also_begins)
        return tuple(piece.strip() for piece in begins)

    @property
    def reasoning_ends(self) -> Pieces:
        """The markers that begin a call inside of open reasoning, too: those that are no word."""
        return tuple(marker for marker in self.call_markers if not marker[0].isalpha())

    def after(self, marker: str) -> Pieces:
        """The pieces between a marker at the beginning of a call and the name; "": no marker has been read."""
        begin = (*self.section_begin, *self.call_begin)
        texts = [piece.strip() for piece in begin]
        if self.at_start or not marker:  # the marker is in front of everything
            return begin
        return begin[texts.index(marker) + 1 if marker in texts else 1 :]

    @property
    def markers(self) -> Pieces:
        """All literal pieces."""
        return (
            *self.section_begin,
            *self.section_end,
            *self.call_begin,
            *self.call_end,
            *self.also_begins,
            *self.arguments_begin,
            *self.parameter_begin,
            *self.parameter_middle,
            *self.parameter_end,
            *self.inner_tokens,
            *(HARMONY_MARKERS if self.form is Form.HARMONY else ()),
            *(() if self.alternative is None else self.alternative.markers),
        )


HARMONY_MARKERS: Final = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)

GENERIC: Final = ToolFamily(name="generic", form=Form.GENERIC)
HARMONY: Final = ToolFamily(
    name="harmony",
    form=Form.HARMONY,
    also_begins=("<|channel|>commentary to=functions.", "<|start|>assistant to=functions."),
)
HERMES: Final = ToolFamily(
    name="hermes",
    form=Form.JSON,
    call_begin=("<tool_call>", "\n"),
    call_end=("\n", "</tool_call>"),
    separator=("\n",),
)
_QWEN3_CODER: Final = ToolFamily(
    name="qwen3_coder",
    form=Form.TAGGED,
    also_begins=("<function=",),
    call_begin=("<tool_call>", "\n", "<function="),
    arguments_begin=(">", "\n"),
    parameter_begin=("<parameter=",),
    parameter_middle=(">", "\n"),
    parameter_end=("\n", "</parameter>", "\n"),
    call_end=("</function>", "\n", "</tool_call>"),
    separator=("\n",),
    newlines=True,
)
_LLAMA3: Final = ToolFamily(
    name="llama3_json",
    form=Form.JSON,
    at_start=True,
    also_begins=("<|python_tag|>",),
    separator=("; ",),
    arguments_keys=("parameters", "arguments"),
)
_LLAMA4: Final = ToolFamily(
    name="pythonic",
    form=Form.PYTHONIC,
    at_start=True,
    also_begins=("<|python_start|>",),
    section_begin=("[",),
    separator=(", ",),
    section_end=("]",),
)
_MISTRAL_V11: Final = ToolFamily(
    name="mistral_v11",
    form=Form.NAMED,
    call_begin=("[TOOL_CALLS]",),
    arguments_begin=("[ARGS]",),
    id_rule=IdRule.NINE,
)
_MISTRAL: Final = ToolFamily(
    name="mistral",
    form=Form.JSON,
    section_begin=("[TOOL_CALLS]", "["),
    separator=(", ",),
    section_end=("]",),
    id_rule=IdRule.NINE,
    alternative=_MISTRAL_V11,
)
_DEEPSEEK_V3: Final = ToolFamily(
    name="deepseek_v3",
    form=Form.NAMED,
    also_begins=("<｜tool▁call▁begin｜>",),
    section_begin=("<｜tool▁calls▁begin｜>",),
    call_begin=("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"),
    arguments_begin=("\n", "```json", "\n"),
    call_end=("\n", "```", "<｜tool▁call▁end｜>"),
    separator=("\n",),
    section_end=("<｜tool▁calls▁end｜>",),
)
_DEEPSEEK_V31: Final = ToolFamily(
    name="deepseek_v31",
    form=Form.NAMED,
    also_begins=("<｜tool▁call▁begin｜>",),
    section_begin=("<｜tool▁calls▁begin｜>",),
    call_begin=("<｜tool▁call▁begin｜>",),
    arguments_begin=("<｜tool▁sep｜>",),
    call_end=("<｜tool▁call▁end｜>",),
    section_end=("<｜tool▁calls▁end｜>",),
)
_DEEPSEEK_V32: Final = ToolFamily(
    name="deepseek_v32",
    form=Form.TAGGED,
    also_begins=('<｜DSML｜invoke name="',),
    section_begin=("<｜DSML｜function_calls>", "\n"),
    call_begin=('<｜DSML｜invoke name="',),
    arguments_begin=('">', "\n"),
    parameter_begin=('<｜DSML｜parameter name="',),
    parameter_middle=('"',),
    parameter_end=("</｜DSML｜parameter>", "\n"),
    call_end=("</｜DSML｜invoke>", "\n"),
    section_end=("</｜DSML｜function_calls>",),
    string_flag=True,
    inner_tokens=("｜DSML｜",),
)
_KIMI_K2: Final = ToolFamily(
    name="kimi_k2",
    form=Form.NAMED,
    also_begins=("<|tool_call_begin|>",),
    section_begin=("<|tool_calls_section_begin|>",),
    call_begin=("<|tool_call_begin|>",),
    name_prefix="functions.",
    indexed_name=True,
    arguments_begin=("<|tool_call_argument_begin|>",),
    call_end=("<|tool_call_end|>",),
    section_end=("<|tool_calls_section_end|>",),
    id_rule=IdRule.INDEXED,
)
_GLM: Final = ToolFamily(
    name="glm45",
    form=Form.TAGGED,
    call_begin=("<tool_call>",),
    arguments_begin=("\n",),
    parameter_begin=("<arg_key>",),
    parameter_middle=("</arg_key>", "\n", "<arg_value>"),
    parameter_end=("</arg_value>", "\n"),
    call_end=("</tool_call>",),
    separator=("\n",),
)
_MINIMAX: Final = ToolFamily(
    name="minimax_m2",
    form=Form.TAGGED,
    also_begins=('<invoke name="',),
    section_begin=("<minimax:tool_call>", "\n"),
    call_begin=('<invoke name="',),
    arguments_begin=('">', "\n"),
    parameter_begin=('<parameter name="',),
    parameter_middle=('">',),
    parameter_end=("</parameter>", "\n"),
    call_end=("</invoke>", "\n"),
    section_end=("</minimax:tool_call>",),
)
_GRANITE: Final = ToolFamily(
    name="granite",
    form=Form.JSON,
    also_begins=("<tool_call>",),  # Granite 3.1
    section_begin=("<|tool_call|>", "["),
    separator=(", ",),
    section_end=("]",),
)
_PHI4_MINI: Final = ToolFamily(
    name="phi4_mini",
    form=Form.JSON,
    section_begin=("functools", "["),
    separator=(", ",),
    section_end=("]",),
)
_SEED_OSS: Final = ToolFamily(
    name="seed_oss",
    form=Form.TAGGED,
    also_begins=("<function=",),
    call_begin=("<seed:tool_call>", "\n", "<function="),
    arguments_begin=(">", "\n"),
    parameter_begin=("<parameter=",),
    parameter_middle=(">",),
    parameter_end=("</parameter>", "\n"),
    call_end=("</function>", "\n", "</seed:tool_call>"),
    separator=("\n",),
)
_DEEPSEEK_V4: Final = replace(
    _DEEPSEEK_V32,
    name="deepseek_v4",
    section_begin=("<｜DSML｜tool_calls>", "\n"),
    section_end=("</｜DSML｜tool_calls>",),
)
_LFM2: Final = replace(
    _LLAMA4,
    name="lfm2",
    at_start=False,
    also_begins=(),
    section_begin=("<|tool_call_start|>", "["),
    section_end=("]", "<|tool_call_end|>"),
)
_GEMMA4: Final = ToolFamily(
    name="gemma4",
    form=Form.PYTHONIC,
    call_begin=("<|tool_call>",),
    name_prefix="call:",
    syntax=("{", ":", ",", "}"),
    quote='<|"|>',
    parameter_end=('<|"|>',),
    call_end=("<tool_call|>",),
)
_COMMAND_A: Final = ToolFamily(
    name="command_a",
    form=Form.JSON,
    section_begin=("<|START_ACTION|>", "[", "\n    "),
    separator=(",\n    ",),
    section_end=("\n]", "<|END_ACTION|>"),
    name_key="tool_name",
    id_key="tool_call_id",
    arguments_keys=("parameters", "arguments"),
)
_APERTUS: Final = ToolFamily(
    name="apertus",
    form=Form.JSON,
    section_begin=("<|tools_prefix|>", "["),
    separator=(", ",),
    section_end=("]", "<|tools_suffix|>"),
    name_key="",
)
_APRIEL: Final = ToolFamily(
    name="apriel",
    form=Form.JSON,
    section_begin=("<tool_calls>", "["),
    separator=(", ",),
    section_end=("]", "</tool_calls>"),
)
_NEMOTRON: Final = ToolFamily(
    name="nemotron",
    form=Form.JSON,
    section_begin=("<TOOLCALL>", "["),
    separator=(", ",),
    section_end=("]", "</TOOLCALL>"),
)

FAMILIES: Final[dict[str, ToolFamily]] = {
    family.name: family
    for family in (
        HARMONY,
        HERMES,
        _QWEN3_CODER,
        _GLM,
        _LLAMA3,
        _LLAMA4,
        _MISTRAL,
        _MISTRAL_V11,
        _DEEPSEEK_V3,
        _DEEPSEEK_V31,
        _DEEPSEEK_V32,
        _KIMI_K2,
        _MINIMAX,
        _GRANITE,
        _PHI4_MINI,
        _NEMOTRON,
        _SEED_OSS,
        _DEEPSEEK_V4,
        _LFM2,
        _GEMMA4,
        _COMMAND_A,
        _APERTUS,
        _APRIEL,
        GENERIC,
    )
}
"""By the name that `--tool-call-parser` takes; detection tries them in this order."""
