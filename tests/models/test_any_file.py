"""Any model file: its architecture, tokenizer and chat template are read, or refused with the file's name and a reason,
and never with anything but a `ConfigError`; in bounded memory and time.

The readers' own tests have damaged bytes; here the files are well formed, and what they say is not. The slow tests read
2,000 of each kind, or as many as ENGINE_FUZZ_EXAMPLES says.
"""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as CoreTokenizer
from tokenizers import decoders, models, pre_tokenizers

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import ModelSpec
from engine.models.tokenizer.tokenizer import Tokenizer
from engine.models.weight_files.weight_memory import tied_head_bytes, weight_bytes
from engine.runtime.errors import ConfigError, RequestError
from engine.tokenizer_manager.conversation.chat_template import ChatTemplate
from tests.selection import examples

MAX_PEAK_BYTES = 32 << 20  # the files have some KB; a tokenizer of 256 tokens takes 1 MB
MAX_CPU_S = 20.0  # of what takes milliseconds: a loop over what a file claims takes hours

FAST = settings(
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FAST, max_examples=int(os.environ.get("ENGINE_FUZZ_EXAMPLES", "2000")))


def read(path: Path, reader: Callable[[Path], object], *, watch_memory: bool) -> None:
    """Read, or be refused in the right way. Watching takes most of the time."""
    refusal = ""
    if watch_memory:
        tracemalloc.start()
    began_s = time.thread_time()
    try:
        reader(path)
    except ConfigError as error:
        refusal = str(error)
    finally:
        took_s = time.thread_time() - began_s
        peak = tracemalloc.get_traced_memory()[1]  # 0 if nobody looks
        tracemalloc.stop()
    assert path.name in refusal or not refusal
    assert len(refusal) < 2000
    refusal.encode()  # it will be printed
    assert peak < MAX_PEAK_BYTES
    assert took_s < MAX_CPU_S


def use(spec: ModelSpec) -> None:
    """What is computed of every model before its weights are read."""
    weight_bytes(spec, 2)
    tied_head_bytes(spec, 2)
    spec.kv_bytes_per_token(2)


def use_tokenizer(tokenizer: Tokenizer) -> None:
    """What a server asks of it."""
    try:
        ids = tokenizer.encode("hello, wörld 🙂")
    except RequestError as error:
        assert "tokenizer fails on this text" in str(error)  # noqa: PT017  (the others may not be raised at all)
        return
    tokenizer.decode(ids)
    tokenizer.min_num_tokens("hello")
    for token_id in ids[:20]:
        tokenizer.token_bytes(token_id)
    if tokenizer.chat_template is not None:
        try:
            template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
            template.render([{"role": "user", "content": "hi"}])
        except (ConfigError, RequestError):
            pass


# ---------------------------------------------------------------- GGUF

U32, F32, BOOL, STRING, ARRAY, U64, I32 = 4, 6, 7, 8, 9, 10, 5
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "B",
    U64: "Q",
    11: "q",
    12: "d",
}
Typed = tuple[int, Any]
"""A GGUF type, and a value; of an array the type of its items, and a list."""


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def scalar(kind: int, value: Any) -> bytes:
    return string(value) if kind == STRING else struct.pack("<" + NUMBERS[kind], value)


def entry(key: str, kind: int, value: Any) -> bytes:
    if isinstance(value, list):
        items = b"".join(scalar(kind, item) for item in value)
        return string(key.encode()) + struct.pack("<IIQ", ARRAY, kind, len(value)) + items
    return string(key.encode()) + struct.pack("<I", kind) + scalar(kind, value)


def gguf_bytes(metadata: dict[str, Typed], tensors: dict[str, tuple[list[int], bytes]]) -> bytes:
    """A file of version 3; tensors are float32, with dimensions in the file's order."""
    out = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    out += b"".join(entry(key, *value) for key, value in metadata.items())
    data = b""
    for name, (shape, content) in tensors.items():
        out += string(name.encode()) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        out += struct.pack("<IQ", 0, len(data))
        data += content + bytes(-len(content) % 32)
    return out + bytes(-len(out) % 32) + data


