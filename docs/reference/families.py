"""`FAMILIES`: the families of models with an implementation of the engine's own, by names that people search for."""

from __future__ import annotations

from typing import Final, NamedTuple


class FamilyRow(NamedTuple):
    """A row of the table in docs/models.md.

    Attributes:
        names: published models, as their makers call them.
        model_type: the field of their `config.json`.
        gguf: the architecture that their GGUF files name, if it is that of another model type.
        missing: kinds of weights, of `WEIGHT_KINDS`, that the family cannot have.
    """

    names: str
    model_type: str
    gguf: str = ""
    missing: tuple[str, ...] = ()


WEIGHT_KINDS: Final = ("bf16", "int8", "int4", "fp8")
"""The columns: 16 bits, 8 bits (GGUF's, too), 4 bits (GGUF's, AWQ, GPTQ, too) and fp8."""

FAMILIES: Final = (
    FamilyRow("Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2, TinyLlama, Yi", "llama"),
    FamilyRow("Llama 4 Scout, Llama 4 Maverick; MobileLLM-R1", "llama4_text"),
    FamilyRow("Mistral 7B, Mistral Nemo, Mistral Small, Codestral", "mistral", gguf="llama"),
    FamilyRow("Qwen2, Qwen2.5, QwQ", "qwen2"),
    FamilyRow("Qwen3", "qwen3"),
    FamilyRow("Qwen3-30B-A3B, Qwen3-Coder", "qwen3_moe"),
    FamilyRow("Qwen3-Next-80B-A3B", "qwen3_next"),
    FamilyRow("Qwen3.5-9B, 27B and other sizes without experts", "qwen3_5_text", gguf="qwen35"),
    FamilyRow("Qwen3.5-35B-A3B and other sizes with experts", "qwen3_5_moe_text", gguf="qwen35moe"),
    FamilyRow("Gemma 2", "gemma2"),
    FamilyRow("Gemma 3", "gemma3_text"),
    FamilyRow("Gemma 3n E2B, E4B", "gemma3n_text"),
    FamilyRow("Gemma 4 E2B, E4B, 31B", "gemma4_text"),
    FamilyRow("Gemma 4 12B", "gemma4_unified_text"),
    FamilyRow("DeepSeek-V2, V2-Lite, V2.5", "deepseek_v2"),
    FamilyRow("DeepSeek-V3, R1", "deepseek_v3", gguf="deepseek2"),
    FamilyRow("Kimi K2", "kimi_k2", gguf="deepseek2"),
    FamilyRow("GLM-4.5, GLM-4.5-Air, GLM-4.6", "glm4_moe"),
    FamilyRow("GLM-4.7-Flash", "glm4_moe_lite", gguf="deepseek2"),
    FamilyRow("LFM2, LFM2.5", "lfm2"),
    FamilyRow("LFM2-8B-A1B", "lfm2_moe", gguf="lfm2moe"),
    FamilyRow("Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini", "phi3"),
    FamilyRow("Phi-3.5-MoE", "phimoe"),
    FamilyRow("gpt-oss-20b, gpt-oss-120b", "gpt_oss"),
    FamilyRow("Mixtral 8x7B, 8x22B", "mixtral", gguf="llama"),
    FamilyRow("Qwen1.5-MoE, Qwen2-57B-A14B", "qwen2_moe"),
    FamilyRow("OLMoE", "olmoe"),
    FamilyRow("SmolLM3", "smollm3"),
    FamilyRow("OLMo 2", "olmo2"),
    FamilyRow("OLMo 3", "olmo3", gguf="olmo2"),
    FamilyRow("Ministral 8B", "ministral", gguf="llama"),
    FamilyRow("Ministral 3", "ministral3"),
    FamilyRow("GLM-4-9B", "glm"),
    FamilyRow("GLM-4-0414, GLM-Z1", "glm4"),
    FamilyRow("StarCoder2", "starcoder2"),
    FamilyRow("Command R, Aya 23, Aya Expanse", "cohere"),
    FamilyRow("Command R7B, Command A, Tiny Aya", "cohere2"),
    FamilyRow("EXAONE 4.0", "exaone4"),
    FamilyRow("Seed-OSS", "seed_oss"),
    FamilyRow("ERNIE 4.5 0.3B", "ernie4_5"),
    FamilyRow("ERNIE 4.5 21B-A3B, 300B-A47B", "ernie4_5_moe"),
    FamilyRow("Granite 3", "granite"),
    FamilyRow("Granite 3 1B-A400M, 3B-A800M; PowerMoE", "granitemoe"),
    FamilyRow("Granite with experts and a shared one", "granitemoeshared", gguf="granitemoe"),
    FamilyRow("Granite 4 H-Small, H-Tiny, H-Micro, Micro and others", "granitemoehybrid"),
    FamilyRow("Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano", "nemotron_h"),
)
