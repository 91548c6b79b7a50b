"""`FimTokens`: the tokens with which a model fills in the middle of a text, and the prompts that are made of them.

The order of a prompt, the separators of other files and the names of tokens are llama.cpp's (`format_prompt_infill`,
`llama-vocab.cpp`; the pattern of repositories is that of Qwen2.5-Coder, arXiv 2409.12186):

    [rep] myproject  [sep] name, text ...  [sep] filename  [pre] prefix, prompt [suf] suffix [mid]

A file that is too long is cut 3:1, as there, but in blocks of 256 tokens: the place of the cut stays while the cursor
moves on, so that the tokens after it stay in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

CUT_TOKENS: Final = 256
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
    ),
    "suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
    ),
    "mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
    ),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
    "rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "sep": ("<|file_sep|>",),
}
GGUF_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "pre": ("fim_pre_token_id", "prefix_token_id"),
    "suf": ("fim_suf_token_id", "suffix_token_id"),
    "mid": ("fim_mid_token_id", "middle_token_id"),
    "pad": ("fim_pad_token_id",),
    "rep": ("fim_rep_token_id",),
    "sep": ("fim_sep_token_id",),
}
"""Keys after `tokenizer.ggml.`; they win over the names of tokens."""
_PROJECT: Final = "myproject\n"
_FILE: Final = "filename\n"
_SNIPPET: Final = "\n\n--- snippet ---\n\n"


class Extra(msgspec.Struct):
    """Part of another file, in llama-server's form."""

    text: str
    filename: str = "tmp"


class FimTokens(NamedTuple):
    """The ids; None where the model has none."""

    pre: int
    suf: int
    mid: int
    pad: int | None = None
    rep: int | None = None
    sep: int | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return tuple(token for token in (self.pad, self.rep, self.sep) if token is not None)

    def prompt(
        self,
        encode: Callable[[str], list[int]],
        prefix: str | Sequence[int],
        suffix: str,
        *,
        room: int,
        written: str = "",
        extra: Sequence[Extra] = (),
        bos: int | None = None,
        suffix_first: bool = False,
    ) -> list[int]:
        """The token ids of a prompt.

        Args:
            encode: without special tokens.
            prefix, suffix: of the file, before and after the place to fill.
            room: most tokens of the prompt.
            written: the beginning of the middle.
            extra: parts of other files, the most important one last.
            bos: begins the prompt; None: nothing does.
            suffix_first: the order suffix, prefix.
        """
        before = encode(prefix) if isinstance(prefix, str) else list(prefix)
        after, begun = encode(suffix), encode(written)
        room = max(0, room - 3 - (bos is not None) - len(begun))
        after = after[: max(room // 4, (room - len(before)) // CUT_TOKENS * CUT_TOKENS)]
        before = before[_cut(len(before), room - len(after)) :]
        first, second = [self.pre, *before, *begun], [self.suf, *after]
        if suffix_first:
            first, second = second, first
        others = self._others(encode, extra) if extra else []
        others = others[_cut(len(others), room - len(after) - len(before)) :]
        return [*others, *([] if bos is None else [bos]), *first, *second, self.mid]

    def _others(self, encode: Callable[[str], list[int]], extra: Sequence[Extra]) -> list[int]:
        ids = [] if self.rep is None else [self.rep, *encode(_PROJECT)]
        for each in extra:
            ids += encode(_SNIPPET) if self.sep is None else [self.sep, *encode(f"{each.filename}\n")]
            ids += encode(each.text)
        return ids if self.sep is None else [*ids, self.sep, *encode(_FILE)]


def _cut(length: int, room: int) -> int:
    """The tokens at the beginning that are left out, in whole blocks."""
    return min(length, -(-max(0, length - room) // CUT_TOKENS) * CUT_TOKENS)


def find_fim_tokens(token_to_id: Callable[[str], int | None], given: Mapping[str, int]) -> FimTokens | None:
    """The tokens of a vocabulary; None if it lacks one of the three that are needed.

    Args:
        token_to_id: the id of a token in the vocabulary's spelling.
        given: ids that the file names, by the fields of `FimTokens`.
    """
    found: dict[str, int] = dict(given)
    for field, names in _NAMES.items():
        ids = (token_to_id(name) for name in names)
        if field not in found and (token_id := next((i for i in ids if i is not None), None)) is not None:
            found[field] = token_id
    return FimTokens(**found) if {"pre", "suf", "mid"} <= found.keys() else None
