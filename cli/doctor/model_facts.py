"""`ModelFacts`: facts about a model's files; gathered here, with every error as text, checked in `model`.

Nothing is downloaded; a model that is not on this machine is reported as not fetched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...launch.resolve.model_resolution import WeightsError, find_model, read_model, runs_in_transformers
from ...models.gguf.gguf_split import parts_of
from ...models.hub.built_in.models import published_sha256
from ...models.source import ModelSource, not_fetched
from ...models.spec.model_spec import ModelSpec
from ...models.weight_files.check_weights import WeightsSummary
from ...runtime.config.engine_config import ModelConfig
from ...runtime.errors import ConfigError, EngineError

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
        no_tower: why the tower beside a GGUF model is not used.
        in_transformers: transformers' code computes it.
        weights, weights_error: the weight files against the architecture, by their headers.
        values_error: a weight with values that loading refuses.
        checksums: of the files with a published one, if compared.
        vocab_size, tokenizer_error: tokens of the tokenizer.
        changed_samples: those of `SAMPLES` that changed by encoding and decoding, with the changed text.
        no_template, template_error: why there is no chat template, and why it cannot render; "" if it does.
        endless_turn: why answers do not end with a turn of the template, and what to do; "" if they do.
    """

    not_fetched: str = ""
    source: ModelSource | None = None
    source_error: str = ""
    spec: ModelSpec | None = None
    spec_error: str = ""
    no_tower: str = ""
    in_transformers: bool = False
    weights: WeightsSummary | None = None
    weights_error: str = ""
    values_error: str = ""
    checksums: tuple[Checksum, ...] = ()
    vocab_size: int | None = None
    tokenizer_error: str = ""
    changed_samples: tuple[tuple[str, str], ...] = ()
    no_template: str = ""
    template_error: str = ""
    endless_turn: str = ""


def gather_model(
    config: ModelConfig,
    *,
    with_torch: bool,
    with_checksums: bool,
    in_blocks: Callable[[ModelSpec], ModelSpec | None] = lambda _spec: None,
    on_step: Callable[[str], None] = lambda _name: None,
) -> ModelFacts:
    """Gather the facts.

    Args:
        config: which model, and how its weights are loaded.
        with_torch: whether torch works, without which values of weights are not read.
        with_checksums: read files with a published checksum completely, and weights that are kept in blocks.
        in_blocks: the architecture as it will run here, if its weights are kept in blocks; else None.
        on_step: called with the name of each slow step.
    """
    dummy = config.load_format == "dummy"
    missing, source_error = _attempt(lambda: not_fetched(config.model, need_weights=not dummy))
    if missing or source_error:
        return ModelFacts(not_fetched=missing or "", source_error=source_error)
    on_step("model files")
    source, source_error = _attempt(lambda: find_model(config, fetch=False))
    if source is None:
        return ModelFacts(source_error=source_error)
    found: dict[str, Any] = {"source": source}
    try:
        resolved, found["spec_error"] = _attempt(lambda: read_model(config, source))
    except WeightsError as error:
        found["weights_error"] = str(error)
        resolved, found["spec_error"] = _attempt(
            lambda: read_model(dataclasses.replace(config, load_format="dummy"), source)
        )
    if resolved is not None:
        found["source"], found["no_tower"] = resolved.source, resolved.no_tower
        found["spec"], found["weights"] = resolved.spec, resolved.weights
        found["in_transformers"] = runs_in_transformers(config, resolved.spec)
        if with_torch and found["in_transformers"]:
            from ...model_runner.hf_backend.transformers_load import check_architecture

            on_step("architecture")
            _, found["spec_error"] = _attempt(lambda: check_architecture(source, resolved.spec))
            found["spec"] = None if found["spec_error"] else resolved.spec
        spec = in_blocks(resolved.spec)
        if with_torch and with_checksums and spec is not None and resolved.weights is not None:
            from ...model_runner.weights.block_format import check_block_values

            on_step("values of the weights")
            _, found["values_error"] = _attempt(lambda: check_block_values(source, spec))
    if with_checksums and not dummy:
        on_step("checksums")
        found["checksums"] = tuple(_checksums(source))
    on_step("tokenizer")
    architecture = None if resolved is None else resolved.spec
    return ModelFacts(**found, **_tokenizer_facts(source, config.chat_template, architecture))


def _attempt(read: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return read(), ""
    except WeightsError:
        raise
    except ConfigError as error:
        return None, str(error)
    except OSError as error:  # files of another user, a disk that fails
        return None, f"{error.filename}: {error.strerror}; give this user read access, or use another model"


# ---------------------------------------------------------------- weights


def _checksums(source: ModelSource) -> Iterator[Checksum]:
    """Checksums of files with a known SHA-256: built-in models, and files of the hub's cache, named by it."""
    path = Path(source.path)
    files = parts_of(path) if source.kind == "gguf" else sorted(path.glob("*.safetensors"))
    for file in [*files, Path(source.tower)] if source.tower else files:
        published = published_sha256(file)
        if not published and file.is_symlink() and _SHA256.fullmatch(file.resolve().name):
            published = file.resolve().name
        if published:
            with file.open("rb") as data:
                yield Checksum(str(file), published, hashlib.file_digest(data, "sha256").hexdigest())


# ---------------------------------------------------------------- tokenizer and chat template


def _tokenizer_facts(
    source: ModelSource, template_choice: str | None, spec: ModelSpec | None
) -> dict[str, Any]:
    from ...models.tokenizer.tokenizer import Tokenizer, load_tokenizer
    from ...tokenizer_manager.conversation.template_choice import (
        load_chat_template,
        turn_without_end,
        why_no_template,
    )

    tokenizer: Tokenizer | None
    encode_only = spec is not None and spec.pooling is not None
    tokenizer, error = _attempt(lambda: load_tokenizer(source, encode_only=encode_only))
    if tokenizer is None:
        return {"tokenizer_error": error}
    found: dict[str, Any] = {"vocab_size": tokenizer.vocab_size}
    if encode_only:
        return found
    found["changed_samples"] = tuple(_changed(tokenizer, SAMPLES))
    template, found["template_error"] = _attempt(
        lambda: load_chat_template(template_choice, tokenizer, source.path)
    )
    if template is None and not found["template_error"]:
        found["no_template"] = why_no_template(tokenizer, "use /v1/completions")
    if template is not None:
        try:
            for chat in CHATS:
                template.render(chat)
            found["endless_turn"] = turn_without_end(
                template, tokenizer, () if spec is None else spec.eos_token_ids
            )
        except EngineError as error:
            found["template_error"] = str(error)
    return found


def _changed(tokenizer: Any, samples: Sequence[str]) -> Iterator[tuple[str, str]]:
    for sample in samples:
        ids = tokenizer.encode(sample, add_special_tokens=False)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if text.removeprefix(" ") != sample.removeprefix(" "):  # SentencePiece puts a space before a text
            yield sample, text
