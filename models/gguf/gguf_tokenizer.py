"""Builds a `tokenizers.Tokenizer` from the vocabulary inside a GGUF file.

Called by `tokenizer`. GGUF stores tokens, types, merges or scores, and the *name* of a pre-tokenizer, see
`pre_tokenizers`.

Three families are built: `gpt2`, byte-level BPE with merges; `llama`, SentencePiece BPE with scores; and `gemma4`, the
same with merges.
"""

from __future__ import annotations

import logging
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as CoreTokenizer
from tokenizers.models import BPE

from ...runtime.errors import ConfigError
from ..fields import Fields
from ..model_files import library_errors
from .gguf_file import GGUFFile
from .pre_tokenizers import PRE_TOKENIZERS

logger = logging.getLogger(__name__)

# Token types of GGUF.
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_ADDED_TYPES: Final = (_UNKNOWN, _CONTROL, _USER_DEFINED)  # matched as a whole, before any splitting

_MAX_PIECE_CHARS: Final = 1024


def build_gguf_tokenizer(file: GGUFFile) -> CoreTokenizer:
    """The tokenizer of `file`, with its control tokens as special tokens and BOS/EOS added as the file requires.

    Raises:
        ConfigError: the file has no vocabulary, its parts are inconsistent, or its kind is not supported.
    """
    fields = Fields(file.path, file.metadata)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(
            f"{file.path}: no tokenizer (tokenizer.ggml.tokens is missing); use a complete GGUF file"
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        token, count = Counter(tokens).most_common(1)[0]
        raise ConfigError(
            f"{file.path}: the vocabulary is damaged: token {reprlib.repr(token)} appears {count} times"
        )
    model = fields.text("tokenizer.ggml.model")
    if model == "gpt2":
        core, add_bos = _byte_level_bpe(file, fields, vocab)
    elif model == "llama":
        core, add_bos = _sentencepiece_bpe(file, fields, vocab, tokens), True
    elif model == "gemma4":
        core, add_bos = _spaced_bpe(file, fields, vocab, tokens), True
    else:
        raise fields.error(
            "tokenizer.ggml.model", model, "which is not supported; supported are: gpt2, llama, gemma4"
        )
    _add_tokens(core, _token_types(file, len(tokens)), tokens)
    _add_post_processor(core, fields, tokens, add_bos)
    return core


def _byte_level_bpe(file: GGUFFile, fields: Fields, vocab: dict[str, int]) -> tuple[CoreTokenizer, bool]:
    """Byte-level BPE, and whether texts start with BOS by default."""
    name = fields.text("tokenizer.ggml.pre", default="default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        supported = ", ".join(PRE_TOKENIZERS)
        raise fields.error("tokenizer.ggml.pre", name, f"which is not supported; supported are: {supported}")
    if name == "default":
        logger.warning("%s names no pre-tokenizer: text may be split differently than in training", file.path)
    core = CoreTokenizer(_bpe(file, vocab, _merge_pairs(file), ignore_merges=pre.whole_words))
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in pre.regexes]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    if pre.nfc:
        core.normalizer = normalizers.NFC()
    return core, pre.add_bos


def _merge_pairs(file: GGUFFile) -> list[tuple[str, str]]:
    """Merges as pairs; a token contains no space, which has another character in these vocabularies."""
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ConfigError(f"{file.path}: the field tokenizer.ggml.merges is missing")
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise ConfigError(
                f"{file.path}: tokenizer.ggml.merges is damaged: {reprlib.repr(merge)} is not a pair"
            )
        pairs.append((left, right))
    return pairs


def _sentencepiece_bpe(
    file: GGUFFile, fields: Fields, vocab: dict[str, int], tokens: Sequence[str]
) -> CoreTokenizer:
    """SentencePiece BPE: spaces become U+2581, bytes without a token become <0x..> tokens."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or scores.shape != (len(tokens),) or np.isnan(scores).any():
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.scores must hold one score for each of {len(tokens)} tokens"
        )
    longest = max(map(len, tokens))
    if longest > _MAX_PIECE_CHARS:  # every split of a token is tried
        raise ConfigError(f"{file.path}: a token has {longest} characters, the limit is {_MAX_PIECE_CHARS}")
    merges = _merges_by_score(vocab, scores.tolist(), _token_types(file, len(tokens)))
    return _with_spaces(file, fields, vocab, tokens, merges, prefix_space=True)


def _spaced_bpe(
    file: GGUFFile, fields: Fields, vocab: dict[str, int], tokens: Sequence[str]
) -> CoreTokenizer:
    """The same with merges in the file; a text is one piece."""
    return _with_spaces(file, fields, vocab, tokens, _merge_pairs(file), prefix_space=False)


def _with_spaces(
    file: GGUFFile,
    fields: Fields,
    vocab: dict[str, int],
    tokens: Sequence[str],
    merges: list[tuple[str, str]],
    *,
    prefix_space: bool,
) -> CoreTokenizer:
    """BPE over characters; `prefix_space`: the default of whether texts start with a space."""
    unknown = fields.token_ids("tokenizer.ggml.unknown_token_id", len(tokens))
    unk_token = tokens[unknown[0]] if unknown else None
    core = CoreTokenizer(
        _bpe(file, vocab, merges, unk_token=unk_token, fuse_unk=unk_token is not None, byte_fallback=True)
    )
    prefix_space = fields.boolean("tokenizer.ggml.add_space_prefix", default=prefix_space)
    spaces = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix_space else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(" ", 1, 0))
    core.decoder = decoders.Sequence(steps)
    return core


def _merges_by_score(
    vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a token, best score first.

    SentencePiece always joins the neighbors with the highest score of their union. BPE joins the pair that comes first
    in its list. Both are the same if the list is sorted by the union's score.
    """
    added = {token for token, token_id in vocab.items() if types[token_id] in _ADDED_TYPES}
    ranked: list[tuple[float, int, int, int]] = []
    pieces = list(vocab)
    for token, token_id in vocab.items():
        if token in added:
            continue
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], token_id, left, right))
    ranked.sort()
    return [(pieces[left], pieces[right]) for _, _, left, right in ranked]


