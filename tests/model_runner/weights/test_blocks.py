"""Weights in blocks: a GGUF file's own, kept as they are, and those made of plain weights while loading."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from engine.model_runner.distributed.join_group import Place
from engine.model_runner.kernels.blocks.block_rounding import round_to_blocks
from engine.model_runner.kernels.blocks.stored_rows import StoredRows
from engine.model_runner.kernels.cpu.library import load_library
from engine.model_runner.kernels.quantized import Part, QuantizedLinears, QuantTarget, reasons_against_blocks
from engine.model_runner.kernels.quantized_weights import BlockWeight
from engine.model_runner.load import load_model_runner
from engine.model_runner.ops.linear import LinearWeight
from engine.model_runner.weights.block_format import BlockFormat
from engine.model_runner.weights.format_selection import quant_target
from engine.model_runner.weights.gguf import GGUFStore
from engine.model_runner.weights.reader import ModuleWeight, Slice, WeightReader
from engine.model_runner.weights.safetensors import SafetensorsStore
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec, with_quantization
from engine.models.spec.quantization import GGUF_FORMS, QuantizationSpec
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.errors import ConfigError
from engine.runtime.feasibility import Capacity
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.conftest import Driver, engine_config
from tests.model_runner.distributed.thread_group import ThreadGroup, on_ranks
from tests.model_runner.weights.test_loading import write_gguf
from tests.models.gguf.test_ggml_types import HALF_FIELDS, by_name, random_blocks

CPU = torch.device("cpu")
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 96, 60)]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
needs_kernel = pytest.mark.skipif(
    bool(reasons_against_blocks(quant_target(CPU, torch.bfloat16))), reason="no kernel for blocks here"
)

# ---------------------------------------------------------------- the file's own

SPEC = ModelSpec(
    model_type="llama",
    vocab_size=96,
    hidden_size=512,
    intermediate_size=768,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
)
ATTENTION = "model.layers.0.self_attn"
SHAPES = {
    f"{ATTENTION}.q_proj": (512, 512),
    f"{ATTENTION}.k_proj": (128, 512),
    f"{ATTENTION}.v_proj": (128, 512),
    "model.layers.0.mlp.down_proj": (512, 768),
    "model.embed_tokens": (96, 512),
}
STORED = ("blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v", "blk.0.ffn_down", "token_embd")


def raw_rows(name: str, shape: tuple[int, int]) -> Any:
    """Rows of random blocks that mean numbers of usual size."""
    ggml_type = by_name(name)
    blocks = random_blocks(name, shape[0] * shape[1] // ggml_type.block_len)
    for offset in HALF_FIELDS[name]:
        scales = blocks[:, offset : offset + 2].copy().view(np.float16) / 1000
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def store_of(path: Path, types: Sequence[str]) -> GGUFStore:
    """A file with these formats for the modules of `SHAPES`."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, shape, kind in zip(STORED, SHAPES.values(), types, strict=True):
        raw = raw_rows(kind, shape)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFStore(path, SPEC)


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("kind", GGUF_FORMS)
def test_blocks_mean_what_is_read_without_them(tmp_path: Path, kind: str) -> None:
    """The rows of q and k, which the file has in another order, are among them."""
    store = store_of(tmp_path / "tiny.gguf", [kind] * 5)
    for module, shape in SHAPES.items():
        plain = torch.empty(shape)
        store.read(f"{module}.weight", plain)

        blocks = store.blocks(f"{module}.weight")

        assert blocks is not None and blocks.form.bits == GGUF_FORMS[kind].bits and blocks.shape == shape
        means = blocks.dequantized(torch.float32)
        if GGUF_FORMS[kind].is_exact or kind == "Q6_K":
            assert torch.equal(means, plain)
        else:  # half a step of 8 bits, and what the scale loses by having 16
            bound = plain.view(-1, 32).abs().amax(1).repeat_interleave(32).view(shape) / 220
            assert ((means - plain).abs() <= bound + 1e-5).all() and not torch.equal(means, plain)
        for part in (Slice(0, 32, 64), Slice(1, 32, 416)):
            cut = store.blocks(f"{module}.weight", part)
            assert cut is not None
            expected = means.narrow(part.axis, part.start, part.stop - part.start)
            assert torch.equal(cut.dequantized(torch.float32), expected)


