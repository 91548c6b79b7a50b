"""`SamplingDefaults`: the sampling parameters of requests that have none of their own, as the model's files give them.

Read with the model's other facts (`ModelSpec.sampling_defaults`); `--sampling-defaults openai` leaves them out. HTTP
endpoints and `LLM` fill in the fields that a request leaves out; a value of the request always has precedence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from .errors import RequestError
from .request_checks import plain
from .sampling_params import NUMBERS, SamplingParams, field_of

logger = logging.getLogger(__name__)

SamplingDefaultsName = Literal["model", "openai"]
OPENAI_SOURCE: Final = "OpenAI's default"


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters that a model's files set, as in `SamplingParams` (`NAMES`); None: they do not.

    Attributes:
        source: where they are from: the name of a file, keys of a GGUF file.
        not_taken: fields of the same source that would change the text and are not used.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    source: str = ""
    not_taken: tuple[str, ...] = ()

    def values(self) -> dict[str, Any]:
        """The parameters that are set, by the names of `SamplingParams`."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}

    def params(self, given: Mapping[str, Any] | None = None) -> SamplingParams:
        """Sampling parameters with these defaults; the `given` fields have precedence.

        Raises:
            TypeError: there is no such field.
            RequestError: a given value has the wrong type or is out of range.
        """
        given = given or {}
        replaced = {field_of(name) for name in given}
        kept = {name: value for name, value in self.values().items() if name not in replaced}
        return SamplingParams(**kept, **given)

    def described(self) -> str:
        """The values, their source and what is not taken, in one line."""
        values = " ".join(f"{name}={value:g}" for name, value in self.values().items())
        text = f"{values} from {self.source}" if values else f"{OPENAI_SOURCE}s"
        return f"{text}; not taken: {', '.join(self.not_taken)}" if self.not_taken else text


OPENAI_DEFAULTS: Final = SamplingDefaults()
"""Temperature 1.0, nothing filtered, no penalty."""

NAMES: Final = tuple(name for name, _, bounds in NUMBERS if bounds.from_model)


def checked_defaults(
    values: Mapping[str, object], path: object, source: str, not_taken: tuple[str, ...] = ()
) -> SamplingDefaults:
    """Defaults from the values of a file; a value that no request could have is left out with a warning.

    Args:
        values: by the names of `SamplingParams`; null counts as missing.
        path: of the file, for warnings.
        source: see `SamplingDefaults`.
        not_taken: see `SamplingDefaults`.
    """
    kept: dict[str, Any] = {}
    for name in NAMES:
        value: Any = plain(values.get(name))
        if value is None:
            continue
        if name == "top_k" and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            logger.warning("%s: %s; the value is ignored", path, error.message)
        else:
            kept[name] = value
    return SamplingDefaults(**kept, source=source if kept else "", not_taken=not_taken)


def effective_defaults(choice: SamplingDefaultsName, of_model: SamplingDefaults) -> SamplingDefaults:
    """The defaults that a server or an `LLM` uses: the setting's choice between the model's and OpenAI's."""
    return of_model if choice == "model" else OPENAI_DEFAULTS