def _bpe(
    file: GGUFFile,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> BPE:
    with library_errors(f"{file.path}: the vocabulary is damaged: "):
        return BPE(
            vocab,
            merges,
            unk_token=unk_token,
            fuse_unk=fuse_unk,
            byte_fallback=byte_fallback,
            ignore_merges=ignore_merges,
        )


def _token_types(file: GGUFFile, num_tokens: int) -> list[int]:
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, np.ndarray) or types.shape != (num_tokens,):
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.token_type must hold one type for each of {num_tokens} tokens"
        )
    listed: list[int] = types.tolist()
    return listed


def _add_tokens(core: CoreTokenizer, types: Sequence[int], tokens: Sequence[str]) -> None:
    """Control tokens become special; user-defined ones are matched as a whole but belong to the text."""
    core.add_tokens(
        [
            AddedToken(tokens[token_id], normalized=False, special=token_type != _USER_DEFINED)
            for token_id, token_type in enumerate(types)
            if token_type in _ADDED_TYPES
        ]
    )


def _add_post_processor(core: CoreTokenizer, fields: Fields, tokens: Sequence[str], add_bos: bool) -> None:
    """Put BOS before and EOS after a text if the file requires it."""
    parts, used = ["$A"], []
    for name, default, position in (("bos", add_bos, 0), ("eos", False, 2)):
        if not fields.boolean(f"tokenizer.ggml.add_{name}_token", default=default):
            continue
        ids = fields.token_ids(f"tokenizer.ggml.{name}_token_id", len(tokens))
        if not ids:
            raise ConfigError(f"{fields.path}: the field tokenizer.ggml.{name}_token_id is missing")
        # Under an internal name: the token's text could be parsed as template syntax ("$B:0" crashes the library).
        parts.insert(position, name)
        used.append({"id": name, "ids": [ids[0]], "tokens": [tokens[ids[0]]]})
    if used:
        core.post_processor = processors.TemplateProcessing(single=parts, special_tokens=used)
