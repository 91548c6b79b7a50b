"""Settings of SGLang, vLLM and llama.cpp for speculative decoding, as settings of this engine; see `peer_tiers`.

Each function takes the value of one of their settings and gives values of ours by name, or raises `ConfigError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from ..errors import ConfigError

_USE: Final = "use --speculative suffix or auto"
_ALGORITHMS: Final = {
    "NGRAM": "ngram",
    "SUFFIX": "suffix",
    "STANDALONE": "draft",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
}
_METHODS: Final = {
    "ngram": "ngram",
    "[ngram]": "ngram",
    "suffix": "suffix",
    "draft_model": "draft",
    "eagle3": "eagle3",
    "mtp": "mtp",
}
_TYPES: Final = {
    "none": "off",
    "ngram-simple": "ngram",
    **dict.fromkeys(("ngram-cache", "ngram-map-k", "ngram-map-k4v", "ngram-mod"), "suffix"),
    **dict.fromkeys(("draft", "draft-simple"), "draft"),
    "draft-eagle3": "eagle3",
    "draft-mtp": "mtp",
}
_OTHERS: Final = {
    "EAGLE": "heads of EAGLE-1 and 2 are not supported",
    "eagle": "heads of EAGLE-1 and 2 are not supported",
    **dict.fromkeys(
        ("medusa", "mlp_speculator"), "heads that draft several tokens at once are not supported"
    ),
    **dict.fromkeys(("DFLASH", "dflash", "draft-dflash", "draft-dspark"), "DFlash is not supported"),
}
_SPEEDS: Final = frozenset(
    {
        "prompt_lookup_min",
        "prompt_lookup_max",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
        "draft_tensor_parallel_size",
        "max_model_len",
        "disable_by_batch_size",
        "disable_padded_drafter_batch",
        "enforce_eager",
    }
)
"""Without an effect here, where measured costs and hit rates choose drafts: they change its speed only."""
_CACHED: Final = "suffix_decoding_max_cached_requests"


def speculative_algorithm(value: object) -> dict[str, object]:
    """SGLang's algorithm."""
    return {"speculative": _ours("speculative_algorithm", value, _ALGORITHMS)}


def spec_type(value: object) -> dict[str, object]:
    """llama.cpp's types: one of them, because a drafter's drafts are mixed with those of the text here anyway."""
    return {"speculative": _ours("spec_type", value, _TYPES)}


def speculative_config(value: object) -> dict[str, object]:
    """vLLM's object: JSON, or a mapping."""
    try:
        config = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"speculative_config is no JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise ConfigError("speculative_config must be an object of JSON")
    method, model = config.get("method"), config.get("model")
    if isinstance(method, str) and method.endswith("_mtp"):
        method = "mtp"
    if method is None and model in ("ngram", "[ngram]"):
        method, model = "ngram", None
    known = _SPEEDS | {"method", "model", "num_speculative_tokens", _CACHED}
    if unknown := sorted(str(name) for name in config if name not in known):
        raise ConfigError(
            f"speculative_config has {', '.join(unknown)}, without a meaning here; leave it out: drafts never change "
            "an answer, and measured costs choose their number"
        )
    if method is None and model is None:
        raise ConfigError(f"speculative_config has neither method nor model; {_USE}")
    settings: dict[str, object] = {"speculative": "auto"}
    if method is not None:
        settings["speculative"] = _ours("speculative_config has a method that", method, _METHODS)
    if settings["speculative"] == "suffix" and config.get(_CACHED) == 0:
        settings["speculative"] = "ngram"  # no finished answers
    if model is not None and settings["speculative"] != "mtp":
        settings["speculative_model"] = model
    if "num_speculative_tokens" in config:
        settings["speculative_num_draft_tokens"] = config["num_speculative_tokens"]
    return settings


def _ours(name: str, value: object, words: Mapping[str, str]) -> str:
    if isinstance(value, str) and value in words:
        return words[value]
    reason = _OTHERS.get(value) if isinstance(value, str) else None
    rule = f"and {reason}" if reason else f"but it must be one of {', '.join(words)}"
    raise ConfigError(f"{name} is {value!r}, {rule}; {_USE}")
