"""Which files of a repository are downloaded."""

from __future__ import annotations

import pytest

from engine.models.hub.wanted_files import (
    NoModelError,
    gguf_models,
    missing_parts,
    quantization_of,
    tower_of,
    wanted_files,
)

SPLIT = [f"BF16/big-BF16-{part:05}-of-00003.gguf" for part in (1, 2, 3)]


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (
            ["README.md", "config.json", "model.safetensors", "original/model.safetensors", "tokenizer.json"],
            ["config.json", "tokenizer.json", "model.safetensors"],
        ),
        (
            [
                *("config.json", "consolidated.safetensors", "model-1.safetensors", "chat_template.jinja"),
                *(
                    "pytorch_model.bin",
                    "pytorch_model.bin.index.json",
                    "trainer_state.json",
                    "onnx/config.json",
                ),
                *("additional_chat_templates/tools.jinja", "deeper/additional_chat_templates/x.jinja"),
            ],
            [
                "config.json",
                "chat_template.jinja",
                "additional_chat_templates/tools.jinja",
                "model-1.safetensors",
            ],
        ),
        (
            [
                *(
                    "config.json",
                    "model.safetensors",
                    "modules.json",
                    "1_Pooling/config.json",
                    "2_Dense/config.json",
                ),
                *("2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "onnx/model.safetensors"),
            ],
            [
                *("config.json", "modules.json", "1_Pooling/config.json", "2_Dense/config.json"),
                *("model.safetensors", "2_Dense/model.safetensors"),
            ],
        ),
        (["config.json", "weights.safetensors"], ["config.json", "weights.safetensors"]),
        (
            ["config.json", "model.safetensors", "model.fp16.safetensors", "a-Q4_0.gguf"],
            ["config.json", "model.safetensors"],
        ),
    ],
)
def test_only_what_is_read(files: list[str], wanted: list[str]) -> None:
    assert wanted_files("org/name", files) == wanted
    assert wanted_files("org/name", files, need_weights=False) == [
        file for file in wanted if not file.endswith(".safetensors")
    ]


def test_the_index_says_which_weights_are_read() -> None:
    files = [
        "config.json",
        "model.safetensors.index.json",
        "a.safetensors",
        "b.safetensors",
        "model.safetensors",
    ]
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}

    wanted = wanted_files("org/name", files, read_index=lambda: index)

    assert wanted == ["config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"]
    with pytest.raises(NoModelError, match=r"names c\.safetensors, which the repository does not have"):
        wanted_files("org/name", files, read_index=lambda: {"weight_map": {"x": "c.safetensors"}})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], "org/name: has only pickled weights"),
        (["README.md"], r"has neither config\.json"),
        ([], r"has neither config\.json"),
        (["mmproj-F16.gguf"], r"has neither config\.json"),
    ],
)
def test_repositories_without_readable_weights(files: list[str], message: str) -> None:
    with pytest.raises(NoModelError, match=message):
        wanted_files("org/name", files)


TOWER = "mmproj-m-F16.gguf"
GGUFS = [
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "m-UD-Q4_K_XL.gguf",
    TOWER,
    "mmproj-m-Q8_0.gguf",
    "README.md",
    *SPLIT,
]


@pytest.mark.parametrize(
    ("quantization", "wanted"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        ("BF16", SPLIT),
        ("BF16/big-BF16", SPLIT),
    ],
)
def test_a_quantization_by_name(quantization: str, wanted: list[str]) -> None:
    assert wanted_files("org/name", GGUFS, quantization=quantization) == [*wanted, TOWER]
    assert wanted_files("org/name", GGUFS, quantization=quantization, need_tower=False) == wanted


@pytest.mark.parametrize(
    ("files", "model", "tower"),
    [
        (["mmproj-BF16.gguf", "mmproj-F32.gguf"], "m.gguf", "mmproj-BF16.gguf"),
        (["m.mmproj-q8_0.gguf", "m.mmproj-Q4_0.gguf"], "m.gguf", "m.mmproj-q8_0.gguf"),
        (["a/mmproj.gguf", "mmproj-x.gguf"], "a/m.gguf", "a/mmproj.gguf"),
        (["b/mmproj.gguf", "mmproj-x.gguf"], "a/m.gguf", "mmproj-x.gguf"),
        (["mmproj-a.gguf", "mmproj-b.gguf"], "m.gguf", ""),
        (["a/mmproj-a.gguf", "a/mmproj-b.gguf", "mmproj-x.gguf"], "a/m.gguf", ""),
        (["b/mmproj.gguf", "mmproj.json"], "m.gguf", ""),
    ],
)
def test_the_tower_of_a_gguf_model(files: list[str], model: str, tower: str) -> None:
    assert tower_of([*files, model], model) == tower


def test_one_gguf_needs_no_quantization() -> None:
    assert wanted_files("org/name", ["a.gguf", "README.md"]) == ["a.gguf"]
    assert wanted_files("org/name", SPLIT) == SPLIT


@pytest.mark.parametrize(
    ("files", "quantization", "message"),
    [
        (
            GGUFS,
            "",
            "several GGUF models; it has BF16, Q4_K_M, Q8_0, UD-Q4_K_XL: choose one, such as org/name:BF16",
        ),
        (GGUFS, "Q5_K_M", "has no GGUF file of Q5_K_M; it has BF16, Q4_K_M, Q8_0, UD-Q4_K_XL"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "'Q4_0' means a-Q4_0, b-Q4_0; write one of these names"),
        (["config.json", "model.safetensors"], "Q4_0", "has no GGUF files, so ':Q4_0' chooses none"),
    ],
)
def test_an_unclear_quantization_lists_what_is_there(
    files: list[str], quantization: str, message: str
) -> None:
    with pytest.raises(NoModelError) as error:
        wanted_files("org/name", files, quantization=quantization)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("model", "quantization"),
    [
        *(
            (f"model-{name}", name)
            for name in ("Q4_K_M", "Q4_0", "Q8_0", "IQ2_XXS", "IQ4_NL", "TQ1_0", "Q6_K")
        ),
        *(
            (f"model.{name}", name)
            for name in ("Q4_1", "F16", "BF16", "F32", "MXFP4", "UD-Q2_K_XL", "Q3_K_XL")
        ),
        ("ggml-model-q4_k_s", "Q4_K_S"),
        ("folder/Q5_K_M", "Q5_K_M"),
        ("SmolLM2-135M-Instruct", ""),
        ("model-Q4ever", ""),
    ],
)
def test_the_quantization_in_a_file_name(model: str, quantization: str) -> None:
    assert quantization_of(model) == quantization


def test_parts_of_a_split_model() -> None:
    assert gguf_models([*SPLIT, "a.GGUF", "imatrix.gguf", "x.mmproj-Q8_0.gguf"]) == {
        "BF16/big-BF16": SPLIT,
        "a": ["a.GGUF"],
    }
    assert [missing_parts(SPLIT), missing_parts(SPLIT[1:]), missing_parts(["a.gguf"])] == [0, 1, 0]
