"""`read_pooling`: the `PoolingSpec` of a folder, and `token_limit`: how long its texts may be.

Both are read as sentence-transformers reads them, so that vectors and scores are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...runtime.config.model_choice import TaskChoice
from ..fields import Fields
from ..model_files import read_json
from ..spec.encoder_spec import PoolingSpec
from .embedder import read_embedder
from .scorer import read_scorer
from .special_tokens import CONFIG
from .task import FoundTask, transformer_fields

_UNLIMITED: Final = 1 << 31
"""transformers saves 10**30 in a tokenizer without a limit."""


def read_pooling(
    folder: Path, fields: Fields, found: FoundTask, choice: TaskChoice, hidden_size: int, name: str = ""
) -> PoolingSpec | None:
    """Options of the model for vectors or scores; None for the task generate.

    Args:
        folder: the model's.
        fields: of its config.json.
        found: the task, see `find_task`.
        choice: what the user asks for.
        hidden_size: of the model.
        name: of the model.

    Raises:
        ConfigError: a file is missing or damaged, or asks for what the engine does not compute.
    """
    if found.task == "generate":
        return None
    _check_transformer(transformer_fields(folder))
    if found.task == "embed":
        return read_embedder(folder, fields, found, choice, hidden_size)
    return read_scorer(folder, fields, found, hidden_size, name)


def token_limit(folder: Path) -> int | None:
    """Most tokens of a text, special tokens included; None: the files set no limit below the model's.

    Raises:
        ConfigError: a file is damaged.
    """
    transformer = transformer_fields(folder)
    if transformer.get("max_seq_length") is not None:
        return transformer.integer("max_seq_length", 1, _UNLIMITED)
    path = folder / CONFIG
    value = Fields(path, read_json(path) if path.exists() else {}).get("model_max_length")
    is_limit = isinstance(value, int) and not isinstance(value, bool) and 0 < value < _UNLIMITED
    return int(value) if is_limit and isinstance(value, int) else None


def _check_transformer(fields: Fields) -> None:
    """Refuse texts that are not taken as they are: templates of chats, settings of the tokenizer for each call."""
    for name in ("query_expansion", "query_length", "document_length"):
        if fields.get(name) is not None:
            raise fields.error(
                name, fields.get(name), "models with a vector for each token are not supported"
            )
    forms = fields.get("modality_config")
    if isinstance(forms, dict) and forms and not {"text", "message"} & set(forms):
        raise fields.error("modality_config", sorted(forms), "only text is supported")
    if settings := fields.get("processing_kwargs"):
        raise fields.error("processing_kwargs", settings, "only the tokenizer's own settings are supported")
