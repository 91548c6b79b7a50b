"""`ModelFacts`: facts about a model's files; gathered here, with every error as text, checked in `model`.

Nothing is downloaded; a model that is not on this machine is reported as not fetched.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...runtime.config.engine_config import ModelConfig
from ...runtime.errors import ConfigError, EngineError
from ...runtime.model_files.default_model import DEFAULT_MODEL, cached_default_model
from ...runtime.model_files.hub import cached_from_hub
from ...runtime.model_files.load_spec import load_spec
from ...runtime.model_files.model_spec import ModelSpec
from ...runtime.model_files.source import HUB_NAME, ModelSource, resolve_source

SAMPLES: Final = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces, a tab\tand\nline breaks\n\n",
    "naïve façade: Größe, 東京, привет, 🙂",
    "def f(x):\n    return {'a': x ** 2}",
)
"""Texts that a tokenizer encodes and decodes as a test."""
CHATS: Final = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "How are you?"},
    ],
)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class Weights(NamedTuple):
    """The weight files, after their headers were checked."""

    num_files: int
    num_tensors: int
    num_bytes: int


class Checksum(NamedTuple):
    """A file, its published SHA-256 and the computed one."""

    path: str
    published: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """See the module. A fact is None if it depends on a check that failed.

    Attributes:
        not_fetched: the model that a start fetches first; "" if nothing.
        source, source_error: the files.
        spec, spec_error: the architecture.
        weights, weights_error: the headers of all weight files against their sizes.
        checksums: of the files with a published one, if compared.
        vocab_size, tokenizer_error: tokens of the tokenizer.
        changed_samples: those of `SAMPLES` that changed by encoding and decoding, with the changed text.
        has_template, template_error: the chat template, and why it cannot render.
    """

    not_fetched: str = ""
    source: ModelSource | None = None
    source_error: str = ""
    spec: ModelSpec | None = None
    spec_error: str = ""
    weights: Weights | None = None
    weights_error: str = ""
    checksums: tuple[Checksum, ...] = ()
    vocab_size: int | None = None
    tokenizer_error: str = ""
    changed_samples: tuple[tuple[str, str], ...] = ()
    has_template: bool = False
    template_error: str = ""


def gather_model(
    config: ModelConfig,
    *,
    with_torch: bool,
    with_checksums: bool,
    on_step: Callable[[str], None] = lambda _name: None,
) -> ModelFacts:
    """Gather the facts.

    Args:
        config: which model, and how its weights are loaded.
        with_torch: whether torch works, without which the headers of safetensors are not read.
        with_checksums: read files with a published checksum completely.
        on_step: called with the name of each slow step.
    """
    if missing := _not_fetched(config.model):
        return ModelFacts(not_fetched=missing)
    dummy = config.load_format == "dummy"
    on_step("model files")
    source, source_error = _attempt(lambda: resolve_source(_local(config.model), need_weights=not dummy))
    if source is None:
        return ModelFacts(source_error=source_error)
    spec, spec_error = _attempt(lambda: load_spec(source))
    found: dict[str, Any] = {"source": source, "spec": spec, "spec_error": spec_error}
    if not dummy and (with_torch or source.kind == "gguf"):
        found["weights"], found["weights_error"] = _attempt(lambda: _read_weights(source))
    if with_checksums and not dummy:
        on_step("checksums")
        found["checksums"] = tuple(_checksums(source))
    on_step("tokenizer")
    return ModelFacts(**found, **_tokenizer_facts(source, config.chat_template))


def _attempt(look: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return look(), ""
    except ConfigError as error:
        return None, str(error)
    except OSError as error:  # files of another user, a disk that fails
        return None, f"{error.filename}: {error.strerror}; give this user read access, or use another model"


def _not_fetched(model: str | None) -> str:
    if model in (None, "default"):
        if cached_default_model() is None:
            return f"the default model, {DEFAULT_MODEL.wheel_bytes / 2**20:.0f} MiB"
    elif _is_hub_name(model) and cached_from_hub(str(model)) is None:
        return f"{model}, from the hub"
    return ""


def _is_hub_name(model: str | None) -> bool:
    return (
        model is not None
        and HUB_NAME.fullmatch(model) is not None
        and not os.path.exists(os.path.expanduser(model))
    )


def _local(model: str | None) -> str | None:
    """The local folder of a fetched hub name; resolving the name would ask the hub for a newer version."""
    return str(cached_from_hub(str(model))) if _is_hub_name(model) else model


# ---------------------------------------------------------------- weights


def _read_weights(source: ModelSource) -> Weights:
    """Raises `ConfigError` for a damaged header, or one that describes more bytes than its file has."""
    if source.kind == "gguf":
        from ...runtime.model_files.gguf.gguf_file import GGUFFile

        tensors = GGUFFile(source.path).tensors
        return Weights(1, len(tensors), sum(tensor.num_bytes for tensor in tensors.values()))
    from ...model_runner.weights.safetensors import SafetensorsStore, weight_files

    folder = Path(source.path)
    store = SafetensorsStore(folder)
    paths = weight_files(folder)
    return Weights(len(paths), len(store.names()), sum(path.stat().st_size for path in paths))


def _checksums(source: ModelSource) -> Iterator[Checksum]:
    """Checksums of files with a known SHA-256: the default model, and files of the hub's cache, named by it."""
    path = Path(source.path)
    for file in [path] if source.kind == "gguf" else sorted(path.glob("*.safetensors")):
        published = ""
        if file.name == DEFAULT_MODEL.file_name:
            published = DEFAULT_MODEL.member_sha256
        elif file.is_symlink() and _SHA256.fullmatch(file.resolve().name):
            published = file.resolve().name
        if published:
            with file.open("rb") as data:
                yield Checksum(str(file), published, hashlib.file_digest(data, "sha256").hexdigest())


# ---------------------------------------------------------------- tokenizer and chat template


def _tokenizer_facts(source: ModelSource, template_path: str | None) -> dict[str, Any]:
    from ...runtime.model_files.tokenizer import Tokenizer, load_tokenizer
    from ...tokenizer_manager.conversation.template_choice import load_chat_template

    tokenizer: Tokenizer | None
    tokenizer, error = _attempt(lambda: load_tokenizer(source))
    if tokenizer is None:
        return {"tokenizer_error": error}
    found: dict[str, Any] = {"vocab_size": tokenizer.vocab_size}
    found["changed_samples"] = tuple(_changed(tokenizer, SAMPLES))
    template, found["template_error"] = _attempt(
        lambda: load_chat_template(template_path, tokenizer, source.path)
    )
    found["has_template"] = template is not None or bool(found["template_error"])
    if template is not None:
        try:
            for chat in CHATS:
                template.render(chat)
        except EngineError as error:
            found["template_error"] = str(error)
    return found


def _changed(tokenizer: Any, samples: Sequence[str]) -> Iterator[tuple[str, str]]:
    for sample in samples:
        ids = tokenizer.encode(sample, add_special_tokens=False)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if text.removeprefix(" ") != sample.removeprefix(" "):  # SentencePiece puts a space before a text
            yield sample, text