ALPHABET = [char.encode() for char in sorted(pre_tokenizers.ByteLevel.alphabet())]
FACTS: dict[str, Typed] = {
    "block_count": (U32, 2),
    "context_length": (U32, 256),
    "embedding_length": (U32, 32),
    "feed_forward_length": (U32, 48),
    "attention.head_count": (U32, 4),
    "attention.head_count_kv": (U32, 2),
    "attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "rope.freq_base": (F32, 10000.0),
    "rope.dimension_count": (U32, 8),
    "vocab_size": (U32, 258),
    "expert_count": (U32, 8),
    "expert_used_count": (U32, 2),
    "expert_feed_forward_length": (U32, 8),
    "attention.sliding_window": (U32, 16),
    "attention.sliding_window_pattern": (U32, 2),
    "attention.key_length": (U32, 8),
    "rope.scaling.type": (STRING, b"yarn"),
    "rope.scaling.factor": (F32, 2.0),
    "rope.scaling.original_context_length": (U32, 128),
    "rope.scaling.attn_factor": (F32, 1.0),
    "final_logit_softcapping": (F32, 0.0),
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "phi3")
BYTE_LEVEL: dict[str, Typed] = {
    "tokenizer.ggml.model": (STRING, b"gpt2"),
    "tokenizer.ggml.pre": (STRING, b"smollm"),
    "tokenizer.ggml.tokens": (STRING, [*ALPHABET, b"he", b"<|end|>"]),
    "tokenizer.ggml.token_type": (I32, [1] * 257 + [3]),
    "tokenizer.ggml.merges": (STRING, [b"h e"]),
}
PIECES: dict[str, Typed] = {
    "tokenizer.ggml.model": (STRING, b"llama"),
    "tokenizer.ggml.tokens": (
        STRING,
        [b"<unk>", b"</s>", *(b"<0x%02X>" % i for i in range(256)), b"h", b"e", b"he"],
    ),
    "tokenizer.ggml.token_type": (I32, [2, 3, *[6] * 256, 1, 1, 1]),
    "tokenizer.ggml.scores": (F32, [0.0] * 258 + [-2.0, -2.0, -1.0]),
    "tokenizer.ggml.unknown_token_id": (U32, 0),
}
COMMON: dict[str, Typed] = {
    "general.alignment": (U32, 32),
    "split.count": (U32, 1),
    "tokenizer.ggml.bos_token_id": (U32, 1),
    "tokenizer.ggml.eos_token_id": (U32, 1),
    "tokenizer.ggml.add_bos_token": (BOOL, 1),
    "tokenizer.ggml.add_eos_token": (BOOL, 0),
    "tokenizer.chat_template": (STRING, b"{% for m in messages %}{{ m.content }}{% endfor %}"),
    "tokenizer.chat_template.tool": (STRING, b"{{ x }}"),
}
TEXTS = [
    b"",
    b"llama",
    b"gpt2",
    b"default",
    b"qwen2",
    b"linear",
    b"none",
    b" ",
    b"$A:0",
    b"x" * 5000,
    "\u2581".encode() * 300,
    b"\xff\xfe",
    b"\x00",
    b"{{ (" * 600,
    b"{% for a in b %}" * 30 + b"x" + b"{% endfor %}" * 30,
    b"{{ 9 ** 9 ** 9 }}",
    b"{{ 'x' * 10 ** 12 }}",
    b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    b"{% if %}",
]
FLOATS = [0.0, -1.0, 1.0, 1e-38, 3e38, float("nan"), float("inf"), float("-inf"), 0.5]
RANGES = {0: (0, 255), 1: (-128, 127), 2: (0, 2**16 - 1), 3: (-(2**15), 2**15 - 1), U32: (0, 2**32 - 1)}
RANGES |= {I32: (-(2**31), 2**31 - 1), U64: (0, 2**64 - 1), 11: (-(2**63), 2**63 - 1), BOOL: (0, 255)}


def scalars(kind: int) -> st.SearchStrategy[Any]:
    if kind == STRING:
        return st.sampled_from(TEXTS) | st.binary(max_size=8)
    if kind in (F32, 12):
        return st.sampled_from(FLOATS)
    low, high = RANGES[kind]
    near = [n for n in (-1, 0, 1, 2, 3, 7, 8, 256, 4096, 65536, 1 << 20, 1 << 30) if low <= n <= high]
    return st.sampled_from([low, high, *near]) | st.integers(low, high)