class Kept:
    """Takes the place of `QuantizedLinears`, and keeps what it is given."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def pack(self, parts: Sequence[Part], *, as_one: bool = False) -> LinearWeight:
        self.parts = list(parts)
        return lambda x, bias=None: x


def load(quantization: QuantizationSpec, reader: WeightReader, name: str, part: Slice | None = None) -> Part:
    kept = Kept()
    linear_format = BlockFormat(quantization, kept)  # type: ignore[arg-type]
    linear_format.load([ModuleWeight(reader, name, SHAPES[name], part)])
    (loaded,) = kept.parts
    return loaded


def test_what_the_file_has_in_blocks_is_kept_and_the_rest_is_plain(tmp_path: Path) -> None:
    store = store_of(tmp_path / "tiny.gguf", ["Q4_K", "Q4_0", "Q6_K", "Q8_0", "Q4_1"])
    types = {f"{ATTENTION}.q_proj": "Q4_K", "model.layers.0.mlp.down_proj": "Q8_0"}
    quantization = QuantizationSpec(method="gguf", types=types)
    reader = WeightReader(store, torch.bfloat16, CPU)

    q, v, down = (
        load(quantization, reader, name)
        for name in (f"{ATTENTION}.q_proj", f"{ATTENTION}.v_proj", "model.layers.0.mlp.down_proj")
    )

    assert isinstance(q, StoredRows) and q.form.bits == 4
    assert isinstance(v, Tensor) and v.dtype == torch.bfloat16
    assert isinstance(down, StoredRows) and down.form.bits == 8


def test_inputs_are_cut_between_blocks_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(tmp_path / "tiny.gguf", ["Q4_K"] * 5)
    name = "model.layers.0.mlp.down_proj"
    quantization = QuantizationSpec(method="gguf", types={name: "Q4_K"})
    reader = WeightReader(store, torch.float32, CPU)

    whole = load(quantization, reader, name)
    half = load(quantization, reader, name, Slice(1, 384, 768))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        third = load(quantization, reader, name, Slice(1, 0, 100))

    assert isinstance(whole, StoredRows) and isinstance(half, StoredRows)
    means = whole.dequantized(torch.float32)
    assert torch.equal(half.dequantized(torch.float32), means[:, 384:])
    assert isinstance(third, Tensor) and torch.equal(third, means[:, :100])
    assert "a rank takes inputs 0 to 99, and blocks of 32 cannot be split" in caplog.text


def test_a_rank_with_the_end_of_the_head_gets_zeros_behind_it(tmp_path: Path) -> None:
    store = store_of(tmp_path / "tiny.gguf", ["Q4_K"] * 4 + ["Q8_0"])
    name = "model.embed_tokens"
    table = torch.empty(SHAPES[name])
    store.read(f"{name}.weight", table)
    for quantization in (
        QuantizationSpec(method="gguf", types={name: "Q8_0"}),
        QuantizationSpec(method="int4", stored=False),
    ):
        kept = Kept()
        reader = WeightReader(store, torch.float32, CPU)
        padded = torch.cat((table[70:], torch.zeros(44, 512)))

        BlockFormat(quantization, kept).head(  # type: ignore[arg-type]
            ModuleWeight(reader, name, SHAPES[name]), range(70, 140), partial(torch.clone, padded)
        )

        (head,) = kept.parts
        if isinstance(head, StoredRows):
            head = head.unpacked()
        assert isinstance(head, BlockWeight) and head.bits == 8 and head.shape == (70, 512)
        steps = head.scales.abs().repeat_interleave(32, dim=1)
        # The file's own 8 bits, or others half a step away: blocks share their scales in pairs then.
        assert ((head.dequantized(torch.float32) - padded).abs() <= 0.57 * steps).all()
        assert quantization.stored is torch.allclose(head.dequantized(torch.float32), padded, rtol=1e-6)
        assert not head.dequantized(torch.float32)[26:].any()


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dequantized"])
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "IQ3_S"])
def test_a_file_with_a_scale_that_is_no_number_is_damaged(tmp_path: Path, kind: str, keep: bool) -> None:
    """Scales of a file are any 16 bits. They are checked while they are packed."""
    path = tmp_path / "tiny.gguf"
    store_of(path, [kind] * 5)
    info = GGUFFile(path).tensors["blk.0.ffn_down.weight"]
    with path.open("r+b") as file:
        file.seek(info.offset + HALF_FIELDS[kind][0])
        file.write(np.float16(np.nan).tobytes())
    name = "model.layers.0.mlp.down_proj"
    quantization = QuantizationSpec(method="gguf", types={name: kind})
    reader = WeightReader(GGUFStore(path, SPEC), torch.bfloat16, CPU)

    target = QuantTarget(
        device=CPU, dtype=torch.bfloat16, capability=(0, 0), triton_reason="-", sgl_reason="-"
    )
    linears = QuantizedLinears(target, lambda weight: pytest.fail("not plain"), keep=keep)
    with pytest.raises(ConfigError, match=f"{name}.weight holds values that are not finite, .*damaged"):
        BlockFormat(quantization, linears).load([ModuleWeight(reader, name, SHAPES[name])])


# ---------------------------------------------------------------- made while loading


def test_plain_weights_are_rounded_block_by_block(make_tiny_llama) -> None:
    tiny = make_tiny_llama(**SIZES)
    reader = WeightReader(SafetensorsStore(tiny.folder), torch.bfloat16, CPU)
    name = "model.layers.0.self_attn.o_proj"
    plain = tiny.reference.state_dict()[f"{name}.weight"].to(torch.bfloat16)
    for method, bits in (("int8", 8), ("int4", 4)):
        kept = Kept()
        spec = QuantizationSpec(method=method, stored=False)  # type: ignore[arg-type]
        part = Slice(1, 64, 128)
        BlockFormat(spec, kept).load([ModuleWeight(reader, name, (128, 128), part)])  # type: ignore[arg-type]
        (made,) = kept.parts
        assert isinstance(made, BlockWeight)
        expected = round_to_blocks(plain[:, 64:], bits, paired_scales=True)  # type: ignore[arg-type]
        assert torch.equal(made.numbers, expected.numbers) and torch.equal(made.scales, expected.scales)


def test_a_width_that_is_no_multiple_of_a_block_stays_plain() -> None:
    made = QuantizationSpec(method="int8", stored=False)
    assert made.form_of("model.layers.0.mlp.up_proj", 48) is None
    assert made.form_of("model.layers.0.mlp.gate", 64) is None  # a router
    narrow = QuantizationSpec(method="int4", stored=False)
    names = ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    forms = [narrow.form_of(f"model.layers.0.{name}", 64) for name in names]
    assert [form.bits for form in forms if form is not None] == [8, 4, 4, 8]
    assert made.bytes_of("model.layers.0.mlp.up_proj", 64, 48) is None
    assert made.bytes_of("model.layers.0.mlp.up_proj", 64, 96) == 64 * 96 + 2 * 64 * 3


# ---------------------------------------------------------------- whole models


def prompt_logprobs(driver: Any, unpack: Any) -> Any:
    req = driver.start(PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0))
    return unpack(driver.step([(req, len(PROMPT))]).prompt_logprobs[0])[0]


@pytest.mark.fast_cases(2)
@needs_kernel
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_that_is_kept_says_what_it_says_dequantized(
    make_tiny_llama, make_driver, unpack, tmp_path, kind, tied, caplog
):
    tiny = make_tiny_llama(**SIZES, tie_word_embeddings=tied)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny, kind)
    spec = read_gguf_spec(GGUFFile(path))
    assert spec.quantization is not None and set(spec.quantization.types.values()) == {kind}

    with caplog.at_level(logging.INFO):
        kept = make_driver(spec, path, kind="gguf", dtype="bfloat16")
    assert f"weights are kept as gguf ({kind} x " in caplog.text
    dequantized = make_driver(with_quantization(spec, "none"), path, kind="gguf", dtype="float32")

    ours, theirs = prompt_logprobs(kept, unpack), prompt_logprobs(dequantized, unpack)
    # bfloat16 alone, kept or not, is off by 0.03 on average on this model of noise.
    assert np.abs(ours - theirs).mean() < 0.08


@pytest.mark.fast_cases(1)
@needs_kernel
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_file_packed_in_one_pass_says_the_same_to_the_bit(
    make_tiny_llama, make_driver, unpack, tmp_path, kind, monkeypatch
):
    tiny = make_tiny_llama(**SIZES)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny, kind)
    spec = read_gguf_spec(GGUFFile(path))

    packed = prompt_logprobs(make_driver(spec, path, kind="gguf", dtype="bfloat16"), unpack)
    monkeypatch.setattr(load_library(), "packs_rows", lambda _type: 0)
    unpacked = prompt_logprobs(make_driver(spec, path, kind="gguf", dtype="bfloat16"), unpack)

    assert np.array_equal(packed, unpacked)


@needs_kernel
@pytest.mark.parametrize(("method", "bound"), [("int8", 0.1), ("int4", 0.8)])
def test_a_model_whose_weights_are_made_says_about_the_same(
    make_tiny_llama, make_driver, unpack, method, bound
):
    tiny = make_tiny_llama(**SIZES)
    made = make_driver(with_quantization(tiny.spec, method), tiny.folder, dtype="bfloat16")

    expected = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    error = np.abs(prompt_logprobs(made, unpack) - expected.numpy()).mean()
    assert 1e-4 < error < bound


@needs_kernel
def test_two_ranks_say_what_one_says(make_tiny_llama, unpack, tmp_path):
    tiny = make_tiny_llama(**SIZES, vocab_size=97)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny, "Q4_1")
    spec = read_gguf_spec(GGUFFile(path))

    def logprobs(group: ThreadGroup) -> Any:
        config = ModelConfig(dtype="bfloat16", device="cpu", num_threads=1, model_impl="engine")
        source = ModelSource("gguf", str(path), "test")
        capacity = Capacity(64, 32, 4, 4, spec.vocab_size)
        runner = load_model_runner(engine_config(config), source, spec, capacity, Place(group, None))
        return prompt_logprobs(Driver(runner, capacity), unpack)

    (alone,) = on_ranks(1, logprobs)
    shared = on_ranks(2, logprobs)[0]  # rank 0 has the sampler

    assert np.abs(shared - alone).mean() < 0.08


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_without_a_kernel_nothing_is_made_in_blocks(make_tiny_llama, make_driver, method):
    tiny = make_tiny_llama(**SIZES)

    with pytest.raises(
        ConfigError, match=f"quantization is {method}, but the product .*float32; use --quanti"
    ):
        make_driver(with_quantization(tiny.spec, method), tiny.folder, dtype="float32")


def test_without_a_kernel_the_file_is_dequantized_and_the_log_says_what_that_costs(
    make_tiny_llama, make_driver, tmp_path, caplog
):
    tiny = make_tiny_llama(**SIZES)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny, "Q8_0")
    spec = read_gguf_spec(GGUFFile(path))
    plain = make_driver(with_quantization(spec, "none"), path, kind="gguf").generate([PROMPT], num=8)

    with caplog.at_level(logging.WARNING):
        driver = make_driver(spec, path, kind="gguf", dtype="float32")

    assert "weights are gguf (Q8_0 x " in caplog.text and "), and the product" in caplog.text
    assert "instead of" in caplog.text
    assert driver.generate([PROMPT], num=8) == plain


def test_a_quantized_checkpoint_can_be_dequantized() -> None:
    stored = QuantizationSpec(method="awq", group_size=32)
    awq = replace(SPEC, quantization=stored)
    plain = with_quantization(awq, "none")
    assert plain.quantization == QuantizationSpec(method="awq", group_size=32, kept=False)
    assert not plain.quantization.is_kept(on_cpu=False)
    assert with_quantization(with_quantization(SPEC, "int8"), "none") == SPEC
