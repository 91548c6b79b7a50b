"""What cannot be served ends `engine serve` at once: one line that names the file and the way out, exit code 2."""

from __future__ import annotations

import json
import re
import socket
import struct

import pytest

from .serving import EngineServe

pytestmark = pytest.mark.real_process


def refusal_of(engine: EngineServe) -> str:
    """The one line with which a start ended that did no harm."""
    assert engine.wait() == 2, engine.log
    assert engine.process.stdout is not None
    assert engine.process.stdout.read() == b""
    assert "Traceback" not in engine.log, engine.log
    (cause,) = engine.causes
    assert engine.log.rstrip().splitlines()[-1] == cause
    assert engine.leftovers() == []
    return cause


def edit_weights(path, edit):
    """Read, change and write the tensors of a file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def lose_a_tensor(folder):
    edit_weights(
        folder / "model.safetensors", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")
    )


def reshape_a_tensor(folder):
    def edit(tensors):
        name = "model.layers.0.self_attn.k_proj.weight"
        tensors[name] = tensors[name][:16].contiguous()

    edit_weights(folder / "model.safetensors", edit)


def add_a_tensor(folder):
    def edit(tensors):
        tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].clone()

    edit_weights(folder / "model.safetensors", edit)


def truncate_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def truncate_the_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def claim_a_huge_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


def empty_weights(folder):
    (folder / "model.safetensors").write_bytes(b"")


def integer_weights(folder):
    def edit(tensors):
        import torch

        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)

    edit_weights(folder / "model.safetensors", edit)


def leave_pickled_weights_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lose_a_shard(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def name_an_unknown_architecture(folder):
    edit_config(folder, model_type="mamba", architectures=["MambaForCausalLM"])


def misspell_a_number(folder):
    edit_config(folder, hidden_size="64")


def contradict_itself(folder):
    edit_config(folder, num_key_value_heads=3)


def ask_for_what_is_not_there_yet(folder):
    edit_config(folder, rope_scaling={"rope_type": "dynamic", "factor": 4})


def shrink_the_vocabulary(folder):
    edit_config(folder, vocab_size=100)


def break_the_configuration(folder):
    (folder / "config.json").write_text("{")


def lose_the_configuration(folder):
    (folder / "config.json").unlink()


def lose_the_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def empty_the_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


def break_the_chat_template(folder):
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("break_it", "pattern"),
    [
        (lose_a_tensor, r"model\.safetensors: tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing"),
        (
            reshape_a_tensor,
            r"model\.safetensors: tensor 'model\.layers\.0\.self_attn\.k_proj\.weight' .*16.*32",
        ),
        (truncate_weights, r"model\.safetensors: truncated"),
        (leave_pickled_weights_only, r"only pickled weights .* safetensors"),
        (lose_a_shard, r"missing, first model-00002-of-00002\.safetensors; download"),
        (name_an_unknown_architecture, r"broken-llama: the engine has no model for mamba"),
        (misspell_a_number, r"config\.json.*hidden_size"),
        (contradict_itself, r"config\.json.*4 attention heads.*3 key/value heads"),
        (ask_for_what_is_not_there_yet, r"config\.json.*dynamic"),
        (break_the_configuration, r"config\.json"),
        (lose_the_configuration, r"config\.json"),
        (lose_the_tokenizer, r"tokenizer\.json"),
        (empty_the_tokenizer, r"tokenizer\.json"),
        (break_the_chat_template, r"chat template"),
    ],
)
def test_a_broken_folder(start_serve, model_copy, break_it, pattern):
    assert_refused(start_serve, model_copy, break_it, pattern)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_it", "pattern"),
    [
        (add_a_tensor, r"model\.safetensors.*model\.layers\.2\.mlp\.up_proj\.weight"),
        (truncate_the_header, r"model\.safetensors: truncated"),
        (claim_a_huge_header, r"model\.safetensors: truncated"),
        (empty_weights, r"model\.safetensors"),
        (integer_weights, r"model\.safetensors: tensor 'lm_head\.weight': dtype I8"),
        (shrink_the_vocabulary, r"(config|tokenizer)\.json.*100|embed_tokens.*100"),
    ],
)
def test_a_folder_broken_in_rarer_ways(start_serve, model_copy, break_it, pattern):
    """Each takes the two seconds that torch takes to import; what is said is tested beside the readers, too."""
    assert_refused(start_serve, model_copy, break_it, pattern)


def assert_refused(start_serve, folder, break_it, pattern):
    break_it(folder)
    cause = refusal_of(start_serve(str(folder)))
    assert re.search(pattern, cause), cause
    assert str(folder) in cause, cause


@pytest.mark.slow
def test_an_empty_folder(start_serve, tmp_path):
    assert str(tmp_path) in refusal_of(start_serve(str(tmp_path)))


@pytest.mark.slow
def test_a_path_that_is_not_there(start_serve, tmp_path):
    assert str(tmp_path / "nothing") in refusal_of(start_serve(str(tmp_path / "nothing")))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["empty.gguf", "text.gguf", "short.gguf"])
def test_a_file_that_is_no_gguf(start_serve, tmp_path, name):
    contents = {"empty": b"", "text": b"not a model\n" * 100, "short": b"GGUF\x03\x00\x00\x00" + b"\xff" * 16}
    path = tmp_path / name
    path.write_bytes(contents[path.stem])
    assert str(path) in refusal_of(start_serve(str(path)))


@pytest.mark.model
def test_a_truncated_gguf(start_serve, tmp_path):
    from engine.models.hub.built_in.fetch import ensure_model

    whole = ensure_model()
    path = tmp_path / "short.gguf"
    with whole.open("rb") as source:
        path.write_bytes(source.read(whole.stat().st_size // 2))
    assert str(path) in refusal_of(start_serve(str(path)))


def test_a_port_in_use(start_serve, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cause = refusal_of(start_serve(str(model), "--port", port))
    assert f"127.0.0.1:{port} is in use" in cause
    assert "--port" in cause


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("--page-size", "0"), r"page_size|page-size"),
        (("--page-size", "many"), r"page.size"),
        (("--no-such-flag",), r"no-such-flag"),
        (("--max-model-len", "99999999"), r"max.model.len"),
        (("--mem-fraction", "1.5"), r"mem.fraction"),
        (("--device", "cuda:9"), r"device"),
        (("--chat-template", "/no/such/file"), r"/no/such/file"),
        (("--host", "192.0.2.1"), r"192\.0\.2\.1"),
        (("--max-total-tokens", "100000000000"), r"max.total.tokens"),
    ],
)
def test_a_bad_flag(start_serve, model, arguments, pattern):
    assert re.search(pattern, refusal_of(start_serve(str(model), *arguments)))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("page_size: [", r"engine\.yaml"),
        ("page_size: many", r"engine\.yaml.*page_size"),
        ("pagesize: 16", r"engine\.yaml.*pagesize"),
        ("- page_size", r"engine\.yaml"),
    ],
)
def test_a_bad_yaml_file(start_serve, model, tmp_path, text, pattern):
    path = tmp_path / "engine.yaml"
    path.write_text(text + "\n")
    assert re.search(pattern, refusal_of(start_serve(str(model), "--config", str(path))))