@st.composite
def typed(draw: st.DrawFn) -> Typed:
    """Any value of any type, or a list of them."""
    kind = draw(st.sampled_from([*NUMBERS, STRING]))
    if draw(st.integers(0, 3)):
        return kind, draw(scalars(kind))
    return kind, draw(
        st.lists(scalars(kind), max_size=4) | st.lists(scalars(kind), min_size=256, max_size=264)
    )


@st.composite
def near(draw: st.DrawFn, before: Typed) -> Typed:
    """A value of the type that belongs there, so that it gets further."""
    kind, value = before
    if not isinstance(value, list):
        return kind, draw(scalars(kind))
    changed = list(value)
    for i in draw(st.lists(st.integers(0, len(value) - 1), min_size=1, max_size=3)):
        changed[i] = draw(scalars(kind) | st.sampled_from(value))
    return kind, changed[: draw(st.integers(0, len(changed)))] if draw(st.booleans()) else changed


@st.composite
def gguf_files(draw: st.DrawFn) -> bytes:
    arch = draw(st.sampled_from(ARCHITECTURES))
    dropped = ("rope.scaling.type", "expert_count") if arch != "qwen3moe" else ("rope.scaling.type",)
    facts = {name: value for name, value in FACTS.items() if name not in dropped or draw(st.booleans())}
    metadata = {"general.architecture": (STRING, arch.encode())}
    metadata |= {f"{arch}.{name}": value for name, value in facts.items()}
    metadata |= draw(st.sampled_from([BYTE_LEVEL, PIECES])) | COMMON
    for key in draw(st.lists(st.sampled_from(sorted(metadata)), max_size=3, unique=True)):
        if draw(st.integers(0, 9)) == 0:
            del metadata[key]
        else:
            metadata[key] = draw(near(metadata[key]) | typed())
    floats = st.lists(st.sampled_from(FLOATS), min_size=1, max_size=5)
    names = (
        "rope_freqs.weight",
        "rope_factors_long.weight",
        "rope_factors_short.weight",
        "token_embd.weight",
    )
    tensors = {
        name: ([len(values)], struct.pack(f"<{len(values)}f", *values))
        for name, values in draw(st.dictionaries(st.sampled_from(names), floats, max_size=2)).items()
    }
    return gguf_bytes(metadata, tensors)


def read_gguf(path: Path) -> None:
    file = GGUFFile(path)
    use_tokenizer(Tokenizer.from_gguf(file))


def read_gguf_facts(path: Path) -> None:
    use(read_gguf_spec(GGUFFile(path)))


def check_gguf(tmp_path: Path, content: bytes, *, watch_memory: bool = False) -> None:
    path = tmp_path / "any.gguf"
    path.write_bytes(content)
    read(path, read_gguf, watch_memory=watch_memory)
    read(path, read_gguf_facts, watch_memory=watch_memory)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_gguf_files_are_good_before_they_are_changed(tmp_path, arch, tokenizer):
    left_out = {"rope.scaling.type"} | ({"expert_count"} if arch != "qwen3moe" else set())
    facts = {f"{arch}.{name}": value for name, value in FACTS.items() if name not in left_out}
    path = tmp_path / "good.gguf"
    path.write_bytes(
        gguf_bytes({"general.architecture": (STRING, arch.encode())} | facts | tokenizer | COMMON, {})
    )
    read_gguf(path)
    read_gguf_facts(path)


