"""Checkpoints: the forms that load, and one clear error for each way in which one can be broken."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from engine.model_runner.weights.dummy import DummyStore
from engine.model_runner.weights.gguf import GGUFStore
from engine.model_runner.weights.reader import Slice, TensorStore, WeightReader
from engine.model_runner.weights.safetensors import SafetensorsStore
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.spec.layer_form import Biases
from engine.runtime.errors import ConfigError

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


def tensors_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_tensors(path: Path, header: dict[str, Any], data: bytes) -> None:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


class TestSafetensors:
    def test_shards_load_as_one_file_does(self, make_tiny_llama, make_driver):
        whole = make_tiny_llama()
        sharded = make_tiny_llama(seed=0, max_shard_size="20KB")
        index = json.loads((sharded.folder / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 2
        (sharded.folder / "model.safetensors").unlink(missing_ok=True)
        driver = make_driver(sharded.spec, sharded.folder)
        assert driver.generate([PROMPT], num=10)[0] == whole.greedy(PROMPT, 10)

    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize("stored", ["float16", "bfloat16"])
    def test_other_dtypes_are_converted(self, make_tiny_llama, make_driver, stored):
        tiny = make_tiny_llama(dtype=stored)
        driver = make_driver(tiny.spec, tiny.folder)
        tiny.reference.float()
        assert driver.generate([PROMPT], num=10)[0] == tiny.greedy(PROMPT, 10)

    def test_buffers_and_tied_heads_of_old_exports_are_ignored(self, make_tiny_llama, make_driver):
        tiny = make_tiny_llama(tie_word_embeddings=True)
        path = tiny.folder / "model.safetensors"
        header, data = tensors_of(path)
        header["lm_head.weight"] = dict(header["model.embed_tokens.weight"])
        header["model.layers.0.self_attn.rotary_emb.inv_freq"] = {
            "dtype": "F32",
            "shape": [4],
            "data_offsets": [0, 16],
        }
        write_tensors(path, header, data)
        driver = make_driver(tiny.spec, tiny.folder)
        assert driver.generate([PROMPT], num=5)[0] == tiny.greedy(PROMPT, 5)

    def test_buffers_of_any_type_are_ignored(self, make_tiny_llama, make_driver):
        """Whatever their size: only what is read must be known."""
        tiny = make_tiny_llama()
        path = tiny.folder / "model.safetensors"
        header, data = tensors_of(path)
        for layer, dtype in enumerate(("F64", "BOOL")):
            header[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = {
                "dtype": dtype,
                "shape": [4],
                "data_offsets": [0, 32],
            }
        write_tensors(path, header, data)
        driver = make_driver(tiny.spec, tiny.folder)
        assert driver.generate([PROMPT], num=5)[0] == tiny.greedy(PROMPT, 5)

    def test_a_tensor_without_numbers_is_refused(self, tmp_path):
        save_file({"a": torch.zeros(0, 4), "b": torch.ones(2)}, tmp_path / "model.safetensors")
        weights = WeightReader(SafetensorsStore(tmp_path), torch.float32, torch.device("cpu"))
        with pytest.raises(ConfigError, match=r"tensor 'a' holds no values: its shape is \[0, 4\]"):
            weights.tensor("a", (0, 4))

    def test_missing_tensor(self, make_tiny_llama, make_driver):
        tiny = make_tiny_llama()
        path = tiny.folder / "model.safetensors"
        header, data = tensors_of(path)
        del header["model.layers.1.mlp.up_proj.weight"]
        write_tensors(path, header, data)
        with pytest.raises(
            ConfigError,
            match=r"model.safetensors: tensor 'model.layers.1.mlp.up_proj.weight' is missing; download",
        ):
            make_driver(tiny.spec, tiny.folder)

    def test_wrong_shape(self, make_tiny_llama, make_driver):
        tiny = make_tiny_llama()
        with pytest.raises(
            ConfigError,
            match=r"model.safetensors: tensor .*gate_proj.weight' has the shape \[80, 48\], but .*\[64, 48\]",
        ):
            make_driver(replace(tiny.spec, intermediate_size=64), tiny.folder)

    def test_unexpected_tensors(self, make_tiny_llama, make_driver):
        tiny = make_tiny_llama(attention_bias=True)
        with pytest.raises(
            ConfigError, match=r"unexpected tensor 'model.layers.0.self_attn.k_proj.bias' \(8 in all\)"
        ):
            make_driver(replace(tiny.spec, biases=Biases()), tiny.folder)

    @pytest.mark.parametrize("keep", [0, 5, 200, -1])
    def test_truncated(self, make_tiny_llama, make_driver, keep):
        tiny = make_tiny_llama()
        path = tiny.folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ConfigError, match=r"model.safetensors: .*(truncated|empty).*download it again"):
            make_driver(tiny.spec, tiny.folder)

    def test_missing_shard(self, make_tiny_llama, make_driver):
        tiny = make_tiny_llama(max_shard_size="20KB")
        shard = sorted(tiny.folder.glob("*.safetensors"))[1]
        shard.unlink()
        with pytest.raises(
            ConfigError, match=rf"index.json: names '{shard.name}', which is not in the folder"
        ):
            make_driver(tiny.spec, tiny.folder)

    def test_no_weights(self, make_tiny_llama, make_driver):
        tiny = make_tiny_llama()
        (tiny.folder / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"neither model.safetensors nor .*--load-format dummy"):
            make_driver(tiny.spec, tiny.folder)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"dtype": "F8_E5M2"}, "tensor 'lm_head.weight': dtype F8_E5M2 is not supported"),
            ({"shape": [96, 49]}, "header is damaged"),
            ({"shape": [-96, -48]}, "header is damaged"),
            ({"data_offsets": [10, 2]}, "header is damaged"),
            ({"data_offsets": "all"}, "header is damaged"),
            ({"data_offsets": [1 << 40, (1 << 40) + 96 * 48 * 4]}, "truncated"),
        ],
    )
    def test_header_that_lies(self, make_tiny_llama, make_driver, change, message):
        tiny = make_tiny_llama()
        path = tiny.folder / "model.safetensors"
        header, data = tensors_of(path)
        header["lm_head.weight"].update(change)
        write_tensors(path, header, data)
        with pytest.raises(ConfigError, match=message):
            make_driver(tiny.spec, tiny.folder)

    @pytest.mark.parametrize(
        "index", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}']
    )
    def test_index_that_lies(self, make_tiny_llama, make_driver, index):
        tiny = make_tiny_llama()
        (tiny.folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ConfigError, match=r"index.json: (damaged|names 'x.safetensors')"):
            make_driver(tiny.spec, tiny.folder)


def write_gguf(path: Path, tiny: Any, quantization: str = "F32") -> None:
    """As llama.cpp's converter writes a Llama: its names, its order of rows in q and k."""
    import gguf

    config, state = tiny.reference.config, tiny.reference.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        for projection, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if projection in name:
                shape = array.shape
                array = (
                    array.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
                )
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if array.ndim == 1 or array.shape[-1] % 32:
            writer.add_tensor(target, np.ascontiguousarray(array))
        else:
            writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestGGUF:
    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize(
        "options", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str
    )
    def test_is_the_same_model_as_in_safetensors(self, make_tiny_llama, make_driver, tmp_path, options):
        tiny = make_tiny_llama(**options)
        path = tmp_path / "tiny.gguf"
        write_gguf(path, tiny)
        driver = make_driver(read_gguf_spec(GGUFFile(path)), path, kind="gguf")
        assert driver.generate([PROMPT], num=20)[0] == tiny.greedy(PROMPT, 20)

    def test_norms_longer_than_a_block_of_rows_are_read_whole(self, make_tiny_llama, make_driver, tmp_path):
        tiny = make_tiny_llama(
            hidden_size=1040, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1
        )
        path = tmp_path / "wide.gguf"
        write_gguf(path, tiny)
        driver = make_driver(read_gguf_spec(GGUFFile(path)), path, kind="gguf")
        assert driver.generate([PROMPT], num=4)[0] == tiny.greedy(PROMPT, 4)

    @pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_1"])
    def test_quantized_weights_are_dequantized(
        self, make_tiny_llama, make_driver, unpack, tmp_path, quantization
    ):
        """Against transformers with the same rounded weights."""
        import gguf

        from engine.runtime.sampling_params import SamplingParams

        tiny = make_tiny_llama(
            hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96
        )
        path = tmp_path / "tiny.gguf"
        write_gguf(path, tiny, quantization)
        kind = gguf.GGMLQuantizationType[quantization]
        for parameter in tiny.reference.parameters():
            if parameter.ndim == 2:
                rounded = gguf.dequantize(gguf.quantize(parameter.detach().numpy(), kind), kind)
                parameter.data = torch.from_numpy(np.array(rounded, dtype=np.float32))
        driver = make_driver(read_gguf_spec(GGUFFile(path)), path, kind="gguf")
        req = driver.start(PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0))
        token, _, _ = unpack(driver.step([(req, len(PROMPT))]).prompt_logprobs[0])
        expected = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
        np.testing.assert_allclose(token, expected, atol=1e-3)

    def test_truncated(self, make_tiny_llama, make_driver, tmp_path):
        tiny = make_tiny_llama()
        path = tmp_path / "tiny.gguf"
        write_gguf(path, tiny)
        path.write_bytes(path.read_bytes()[:-5000])
        with pytest.raises(ConfigError, match=r"tiny.gguf: truncated: tensor .*download it again"):
            make_driver(tiny.spec, path, kind="gguf")

    def test_missing_and_unexpected_tensors(self, make_tiny_llama, make_driver, tmp_path):
        tiny = make_tiny_llama()
        path = tmp_path / "tiny.gguf"
        write_gguf(path, tiny)
        with pytest.raises(
            ConfigError, match=r"tiny.gguf: tensor 'model.layers.2.input_layernorm.weight' is missing"
        ):
            make_driver(replace(tiny.spec, num_layers=3), path, kind="gguf")
        with pytest.raises(
            ConfigError, match=r"tiny.gguf: unexpected tensor 'blk.1.attn_k.weight' \(9 in all\)"
        ):
            make_driver(replace(tiny.spec, num_layers=1), path, kind="gguf")


