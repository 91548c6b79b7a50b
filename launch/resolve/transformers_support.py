"""`why_not_transformers`: whether the installed transformers can compute an architecture, without importing it.

An import takes seconds and loads torch, and a start asks before any process exists. The answer is read from the
package's files: its version, the architectures with a language model, and two marks of their code. What only a run of
the model shows is found when it is loaded (`model_runner/hf_backend/transformers_check`).

Where the package is missing, the tables below give the answer of version 5.23: an installation that cannot help is not
suggested. A test compares them with the package that the tests install.
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
_STATE: Final = (
    "its layers keep a state beside keys and values (state space, linear attention, compressed keys), which the KV "
    "pool cannot hold; use a model with attention only"
)
_OWN_ATTENTION: Final = (
    "its code in transformers does not support external attention (AttentionInterface); use another model"
)

TABLES_OF: Final = "5.23"
"""The version of transformers that the following tables of `model_type` values describe."""
_COMPUTED = """
afmoe apertus arcee aria_text axk1 axk2 beam bert bert-generation bitnet camembert cohere cohere2 cohere2_moe
cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1 dots3_note
dots3_note_text electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint fuyu gemma gemma2 gemma3
gemma3_text gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant
gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss
granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
hy_v4 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4 llama4_text
longcat_flash mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral
mllama modernbert-decoder moshi moss_transcribe_diarize nanochat nemotron olmo olmo2 olmo3 olmoe openai-gpt opt
persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roc_bert
seed_oss smollm3 solar_open starcoder2 vaultgemma xlm-roberta xlm-roberta-xl xmod youtu
"""
_WITH_STATE = """
bailing_hybrid bamba deepseek_v4 falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear mamba mamba2 nemotron_h
olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma rwkv
xlstm zamba zamba2 zaya
"""
_WITH_OWN_ATTENTION = """
bart big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom blt codegen cpmant falcon git gpt_neo
gpt_neox_japanese gptj inkling2_text inkling_text marian mbart megatron-bert mpt musicgen musicgen_melody mvp pegasus
plbart prophetnet reformer rembert roformer stablelm trocr whisper xglm xlm xlnet
"""

COMPUTED: Final = frozenset(_COMPUTED.split())
"""Types that nothing is known against."""
WITH_STATE: Final = frozenset(_WITH_STATE.split())
WITH_OWN_ATTENTION: Final = frozenset(_WITH_OWN_ATTENTION.split())


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
    """Reason why the package cannot compute this architecture, and what to do; None: nothing is known against it.

    If the package is missing or too old (`why_no_package`), the tables above answer.
    """
    if installed is None or why_no_package(installed) is not None:
        version = TABLES_OF
        known: frozenset[str] | None = COMPUTED | WITH_STATE | WITH_OWN_ATTENTION
        has_state, has_own_attention = model_type in WITH_STATE, model_type in WITH_OWN_ATTENTION
    else:
        version = installed.version
        known = _language_models(installed.folder)
        code = _code_of(installed.folder, model_type)
        has_state = code is not None and _HAS_STATE in code
        has_own_attention = code is not None and _TAKES_ATTENTION not in code
    if known is None:
        return None
    if model_type not in known:
        return (
            f"transformers {version} has no built-in language model for model_type {model_type!r}, and code from a "
            "model's folder is never run; a newer transformers may know it: pip install -U transformers"
        )
    if has_state:
        return _STATE
    return _OWN_ATTENTION if has_own_attention else None


def why_no_package(installed: Installed | None) -> str | None:
    """Reason why there is no package that could compute anything, and what to do; None: there is one."""
    if installed is None:
        return f"that package is not installed; install it: {_INSTALL}"
    major = installed.version.partition(".")[0]
    if major.isdecimal() and int(major) < MIN_MAJOR:
        return f"the installed version {installed.version} is too old; install a newer one: {_INSTALL}"
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
