"""`HubName`: a model of the hub as users write it: `org/repo`, `org/repo@revision`, `org/repo:Q4_K_M`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ...runtime.errors import ConfigError

DEFAULT_REVISION: Final = "main"
BUILT_IN: Final = {
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
}
"""Short name -> name on the hub. Other built-in models are not on the hub, see `built_in/models`."""

_NAME: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w.+-]+(?:/[\w.+-]+)*))?"
    r"(?::(?P<quantization>[\w.-]+(?:/[\w.-]+)*))?"
)


class HubName(NamedTuple):
    """A parsed name.

    Attributes:
        repo: `org/repo`.
        revision: branch, tag or commit.
        quantization: of a GGUF repository: `Q4_K_M`, or the name of a file; "" for the only one, or for safetensors.
    """

    repo: str
    revision: str = DEFAULT_REVISION
    quantization: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repo}{revision}{self.quantization and ':'}{self.quantization}"


def parse_hub_name(text: str) -> HubName | None:
    """The parsed name; None if `text` does not have the form of one.

    Raises:
        ConfigError: a revision or quantization with a component "..", or ".".
    """
    match = _NAME.fullmatch(BUILT_IN.get(text.lower(), text))
    if match is None:
        return None
    name = HubName(match["repo"], match["revision"] or DEFAULT_REVISION, match["quantization"] or "")
    if {"..", "."} & {*name.revision.split("/"), *name.quantization.split("/")}:
        raise ConfigError(f"{text}: a revision or quantization cannot contain '..'; write org/repo@revision")
    return name