class TestDummy:
    def test_is_random_reproducible_and_never_zero(self):
        def read(seed: int, name: str) -> torch.Tensor:
            return WeightReader(DummyStore(seed), torch.float32, torch.device("cpu")).tensor(name, (300, 200))

        weight = read(1, "a")
        assert torch.equal(weight, read(1, "a"))
        assert not torch.equal(weight, read(1, "b"))
        assert not torch.equal(weight, read(2, "a"))
        assert weight.abs().max() <= 0.02
        assert weight.std().item() == pytest.approx(0.04 / 12**0.5, rel=0.02)

    def test_rows_of_large_ones_differ_too(self):
        weights = WeightReader(DummyStore(1), torch.bfloat16, torch.device("cpu"))
        weight = weights.tensor("a", (4200, 1024))  # more than is drawn
        rows = {row.view(torch.int16).numpy().tobytes() for row in weight}
        assert len(rows) == 4200
        assert weight.float().std().item() == pytest.approx(0.04 / 12**0.5, rel=0.02)

    def test_runs(self, make_tiny_llama, make_driver):
        driver = make_driver(make_tiny_llama().spec)
        assert len(driver.generate([PROMPT], num=4)[0]) == 4


def test_a_stack_of_tensors_is_one_tensor(make_tiny_llama):
    tiny = make_tiny_llama()
    reader = WeightReader(SafetensorsStore(tiny.folder), torch.float32, torch.device("cpu"))
    names = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"]
    stacked = reader.stacked(names, [(48, 48), (16, 48), (16, 48)])
    state = tiny.reference.state_dict()
    assert torch.equal(stacked, torch.cat([state[name] for name in names]))
    with pytest.raises(ConfigError, match="unexpected tensor"):
        reader.finish()


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "dummy"])
def test_a_part_of_a_tensor_is_that_part_of_the_whole(make_tiny_llama, tmp_path, kind):
    """For every store, along both axes, and for a weight whose rows GGUF keeps in another order."""
    tiny = make_tiny_llama()
    write_gguf(tmp_path / "tiny.gguf", tiny)
    stores: dict[str, Callable[[], TensorStore]] = {
        "safetensors": lambda: SafetensorsStore(tiny.folder),
        "gguf": lambda: GGUFStore(tmp_path / "tiny.gguf", tiny.spec),
        "dummy": lambda: DummyStore(1),
    }
    store = stores[kind]()
    reader = WeightReader(store, torch.float32, torch.device("cpu"))
    name, shape = "model.layers.0.self_attn.q_proj.weight", (48, 48)
    whole = reader.tensor(name, shape)

    rows = reader.stacked([name, name], [shape, shape], slices=[Slice(0, 16, 24), Slice(0, 40, 48)])
    columns = reader.stacked([name], [shape], slices=[Slice(1, 8, 20)])

    assert torch.equal(rows, torch.cat((whole[16:24], whole[40:48])))
    assert torch.equal(columns, whole[:, 8:20])
