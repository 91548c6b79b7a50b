"""Pre-tokenizers by the names in GGUF files: how text is split before BPE.

Only llama.cpp defines what a name means (llama.cpp:src/llama-vocab.cpp); the table reproduces it for all names of
models that generate text, so that text is split as in training. Where llama.cpp adapts the expression of a published
tokenizer.json to its own engine, the published one is here. An unknown name is refused: a wrong split degrades answers
silently.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_WORDS: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_REGEX: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_WORDS
_QWEN2_REGEX: Final = _LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_REGEX: Final = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_REGEX: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_YOUTU_WORDS: Final = _TEKKEN_REGEX.replace(r"\p{M}]+|", r"\p{M}]+" + _CONTRACTIONS + "?|").replace(
    r"\p{M}]*|\p{N}", r"\p{M}]*" + _CONTRACTIONS + r"?|\p{N}"
)
_GPT4O_REGEX: Final = _YOUTU_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_GPT2_REGEX: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT_REGEXES: Final = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_REGEX, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON_REGEXES: Final = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_REGEX, r"[0-9][0-9][0-9]")
_BLOOM_REGEX: Final = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CHINESE_JAPANESE: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CHINESE_KOREAN: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PUNCTUATION_WORDS: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
)
_DEEPSEEK3_REGEX: Final = _PUNCTUATION_WORDS + r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_LETTERS: Final = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM_REGEXES: Final = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CHINESE_KOREAN,
    r"\p{N}+",
)
_SPACES: Final = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))


class PreTokenizer(NamedTuple):
    """Splitting of text before BPE, and other properties that llama.cpp derives from the pre-tokenizer's name.

    Attributes:
        regexes: applied in order, each to the pieces of the one before.
        whole_words: a piece that is a token is used without applying the merges.
        add_bos: texts begin with BOS, unless the file overrides it.
        nfc: text is normalized first, which only the published tokenizer.json does.
    """

    regexes: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2: Final = PreTokenizer((_GPT2_REGEX,))
_DIGITS: Final = PreTokenizer((r"\p{N}", _GPT2_REGEX))
_LLAMA3: Final = PreTokenizer((_LLAMA3_REGEX,), whole_words=True, add_bos=True)
_LLAMA3_WORDS: Final = PreTokenizer((_LLAMA3_REGEX,))
_QWEN2: Final = PreTokenizer((_QWEN2_REGEX,), nfc=True)
_QWEN2_WORDS: Final = PreTokenizer((_QWEN2_REGEX,))
_BLOOM: Final = PreTokenizer((_BLOOM_REGEX,))
_GLM4: Final = PreTokenizer((_LLAMA3_REGEX,), whole_words=True)
_GPT4O: Final = PreTokenizer((_GPT4O_REGEX,))
_DEEPSEEK3: Final = PreTokenizer((r"\p{N}{1,3}", _CHINESE_JAPANESE, _DEEPSEEK3_REGEX))
_BAILING: Final = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)

PRE_TOKENIZERS: Final[dict[str, PreTokenizer]] = {
    "default": PreTokenizer(_DEFAULT_REGEXES),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais"), _GPT2
    ),
    **dict.fromkeys(("trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), _LLAMA3),
    **dict.fromkeys(("midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), _LLAMA3_WORDS),
    **dict.fromkeys(("glm4", "glm5"), _GLM4),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _LLAMA3_REGEX.replace("{1,3}", "+")), whole_words=True),
    "jais-2": PreTokenizer((_LLAMA3_REGEX.removesuffix(r"\s+(?!\S)|\s+") + _SPACES + r"|\s",)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(
        ("kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN2_WORDS
    ),
    "qwen35": PreTokenizer((_QWEN35_REGEX,)),
    "ufakzeka": PreTokenizer((_QWEN2_REGEX.removeprefix(_CONTRACTIONS + "|"),)),
    "seed-coder": PreTokenizer((_QWEN2_REGEX.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2_REGEX)),
    "exaone-moe": PreTokenizer(
        (
            _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "tekken": PreTokenizer((_TEKKEN_REGEX,), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O_REGEX))),
    "youtu": PreTokenizer(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+"
            "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
            "|[\u3105-\u312f]+|" + _CHINESE_JAPANESE,
            _YOUTU_WORDS,
        ),
        whole_words=True,
    ),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM_REGEXES),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_KOREAN, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _CHINESE_JAPANESE,
            _PUNCTUATION_WORDS + r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "falcon": PreTokenizer(_FALCON_REGEXES),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _BLOOM),
    "viking": PreTokenizer((_BLOOM_REGEX, r"\p{N}")),
}
"""By the names in GGUF files. Not here: names of models that embed text (jina, roberta, whitespace), and those that
llama.cpp splits with code of its own (kimi-k2, afmoe, superbpe, chameleon, sarvam-moe)."""
