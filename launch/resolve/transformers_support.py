"""`why_not_transformers`: whether the installed transformers can compute an architecture, without importing it.

An import takes seconds and loads torch, and a start asks before any process exists. The answer is read from the
package's files: its version, the architectures with a language model, and two marks of their code. What only a run of
the model shows is found when it is loaded (`model_runner/hf_backend/transformers_check`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Final, NamedTuple

MIN_MAJOR: Final = 5
TIMES_SLOWER: Final = 2.0
"""CPU time of a token through transformers' code / that of the engine's own, on a CPU in bfloat16: the larger of decode
and prefill over three families, rounded up; measured by `benchmarks/fallback_step.py`. More for a model in which few
modules are recognized (`model_runner/hf_backend/swap`)."""
_INSTALL: Final = 'pip install "transformers>=5.0"'
_LANGUAGE_MODELS: Final = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\b.*?^\)", re.MULTILINE | re.DOTALL)
_NAME: Final = re.compile(r'\(\s*"([^"]+)"\s*,')
_HAS_STATE: Final = "_is_stateful = True"
_TAKES_ATTENTION: Final = "_supports_attention_backend = True"


class Installed(NamedTuple):
    """The installed package.

    Attributes:
        version: of the package.
        folder: of its code.
    """

    version: str
    folder: Path


def find_transformers() -> Installed | None:
    """The installed package; None: there is none."""
    try:
        spec = importlib.util.find_spec("transformers")
        version = importlib.metadata.version("transformers")
    except (ImportError, ValueError, importlib.metadata.PackageNotFoundError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Installed(version, Path(next(iter(spec.submodule_search_locations))))


def why_not_transformers(model_type: str, installed: Installed | None) -> str | None:
    """Reason why the package cannot compute this architecture, and what to do; None: nothing is known against it."""
    if installed is None:
        return f"that package is not installed; install it: {_INSTALL}"
    version, folder = installed
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < MIN_MAJOR:
        return f"the installed version {version} is too old; install a newer one: {_INSTALL}"
    known = _language_models(folder)
    if known is None:
        return None
    if model_type not in known:
        return (
            f"transformers {version} has no built-in language model for model_type {model_type!r}, and code from a "
            "model's folder is never run; a newer transformers may know it: pip install -U transformers"
        )
    code = _code_of(folder, model_type)
    if code is None:
        return None
    if _HAS_STATE in code:
        return (
            "it has layers with a state (state space, linear attention), which the KV pool cannot hold; use a model "
            "with attention only"
        )
    if _TAKES_ATTENTION not in code:
        return "its code in transformers does not support external attention (AttentionInterface); use another model"
    return None


@functools.lru_cache(maxsize=4)
def _language_models(folder: Path) -> frozenset[str] | None:
    """The `model_type` values with a language model; None: this version lists them in another way."""
    text = _read(folder / "models" / "auto" / "modeling_auto.py") or ""
    block = _LANGUAGE_MODELS.search(text)
    return frozenset(_NAME.findall(block[0])) if block else None


def _code_of(folder: Path, model_type: str) -> str | None:
    """The source of an architecture; None: it is in a folder of another name."""
    name = model_type.replace("-", "_")
    for each in (name, name.removesuffix("_text")):  # language models of multimodal ones are beside them
        if (code := _read(folder / "models" / each / f"modeling_{each}.py")) is not None:
            return code
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