@FAST
@given(content=gguf_files())
def test_any_gguf_metadata(tmp_path, content):
    check_gguf(tmp_path, content, watch_memory=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@MANY
@given(content=gguf_files())
def test_much_more_gguf_metadata(tmp_path, content):
    check_gguf(tmp_path, content)


# ---------------------------------------------------------------- model folders

CONFIG: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": [1],
    "torch_dtype": "float32",
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "query_pre_attn_scalar": 8,
    "partial_rotary_factor": 1.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
    "quantization_config": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
    },
}
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "phi3", "gemma3", "opt", "x")
TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": "<|start|>",
    "eos_token": {"content": "<|end|>"},
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "added_tokens_decoder": {"2": {"content": "<|end|>"}},
}
PLAIN: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    8,
    255,
    4096,
    65536,
    2**31,
    2**63,
    2**64,
    -(2**64),
    10**400,
]
PLAIN += [0.5, 1e-320, 1e308, -1.0, float("nan"), float("inf"), float("-inf"), 8.0]
PLAIN += ["", "x", "8", "\ud800", "re:(", "re:(a+)+$", "fp8", "awq", "int4", "yarn", "longrope", "llama3"]
PLAIN += ["{{ (" * 600, "{% for a in b %}" * 30 + "{% endfor %}" * 30, "x" * 3000, "\x00", "full_attention"]
NAMES = "rope_type type factor short_factor content name template bits 0 quant_method group_size weight_block_size"
VALUES = st.recursive(
    st.sampled_from(PLAIN),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["", "modules_to_not_convert", "config_groups", *NAMES.split()]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@st.composite
def changed(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """An object of which some fields, or fields of fields, are another."""
    object_ = {name: value for name, value in good.items() if draw(st.integers(0, 7))}
    for name in draw(st.lists(st.sampled_from(sorted(good)), max_size=3, unique=True)):
        inner = good[name]
        if isinstance(inner, dict) and draw(st.booleans()):
            object_[name] = inner | {draw(st.sampled_from(sorted(inner))): draw(VALUES)}
        else:
            object_[name] = draw(VALUES)
    return object_


def base_tokenizer() -> dict[str, Any]:
    core = CoreTokenizer(
        models.BPE({char.decode(): i for i, char in enumerate(ALPHABET)} | {"he": 256}, [("h", "e")])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|start|>", "<|end|>"])
    document: dict[str, Any] = json.loads(core.to_str())
    return document


TOKENIZER = base_tokenizer()
STEPS = [
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "Sequence", "pretokenizers": []},
    {"type": "Sequence", "decoders": []},
    {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "NFC"},
    {"type": "Strip", "content": " ", "start": 2**40, "stop": 0},
    {"type": "ByteFallback"},
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "a", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
]
TOKENIZER_PARTS = st.sampled_from(STEPS) | VALUES


@st.composite
def tokenizers(draw: st.DrawFn) -> dict[str, Any]:
    document = dict(TOKENIZER)
    for name in draw(st.lists(st.sampled_from(sorted(document)), max_size=2, unique=True)):
        document[name] = draw(TOKENIZER_PARTS)
    if draw(st.booleans()):
        model = dict(TOKENIZER["model"])
        model[draw(st.sampled_from(sorted(model)))] = draw(VALUES)
        document["model"] = model
    if draw(st.booleans()):
        token = dict(TOKENIZER["added_tokens"][0])
        token[draw(st.sampled_from(sorted(token)))] = draw(VALUES)
        document["added_tokens"] = [token, *TOKENIZER["added_tokens"][1:]]
    return document


@st.composite
def folders(draw: st.DrawFn) -> dict[str, str]:
    """The files of a model folder."""
    config = draw(changed(CONFIG)) | {"model_type": draw(st.sampled_from(MODEL_TYPES))}
    return {
        "config.json": json.dumps(config),
        "tokenizer_config.json": json.dumps(draw(changed(TOKENIZER_CONFIG))),
        "generation_config.json": json.dumps(draw(changed({"eos_token_id": [2], "bos_token_id": 1}))),
        "tokenizer.json": json.dumps(draw(tokenizers())),
    }


def check_folder(tmp_path: Path, files: dict[str, str], *, watch_memory: bool = False) -> None:
    folder = tmp_path / "any-model"
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    read(folder, lambda path: use(read_hf_spec(path)), watch_memory=watch_memory)
    read(folder, lambda path: use_tokenizer(Tokenizer.from_folder(path)), watch_memory=watch_memory)


def test_the_folder_is_good_before_it_is_changed(tmp_path):
    config = {
        name: value for name, value in CONFIG.items() if name not in ("quantization_config", "sliding_window")
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    use(read_hf_spec(tmp_path))
    use_tokenizer(Tokenizer.from_folder(tmp_path))


@FAST
@given(files=folders())
def test_any_folder(tmp_path, files):
    check_folder(tmp_path, files, watch_memory=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@MANY
@given(files=folders())
def test_many_more_folders(tmp_path, files):
    check_folder(tmp_path, files)
