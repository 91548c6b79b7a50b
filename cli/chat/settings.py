"""`ChatSettings`: how answers are sampled; what `/set` and the sampling flags of `engine chat` change."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ...runtime.errors import RequestError
from ...runtime.sampling_params import SamplingParams

_ENCLOSED: Final = frozenset({('"', '"'), ("'", "'"), ("[", "]")})
_QUOTE, _ESCAPED_QUOTE = '"', '\\"'
_NONE_WORDS: Final = frozenset({"none", "auto", "default", "off"})


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Sampling parameters by the names of the OpenAI API; None leaves the choice to the model's defaults.

    Raises:
        RequestError: an invalid value.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        from ...tokenizer_manager.http.schema.errors import OPENAI_NAMES, renamed_fields

        with renamed_fields(OPENAI_NAMES):
            SamplingParams(**self.params())

    def params(self) -> dict[str, Any]:
        """The parameters that are set, as fields of the engine's `SamplingParams`."""
        return {"max_new_tokens" if name == "max_tokens" else name: v for name, v in self._given().items()}

    def body(self) -> dict[str, Any]:
        """The fields of a request to `/v1/chat/completions`; only the set ones, because servers differ."""
        return {name: list(v) if name == "stop" else v for name, v in self._given().items()}

    def _given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in PARAMETERS}
        return {name: value for name, value in values.items() if value not in (None, ())}

    def changed(self, name: str, text: str) -> ChatSettings:
        """A copy with one parameter set from text; `none` takes it back to its default.

        Raises:
            RequestError: an unknown parameter, or an invalid value.
        """
        if name not in PARAMETERS:
            near = difflib.get_close_matches(name, PARAMETERS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(PARAMETERS)}"
            raise RequestError(f"unknown parameter {name!r}; {hint}", param=name)
        if text.lower() in _NONE_WORDS:
            value = getattr(DEFAULTS, name)
        else:
            try:
                value = PARAMETERS[name](text)
            except ValueError:
                wants = "a whole number" if PARAMETERS[name] is int else "a number"
                raise RequestError(f"{name} is {text!r}, but it must be {wants}", param=name) from None
        return dataclasses.replace(self, **{name: value})


def _stop_strings(text: str) -> tuple[str, ...]:
    """Stop strings from text: `END`, `"END"` with the escapes of JSON, or several as a JSON list.

    Without quotes, backslash-n and backslash-t are a line break and a tab.

    Raises:
        RequestError: quotes or a list that JSON cannot read.
    """
    if len(text) >= 2 and (text[0], text[-1]) in _ENCLOSED:
        quoted = f'"{text[1:-1].replace(_QUOTE, _ESCAPED_QUOTE)}"' if text[0] == "'" else text
        try:
            value = json.loads(quoted)
        except ValueError as error:
            raise RequestError(
                f'stop is {text}, which JSON cannot read: {error}; write END, "END" or ["a", "b"]',
                param="stop",
            ) from None
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str) for each in values):
            raise RequestError(f'stop is {text}, but each stop string must be text: ["a", "b"]', param="stop")
        return tuple(values)
    return (text.replace("\\n", "\n").replace("\\t", "\t"),)


PARAMETERS: Final[dict[str, Callable[[str], Any]]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "stop": _stop_strings,
}
"""Parameter -> how its value is read from text."""
DEFAULTS: Final = ChatSettings()
