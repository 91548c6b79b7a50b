"""`FieldPolicy`: decides about each field of a request, so that no field is ignored silently.

- supported: a field of the endpoint's struct;
- no effect: cannot change the answer; accepted;
- not yet: would change the answer and is not supported; refused unless it has a neutral value;
- unknown: accepted with a warning in the response, since routers and clients add fields; refused under `--strict`.

The same holds for objects inside a request, under their path. `Notes` collects the warnings of one request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from ....runtime.errors import RequestError
from .cache_fields import BREAKPOINTS, CacheOptions
from .values import Body, objects_in, shortened, show

NotYet = dict[str, tuple[Any, ...]]
"""Field -> its neutral values, which have no effect; null and empty strings and lists always are."""

NO_EFFECT: Final = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
        "store",
        # Other engines' options for the place of a result, for features that are refused or always on here.
        "cache_prompt",
        "no_logs",
    }
)

SAMPLING_NOT_YET: Final[NotYet] = {
    "beam_width": (1,),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "early_stopping": (False,),
    "guided_decoding_backend": (),
    "length_penalty": (1,),
    "logits_processors": (),
    "mirostat": (0,),
    "repeat_penalty": (1,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "return_hidden_states": (False,),
    "spaces_between_special_tokens": (True,),
    "tfs_z": (1,),
    "top_a": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

COMPLETION_NO_EFFECT: Final = NO_EFFECT - {"prompt_cache_key", "prompt_cache_retention", "service_tier"}
CHAT_NO_EFFECT: Final = COMPLETION_NO_EFFECT - {"prompt_cache_options"} | {"prediction"}
"""`prediction` is a guess at the answer, which only makes it faster."""
CHAT_NOT_YET: Final[NotYet] = SAMPLING_NOT_YET | {
    "audio": (),
    "chat_template": (),
    "echo": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "no_stop_trim": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

COMPLETION_NOT_YET: Final[NotYet] = SAMPLING_NOT_YET | {
    "no_stop_trim": (False,),
    "prompt_embeds": (),
}


NOTHING: Final[tuple[object, ...]] = (None, "", [])
"""Values of any field that ask for nothing."""
_MAX_WARNINGS: Final = 16
_MAX_NAME_CHARS: Final = 100


class FieldPolicy:
    """The fields that one kind of object may have.

    Attributes:
        no_effect: fields that are accepted and change nothing; docs/api.md names them.
    """

    def __init__(
        self,
        supported: type[msgspec.Struct],
        not_yet: NotYet,
        *,
        no_effect: Iterable[str] = NO_EFFECT,
        nested: Mapping[str, FieldPolicy] | None = None,
        kinds: Collection[str | None] | None = None,
    ) -> None:
        """Define the fields.

        Args:
            supported: the struct with the supported fields.
            not_yet: fields that would change the answer, and the neutral values of each.
            no_effect: fields that cannot change the answer.
            nested: supported fields with an object or a list of objects as value -> the policy of these.
            kinds: values of `type`, None for a missing one; objects of other types are not checked.
        """
        self._supported = frozenset(field.encode_name for field in msgspec.structs.fields(supported))
        self._not_yet = not_yet
        self.no_effect = frozenset(no_effect)
        self._nested = nested or {}
        self._kinds = kinds
        assert not self._supported & (self._not_yet.keys() | self.no_effect)

    def check(self, body: Body, *, strict: bool, at: str = "") -> list[str]:
        """Check the fields of an object.

        Args:
            body: the object.
            strict: refuse unknown fields.
            at: path of the object in the request, for errors.

        Returns:
            warnings for the response.

        Raises:
            RequestError: a field is refused.
        """
        warnings: list[str] = []
        if self._kinds is not None and body.get(_TYPE) not in self._kinds:
            return warnings
        for field, value in body.items():
            param = f"{at}.{field}" if at else field
            if field in self._supported:
                if field in self._nested:
                    for place, each in objects_in(value, param):
                        warnings += self._nested[field].check(each, strict=strict, at=place)
            elif field in self._not_yet:
                if not self._is_neutral(field, value):
                    raise RequestError(
                        f"{param} is {show(value)}, but it is not supported yet and would change the answer; "
                        f"leave it out",
                        param=param,
                        code="unsupported_field",
                    )
            elif field not in self.no_effect:
                name = shortened(param, _MAX_NAME_CHARS)
                if strict:
                    raise RequestError(
                        f"{name} is not a field of this request; leave it out, or run the server without --strict",
                        param=name,
                        code="unknown_field",
                    )
                warnings.append(f"unknown field {name} was ignored")
        return first_warnings(warnings)

    def _is_neutral(self, field: str, value: object) -> bool:
        # `1 == True` in Python, so booleans are compared by type too.
        return value in NOTHING or any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in self._not_yet[field]
        )


def first_warnings(warnings: list[str]) -> list[str]:
    """The first `_MAX_WARNINGS` warnings, and the number of the others."""
    if len(warnings) <= _MAX_WARNINGS + 1:
        return warnings
    return [*warnings[:_MAX_WARNINGS], f"and {len(warnings) - _MAX_WARNINGS} warnings more"]


_TYPE: Final = "type"


def policy_of(
    fields: Iterable[str],
    no_effect: Iterable[str] = (),
    nested: Mapping[str, FieldPolicy] | None = None,
    kinds: Collection[str | None] | None = None,
) -> FieldPolicy:
    """The policy of an item with these fields, those of `nested`, and `type`; `kinds` as in `FieldPolicy`."""
    names = [(name, Any, None) for name in {_TYPE, *fields, *(nested or ())}]
    supported = msgspec.defstruct("Item", names)
    return FieldPolicy(supported, {}, no_effect=no_effect, nested=nested, kinds=kinds)


_NAME: Final = policy_of(("name",))
FUNCTION_POLICY: Final = policy_of(("name", "description", "parameters", "strict"))
_CUSTOM: Final = policy_of(
    ("name", "description"), nested={"format": policy_of(("syntax", "definition", "grammar"))}
)
TOOL_POLICY: Final = policy_of(
    ("name", "description", "parameters", "strict", "format", *BREAKPOINTS),
    ("defer_loading",),
    {"function": FUNCTION_POLICY, "custom": _CUSTOM},
    kinds=("function", "custom", None),
)
"""Fields of a tool in OpenAI's forms, nested or flat."""
CHOICE_POLICY: Final = policy_of(
    ("name", "mode", "tools"),
    nested={"function": _NAME, "custom": _NAME, "allowed_tools": policy_of(("mode", "tools"))},
)
"""Fields of `tool_choice` in OpenAI's forms."""
CALL_POLICY: Final = policy_of(
    ("id",),
    ("index",),
    {"function": policy_of(("name", "arguments"), ("index",)), "custom": policy_of(("name", "input"))},
)
"""Fields of a call in a message."""
_TEXTS: Final = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
_PART_FIELDS: Final = ("text", "refusal", *BREAKPOINTS)
_PART_NO_EFFECT: Final = ("annotations", "citations", "id", "logprobs")
CACHE_OPTIONS_POLICY: Final = FieldPolicy(CacheOptions, {}, no_effect=())
PART_POLICY: Final = policy_of(_PART_FIELDS, _PART_NO_EFFECT, kinds=(*_TEXTS, None))
"""Fields of a text part, which may leave out its type."""
RESULT_POLICY: Final = policy_of(_PART_FIELDS, _PART_NO_EFFECT, kinds=_TEXTS)
"""Fields of a text part of a tool's result, where an object without a type is a value."""


class Notes:
    """Observations while a request is read."""

    def __init__(self, warnings: list[str], *, strict: bool) -> None:
        """Begin.

        Args:
            warnings: so far.
            strict: refuse unknown fields.
        """
        self._warnings = warnings
        self._strict = strict

    @property
    def warnings(self) -> list[str]:
        """For the answer."""
        return first_warnings(self._warnings)

    def warn(self, *warnings: str) -> None:
        """Add warnings."""
        self._warnings += warnings

    def check(self, policy: FieldPolicy, item: Body, at: str) -> None:
        """Check the fields of an item.

        Raises:
            RequestError: an unknown field, under `--strict`.
        """
        self._warnings += policy.check(item, strict=self._strict, at=at)
